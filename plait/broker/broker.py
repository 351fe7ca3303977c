"""The broker: sends, pulls and acks of one node, as a plain object.

Its caller drives it. A request is a method call with a callback for the answer. The caller calls ``commit`` at the end
of a loop turn in which something changed, ``begin_sync`` and ``end_sync`` around the blocking part of a sync, and
``run_timers`` at ``next_deadline``. The broker reaches disk and time only through objects that it was given, so a test
can run it step by step.

Promises: an acknowledged message is written (``flush="async"``) or durable (``flush="sync"``), and a message is visible
only from then on. Acks, nacks, resets and removals are acknowledged after their events are written to the action
log. Rows of at-most-once groups are delivered after their event is durable; rows of other groups may be delivered
before, and are redelivered after a crash.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from plait.broker import flow_control as flow
from plait.broker import subjects
from plait.broker.appender import Appender, Submission
from plait.broker.commit import Commit, SendCallback, SyncWork
from plait.broker.config import BrokerConfig
from plait.broker.granted_numbers import GrantedNumbers
from plait.broker.groups.dead_letters import DeadLetters
from plait.broker.groups.lease_grants import LeaseGrants
from plait.broker.groups.retries import Retries
from plait.broker.groups.shared_group import FAILURE, AttachedConsumer, Delivery, Group, NackOutcome
from plait.broker.partitions import sealing
from plait.broker.partitions.key_cache import KnownRows
from plait.broker.partitions.partition import LogPositions, Partition
from plait.broker.partitions.suspended import Deadlines, Waiter
from plait.broker.partitions.waking import WaiterWaking
from plait.broker.recovery import shards as state
from plait.broker.recovery.checkpointer import CheckpointWork, Snapshots
from plait.broker.recovery.segment_headers import SegmentHeaders
from plait.broker.recovery.start_up import Recovery, RecoveryReport
from plait.broker.schedule.forwards import Forwards
from plait.broker.schedule.schedules import Schedules
from plait.broker.staging.stages import Stages
from plait.clock import Clock
from plait.errors import DiskFull, FrameError, PlaitError, ReadOnly, StorageFailed
from plait.frame.builder import FrameParts
from plait.frame.columns import Column
from plait.frame.header import FLAG_FORWARDED, FLAG_UNSEQUENCED
from plait.frame.view import FrameView
from plait.limits import MIB
from plait.model.reason import Reason
from plait.storage.catalog import STAGE, SubjectSettings
from plait.storage.checkpoint import Checkpoints
from plait.storage.disk import Disk
from plait.storage.logs.action_log import DIRECTORY as ACTION_DIRECTORY
from plait.storage.logs.action_log import FLAG_DUE, Action, ActionBuffer, Definition
from plait.storage.logs.consume_log import DIRECTORY as CONSUME_DIRECTORY
from plait.storage.logs.consume_log import OpenMaps
from plait.storage.logs.log import Log
from plait.storage.logs.retained_log import DIRECTORY as RETAINED_DIRECTORY
from plait.storage.producers import ProducerTable
from plait.storage.ranges import Range

MESSAGE_DIRECTORY = "message"
#: Columns that only the broker adds to frames.
_NOT_SENT_BITS = 1 << Column.RUNS | 1 << Column.SELECTION | 1 << Column.SCHEDULE | 1 << Column.NOTE
_DELAYED_BIT = 1 << Column.DELIVER_AT


class Broker:
    """One node: its partitions, groups and logs."""

    def __init__(self, disk: Disk, clock: Clock, config: BrokerConfig | None = None) -> None:
        self.disk = disk
        self.clock = clock
        self.config = config or BrokerConfig()
        self.limits = self.config.limits
        self.epoch = 0
        #: Only meta servers create partitions; the first use of a name does not.
        self.routed = False
        self.on_dirty: Callable[[], object] = lambda: None
        self._partitions: dict[int, Partition] = {}
        #: Changed only by ``add_partition`` and ``remove_partition``: a segment header defines every partition.
        self.partitions: Mapping[int, Partition] = self._partitions
        #: By partition name. The partition of a subject without a route has the name of the subject.
        self.subjects: dict[str, Partition] = {}
        self.dropped = sealing.Dropped()
        self.numbers = GrantedNumbers()
        self.group_count = 0
        self.next_partition = 1
        self.next_group = 1
        self.next_consumer = 1
        self.action_index = 0
        self.read_only = False
        self.failed: StorageFailed | None = None
        self.deadlines = Deadlines()
        self.retries = Retries()
        self._pending: dict[Partition, list[Submission]] = {}
        self._pending_since = 0.0
        self._answers: list[Callable[[], None]] = []
        self._durable_answers: list[Callable[[], None]] = []
        self._unsynced: deque[Commit] = deque()
        #: Running syncs, and when each began (monotonic clock).
        self.syncs: dict[SyncWork, float] = {}
        self._actions = ActionBuffer()
        self._actions_stalled = False
        #: Why the disk takes no more messages; empty while it does.
        self.low_space = ""
        #: Retention should run now: a subject was deleted or its retention was shortened.
        self.retention_wanted = False
        self._dirty = False
        #: Attached consumers by session number.
        self.sessions: dict[int, AttachedConsumer] = {}
        self._next_session = 1
        disk.make_directory(CONSUME_DIRECTORY)
        # Where sends wait for syncs, the logs zero their files ahead of the writes.
        ahead = 1 * MIB if self.config.flush == "sync" else 0
        self.message_log = Log(disk, MESSAGE_DIRECTORY, self.config.message_segment_size, zero_ahead=ahead)
        self.action_log = Log(disk, ACTION_DIRECTORY, self.config.action_segment_size, zero_ahead=ahead)
        self.retained_log = Log(disk, RETAINED_DIRECTORY, self.config.retained_segment_size, zero_ahead=ahead)
        #: The first-hand logs in sync order: the action log refers to the others and is synced last.
        self.logs = (self.message_log, self.retained_log, self.action_log)
        self.checkpoints = Checkpoints(disk)
        limits = self.limits
        self.maps = OpenMaps(limits.open_maps)
        self.known_rows = KnownRows(limits.key_rows)
        self.producers = ProducerTable(
            producers_max=limits.producers,
            window_frames=limits.producer_window_frames,
            keep_seconds=limits.producer_seconds,
        )
        self.appender = Appender(self.message_log, self.producers)
        self.snapshots = Snapshots(self)
        self.schedules = Schedules(self)
        self.forwards = Forwards(self)
        self.stages = Stages(self)
        self.segment_headers = SegmentHeaders(self)
        self.dead_letters = DeadLetters(self)
        self.leases = LeaseGrants(self)
        self.waking = WaiterWaking(self)

    # --- start and stop -------------------------------------------------------------------------

    def start(self) -> RecoveryReport:
        """Recover the state from disk. Blocks; afterwards the broker accepts requests."""
        try:
            report = Recovery(self).run()
            self.message_log.on_segment = self.segment_headers.of_message_segment
            self.action_log.on_segment = self.segment_headers.of_action_segment
            self.retained_log.on_segment = self.segment_headers.of_retained_segment
            self.segment_headers.refresh()
            # The epoch must be durable before any frame has it. The checkpoint also replaces the clean one: a power
            # loss after this point is an unclean stop, even if it loses everything written since.
            self.checkpoint(clean=False)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise DiskFull(
                    "the disk is full, and the broker must write a checkpoint to start; free some space",
                    **flow.space(self),
                ) from error
            raise StorageFailed(f"recovery of the data directory failed: {error}") from error
        return report

    def stop(self) -> None:
        """Write everything, sync, and write a clean checkpoint. Blocks."""
        try:
            if self.failed is None:
                self._stop()
        finally:
            self.close()

    def close(self) -> None:
        """Close the files."""
        for log in self.logs:
            log.close()

    def _stop(self) -> None:
        self.commit()
        for partition in self.partitions.values():
            for waiter in [*partition.readers, *(w for g in partition.waiting for w in g.waiters)]:
                waiter.time_out()
        work = self.begin_checkpoint(clean=True, waited_for=True).copy_all()
        try:
            work.run()
        except OSError as error:
            self.storage_failed(error)
            assert self.failed is not None
            raise self.failed from error
        # If the checkpoint was not written (full disk), nothing is lost; the next start reads more of the logs.
        self.end_checkpoint(work)

    def checkpoint(self, *, clean: bool = False) -> None:
        """Make a checkpoint now. Blocks; raises OSError when the checkpoint cannot be written."""
        self.snapshots.make(clean=clean)

    def begin_checkpoint(self, *, clean: bool = False, waited_for: bool = False) -> CheckpointWork:
        """Begin a checkpoint. The caller calls ``copy_some``, then ``run`` in a thread, then ``end_checkpoint``."""
        return self.snapshots.begin(clean=clean, waited_for=waited_for)

    def settled_position(self) -> LogPositions:
        """Commit, and return the log positions up to which the state in memory includes the logs."""
        self.commit()
        if self.failed is not None:
            raise self.failed
        if self._actions_stalled:
            # The state includes these events; the log gets them later. Sealing numbers them before this position.
            self._seal_actions(self.clock.now())
        return LogPositions(self.message_log.written, self.retained_log.written, self.action_index)

    def end_checkpoint(self, work: CheckpointWork) -> None:
        """Finish a checkpoint. If it was not written (``work.error``), the next one covers its changes too."""
        self.snapshots.end(work)

    # --- bookkeeping used by recovery -----------------------------------------------------------

    def touch(self, partition: Partition) -> None:
        """Mark the checkpoint shard of the partition as dirty."""
        self.snapshots.dirty.add(partition.id % state.SHARDS)

    def add_partition(self, partition: Partition) -> None:
        self._partitions[partition.id] = partition
        self.segment_headers.add(partition)
        self.snapshots.add(partition)
        subjects.added(self, partition)

    def remove_partition(self, partition: Partition) -> None:
        if self._partitions.pop(partition.id, None) is not None:
            self.segment_headers.remove(partition)

    def add_group(self, group: Group) -> None:
        self.group_count += 1
        self.leases.add(group)

    def remove_group(self, group: Group) -> None:
        group.partition.remove_group(group)
        group.partition.waiting.pop(group, None)
        group.expected = 0
        self.leases.remove(group)
        self.group_count -= 1

    # --- subjects -------------------------------------------------------------------------------

    def partition_of(self, subject: str, *, create: bool = True) -> Partition:
        """The partition of a subject; created now where that is allowed."""
        return self.subjects.get(subject) or subjects.make(self, subject, create=create)

    def create_subject(self, subject: str, settings: SubjectSettings | None = None) -> Partition:
        """Create a subject. Its definition is in the message log before its first row."""
        return subjects.create_subject(self, subject, settings)

    def delete_subject(self, subject: str) -> None:
        """Delete a subject with its messages and groups."""
        subjects.delete_subject(self, subject)

    def append_own(self, *frames: FrameParts) -> int:
        """Append frames that the broker made to the message log, in one segment. Returns the offset of the first."""
        size = sum(frame.size for frame in frames)
        try:
            self.message_log.place_for(size, own=True)
        except OSError as error:
            raise self.disk_error(error) from error
        self._mark()
        return self.message_log.append([part for frame in frames for part in frame.parts], size)

    # --- sends ----------------------------------------------------------------------------------

    def submit(self, partition: Partition, frame: FrameView, reply: SendCallback | None) -> None:
        """Accept a received frame; ``reply`` gets the result after the commit. Raises when the frame is refused."""
        if self.failed is not None:
            raise self.failed
        if self.read_only or self.low_space:
            self.refuse_when_full()
        if self.syncs:
            self._refuse_when_busy()
        frame.validate()
        if frame.flags & FLAG_FORWARDED:
            self.forwards.check(partition, frame, answered=reply is not None)
        elif frame.column_bits & _NOT_SENT_BITS:
            raise FrameError(
                "a producer's frame must not have runs, selection, schedule or note columns: only brokers add them"
            )
        elif partition.row.kind == STAGE:
            self.stages.check(partition, frame)
        elif frame.flags & FLAG_UNSEQUENCED and reply is not None:
            raise FrameError(
                "unsequenced frames are accepted for stages and oneway sends only: a resend would store them twice"
            )
        elif frame.column_bits & _DELAYED_BIT or partition.row.kind:
            self.schedules.check(partition, frame)
        waiting = self._pending.get(partition)
        if waiting is None:
            self._pending[partition] = [Submission(frame, reply)]
        else:
            waiting.append(Submission(frame, reply))
        if not self._dirty:
            self._mark()

    def refuse_when_full(self) -> None:
        """Raise while the message log accepts no rows."""
        if self.read_only:
            raise ReadOnly("this broker is read-only and refuses sends; send to another broker")
        if self.low_space:
            raise DiskFull(self.low_space, **flow.space(self))

    def _refuse_when_busy(self) -> None:
        # A checkpoint continues after its sync; the logs are free by then, so finished syncs do not count.
        begun = min((begun for work, begun in self.syncs.items() if not work.done), default=None)
        if begun is not None:
            oldest = self._unsynced[0].since if self._unsynced else begun
            flow.refuse_when_busy(begun, oldest, self.clock.monotonic(), self.limits)

    # --- the end of a loop turn -----------------------------------------------------------------

    def _mark(self) -> None:
        if not self._dirty:
            self._dirty = True
            self.on_dirty()

    def commit(self) -> None:
        """Write the changes of this loop turn. In sync mode the answers wait for ``end_sync``."""
        if not self._dirty or self.failed is not None:
            return
        pending, self._pending = self._pending, {}
        commit = Commit(self.clock.monotonic())
        now = self.clock.now()
        for partition, submissions in pending.items():
            try:
                self.appender.append(partition, submissions, self.epoch, now, commit)
            except OSError as error:
                refusal = self.disk_error(error)
                answered = {id(reply) for reply, _, _ in commit.replies}
                for submission in submissions:
                    if submission.reply is not None and id(submission.reply) not in answered:
                        commit.replies.append((submission.reply, None, refusal))
            self.snapshots.dirty.add(partition.id % state.SHARDS)
        if self.schedules.ready:
            self.schedules.run(now, commit)
        if self.stages.ready:
            self.stages.run(now, commit)
        if self.failed is not None:
            return
        try:
            if self.message_log.pending:
                self.message_log.write()
            if self.retained_log.pending:
                self.retained_log.write()
            if commit.partitions and self.config.flush != "sync":
                # Before the events are written: the deliveries of this turn add events.
                self._make_visible(commit)
            self._dirty = False
            self._write_actions(now)
            if self.stages.ready or self._pending:
                # Publishing continues with the next commit. Requests for it during this one had no effect.
                self._mark()
        except OSError as error:
            self.storage_failed(error)
            return
        if commit.delayed:
            self.schedules.take_in(commit)
        if not self._actions_stalled:
            # While stalled, the events are not in the log: their answers wait for the commit that writes them.
            commit.answers, self._answers = self._answers, []
            commit.durable_answers, self._durable_answers = self._durable_answers, []
        if self.config.flush == "sync" or commit.durable_answers:
            commit.ends = [log.written for log in self.logs]
            self._unsynced.append(commit)
            if self.config.flush == "sync":
                return
        self._answer(commit)

    def _write_actions(self, now: int) -> None:
        self._actions_stalled = False
        actions, log = self._actions, self.action_log
        if actions.count:
            try:
                log.place_for(actions.size_bound)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EMFILE, errno.ENFILE):
                    raise
                # The events stay in memory until there is space; until then pulls and acks are refused or unanswered.
                self._actions_stalled = True
            else:
                self._seal_actions(now)
                for frame in actions.drain():
                    log.append(frame.parts, frame.size)
        if log.pending:
            log.write()

    def _seal_actions(self, now: int) -> None:
        ends = self.message_log.end, self.retained_log.end
        self.action_index += self._actions.build_frames(self.action_index, ends, self.epoch, now)

    def _make_visible(self, commit: Commit) -> None:
        """Make the rows of a commit visible, and serve the suspended pulls that wait for them."""
        for partition, end in commit.partitions.items():
            partition.visible = max(partition.visible, end)
        for partition in commit.partitions:
            if partition.waiting or partition.readers:
                self.waking.wake(partition)

    def _answer(self, commit: Commit) -> None:
        """The commit counts: answer its callers."""
        for reply, sequence, error in commit.replies:
            reply(sequence, error)
        for answer in commit.answers:
            answer()

    # --- durability -----------------------------------------------------------------------------

    @property
    def sync_wanted(self) -> bool:
        """Whether a commit or a stage needs a sync."""
        return bool(self._unsynced or self.stages.unsynced)

    @property
    def syncing(self) -> bool:
        return bool(self.syncs)

    def begin_sync(self) -> SyncWork:
        """Begin to sync everything written so far. The caller calls ``run`` in a thread, then ``end_sync``."""
        if self.failed is not None:
            raise self.failed
        work = SyncWork([log.begin_sync() for log in self.logs])
        self.syncs[work] = self.clock.monotonic()
        return work

    def end_sync(self, work: SyncWork) -> None:
        """The sync succeeded: answer the requests that waited for it. After a storage failure none is answered."""
        self.syncs.pop(work, None)
        if self.failed is not None:
            return
        for log, job in zip(self.logs, work.jobs, strict=True):
            log.end_sync(job)
        while self._unsynced and work.covers(self._unsynced[0].ends):
            commit = self._unsynced.popleft()
            if self.config.flush == "sync":
                self._make_visible(commit)
                self._answer(commit)
            for answer in commit.durable_answers:
                answer()
        if self.stages.unsynced:
            self.stages.synced()

    def storage_failed(self, error: OSError) -> None:
        """A write or a sync failed: data in the page cache may never reach the disk, so the server must stop."""
        self.failed = StorageFailed(f"writing or syncing a log failed ({error}); the server stops and must recover")

    def disk_error(self, error: OSError) -> PlaitError:
        return flow.disk_error(self, error)

    def check_space(self) -> None:
        """Compare the disk space with the watermarks. The result holds until the next call."""
        flow.check_space(self)
        if self._actions_stalled:
            self._mark()

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
        group = consumer.group
        if self.failed is not None or self._actions_stalled:
            self.refuse_when_stalled()
        count = max(1, min(count, self.limits.pull_count))
        size = min(size, self.limits.pull_bytes)
        # Suspended pulls already got every row there was for them, so this pull overtakes none of them.
        delivery = group.take(self.message_log, consumer, count, size, self)
        if delivery is not None:
            self.deliver(group, delivery, reply)
            return None
        if wait <= 0:
            reply(None)
            return None
        waiter = Waiter(group.waiters, consumer, count, size, reply)
        group.partition.waiting[group] = None
        deadline = self.clock.monotonic() + min(wait, self.limits.pull_wait_seconds)
        self.deadlines.add(deadline, waiter, Waiter.time_out)
        return deadline

    def read(
        self,
        partition: Partition,
        sequence: int,
        count: int,
        size: int,
        wait: float,
        reply: Callable[..., None],
    ) -> None:
        """Read rows without a group; ``reply`` gets a ``Batch`` or None."""
        size = min(size, self.limits.pull_bytes)
        batch = partition.read(self.message_log, sequence, partition.visible, count, size)
        if batch.count or wait <= 0:
            reply(batch)
            return
        waiter = Waiter(partition.readers, None, count, size, reply, max(sequence, batch.end))
        self.deadlines.add(self.clock.monotonic() + min(wait, self.limits.pull_wait_seconds), waiter, Waiter.time_out)

    def deliver(self, group: Group, delivery: Delivery, reply: Callable[[Delivery | None], None]) -> None:
        """Answer a pull, for an at-most-once group after its event is durable."""
        if group.definition.delivery == "at_most_once":
            # R12: the event is durable before the rows are sent, whatever the flush mode.
            self.answer_when_durable(lambda: reply(delivery))
        else:
            reply(delivery)

    def wake_group(self, group: Group) -> None:
        """Serve the suspended pulls of a group that may have rows now."""
        self.waking.wake_group(group)

    def refuse_when_stalled(self) -> None:
        """Raise while the action log cannot record consumption events."""
        if self.failed is not None:
            raise self.failed
        if self._actions_stalled:
            raise DiskFull(
                "the disk is full: the action log cannot record progress, so nothing is delivered; free some space",
                **flow.space(self),
            )

    # --- acks -----------------------------------------------------------------------------------

    def ack(
        self,
        consumer: AttachedConsumer,
        ranges: list[tuple[int, int, int]],
        reply: Callable[[], None] | None,
        tags: Sequence[int] = (),
    ) -> None:
        """Ack (start, end, epoch) ranges of a consumer."""
        if self.failed is not None or self._actions_stalled:
            self.refuse_when_stalled()
        group = consumer.group
        group.ack(consumer, ranges, self, tags)
        self.answer_after_commit(reply)
        # A consumer that held too many separate ranges may get rows again.
        if group.waiters and (group.definition.ordered or group.has_more):
            self.wake_group(group)

    def nack(
        self,
        consumer: AttachedConsumer,
        ranges: list[tuple[int, int, int]],
        reply: Callable[[], None] | None,
        failure: NackOutcome = FAILURE,
        tags: Sequence[int] = (),
    ) -> None:
        """Nack (start, end, epoch) ranges of a consumer: they are redelivered or become dead letters."""
        self.refuse_when_stalled()
        group = consumer.group
        now = self.clock.now()
        group.nack(consumer, ranges, self, now, failure, tags)
        self.answer_after_commit(reply)
        self.retries.expect(group)
        self.wake_group(group)

    def answer_after_commit(self, reply: Callable[[], None] | None) -> None:
        """Answer after the commit of this turn counts (written, or durable in sync mode)."""
        if reply is not None:
            self._answers.append(reply)
        self._mark()

    def answer_when_durable(self, reply: Callable[[], None]) -> None:
        """Answer after the commit of this turn is durable, whatever the flush mode."""
        self._durable_answers.append(reply)
        self._mark()

    def bury(self, group: Group, consumer: int, pieces: list[Range], reason: Reason) -> list[Range]:
        """Make dead letters of ranges that a consumer holds (``Journal``). Returns the ranges that must wait."""
        return self.dead_letters.bury(group, consumer, pieces, reason)

    def event(
        self,
        action: Action,
        group: Group,
        consumer: int,
        start: int,
        end: int,
        attempt: int,
        due: int = 0,
        flags: int = 0,
    ) -> None:
        """Record a consumption event in the action log (``Journal``)."""
        time, flags = (due, flags | FLAG_DUE) if due else (self.clock.now(), flags)
        self._actions.event(action, group.id, consumer, start, end, attempt, self.epoch, time, flags)
        self.snapshots.dirty.add(group.partition.id % state.SHARDS)
        if not self._dirty:
            self._mark()

    def record(self, action: Action, partition: Partition, start: int, end: int, due: int) -> None:
        """Record an event about delayed rows in the action log."""
        self._actions.event(action, 0, partition.id, start, end, 0, self.epoch, due, FLAG_DUE)
        self.touch(partition)
        self._mark()

    def define(self, definition: Definition) -> None:
        self._actions.define(definition)
        self._mark()

    def new_session(self, consumer: AttachedConsumer) -> int:
        """Assign a new session number to a consumer."""
        self.sessions.pop(consumer.session, None)
        consumer.session = self._next_session
        self._next_session += 1
        self.sessions[consumer.session] = consumer
        return consumer.session

    # --- time -----------------------------------------------------------------------------------

    @property
    def next_deadline(self) -> float | None:
        """When ``run_timers`` has work to do, on the monotonic clock."""
        deadline, due = self.deadlines.next, self.retries.next
        if due is not None:
            # Wall time may jump, so the server also runs the timers every second.
            at = self.clock.monotonic() + max(due - self.clock.now(), 0) / 1_000_000
            deadline = at if deadline is None else min(at, deadline)
        if self.schedules.by_subject and (later := self.schedules.next_deadline) is not None:
            deadline = later if deadline is None else min(later, deadline)
        return deadline

    def run_timers(self) -> None:
        """Deliver rows that have become due, and answer suspended pulls whose wait time is over."""
        for group in self.retries.due(self.clock.now(), self.waking.failed):
            self.wake_group(group)
        if (self.schedules.by_subject and self.schedules.look()) or self.stages.look():
            self._mark()
        self.deadlines.run(self.clock.monotonic())
