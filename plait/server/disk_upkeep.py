"""The upkeep of a broker's data directory: checkpoints, the next log segments, indexes, and retention."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from typing import Any

from plait.broker import Attachments, Broker, Retention
from plait.server.notices import Notices

log = logging.getLogger("plait.server")

#: How often it is checked whether there is work.
LOOK_SECONDS = 1.0
#: The pause after an index could not be written: a segment is then indexed from its beginning.
INDEX_PAUSE_SECONDS = 60.0


class DiskUpkeep:
    """Three background jobs, ``checkpoints``, ``indexing`` and ``housekeeping``."""

    def __init__(
        self,
        broker: Broker,
        membership: Attachments,
        threads: Executor,
        index_thread: Executor,
        storage_failed: Callable[[OSError], None],
    ) -> None:
        """``index_thread`` builds indexes: that takes too long for ``threads``. ``storage_failed`` stops the server."""
        self._broker = broker
        self._membership = membership
        self._retention = Retention(broker)
        self._threads = threads
        self._index_thread = index_thread
        self._storage_failed = storage_failed
        self._notices = Notices(log)
        #: The error of the last checkpoint; empty if it was written.
        self._checkpoints_fail = ""

    @property
    def jobs(self) -> tuple[Callable[[], Coroutine[Any, Any, None]], ...]:
        return self.checkpoints, self.indexing, self.housekeeping

    async def checkpoints(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self._broker.snapshots.due:
                await self._checkpoint()
                # Segments that waited for a newer checkpoint can be removed.
                self._broker.catalog.retention_wanted |= self._broker.snapshots.wanted
            await self._prepare_segments()

    async def _checkpoint(self) -> None:
        work = self._broker.snapshots.begin()
        await _in_turns(work.copy_some)
        try:
            await self._in_thread(work.run)
        except OSError as error:
            self._storage_failed(error)
            return
        self._broker.snapshots.end(work)
        self._checkpoint_ended(work.error)
        await _in_turns(self._broker.snapshots.settle_some)

    def _checkpoint_ended(self, error: OSError | None) -> None:
        """Log when checkpoints begin to fail, and when they succeed again."""
        if error is not None and self._checkpoints_fail != str(error):
            log.error(
                "a checkpoint cannot be written: %s; nothing is lost, but the next start replays logs from the last "
                "checkpoint, and no log file is deleted meanwhile",
                error,
            )
        elif error is None and self._checkpoints_fail:
            log.info("checkpoints are written again")
        self._checkpoints_fail = str(error) if error is not None else ""

    async def _prepare_segments(self) -> None:
        """Create the next segment of each log before it is needed."""
        try:
            for each in self._broker.logs:
                await self._in_thread(each.prepare_next)
        except OSError as error:
            self._notices.begin("segments", f"the next log segment cannot be created yet: {error}")
        else:
            self._notices.end("segments", "log segments can be created again")

    async def indexing(self) -> None:
        """Index what was written to the message log, a few milliseconds at a time."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            index = self._broker.message_index
            try:
                index.look()
                while (work := index.begin()) is not None:
                    await asyncio.get_running_loop().run_in_executor(self._index_thread, work.run)
                    work.done()
            except OSError as error:
                index.give_up()
                self._notices.begin("index", f"an index cannot be written: {error}; queries read the log instead")
                await asyncio.sleep(INDEX_PAUSE_SECONDS)
            else:
                self._notices.end("index", "indexes are written again")

    async def housekeeping(self) -> None:
        """Runs every ``housekeeping_seconds``, and soon after a subject is deleted or its retention reduced."""
        passed = 0.0
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            passed += LOOK_SECONDS
            for _ in self._broker.segment_headers.refresh_steps():
                await asyncio.sleep(0)
            if passed < self._broker.config.housekeeping_seconds and not self._broker.catalog.retention_wanted:
                continue
            passed = 0.0
            try:
                for _ in self.housekeeping_steps():
                    await asyncio.sleep(0)
            except OSError as error:
                self._notices.begin("retention", f"expired messages cannot be removed yet: {error}")
            else:
                self._notices.end("retention", "expired messages are removed again")

    def housekeep(self) -> None:
        """Run retention and forget idle groups; tests with a manual clock call this."""
        for _ in self.housekeeping_steps():
            pass

    def housekeeping_steps(self) -> Iterator[None]:
        """``housekeep`` in steps of one loop turn each: its work grows with the number of subjects and groups."""
        yield from self._retention.steps()
        yield
        for _ in self._membership.forget_idle_steps():
            yield

    async def _in_thread(self, call: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._threads, call)


async def _in_turns(step: Callable[[], bool]) -> None:
    """Call ``step`` once per loop turn until it returns False; requests are served in between."""
    while step():  # noqa: ASYNC110 - nothing is waited for
        await asyncio.sleep(0)
