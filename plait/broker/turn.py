"""The turn: what the broker changes in one loop turn, written together by one commit.

Requests add rows, events and answers. ``commit`` writes them and calls the answers; with ``flush="sync"`` the answers
wait for a sync. The turn also refuses requests while the logs cannot accept their rows or events: because of flow
control, a full disk or a failed write.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from plait.broker import flow_control as flow
from plait.broker.appender import FIRST_FRAMES_BOUND, ActionBuffer, Appender, Submission
from plait.broker.commit import Commit, SyncWork
from plait.broker.config import BrokerConfig
from plait.broker.groups.group import Bury, Group
from plait.broker.groups.limited_delivery import OpeningRates
from plait.broker.groups.ordered.locks import LockFloors
from plait.broker.groups.waking import wake
from plait.broker.partitions.partition import LogPositions, Partition
from plait.broker.partitions.scans import Scans
from plait.clock import Clock
from plait.errors import DiskFull, FlowControl, PlaitError, ReadOnly, StorageFailed
from plait.frame.builder import FrameParts
from plait.limits import MIB
from plait.storage.disk import Disk
from plait.storage.logs.action_events import Event
from plait.storage.logs.action_log import DIRECTORY as ACTION_DIRECTORY
from plait.storage.logs.action_log import Definition
from plait.storage.logs.log import Log
from plait.storage.logs.retained_log import DIRECTORY as RETAINED_DIRECTORY
from plait.storage.producers import ProducerTable

MESSAGE_DIRECTORY = "message"


class ScheduleWork(Protocol):
    """What a commit calls of ``DueDelivery``."""

    ready: bool
    by_name: Mapping[str, object]

    def run(self, now: int, commit: Commit) -> None: ...

    def take_in(self, commit: Commit) -> None: ...


class StageWork(Protocol):
    """What a commit and a sync call of ``StagePublisher``."""

    ready: bool

    @property
    def unsynced(self) -> object: ...

    def run(self, now: int, commit: Commit) -> None: ...

    def synced(self) -> None: ...


class TransactionWork(Protocol):
    """What a commit calls of ``HalfPublisher``."""

    ready: bool

    def run(self, now: int, commit: Commit) -> None: ...


class Turn:
    """The logs of a broker, and the changes that the next commit writes to them."""

    due_delivery: ScheduleWork
    stage_publisher: StageWork
    half_publisher: TransactionWork
    bury: Bury

    def __init__(self, disk: Disk, clock: Clock, config: BrokerConfig, producers: ProducerTable) -> None:
        self.disk, self.clock, self.config, self.limits = disk, clock, config, config.limits
        self.epoch = self.action_index = 0
        self.read_only = self.dirty = False
        self.failed: StorageFailed | None = None
        #: Why the disk accepts no more messages; empty while it accepts them.
        self.low_space = ""
        #: Called when the turn has its first change.
        self.on_dirty: Callable[[], object] = lambda: None
        #: Called after ``run`` if storage failed, or a sync or the due time of a row is awaited; with a defect, if any.
        self.on_work: Callable[[Exception | None], object] = lambda error: None
        #: True once the server has stopped or was abandoned: ``run`` then writes nothing more.
        self.halted = False
        #: Frames that the next commit appends.
        self.pending: dict[Partition, list[Submission]] = {}
        #: True if the disk is full: buffered events wait for space, and so do their answers.
        self.stalled = False
        #: Checkpoint shards that have changed since they were last copied.
        self.dirty_shards: set[int] = set()
        #: The lowest epochs under which locks of ordered groups are granted.
        self.floors = LockFloors()
        self.rates = OpeningRates()
        self.scans = Scans(clock.monotonic, self.limits.pull_wait_seconds)
        #: Running syncs, and when each began (monotonic clock).
        self.syncs: dict[SyncWork, float] = {}
        self._actions = ActionBuffer()
        #: Called when the next commit takes effect (when it is written, or durable in sync mode).
        self.answers: list[Callable[[], None]] = []
        self._durable_answers: list[Callable[[], None]] = []
        #: Commits that are not durable yet and must be.
        self.unsynced: deque[Commit] = deque()
        # Where sends wait for syncs, the logs zero their files ahead of the writes.
        ahead = 1 * MIB if config.flush == "sync" else 0
        self.message_log = Log(disk, MESSAGE_DIRECTORY, config.message_segment_size, zero_ahead=ahead)
        self.action_log = Log(disk, ACTION_DIRECTORY, config.action_segment_size, zero_ahead=ahead)
        self.retained_log = Log(disk, RETAINED_DIRECTORY, config.retained_segment_size, zero_ahead=ahead)
        #: The first-hand logs in sync order: the action log refers to the others and is synced last.
        self.logs = (self.message_log, self.retained_log, self.action_log)
        self.appender = Appender(self.message_log, producers)

    # --- changes of this turn -------------------------------------------------------------------

    def mark(self) -> None:
        if not self.dirty:
            self.dirty = True
            self.on_dirty()

    def touch(self, partition: Partition) -> None:
        """Mark the checkpoint shard of the partition as dirty."""
        self.dirty_shards.add(partition.shard)

    def event(self, group: Group, event: Event) -> None:
        """Record an event of a group in the action log."""
        self._actions.event(event, group.id, self.epoch)
        self.dirty_shards.add(group.partition.shard)
        if not self.dirty:
            self.mark()

    def record(self, event: Event) -> None:
        """Record an event that belongs to no group in the action log."""
        self._actions.event(event, 0, self.epoch)
        self.mark()

    def define(self, definition: Definition) -> None:
        self._actions.define(definition)
        self.mark()

    def append_own(self, *frames: FrameParts) -> int:
        """Append frames that the broker made to the message log, in one segment. Returns the offset of the first."""
        size = sum(frame.size for frame in frames)
        try:
            self.message_log.place_for(size, own=True)
        except OSError as error:
            raise self.disk_error(error) from error
        self.mark()
        return self.message_log.append([part for frame in frames for part in frame.parts], size)

    def answer_after_commit(self, reply: Callable[[], None] | None) -> None:
        """Answer when the commit of this turn takes effect (when it is written, or durable in sync mode)."""
        if reply is not None:
            self.answers.append(reply)
        self.mark()

    def answer_when_durable(self, reply: Callable[[], None]) -> None:
        """Answer after the commit of this turn is durable, whatever the flush mode."""
        self._durable_answers.append(reply)
        self.mark()

    # --- flow control ---------------------------------------------------------------------------

    def refuse_when_full(self) -> None:
        """Raise while the message log accepts no rows."""
        if self.read_only:
            raise ReadOnly("this broker is read-only and refuses sends; send to another broker")
        if self.low_space:
            raise DiskFull(self.low_space, **self.space())

    def refuse_when_busy(self) -> None:
        """Raise while a sync takes too long."""
        # A checkpoint continues after its sync. The logs are free by then, so finished syncs are ignored.
        begun = min((begun for work, begun in self.syncs.items() if not work.done), default=None)
        if begun is not None:
            oldest = self.unsynced[0].since if self.unsynced else begun
            flow.refuse_when_busy(begun, oldest, self.clock.monotonic(), self.limits)

    def refuse_when_stalled(self) -> None:
        """Raise while the action log cannot record consumption events."""
        if self.failed is not None:
            raise self.failed
        if self.stalled:
            raise DiskFull(
                "the disk is full: the action log cannot record progress, so nothing is delivered; free some space",
                **self.space(),
            )

    def check_space(self) -> None:
        """Compare the disk space with the watermarks. The result holds until the next call."""
        free, total = self.disk.space()
        self.low_space = flow.low_space(free, total, self.config, self.message_log.files.lacking)
        self.message_log.leave_free = flow.floor_of(total, self.config)
        if self.stalled:
            self.mark()

    def space(self) -> dict[str, int]:
        """Free and total bytes, for the details of a disk error."""
        return dict(zip(("free", "total"), self.disk.space(), strict=True))

    def disk_error(self, error: OSError) -> PlaitError:
        """The error for a failed write. A full disk refuses requests; any other failure stops the server."""
        if error.errno == errno.ENOSPC:
            self.check_space()
            text = self.low_space or f"the disk is full; nothing was stored; {flow.SPACE_HELP}"
            return DiskFull(text, **self.space())
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            self.storage_failed(error)
        return self.failed or FlowControl(
            "too many open files to create a segment; nothing was stored, raise the limit (ulimit -n) and send again"
        )

    def storage_failed(self, error: OSError) -> None:
        """Fail after a failed write or sync: cached data may never reach the disk, so the server must stop."""
        self.failed = StorageFailed(f"writing or syncing a log failed ({error}); the server stops and must recover")

    # --- the end of a turn ----------------------------------------------------------------------

    def run(self) -> None:
        """Commit at the end of a loop turn of the server."""
        if self.halted:
            return
        try:
            self.commit()
            if self.failed is not None or self.unsynced or self.stage_publisher.unsynced or self.due_delivery.by_name:
                self.on_work(None)
        except Exception as error:  # noqa: BLE001 (the host logs it)
            self.on_work(error)

    def commit(self) -> None:
        """Write the changes of this loop turn. In sync mode the answers wait for ``end_sync``."""
        if not self.dirty or self.failed is not None:
            return
        commit, now = Commit(self.clock.monotonic()), self.clock.now()
        if self.pending:
            self._append(now, commit)
        if self.half_publisher.ready:
            self.half_publisher.run(now, commit)
        if self.due_delivery.ready:
            self.due_delivery.run(now, commit)
        if self.stage_publisher.ready:
            self.stage_publisher.run(now, commit)
        if self.failed is not None:
            return
        try:
            for log in self.logs[:2]:
                if log.pending:
                    log.write()
            if commit.partitions and self.config.flush != "sync":
                # Before the events are written: the deliveries of this turn add events.
                self._make_visible(commit)
            self.dirty = False
            if self._actions.size or self.action_log.pending:
                self._write_actions(now)
            if self.stage_publisher.ready or self.half_publisher.ready or self.pending:
                # Publishing continues with the next commit. Requests for it during this one had no effect.
                self.mark()
        except OSError as error:
            self.storage_failed(error)
            return
        if commit.delayed:
            self.due_delivery.take_in(commit)
        if not self.stalled:
            # While stalled, the events are not in the log: their answers wait for the commit that writes them.
            commit.answers, self.answers = self.answers, []
            commit.durable_answers, self._durable_answers = self._durable_answers, []
        if self.config.flush == "sync" or commit.durable_answers:
            commit.ends = [log.written for log in self.logs]
            self.unsynced.append(commit)
            if self.config.flush == "sync":
                return
        self._answer(commit)

    def _append(self, now: int, commit: Commit) -> None:
        """Append the submitted frames to the message log; add their callbacks to the commit."""
        pending, self.pending = self.pending, {}
        for partition, submissions in pending.items():
            try:
                self.appender.append(partition, submissions, self.epoch, now, commit)
            except OSError as error:
                refusal = self.disk_error(error)
                answered = {id(reply) for reply, _, _ in commit.replies}
                for submission in submissions:
                    if submission.reply is not None and id(submission.reply) not in answered:
                        commit.replies.append((submission.reply, None, refusal))
            self.dirty_shards.add(partition.shard)

    def _write_actions(self, now: int) -> None:
        actions, log, self.stalled = self._actions, self.action_log, False
        if actions.size:
            bound = actions.size + FIRST_FRAMES_BOUND
            try:
                if log.end + bound > log.room_end:
                    log.place_for(bound)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EMFILE, errno.ENFILE):
                    raise
                # The events stay in memory until there is space; until then pulls and acks are refused or unanswered.
                self.stalled = True
            else:
                ends = self.message_log.end, self.retained_log.end
                self.action_index = actions.build_frames(self.action_index, ends, self.epoch, now)
                for frame in actions.frames:
                    log.append(frame.parts, frame.size)
                actions.frames, actions.size = [], 0
        if log.pending:
            log.write()

    def _make_visible(self, commit: Commit) -> None:
        """Make the rows of a commit visible, and serve the suspended pulls that wait for them."""
        for partition, end in commit.partitions.items():
            partition.visible = max(partition.visible, end)
            if partition.waiting or partition.readers:
                wake(partition, commit.newest.get(partition), self.scans)

    def _answer(self, commit: Commit) -> None:
        """Answer the callers of a commit that takes effect."""
        for reply, sequence, error in commit.replies:
            reply(sequence, error)
        for answer in commit.answers:
            answer()

    def settled_position(self) -> LogPositions:
        """Commit, and return the log positions up to which the state in memory includes the logs."""
        self.commit()
        if self.failed is not None:
            raise self.failed
        if self.stalled:
            # The state includes these events; the log gets them later. Sealing numbers them before this position.
            ends = self.message_log.end, self.retained_log.end
            self.action_index = self._actions.build_frames(self.action_index, ends, self.epoch, self.clock.now())
        return LogPositions(self.message_log.written, self.retained_log.written, self.action_index)

    # --- durability -----------------------------------------------------------------------------

    @property
    def sync_wanted(self) -> bool:
        """Whether a commit or a stage needs a sync."""
        return bool(self.unsynced or self.stage_publisher.unsynced)

    def begin_sync(self) -> SyncWork:
        """Begin to sync everything written so far. The caller calls ``run`` in a thread, then ``end_sync``."""
        if self.failed is not None:
            raise self.failed
        work = SyncWork([log.begin_sync() for log in self.logs])
        self.syncs[work] = self.clock.monotonic()
        return work

    def end_sync(self, work: SyncWork) -> None:
        """Answer the requests that waited for a sync that succeeded. After a storage failure none is answered."""
        self.syncs.pop(work, None)
        if self.failed is not None:
            return
        for log, job in zip(self.logs, work.jobs, strict=True):
            log.end_sync(job)
        while self.unsynced and work.covers(self.unsynced[0].ends):
            commit = self.unsynced.popleft()
            if self.config.flush == "sync":
                self._make_visible(commit)
                self._answer(commit)
            for answer in commit.durable_answers:
                answer()
        if self.stage_publisher.unsynced:
            self.stage_publisher.synced()


def write_messages(turn: Turn) -> None:
    """Write the message log, so that the rows of this turn can be read."""
    try:
        turn.message_log.write()
    except OSError as error:
        turn.storage_failed(error)
        assert turn.failed is not None
        raise turn.failed from error
