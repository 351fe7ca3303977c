"""The broker: sends, pulls and acks of one node, as a plain object.

Its caller drives it. A request is a method call with a callback for the answer. The caller calls ``turn.commit`` at the
end of a loop turn in which something changed, ``turn.begin_sync`` and ``turn.end_sync`` around the blocking part of a
sync, and ``run_timers`` at ``next_deadline``. The broker reaches disk and time only through objects that it was given,
so a test can run it step by step.

Promises: an acknowledged message is written (``flush="async"``) or durable (``flush="sync"``), and a message is visible
only from then on. Acks, nacks, rewinds and removals are acknowledged after their events are written to the action
log. Rows of at-most-once groups are delivered after their event is durable; rows of other groups may be delivered
before, and are redelivered after a crash.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from operator import attrgetter

from plait.broker.appender import Submission
from plait.broker.catalog import Catalog
from plait.broker.commit import SendCallback
from plait.broker.config import BrokerConfig
from plait.broker.granted_numbers import GrantedNumbers
from plait.broker.groups.dead_letters import DeadLetters
from plait.broker.groups.group import FAILURE, AttachedConsumer, Group, NackOutcome
from plait.broker.groups.limited_delivery import take_limited
from plait.broker.groups.ordered.lease_grants import LeaseGrants
from plait.broker.groups.ordered.ordered_group import OrderedGroup
from plait.broker.groups.waking import DueHeap, Waiter, end_pulls, wake_group
from plait.broker.partitions.filtered_read import reader_of
from plait.broker.partitions.partition import Delivery, Partition, ReadBatch
from plait.broker.partitions.settings import refuse_on_strict
from plait.broker.query.message_index import MessageIndex
from plait.broker.recovery.checkpointer import Snapshots
from plait.broker.recovery.segment_headers import SegmentHeaders
from plait.broker.recovery.start_up import Recovery, RecoveryReport
from plait.broker.schedule.bucketed import BucketedRows
from plait.broker.schedule.due_delivery import DueDelivery, check_delayed
from plait.broker.schedule.due_rows import DueRows
from plait.broker.schedule.forwards import Forwards
from plait.broker.schedule.schedules import Schedules
from plait.broker.staging.stage_publisher import StagePublisher
from plait.broker.staging.stages import Stages
from plait.broker.transactions.check_backs import CheckBacks
from plait.broker.transactions.half_publisher import HalfPublisher
from plait.broker.transactions.transactions import Transactions
from plait.broker.turn import Turn
from plait.clock import Clock
from plait.errors import DiskFull, FrameError, StorageFailed
from plait.filter.message_filter import Filter
from plait.frame.columns import Column
from plait.frame.header import FLAG_FORWARDED, FLAG_UNSEQUENCED
from plait.frame.view import FrameView
from plait.storage.catalog import HALF
from plait.storage.checkpoint import Checkpoints
from plait.storage.disk import Disk
from plait.storage.logs.consume_log import DIRECTORY as CONSUME_DIRECTORY
from plait.storage.producers import ProducerTable

#: Columns that only the broker adds to frames.
_NOT_SENT_BITS = 1 << Column.RUNS | 1 << Column.SELECTION | 1 << Column.SCHEDULE | 1 << Column.NOTE
_DELAYED_BIT = 1 << Column.DELIVER_AT
_PRIORITY_BIT = 1 << Column.PRIORITY


class Broker:
    """One node: its partitions, groups and logs."""

    def __init__(self, disk: Disk, clock: Clock, config: BrokerConfig | None = None) -> None:
        self.config = config or BrokerConfig()
        self.limits = limits = self.config.limits
        self.producers = ProducerTable(
            producers_max=limits.producers,
            window_frames=limits.producer_window_frames,
            keep_seconds=limits.producer_seconds,
        )
        self.turn = turn = Turn(disk, clock, self.config, self.producers)
        self.disk, self.clock = disk, clock
        self.message_log, self.retained_log, self.action_log = self.logs = turn.logs
        #: Recently dropped partitions: name → (route version of the drop, until when it is remembered).
        self.dropped: dict[str, tuple[int, float]] = {}
        self.numbers = GrantedNumbers()
        self.deadlines = DueHeap[Waiter](attrgetter("deadline"))
        #: Groups with waiting rows, by the wall time of the next retry in microseconds. Other groups cost nothing.
        self.retries = DueHeap[Group](attrgetter("expected"))
        self.sessions: dict[int, AttachedConsumer] = {}
        disk.make_directory(CONSUME_DIRECTORY)
        self.checkpoints = checkpoints = Checkpoints(disk)
        self.segment_headers = SegmentHeaders(turn)
        self.dead_letters = DeadLetters(turn)
        self.leases = LeaseGrants(turn, self.numbers, self.sessions)
        self.catalog = catalog = Catalog(
            turn, self.segment_headers, checkpoints, self.producers, self.leases, self.sessions
        )
        self.partitions, self.subjects = catalog.partitions, catalog.subjects
        self.partition_of, self.create_subject = catalog.partition_of, catalog.create_subject
        self.schedules = schedules = Schedules(turn, catalog, checkpoints)
        self.bucketed = BucketedRows(turn, checkpoints, schedules)
        self.forwards = Forwards(turn, catalog, schedules)
        self.due_rows = DueRows(turn.message_log, schedules)
        self.due_delivery = turn.due_delivery = DueDelivery(turn, catalog, schedules, self.due_rows, self.forwards)
        self.stages = Stages(turn, catalog)
        self.publisher = turn.stage_publisher = StagePublisher(turn, catalog, self.stages, schedules)
        self.half_publisher = turn.half_publisher = HalfPublisher(turn, catalog, schedules)
        self.transactions = Transactions(turn, catalog, schedules, self.half_publisher)
        self.check_backs = CheckBacks(turn, self.transactions)
        self.message_index = MessageIndex(disk, self.message_log)
        self.snapshots = Snapshots(turn, catalog, self.producers, checkpoints, self.bucketed, self.half_publisher)
        turn.bury = self.dead_letters.bury

    # --- start and stop -------------------------------------------------------------------------

    def start(self) -> RecoveryReport:
        """Recover the state from disk. Blocks; afterwards the broker accepts requests."""
        try:
            report = self.recover()
            self.message_log.on_segment = self.segment_headers.of_message_segment
            self.action_log.on_segment = self.segment_headers.of_action_segment
            self.retained_log.on_segment = self.segment_headers.of_retained_segment
            self.segment_headers.refresh()
            # The epoch must be durable before any frame has it. The checkpoint also replaces the clean one: a power
            # loss after this point is an unclean stop, even if it loses everything written since.
            self.snapshots.make()
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise DiskFull(
                    "the disk is full, and the broker must write a checkpoint to start; free some space",
                    **self.turn.space(),
                ) from error
            raise StorageFailed(f"recovery of the data directory failed: {error}") from error
        return report

    def recover(self) -> RecoveryReport:
        """Load the last checkpoint and replay the logs."""
        kinds = self.bucketed, self.forwards, self.stages, self.transactions
        report = Recovery(self.turn, self.catalog, self.checkpoints, self.producers, *kinds).run()
        self.check_backs.recovered()
        self.snapshots.drop_unknown_consume_logs()
        for partition in self.partitions.values():
            partition.visible = partition.next
            self.numbers.learn(partition.row.route)
        for group in self.catalog.groups.values():
            self.expect_retry(group)
            if isinstance(group, OrderedGroup):
                self.numbers.learn(group.locks.newest)
                # The crash may have lost grants whose owners use their locks until the lease ends (R15).
                group.handover.frozen_until = self.clock.monotonic() + self.leases.longest
        return report

    def stop(self) -> None:
        """Write everything, sync, and write a clean checkpoint. Blocks."""
        try:
            if self.turn.failed is None:
                self._stop()
        finally:
            self.close()

    def close(self) -> None:
        """Close the files."""
        self.message_index.close()
        for log in self.logs:
            log.close()

    def _stop(self) -> None:
        self.turn.commit()
        for partition in self.partitions.values():
            for waiter in [*partition.readers, *(w for g in partition.waiting for w in g.waiters)]:
                waiter.time_out()
        work = self.snapshots.begin(clean=True, waited_for=True).copy_all()
        try:
            work.run()
        except OSError as error:
            self.turn.storage_failed(error)
            assert self.turn.failed is not None
            raise self.turn.failed from error
        # If the checkpoint was not written (full disk), nothing is lost; the next start reads more of the logs.
        self.snapshots.end(work)

    def delete_subject(self, subject: str) -> None:
        """Delete a subject with its messages and groups."""
        self.forwards.forget(self.catalog.delete_subject(subject).row.subject)

    # --- sends ----------------------------------------------------------------------------------

    def submit(self, partition: Partition, frame: FrameView, reply: SendCallback | None) -> None:
        """Accept a received frame; ``reply`` gets the result after the commit. Raises when the frame is refused."""
        turn = self.turn
        if turn.failed is not None:
            raise turn.failed
        if turn.read_only or turn.low_space:
            turn.refuse_when_full()
        if turn.syncs:
            turn.refuse_when_busy()
        frame.validate()
        if frame.column_bits & _PRIORITY_BIT:
            refuse_on_strict(partition.main or self.subjects.get(partition.row.name, partition))
        if frame.flags & FLAG_FORWARDED:
            self.forwards.check(partition, frame, answered=reply is not None)
        elif frame.column_bits & _NOT_SENT_BITS:
            if partition.row.kind == HALF:
                self.transactions.store(partition, frame, reply)
                return
            raise FrameError(
                "a producer's frame must not have runs, selection, schedule or note columns: only brokers add them"
            )
        elif partition.row.stage is not None:
            self.stages.check(partition, frame)
        elif frame.flags & FLAG_UNSEQUENCED and reply is not None:
            raise FrameError(
                "unsequenced frames are accepted for stages and oneway sends only: a resend would store them twice"
            )
        elif frame.column_bits & _DELAYED_BIT or partition.row.kind:
            check_delayed(partition, frame, self.clock.now())
        waiting = turn.pending.get(partition)
        if waiting is None:
            turn.pending[partition] = [Submission(frame, reply)]
        else:
            waiting.append(Submission(frame, reply))
        if not turn.dirty:
            turn.mark()

    # --- pulls ----------------------------------------------------------------------------------

    def pull(
        self,
        consumer: AttachedConsumer,
        count: int,
        size: int,
        wait: float,
        reply: Callable[[Delivery | None], None],
    ) -> float | None:
        """Deliver rows to a consumer, now or within ``wait`` seconds; ``reply`` gets None when there are none.

        Returns the deadline of a suspended pull.
        """
        group, turn = consumer.group, self.turn
        if turn.failed is not None or turn.stalled:
            turn.refuse_when_stalled()
        count = max(1, min(count, self.limits.pull_count))
        size = min(size, self.limits.pull_bytes)
        # There are no rows for the suspended pulls now, so this pull overtakes none of them.
        if group.paused:
            delivery = None
        elif group.rate is None:
            delivery = group.take(consumer, count, size)
        else:
            delivery = take_limited(group, consumer, count, size)
        if group.once:
            reply = self._when_durable(reply)
        if delivery is not None or wait <= 0:
            reply(delivery)
            return None
        deadline = self.clock.monotonic() + min(wait, self.limits.pull_wait_seconds)
        waiter = Waiter(group.waiters, consumer, count, size, reply, deadline)
        group.waiters[waiter] = group.partition.waiting[group] = None
        self.deadlines.add(deadline, waiter)
        return deadline

    def _when_durable(self, reply: Callable[[Delivery | None], None]) -> Callable[[Delivery | None], None]:
        """The reply to a pull of an at-most-once group: its event is durable before the rows are sent (R12)."""

        def answer(delivery: Delivery | None) -> None:
            if delivery is None:
                reply(None)
            else:
                self.turn.answer_when_durable(lambda: reply(delivery))

        return answer

    def read(
        self,
        partition: Partition,
        sequence: int,
        count: int,
        size: int,
        wait: float,
        reply: Callable[[ReadBatch], None],
        wanted: Filter | None = None,
    ) -> None:
        """Read rows without a group, all or those that match a filter."""
        size = min(size, self.limits.pull_bytes)
        read = reader_of(partition, self.message_log, wanted, self.turn.scans.budget)
        waiter = self.turn.scans.read(partition, sequence, count, size, wait, reply, read, wanted)
        if waiter is not None:
            self.deadlines.add(waiter.deadline, waiter)

    # --- acks -----------------------------------------------------------------------------------

    def ack(
        self,
        consumer: AttachedConsumer,
        ranges: list[tuple[int, int, int]],
        reply: Callable[[], None] | None,
        tags: Sequence[int] = (),
    ) -> None:
        """Ack (start, end, epoch) ranges of a consumer."""
        group, turn = consumer.group, self.turn
        if turn.failed is not None or turn.stalled:
            turn.refuse_when_stalled()
        group.ack(consumer, ranges, tags)
        if reply is not None:
            turn.answers.append(reply)
        if not turn.dirty:
            turn.mark()
        # A consumer that held too many separate ranges may get rows again.
        if group.waiters and (group.definition.ordered or group.has_more):
            wake_group(group)

    def nack(
        self,
        consumer: AttachedConsumer,
        ranges: list[tuple[int, int, int]],
        reply: Callable[[], None] | None,
        failure: NackOutcome = FAILURE,
        tags: Sequence[int] = (),
    ) -> None:
        """Nack (start, end, epoch) ranges of a consumer: they are redelivered or become dead letters."""
        group, turn = consumer.group, self.turn
        turn.refuse_when_stalled()
        group.nack(consumer, ranges, self.clock.now(), failure, tags)
        turn.answer_after_commit(reply)
        self.expect_retry(group)
        wake_group(group)

    # --- time -----------------------------------------------------------------------------------

    @property
    def next_deadline(self) -> float | None:
        """When ``run_timers`` has work to do, on the monotonic clock."""
        times = [self.deadlines.next, self.check_backs.next_deadline, self.turn.rates.next]
        due = self.retries.next
        if due is not None:
            # Wall time may jump, so the server also runs the timers every second.
            times.append(self.clock.monotonic() + max(due - self.clock.now(), 0) / 1_000_000)
        if self.schedules.by_name:
            times.append(self.due_delivery.next_deadline)
        return min((time for time in times if time is not None), default=None)

    def run_timers(self) -> None:
        """Deliver rows that have become due, and answer suspended pulls whose wait time is over."""
        now = self.clock.now()
        for group in self.retries.take(now):
            group.expected = 0
            try:
                ready = group.return_due(now)
            except Exception:  # noqa: BLE001 (end_pulls logs it)
                end_pulls(group)
                continue
            if ready:
                wake_group(group)
            self.expect_retry(group)
        self.turn.rates.run(self.clock.monotonic())
        self.check_backs.run_timers()
        due = bool(self.schedules.by_name) and self.due_delivery.look()
        if due or self.publisher.look() or self.half_publisher.look():
            self.turn.mark()
        for waiter in self.deadlines.take(self.clock.monotonic()):
            waiter.time_out()

    def expect_retry(self, group: Group) -> None:
        """Note the time of the group's next retry, after its waiting rows changed."""
        due = group.next_due
        if due is not None and (group.expected == 0 or due < group.expected):
            group.expected = due
            self.retries.add(due, group)
