"""Runs the syncs of the logs, one at a time. One sync makes the changes of all waiting requests durable.

While the disk is fast, a sync that a request waits for runs on the event loop itself, because handing it to a thread
and back takes as long as the sync. A large sync, or one after a slow sync, runs in a thread, and the loop continues. So
a disk that hangs blocks the loop at most once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor

from plait.broker import Broker
from plait.broker.commit import SyncWork
from plait.clock import Clock
from plait.limits import KIB
from plait.server.listener import Connections

log = logging.getLogger("plait.server")

#: After a slower sync, the next one runs in a thread.
QUICK_SECONDS = 0.002
#: A larger sync runs in a thread.
QUICK_SIZE = 256 * KIB


class Syncs:
    """Runs the syncs that the broker asks for."""

    def __init__(
        self,
        broker: Broker,
        clock: Clock,
        connections: Connections,
        threads: Executor,
        fail: Callable[[Exception], None],
    ) -> None:
        self._broker = broker
        self._clock = clock
        self._connections = connections
        self._threads = threads
        self._fail = fail
        self._busy = False
        self._begun = 0.0
        #: The duration of the last sync. At first it counts as slow, so that the first sync runs in a thread.
        self._seconds = QUICK_SECONDS

    def begin(self) -> None:
        """Start a sync. If one is running, the next sync starts when it ends."""
        if self._busy or self._connections.ending:
            return
        self._busy = True
        # A checkpoint syncs too, and this sync would have to wait for it on the loop.
        alone = not self._broker.turn.syncs
        awaited = self._broker.turn.sync_wanted
        self._begun = self._clock.monotonic()
        work = self._broker.turn.begin_sync()
        if awaited and alone and self._seconds < QUICK_SECONDS and work.size <= QUICK_SIZE:
            try:
                work.run()
            except OSError as error:
                self._end(work, error)
            else:
                self._end(work, None)
        else:
            done = asyncio.get_running_loop().run_in_executor(self._threads, work.run)
            done.add_done_callback(lambda d: self._end(work, d.exception()))

    def _end(self, work: SyncWork, error: BaseException | None) -> None:
        self._busy = False
        self._seconds = self._clock.monotonic() - self._begun
        if self._connections.ending:
            # A clean stop syncs everything itself; after a crash no request is answered.
            return
        try:
            if isinstance(error, OSError):
                self._broker.turn.storage_failed(error)
            elif error is not None:
                raise error
            else:
                self._broker.turn.end_sync(work)
            if self._broker.turn.failed is not None:
                self._fail(self._broker.turn.failed)
            elif self._broker.turn.sync_wanted:
                self.begin()
        except Exception as defect:
            log.exception("a sync failed")
            self._fail(defect)
