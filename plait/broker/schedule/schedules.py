"""The schedule: messages with a due time.

A delayed row is appended to the *schedule partition* of its subject in the message log, and then its receipt is sent;
the number of the row is its sequence there. A checkpoint moves the rows that still wait to buckets
(``storage.schedule``). A due row is appended to the subject's own partition, in a frame that names the numbers that it
settles: delivery and its record are one write, so a crash cannot make a row be delivered twice or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from plait.broker.commit import Commit
from plait.broker.partitions.partition import Partition
from plait.broker.schedule.bucketed import BucketedRows
from plait.broker.schedule.due_rows import DELIVER_SIZE_MAX, BucketedOffset, DueRows, reading
from plait.broker.schedule.upcoming import Upcoming
from plait.broker.subjects import create_partition
from plait.errors import DiskFull, FlowControl, FrameError, InvalidArgument, LimitExceeded, ReadOnly, StorageFailed
from plait.frame.columns import Column
from plait.frame.gather import Gathered, Int64s
from plait.frame.header import pack_stamp
from plait.frame.view import FrameView
from plait.model.retry_policy import WAIT_SECONDS_MAX
from plait.storage.catalog import SCHEDULE, PartitionRow
from plait.storage.logs.action_log import Action
from plait.storage.schedule.bucket import NEVER, Bucket, keys_at
from plait.storage.schedule.unbucketed import UnbucketedRows

if TYPE_CHECKING:
    from plait.broker.broker import Broker

#: Rows that one turn delivers: the loop serves other requests too.
DELIVER_MAX: Final = 8_192
#: Time between two turns that deliver, so that rows that are due together are delivered together.
TURN_SECONDS: Final = 0.004
#: Time before a delivery is tried again that found no space on the disk.
RETRY_SECONDS: Final = 1.0
#: Notices that wait to be logged; further ones are dropped.
DAMAGES_MAX: Final = 1_000
#: The clock of a sender may be ahead of the broker's clock by this.
AHEAD_SECONDS: Final = 60.0
#: The latest possible due time, in microseconds from now.
_AHEAD_MAX: Final = int((WAIT_SECONDS_MAX + AHEAD_SECONDS) * 1_000_000)


class Schedule:
    """The delayed rows of one partition."""

    __slots__ = ("held", "partition", "unbucketed")

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.unbucketed = UnbucketedRows(partition.next)
        #: Due rows wait outside the window: the partition does not take them and the route is not known yet, or the
        #: partition is unknown.
        self.held = False


class Schedules:
    """All delayed rows of a broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        #: By partition name.
        self.by_subject: dict[str, Schedule] = {}
        self._by_partition: dict[int, Schedule] = {}
        self.buckets: dict[int, Bucket] = {}
        self.upcoming = Upcoming(self.buckets)
        self.window = self.upcoming.window
        self.rows = DueRows(broker, self)
        self.bucketed = BucketedRows(broker, self)
        #: Rows are due: the next commit delivers them.
        self.ready = False
        #: Monotonic times: when the next delivering turn is due, and until when deliveries pause after an error.
        self._turn_at = self._held_until = 0.0
        #: The last reported reason why nothing is delivered.
        self._stall_reason = ""
        #: Rows that were damaged; and notices about damage and delays that the server has not logged yet.
        self.lost_count = 0
        self.damages: list[str] = []

    # --- which there are ------------------------------------------------------------------------

    def add(self, partition: Partition) -> None:
        """Register a schedule partition."""
        schedule = Schedule(partition)
        partition.main = self._broker.subjects.get(partition.row.name)
        self._by_partition[partition.id] = schedule
        self.by_subject[partition.row.name] = schedule

    def enters(self, partition: Partition) -> None:
        """Connect a new partition with its schedule, if it has one."""
        schedule = self.by_subject.get(partition.row.name)
        if schedule is not None:
            schedule.partition.main = partition
            if schedule.held:
                schedule.held = False
                self.upcoming.begin_again(self.by_subject.values())

    def remove(self, partition: Partition) -> None:
        """Remove the delayed rows of a deleted subject."""
        schedule = self._by_partition.pop(partition.id, None)
        if schedule is not None:
            schedule.unbucketed = UnbucketedRows(partition.next)
            if self.by_subject.get(partition.row.name) is schedule:
                del self.by_subject[partition.row.name]
        self.window.remove_partition(partition.id)
        for bucket in self.buckets.values():
            for run in np.flatnonzero(bucket.of(partition.id)).tolist():
                bucket.drop_run(run)
        self.bucketed.drop_finished()

    def partition_of(self, subject: str) -> Partition:
        """The schedule partition of a subject; created now, like the subject itself, where that is allowed."""
        target = self._broker.partition_of(subject)
        schedule = self.by_subject.get(subject)
        if schedule is not None:
            return schedule.partition
        broker = self._broker
        row = PartitionRow(
            broker.next_partition, target.row.subject, target.row.name, broker.clock.now(), kind=SCHEDULE
        )
        return create_partition(broker, row)

    def all(self) -> Iterable[Schedule]:
        """All schedules; during recovery also deleted ones beside their successors."""
        return self._by_partition.values()

    def get(self, partition: int) -> Schedule | None:
        """The schedule of a schedule partition."""
        return self._by_partition.get(partition)

    @property
    def count(self) -> int:
        """The number of waiting rows."""
        bucketed = sum(bucket.waiting for bucket in self.buckets.values())
        return bucketed + sum(schedule.unbucketed.waiting for schedule in self.by_subject.values())

    def waits(self, schedule: Schedule) -> bool:
        """Whether the schedule has waiting rows."""
        return schedule.unbucketed.waiting > 0 or any(
            bucket.of(schedule.partition.id).any() for bucket in self.buckets.values()
        )

    def any_held(self, subject: str) -> bool:
        """Whether due rows of the subject wait for its route."""
        return any(each.held and each.partition.row.subject == subject for each in self.by_subject.values())

    def report(self, file: str, reason: str, rows: int) -> None:
        """Count lost rows and report the damage."""
        self.lost_count += rows
        self.notice(f"{file}: {rows} delayed messages are lost: {reason}")

    def notice(self, text: str) -> None:
        """Queue a notice for the server's log."""
        if len(self.damages) < DAMAGES_MAX:
            self.damages.append(text)

    # --- rows come ------------------------------------------------------------------------------

    def check(self, partition: Partition, frame: FrameView) -> None:
        """Refuse a received frame with a deliver-at column in the wrong partition, or with an impossible due time."""
        delayed = frame.has(Column.DELIVER_AT)
        if partition.row.kind != SCHEDULE:
            if delayed:
                raise FrameError("a frame with due times belongs in the subject's schedule partition; send it there")
        elif not delayed:
            raise FrameError("a frame without due times belongs in the subject's own partition; send it there")
        else:
            self.check_time(int(frame.values(Column.DELIVER_AT).max()))

    def check_time(self, due: int) -> None:
        """Refuse an impossible due time."""
        ahead = due - self._broker.clock.now()
        if ahead > _AHEAD_MAX or due < 0:
            raise InvalidArgument(
                f"a delay of {ahead / 1e6:.0f} seconds is over the limit of {WAIT_SECONDS_MAX:.0f}; deliver earlier"
            )

    def take_in(self, commit: Commit) -> None:
        """Add the delayed rows that a commit wrote."""
        for partition, frame, offset, base in commit.delayed:
            schedule = self._by_partition.get(partition.id)
            if schedule is not None:
                self.upcoming.append(schedule, frame, offset, base)

    # --- rows leave -----------------------------------------------------------------------------

    @property
    def next_deadline(self) -> float | None:
        """When to check for due rows, on the monotonic clock."""
        due = self.upcoming.next
        if due is None:
            return None
        clock = self._broker.clock
        return max(clock.monotonic() + max(due - clock.now(), 0) / 1_000_000, self._turn_at)

    def look(self) -> bool:
        """Set and return ``ready``: whether ``run`` has work to do."""
        clock = self._broker.clock
        now = clock.now()
        if self.upcoming.is_ahead(now):
            self.upcoming.begin_again(self.by_subject.values())
        due = self.window.next_due <= now or self.upcoming.wants(now)
        self.ready = due and clock.monotonic() >= self._held_until
        return self.ready

    def run(self, now: int, commit: Commit) -> None:
        """Deliver due rows. Rows that find no space on the disk stay and are tried again."""
        try:
            self._broker.turn.refuse_when_full()
            self.write()
            self._deliver_all(now, commit)
            self._stall_reason = ""
        except OSError as error:
            self._hold()
            self._broker.turn.disk_error(error)
        except FlowControl as error:
            self._hold()
            if self._stall_reason != str(error):
                self._stall_reason = str(error)
                self.notice(f"delivery of delayed messages is paused: {error}")
        except (DiskFull, ReadOnly):
            self._hold()
        except StorageFailed:
            # ``broker.turn.failed`` is set, and the server stops.
            pass

    def _hold(self) -> None:
        """Pause deliveries for ``RETRY_SECONDS``."""
        self.ready = False
        self._turn_at = self._held_until = self._broker.clock.monotonic() + RETRY_SECONDS

    def write(self) -> None:
        """Write the log, so that the rows of this turn can be read."""
        try:
            self._broker.message_log.write()
        except OSError as error:
            self._broker.turn.storage_failed(error)
            assert self._broker.turn.failed is not None
            raise self._broker.turn.failed from error

    def _deliver_all(self, now: int, commit: Commit) -> None:
        self.ready = False
        clock = self._broker.clock
        self._turn_at = clock.monotonic() + TURN_SECONDS
        with reading():
            self.upcoming.load(now)
        rows = self.window.due(now, DELIVER_MAX)
        if not len(rows):
            return
        kept = np.ones(len(rows), bool)
        try:
            partitions = rows["partition"]
            # Group the rows by subject, in order.
            order = np.argsort(partitions, kind="stable")
            edges = np.flatnonzero(np.diff(partitions[order], prepend=-1, append=-1))
            subjects = [order[start:stop] for start, stop in pairwise(edges.tolist())]
            room = DELIVER_SIZE_MAX
            # The subject with the earliest due row is first; without room for more, the next turn starts with another.
            for mine in sorted(subjects, key=lambda mine: int(mine[0])):
                schedule = self._by_partition[int(partitions[mine[0]])]
                if not schedule.held:
                    room -= self._deliver(schedule, rows, mine, now, commit, kept, room)
                if schedule.held:
                    # They enter the window again when the route is known.
                    kept[mine] = False
                if room <= 0:
                    break
        finally:
            self.window.took(len(rows), rows[kept])
            self.bucketed.drop_finished()

    def _deliver(
        self,
        schedule: Schedule,
        rows: Any,
        mine: Int64s,
        now: int,
        commit: Commit,
        kept: npt.NDArray[np.bool_],
        room: int,
    ) -> int:
        """Deliver the rows of one partition that fit in ``room``, and clear their bits in ``kept``. Returns their size.

        Each row follows the current route (R20): to this partition, or to a forward partition for another one.
        """
        name = schedule.partition.row.name
        target = self._broker.subjects.get(name)
        if target is None:
            schedule.held = True
            self.notice(
                f"delayed messages of {name!r} cannot be delivered: the definition of their partition is damaged"
            )
            return 0
        mine, lost = self.rows.readable(schedule, rows, mine)
        kept[lost] = False
        if not len(mine):
            return 0
        with reading():
            mine, gathered, size = self.rows.gather(schedule, rows, mine, room)
        if gathered is None:
            return room
        if target.accepts is None:
            self._append(schedule, target, gathered, rows, mine, now, commit, kept)
            return size
        parts = self._broker.forwards.split(target, gathered.key_hashes, rows["number"][mine])
        if parts is None:
            schedule.held = True
            return 0
        if len(parts) == 1:
            self._append(schedule, parts[0][0], gathered, rows, mine, now, commit, kept)
            return size
        for partition, which in parts:
            with reading():
                some, gathered, _ = self.rows.gather(schedule, rows, mine[which])
            assert gathered is not None
            self._append(schedule, partition, gathered, rows, some, now, commit, kept, in_turn=False)
        return size

    def _append(
        self,
        schedule: Schedule,
        target: Partition,
        gathered: Gathered,
        rows: Any,
        mine: Int64s,
        now: int,
        commit: Commit,
        kept: npt.NDArray[np.bool_],
        *,
        in_turn: bool = True,
    ) -> None:
        """Append rows to a partition in frames that settle them."""
        broker = self._broker
        chosen = rows[mine]
        for start, stop, frame in self.rows.frames(gathered, chosen, target):
            broker.message_log.place_for(frame.size)
            base = target.next
            frame.stamp_with(pack_stamp(target.id, base, now, broker.message_log.durable, broker.turn.epoch))
            offset = broker.message_log.append(frame.parts, frame.size)
            target.appended(base, offset, now, frame.size, frame.count, broker.turn.epoch)
            commit.partitions[target] = target.next
            broker.turn.touch(target)
            kept[mine[start:stop]] = False
            self.rows.left(schedule, chosen[start:stop], in_turn=in_turn)

    def route_known(self, subject: str) -> None:
        """The route of a subject is known: move the due rows that wait for it into the window."""
        held = [each for each in self.by_subject.values() if each.held and each.partition.row.subject == subject]
        for schedule in held:
            schedule.held = False
        if held:
            self.upcoming.begin_again(self.by_subject.values())

    # --- cancel and reschedule --------------------------------------------------------------------

    def cancel(self, subject: str, number: int, due: int) -> bool:
        """Cancel a row; False when the row does not wait. Counts once committed."""
        with reading():
            found = self._find(subject, number, due)
        if found is None:
            return False
        schedule, place = found
        self._broker.turn.record(Action.CANCEL, schedule.partition, number, number + 1, due)
        self._settle(schedule, number, due, place)
        return True

    def reschedule(self, subject: str, number: int, due: int, to: int) -> int | None:
        """Change the due time of a row. Returns its new number; None when the row does not wait."""
        self.check_time(to)
        broker = self._broker
        with reading():
            found = self._find(subject, number, due)
        if found is None:
            return None
        schedule, place = found
        broker.turn.refuse_when_full()
        self.write()
        with reading():
            frame = self.rows.copy(schedule, number, due, to, place)
        if frame is None:
            return None
        partition = schedule.partition
        base, now = partition.next, broker.clock.now()
        frame.stamp_with(pack_stamp(partition.id, base, now, broker.message_log.durable, broker.turn.epoch))
        offset = broker.turn.append_own(frame)
        partition.appended(base, offset, now, frame.size, 1, broker.turn.epoch)
        broker.turn.touch(partition)
        self._settle(schedule, number, due, place)
        self.upcoming.append(schedule, FrameView(frame.tobytes()), offset, base)
        return base

    def _find(self, subject: str, number: int, due: int) -> tuple[Schedule, BucketedOffset | None] | None:
        """The schedule of the subject, if the row waits in it, and the location of a bucketed row."""
        self._broker.partition_of(subject, create=False)
        self._broker.turn.refuse_when_stalled()
        schedule = self.by_subject.get(subject)
        if schedule is None or not 0 <= due < NEVER:
            return None
        if number >= schedule.unbucketed.base:
            return (schedule, None) if schedule.unbucketed.due_of(number) == due else None
        place = self._find_bucketed(schedule, number, due)
        if place is None:
            return None
        self._refuse_more()
        return schedule, place

    def _find_bucketed(self, schedule: Schedule, number: int, due: int) -> BucketedOffset | None:
        """The location of a waiting row in a bucket."""
        for key in keys_at(due):
            bucket = self.buckets.get(key)
            if bucket is None:
                continue
            runs = bucket.runs
            maybe = bucket.of(schedule.partition.id) & (runs["due_first"] <= due) & (runs["due_last"] >= due)
            maybe &= (runs["low"] <= number) & (runs["high"] >= number)
            for run in np.flatnonzero(maybe).tolist():
                columns = bucket.glance(run)
                if columns is None:
                    continue
                times, numbers = columns
                low = max(int(np.searchsorted(times, due, "left")), int(bucket.cursors[run]))
                high = int(np.searchsorted(times, due, "right"))
                found = np.flatnonzero(numbers[low:high] == number)
                if len(found) and not bucket.is_settled(run, low + int(found[0])) and bucket.open_run(run):
                    return BucketedOffset(bucket, run, low + int(found[0]))
        return None

    def _settle(self, schedule: Schedule, number: int, due: int, place: BucketedOffset | None) -> None:
        """Settle a waiting row before it is due."""
        self._broker.turn.touch(schedule.partition)
        self.window.remove(due, number, schedule.partition.id)
        if place is None:
            schedule.unbucketed.settle(np.array([number]))
        else:
            place.bucket.settle(place.run, np.array([place.row]))
            self.bucketed.drop_finished()

    def _refuse_more(self) -> None:
        """Raise when too many rows were settled before they were due: each takes memory until its run ends."""
        limit = self._broker.limits.schedule_settled
        if sum(bucket.settled_count for bucket in self.buckets.values()) >= limit:
            raise LimitExceeded(
                f"limit of messages cancelled long before they are due reached ({limit}, limit `schedule_settled`); "
                "cancel more later or raise it",
                limit="schedule_settled",
                value=limit,
            )
