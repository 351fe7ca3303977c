"""``Server``: a broker behind sockets.

One event loop runs the broker's decisions; fdatasync and checkpoints run in threads. Requests of one loop turn are
committed together at its end. A failed write or sync of a log stops the server: it answers no further request and
exits, and the next start recovers.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import inf
from typing import Any

from plait import tasks
from plait.broker import Attachments, Broker, BrokerConfig, Retention
from plait.broker.groups.shared_group import AttachedConsumer
from plait.broker.recovery.start_up import RecoveryReport
from plait.clock import Clock, SystemClock
from plait.errors import StorageFailed
from plait.server.cluster.cluster_role import ClusterRole
from plait.server.cluster.forwarder import Forwarder
from plait.server.listener import Listener
from plait.server.notices import Notice
from plait.server.requests import Handlers
from plait.server.sync_queue import Syncs
from plait.storage.disk import Disk, RealDisk
from plait.version import VERSION

log = logging.getLogger("plait.server")

#: How often consumers, half-open connections and disk space are checked.
TICK_SECONDS = 1.0


class Server(Listener):
    """A broker that listens. ``start`` recovers and binds, ``stop`` drains, ``failed`` is set when storage fails."""

    def __init__(
        self,
        disk: Disk,
        config: BrokerConfig | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 7450,
        clock: Clock | None = None,
        meta: str | None = None,
        metas: Sequence[str] = (),
    ) -> None:
        """``meta``: database URL of a meta server in this process. ``metas``: addresses of other meta servers."""
        self.config = config or BrokerConfig()
        super().__init__(host, port, clock or SystemClock(), self.config.limits)
        self.disk = disk
        self.cluster = ClusterRole(self, meta, metas)
        self.failed: asyncio.Future[StorageFailed] | None = None
        self.report: RecoveryReport | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.threads = ThreadPoolExecutor(2, "plait-disk")
        self._syncs = Syncs(self)
        self._space = Notice("the disk has space again; messages are accepted")
        self._marks = Notice("the durable marks of the logs are written again")
        self._next_segments = Notice("log segments can be created again")
        self._removing = Notice("expired messages are removed again")
        self._timer: asyncio.TimerHandle | None = None
        #: When the timer runs, on the monotonic clock.
        self.timer_at = inf
        #: Fires at the end of the lease that expires first.
        self._lease_timer: asyncio.TimerHandle | None = None
        #: The error of the last checkpoint; empty if it was written.
        self._checkpoints_fail = ""
        #: The broker writes nothing more: it has stopped or was abandoned.
        self._stopped = False

    @property
    def ending(self) -> bool:
        """True if the server is stopping or storage has failed: new connections are refused."""
        return self._stopping or (self.failed is not None and self.failed.done())

    async def start(self) -> RecoveryReport:
        """Recover the data directory and serve; ``port`` is set afterwards."""
        self.loop = asyncio.get_running_loop()
        self.failed = self.loop.create_future()
        if isinstance(self.disk, RealDisk):
            self.disk.lock()
        try:
            self.broker = Broker(self.disk, self.clock, self.config)
            self.broker.routed = not self.cluster.alone
            self.report = await self.loop.run_in_executor(self.threads, self.broker.start)
            self.membership = Attachments(self.broker)
            self.retention = Retention(self.broker)
            self.handlers = Handlers(self)
            self.sessions = self.broker.sessions
            # A partial instead of a method saves a Python call in every turn with a change.
            self.broker.on_dirty = partial(self.loop.call_soon, self._commit)
            self.broker.check_space()
            await self.bind()
            await self.cluster.start()
            await self.listen()
        except BaseException:
            self.end_listening()
            await self.cluster.stop()
            self._release()
            raise
        self.arm_timer()
        jobs = [self._sync_loop, self._tick_loop, self._checkpoint_loop, self._housekeeping_loop]
        if not self.cluster.alone:
            jobs.append(Forwarder(self).run)
        for job in jobs:
            self._tasks.append(tasks.start(job(), f"plait-server{job.__name__}", failed=self._job_failed))
        return self.report

    def _release(self) -> None:
        """Close the files and unlock the data directory."""
        self.threads.shutdown(wait=False)
        if hasattr(self, "broker"):
            self.broker.close()
        if isinstance(self.disk, RealDisk):
            self.disk.unlock()

    async def stop(self) -> None:
        """Stop serving: answer accepted requests, flush, and write a clean checkpoint."""
        if self._stopping:
            return
        self._stopping = True
        self.end_listening()
        await self.cluster.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._cancel_timers()
        # Disk work in progress must end before the last checkpoint.
        await self.loop.run_in_executor(None, self.threads.shutdown)
        try:
            if self.broker.failed is None:
                self.broker.stop()
        finally:
            self._stopped = True
            await self.hang_up()
            self._release()

    def _cancel_timers(self) -> None:
        for timer in (self._timer, self._lease_timer):
            if timer is not None:
                timer.cancel()

    def lost(self, consumer: AttachedConsumer, session: int) -> None:
        self.membership.disconnected(consumer, session)

    async def abandon(self) -> None:
        """Stop like a crash: no further reply, write or checkpoint. The next start recovers."""
        if self._stopping:
            return
        self._stopping = self._stopped = True
        self.end_listening()
        await self.cluster.abandon()
        for task in self._tasks:
            task.cancel()
        self._cancel_timers()
        self.abort_all()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # A thread cannot be killed: wait for its work before the files are closed.
        await self.loop.run_in_executor(None, self.threads.shutdown)
        self._release()

    def describe(self) -> dict[str, Any]:
        """Facts about this server."""
        broker = self.broker
        free, total = self.disk.space()
        return {
            "version": VERSION,
            "address": self.address,
            "group": self.config.group,
            "epoch": broker.epoch,
            "flush": self.config.flush,
            "pid": os.getpid(),
            "connections": len(self.connections),
            "consumers": len(broker.sessions),
            "subjects": len(broker.subjects),
            "groups": broker.group_count,
            "producers": len(broker.producers),
            "scheduled": broker.schedules.count,
            "stages": len(broker.stages),
            "message_log_start": broker.message_log.start,
            "message_log_end": broker.message_log.end,
            "message_log_durable": broker.message_log.durable,
            "action_log_end": broker.action_log.end,
            "kept_log_end": broker.retained_log.end,
            "disk_free": free,
            "disk_total": total,
        }

    # --- the loop -------------------------------------------------------------------------------

    def _commit(self) -> None:
        if self._stopped:
            return
        try:
            self.broker.commit()
            if self.broker.failed is not None:
                self.fail(self.broker.failed)
            elif self.broker.sync_wanted:
                self._syncs.begin()
            if self.broker.schedules.by_subject:
                self.arm_timer()
        except Exception as error:
            log.exception("a commit failed")
            self.defect(error)

    def defect(self, error: Exception) -> None:
        """An unexpected error in a central part: the state in memory cannot be trusted, so the server stops."""
        if self.broker.failed is None:
            self.broker.failed = StorageFailed(
                f"the server stops because of an internal defect ({error!r}); the next start recovers"
            )
        self.fail(self.broker.failed)

    def fail(self, error: StorageFailed) -> None:
        """Storage failed: close all connections without further replies."""
        assert self.failed is not None
        if not self.failed.done():
            log.critical("%s", error)
            self.failed.set_result(error)
            self.end_listening()
            self.abort_all()

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
            self.defect(error)
        else:
            self.arm_timer()

    def _job_failed(self, error: Exception) -> None:
        """A background job failed: the server cannot work without it, so it stops."""
        if isinstance(error, StorageFailed):
            self.fail(error)
        else:
            self.defect(error)

    async def _sync_loop(self) -> None:
        """Sync every flush interval. Requests that wait for a sync start it themselves."""
        while True:
            await asyncio.sleep(self.config.flush_seconds)
            if any(each.written != each.durable for each in self.broker.logs):
                self._syncs.begin()

    async def _in_thread(self, call: Callable[[], None]) -> bool:
        """Run blocking disk work. Returns False if it failed, which stops the server."""
        try:
            await self.loop.run_in_executor(self.threads, call)
        except OSError as error:
            self.broker.storage_failed(error)
            assert self.broker.failed is not None
            self.fail(self.broker.failed)
            return False
        return True

    async def _tick_loop(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            try:
                for _ in self._ticking():
                    await asyncio.sleep(0)
            except OSError as error:
                self._space.begin(f"the free space of the disk cannot be read: {error}")

    def tick(self) -> None:
        """Run the checks of every second; tests with a manual clock call this."""
        for _ in self._ticking():
            pass

    def _ticking(self) -> Iterator[None]:
        """``tick`` in steps of one loop turn each."""
        self.abort_overdue()
        self._lose_silent()
        yield
        # Grants that waited for the end of leases from before the start.
        yield from self.broker.leases.look_steps()
        # The loop's timers use a clock that stops while the machine is suspended.
        self.broker.run_timers()
        self._check_files()
        if self.ending:
            return
        self.broker.check_space()
        if self.broker.low_space:
            self._space.begin(self.broker.low_space, kind="full")
        else:
            self._space.end()
        while self.broker.schedules.damages:
            log.error("%s", self.broker.schedules.damages.pop(0))
        self.broker.producers.forget(self.clock.now())

    def _check_files(self) -> None:
        """Check that the data directory is still locked, and write the durable marks of the logs."""
        if self.ending:
            return
        try:
            if isinstance(self.disk, RealDisk):
                self.disk.check_lock()
        except OSError as error:
            self.broker.storage_failed(error)
            assert self.broker.failed is not None
            self.fail(self.broker.failed)
            return
        try:
            for each in self.broker.logs:
                each.note_durable()
        except OSError as error:
            self._marks.begin(
                f"the durable marks of the logs cannot be written: {error}; the next start uses older ones"
            )
        else:
            self._marks.end()

    def _lose_silent(self) -> None:
        if self._stopped:
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
            held_by = self.holders.get(consumer)
            if held_by is not None:
                connection, session = held_by
                connection.end_session(session)
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

    async def _checkpoint_loop(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            if self.broker.snapshots.due:
                await self._checkpoint()
                # Segments that waited for a newer checkpoint can be removed.
                self.broker.retention_wanted |= self.broker.snapshots.wanted
            await self._prepare([first_hand.prepare_next for first_hand in self.broker.logs])

    async def _checkpoint(self) -> None:
        work = self.broker.begin_checkpoint()
        await _in_turns(work.copy_some)
        if await self._in_thread(work.run):
            self.broker.end_checkpoint(work)
            self._checkpoint_ended(work.error)
            await _in_turns(self.broker.snapshots.settle_some)

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

    async def _prepare(self, calls: list[Callable[[], None]]) -> None:
        try:
            for call in calls:
                await self.loop.run_in_executor(self.threads, call)
        except OSError as error:
            self._next_segments.begin(f"the next log segment cannot be created yet: {error}")
        else:
            self._next_segments.end()

    async def _housekeeping_loop(self) -> None:
        """Runs every ``housekeeping_seconds``, and soon after a subject is deleted or its retention reduced."""
        passed = 0.0
        while True:
            await asyncio.sleep(TICK_SECONDS)
            passed += TICK_SECONDS
            for _ in self.broker.segment_headers.refresh_steps():
                await asyncio.sleep(0)
            if passed < self.broker.config.housekeeping_seconds and not self.broker.retention_wanted:
                continue
            passed = 0.0
            try:
                for _ in self._housekeeping():
                    await asyncio.sleep(0)
            except OSError as error:
                self._removing.begin(f"expired messages cannot be removed yet: {error}")
            else:
                self._removing.end()

    def housekeep(self) -> None:
        """Run retention and forget idle groups; tests with a manual clock call this."""
        for _ in self._housekeeping():
            pass

    def _housekeeping(self) -> Iterator[None]:
        """``housekeep`` in steps of one loop turn each: its work grows with the number of subjects and groups."""
        yield from self.retention.steps()
        yield
        for _ in self.membership.forget_idle_steps():
            yield


async def _in_turns(step: Callable[[], bool]) -> None:
    """Call ``step`` once per loop turn until it returns False; requests are served in between."""
    while step():  # noqa: ASYNC110 - nothing is waited for
        await asyncio.sleep(0)
