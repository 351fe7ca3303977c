"""``BrokerHost``: runs a broker on an event loop.

The loop runs the broker's decisions; fdatasync and checkpoints run in threads. Requests of one loop turn are committed
together at its end. A failed write or sync of a log stops the server: it answers no further request and exits, and the
next start recovers.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import inf
from typing import Any

from plait import tasks
from plait.broker import Attachments, Broker, BrokerConfig
from plait.broker.partitions.partition import Partition
from plait.broker.recovery.start_up import RecoveryReport
from plait.errors import StorageFailed
from plait.server.disk_upkeep import DiskUpkeep
from plait.server.listener import Listener
from plait.server.notices import Notices
from plait.server.sync_queue import Syncs
from plait.storage.disk import Disk, RealDisk
from plait.version import VERSION

log = logging.getLogger("plait.server")

#: How often consumers, half-open connections and disk space are checked.
TICK_SECONDS = 1.0


class BrokerHost:
    """A broker with its commits, syncs, timers, checkpoints and retention. ``failed`` is set when storage fails."""

    def __init__(self, listener: Listener, disk: Disk, config: BrokerConfig) -> None:
        """``listener`` has the port and the connections of the broker's clients."""
        self._listener = listener
        self._connections = listener.connections
        self.disk = disk
        self.config = config
        self.clock = listener.clock
        self.failed: asyncio.Future[StorageFailed] | None = None
        self.threads = ThreadPoolExecutor(2, "plait-disk")
        self.index_thread = ThreadPoolExecutor(1, "plait-index")
        self._tasks: list[asyncio.Task[None]] = []
        self._notices = Notices(log)
        self._timer: asyncio.TimerHandle | None = None
        #: When the timer runs, on the monotonic clock.
        self.timer_at = inf
        #: Fires at the end of the lease that expires first.
        self._lease_timer: asyncio.TimerHandle | None = None
        #: Reports the progress of a partition to the meta servers, then calls a function; None without a meta server.
        self.report: Callable[[Partition, Callable[[], None]], None] | None = None
        #: True once the broker has stopped or was abandoned; it then writes nothing more.
        self.stopped = False

    @property
    def address(self) -> str:
        """The address for clients."""
        return self._listener.address

    # --- start and stop -------------------------------------------------------------------------

    async def recover(self, *, routed: bool) -> RecoveryReport:
        """Lock and recover the data directory. ``routed``: a meta server decides which partitions there are."""
        self.loop = asyncio.get_running_loop()
        self.failed = self.loop.create_future()
        if isinstance(self.disk, RealDisk):
            self.disk.lock()
        self.broker = Broker(self.disk, self.clock, self.config)
        self.broker.catalog.routed = routed
        report = await self.loop.run_in_executor(self.threads, self.broker.start)
        self.membership = Attachments(self.broker)
        self.upkeep = DiskUpkeep(self.broker, self.membership, self.threads, self.index_thread, self._storage_failed)
        self._syncs = Syncs(self.broker, self.clock, self._connections, self.threads, self.fail)
        turn = self.broker.turn
        # A partial instead of a method saves a Python call in every turn with a change.
        turn.on_dirty = partial(self.loop.call_soon, turn.run)
        turn.on_work = self._committed
        turn.rates.on_change = self.arm_timer
        turn.scans.budget.on_begin = partial(self.loop.call_soon, turn.scans.next_turn)
        turn.check_space()
        return report

    def run(self, *jobs: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start the timers and the background jobs, with ``jobs`` of the server."""
        self.arm_timer()
        for job in (self._sync_loop, self._tick_loop, *self.upkeep.jobs, *jobs):
            self._tasks.append(tasks.start(job(), f"plait-server-{job.__name__}", failed=self.fail))

    async def end_jobs(self) -> None:
        """Stop the background jobs and the timers, and wait for disk work in progress: a thread cannot be killed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for timer in (self._timer, self._lease_timer):
            if timer is not None:
                timer.cancel()
        for pool in (self.threads, self.index_thread):
            await self.loop.run_in_executor(None, pool.shutdown)

    def release(self) -> None:
        """Close the files and unlock the data directory."""
        self.threads.shutdown(wait=False)
        self.index_thread.shutdown(wait=False)
        if hasattr(self, "broker"):
            self.broker.close()
        if isinstance(self.disk, RealDisk):
            self.disk.unlock()

    def fail(self, error: Exception) -> None:
        """Stop the server, because storage failed or because of an internal defect. No further request is answered.

        After a defect the state in memory may be wrong, so the server cannot continue.
        """
        assert self.failed is not None
        if not isinstance(error, StorageFailed):
            error = self.broker.turn.failed = self.broker.turn.failed or StorageFailed(
                f"the server stops because of an internal defect ({error!r}); the next start recovers"
            )
        if not self.failed.done():
            log.critical("%s", error)
            self.failed.set_result(error)
            self._listener.end_listening()
            self._connections.abort_all()

    def describe(self) -> dict[str, Any]:
        """Facts about this server."""
        broker = self.broker
        free, total = self.disk.space()
        return {
            "version": VERSION,
            "address": self.address,
            "group": self.config.group,
            "epoch": broker.turn.epoch,
            "flush": self.config.flush,
            "pid": os.getpid(),
            "connections": len(self._connections),
            "consumers": len(broker.sessions),
            "subjects": len(broker.subjects),
            "groups": len(broker.catalog.groups),
            "producers": len(broker.producers),
            "scheduled": broker.schedules.count,
            "stages": len(broker.stages),
            "message_log_start": broker.message_log.start,
            "message_log_end": broker.message_log.end,
            "message_log_durable": broker.message_log.durable,
            "action_log_end": broker.action_log.end,
            "retained_log_end": broker.retained_log.end,
            "disk_free": free,
            "disk_total": total,
        }

    # --- the loop -------------------------------------------------------------------------------

    def halt(self) -> None:
        """Commit nothing more, because the broker has stopped or was abandoned."""
        self.stopped = True
        if hasattr(self, "broker"):
            self.broker.turn.halted = True
            self.broker.turn.scans.clear()

    def _committed(self, defect: Exception | None) -> None:
        turn = self.broker.turn
        if defect is not None:
            log.error("a commit failed", exc_info=defect)
            self.fail(defect)
        elif turn.failed is not None:
            self.fail(turn.failed)
        elif turn.unsynced or turn.stage_publisher.unsynced:
            self._syncs.begin()
        if defect is None and self.broker.schedules.by_name:
            self.arm_timer()

    def arm_timer(self) -> None:
        """Set the timer to the broker's next deadline."""
        due = self.broker.next_deadline
        if due is None:
            return
        if self._timer is not None:
            if self.timer_at <= due:
                return
            self._timer.cancel()
        self.timer_at = due
        self._timer = self.loop.call_later(max(due - self.clock.monotonic(), 0), self._run_timer)

    def _run_timer(self) -> None:
        self._timer = None
        self.timer_at = inf
        try:
            self.broker.run_timers()
        except Exception as error:
            log.exception("a timer failed")
            self.fail(error)
        else:
            self.arm_timer()

    async def _sync_loop(self) -> None:
        """Sync every flush interval. Requests that wait for a sync start it themselves."""
        while True:
            await asyncio.sleep(self.config.flush_seconds)
            if any(each.written != each.durable for each in self.broker.logs):
                self._syncs.begin()

    def _storage_failed(self, error: OSError) -> None:
        self.broker.turn.storage_failed(error)
        assert self.broker.turn.failed is not None
        self.fail(self.broker.turn.failed)

    async def _tick_loop(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            try:
                for _ in self._ticking():
                    await asyncio.sleep(0)
            except OSError as error:
                self._notices.begin("space", f"the free space of the disk cannot be read: {error}")

    def tick(self) -> None:
        """Run the checks of every second; tests with a manual clock call this."""
        for _ in self._ticking():
            pass

    def _ticking(self) -> Iterator[None]:
        """``tick`` in steps of one loop turn each."""
        self._connections.abort_overdue()
        self._lose_silent()
        yield
        # Grants that waited for the end of leases from before the start.
        yield from self.broker.leases.look_steps()
        # The loop's timers use a clock that stops while the machine is suspended.
        self.broker.run_timers()
        self._check_files()
        if self._connections.ending:
            return
        self.broker.turn.check_space()
        if self.broker.turn.low_space:
            self._notices.begin("space", self.broker.turn.low_space, kind="full")
        else:
            self._notices.end("space", "the disk has space again; messages are accepted")
        while self.broker.schedules.notices:
            log.error("%s", self.broker.schedules.notices.pop(0))
        self.broker.producers.forget(self.clock.now())

    def _check_files(self) -> None:
        """Check that the data directory is still locked, and write the durable marks of the logs."""
        if self._connections.ending:
            return
        try:
            if isinstance(self.disk, RealDisk):
                self.disk.check_lock()
        except OSError as error:
            self._storage_failed(error)
            return
        try:
            for each in self.broker.logs:
                each.note_durable()
        except OSError as error:
            self._notices.begin(
                "marks", f"the durable marks of the logs cannot be written: {error}; the next start uses older ones"
            )
        else:
            self._notices.end("marks", "the durable marks of the logs are written again")

    def _lose_silent(self) -> None:
        if self.stopped:
            return
        for consumer, count in self.membership.lose_silent():
            group = consumer.group
            log.warning(
                "consumer %s of group %s on subject %s is lost; its %d messages in flight go to other consumers",
                consumer.client,
                group.name,
                group.partition.row.subject,
                count,
            )
            self._connections.end_session(consumer)
        self._wait_for_lease_end()

    def _wait_for_lease_end(self) -> None:
        """Set the timer to the end of the lease that expires first, because other consumers wait for its LPs.

        The lease may be renewed before the timer fires.
        """
        if self._lease_timer is not None:
            self._lease_timer.cancel()
        end = self.membership.next_lease_end
        if end is not None:
            self._lease_timer = self.loop.call_later(max(end - self.clock.monotonic(), 0), self._lose_silent)
