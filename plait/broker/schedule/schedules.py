"""The schedule: messages that are to be delivered at a time of their own.

A delayed row is appended to its subject's *schedule partition* in the message log; that is what its receipt means, and
its number is its sequence there. When a checkpoint is made, the rows that still wait are filed in buckets
(``storage.buckets``). When a row is due it is appended to its subject's own partition, in a frame that names the
numbers it settles: delivery and its record are one write, so a row is delivered once, whatever happens in between.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from plait.broker.appender import Appended
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

#: Rows that are delivered in one turn: the loop has others to serve.
DELIVER_MAX: Final = 8_192
#: Time between two turns that deliver: rows that are due together leave together.
TURN_SECONDS: Final = 0.004
#: Time before a delivery that the disk had no room for is tried again.
RETRY_SECONDS: Final = 1.0
#: Damages that wait to be told; more are only counted.
DAMAGES_MAX: Final = 1_000
#: A sender's clock may be ahead of the broker's by this.
AHEAD_SECONDS: Final = 60.0
#: The latest time that can be asked for, from now on.
_AHEAD_MAX: Final = int((WAIT_SECONDS_MAX + AHEAD_SECONDS) * 1_000_000)


class Schedule:
    """One partition's delayed rows."""

    __slots__ = ("fresh", "held", "partition")

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.fresh = UnbucketedRows(partition.next)
        #: Rows are due that the partition does not take (any more), and where the route leads is not known yet; or the
        #: partition is not known. They are not in the window.
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
        self.filed = BucketedRows(broker, self)
        #: Something is due: the next commit delivers it.
        self.ready = False
        #: On the monotonic clock: the next turn that delivers comes at the first; until the second none does.
        self._turn_at = self._held_until = 0.0
        #: Why nothing is delivered at present, as far as it was told.
        self._hindrance = ""
        #: Rows that did not read back, and what has not been told yet of that and of what is held up.
        self.lost_count = 0
        self.damages: list[str] = []

    # --- which there are ------------------------------------------------------------------------

    def add(self, partition: Partition) -> None:
        """A schedule partition is known."""
        schedule = Schedule(partition)
        partition.main = self._broker.subjects.get(partition.row.name)
        self._by_partition[partition.id] = schedule
        self.by_subject[partition.row.name] = schedule

    def enters(self, partition: Partition) -> None:
        """A partition is known whose schedule may be."""
        schedule = self.by_subject.get(partition.row.name)
        if schedule is not None:
            schedule.partition.main = partition
            if schedule.held:
                schedule.held = False
                self.upcoming.begin_again(self.by_subject.values())

    def remove(self, partition: Partition) -> None:
        """A subject was deleted: its delayed rows will never be due."""
        schedule = self._by_partition.pop(partition.id, None)
        if schedule is not None:
            schedule.fresh = UnbucketedRows(partition.next)
            if self.by_subject.get(partition.row.name) is schedule:
                del self.by_subject[partition.row.name]
        self.window.remove_partition(partition.id)
        for bucket in self.buckets.values():
            for run in np.flatnonzero(bucket.of(partition.id)).tolist():
                bucket.drop_run(run)
        self.filed.drop_finished()

    def partition_of(self, subject: str) -> Partition:
        """The subject's schedule partition; made now, as the subject itself, if that is allowed."""
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
        """Every schedule that is known; recovery may know a deleted one beside its successor."""
        return self._by_partition.values()

    def get(self, partition: int) -> Schedule | None:
        """The schedule of a schedule partition."""
        return self._by_partition.get(partition)

    @property
    def count(self) -> int:
        """Rows that wait."""
        filed = sum(bucket.waiting for bucket in self.buckets.values())
        return filed + sum(schedule.fresh.waiting for schedule in self.by_subject.values())

    def waits(self, schedule: Schedule) -> bool:
        """It has rows."""
        return schedule.fresh.waiting > 0 or any(
            bucket.of(schedule.partition.id).any() for bucket in self.buckets.values()
        )

    def any_held(self, subject: str) -> bool:
        """Due rows of the subject wait until its route is known."""
        return any(each.held and each.partition.row.subject == subject for each in self.by_subject.values())

    def report(self, file: str, reason: str, rows: int) -> None:
        """Rows that wait do not read back."""
        self.lost_count += rows
        self.tell(f"{file}: {rows} delayed messages are lost: {reason}")

    def tell(self, text: str) -> None:
        """Something that whoever runs the server should know."""
        if len(self.damages) < DAMAGES_MAX:
            self.damages.append(text)

    # --- rows come ------------------------------------------------------------------------------

    def check(self, partition: Partition, frame: FrameView) -> None:
        """A frame that was sent has delivery times where they belong, and possible ones."""
        delayed = frame.has(Column.DELIVER_AT)
        if partition.row.kind != SCHEDULE:
            if delayed:
                raise FrameError("a frame with delivery times goes to its subject's schedule; ask for that route")
        elif not delayed:
            raise FrameError("a frame without delivery times does not go to a schedule")
        else:
            self.check_time(int(frame.values(Column.DELIVER_AT).max()))

    def check_time(self, due: int) -> None:
        """A delivery time is possible."""
        ahead = due - self._broker.clock.now()
        if ahead > _AHEAD_MAX or due < 0:
            raise InvalidArgument(
                f"a message can be delayed by at most {WAIT_SECONDS_MAX:.0f} seconds; this one by {ahead / 1e6:.0f}"
            )

    def take_in(self, appended: Appended) -> None:
        """A commit wrote frames of rows that wait."""
        for partition, frame, offset, base in appended.delayed:
            schedule = self._by_partition.get(partition.id)
            if schedule is not None:
                self.upcoming.append(schedule, frame, offset, base)

    # --- rows leave -----------------------------------------------------------------------------

    @property
    def next_deadline(self) -> float | None:
        """When to look, on the monotonic clock."""
        due = self.upcoming.next
        if due is None:
            return None
        clock = self._broker.clock
        return max(clock.monotonic() + max(due - clock.now(), 0) / 1_000_000, self._turn_at)

    def look(self) -> bool:
        """Whether there is something to do for ``run``."""
        clock = self._broker.clock
        now = clock.now()
        if self.upcoming.is_ahead(now):
            self.upcoming.begin_again(self.by_subject.values())
        due = self.window.next_due <= now or self.upcoming.wants(now)
        self.ready = due and clock.monotonic() >= self._held_until
        return self.ready

    def run(self, now: int, appended: Appended) -> None:
        """Deliver what is due; what there is no room for stays, and is tried again."""
        try:
            self._broker.refuse_when_full()
            self.write()
            self._deliver_all(now, appended)
            self._hindrance = ""
        except OSError as error:
            self._hold()
            self._broker.disk_error(error)
        except FlowControl as error:
            self._hold()
            if self._hindrance != str(error):
                self._hindrance = str(error)
                self.tell(f"delayed messages are held up: {error}")
        except (DiskFull, ReadOnly):
            self._hold()
        except StorageFailed:
            # The broker knows, and stops.
            pass

    def _hold(self) -> None:
        """Nothing is delivered for a while."""
        self.ready = False
        self._turn_at = self._held_until = self._broker.clock.monotonic() + RETRY_SECONDS

    def write(self) -> None:
        """Rows that came this turn can be read from here on."""
        try:
            self._broker.message_log.write()
        except OSError as error:
            self._broker.storage_failed(error)
            assert self._broker.failed is not None
            raise self._broker.failed from error

    def _deliver_all(self, now: int, appended: Appended) -> None:
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
            # Each subject's rows together, in their order.
            order = np.argsort(partitions, kind="stable")
            edges = np.flatnonzero(np.diff(partitions[order], prepend=-1, append=-1))
            subjects = [order[start:stop] for start, stop in pairwise(edges.tolist())]
            room = DELIVER_SIZE_MAX
            # The one that has waited longest first: it is the next one's turn when there is no room for more.
            for mine in sorted(subjects, key=lambda mine: int(mine[0])):
                schedule = self._by_partition[int(partitions[mine[0]])]
                if not schedule.held:
                    room -= self._deliver(schedule, rows, mine, now, appended, kept, room)
                if schedule.held:
                    # They are looked for again when the route is known.
                    kept[mine] = False
                if room <= 0:
                    break
        finally:
            self.window.took(len(rows), rows[kept])
            self.filed.drop_finished()

    def _deliver(
        self,
        schedule: Schedule,
        rows: Any,
        mine: Int64s,
        now: int,
        appended: Appended,
        kept: npt.NDArray[np.bool_],
        room: int,
    ) -> int:
        """Deliver one partition's rows, as far as there is room; those that left are kept no longer. Their size.

        Each goes where the route leads now (R20): into the partition, or to another one by way of a forward partition.
        """
        name = schedule.partition.row.name
        target = self._broker.subjects.get(name)
        if target is None:
            schedule.held = True
            self.tell(f"delayed messages of {name!r} wait: the definition of their partition is damaged")
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
            self._append(schedule, target, gathered, rows, mine, now, appended, kept)
            return size
        ways = self._broker.forwards.ways(target, gathered.key_hashes, rows["number"][mine])
        if ways is None:
            schedule.held = True
            return 0
        if len(ways) == 1:
            self._append(schedule, ways[0][0], gathered, rows, mine, now, appended, kept)
            return size
        for partition, which in ways:
            with reading():
                some, gathered, _ = self.rows.gather(schedule, rows, mine[which])
            assert gathered is not None
            self._append(schedule, partition, gathered, rows, some, now, appended, kept, in_turn=False)
        return size

    def _append(
        self,
        schedule: Schedule,
        target: Partition,
        gathered: Gathered,
        rows: Any,
        mine: Int64s,
        now: int,
        appended: Appended,
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
            frame.stamp_with(pack_stamp(target.id, base, now, broker.message_log.durable, broker.epoch))
            offset = broker.message_log.append(frame.parts, frame.size)
            target.appended(base, offset, now, frame.size, frame.count, broker.epoch)
            appended.partitions[target] = target.next
            broker.touch(target)
            kept[mine[start:stop]] = False
            self.rows.left(schedule, chosen[start:stop], in_turn=in_turn)

    def route_known(self, subject: str) -> None:
        """Where the rows of a subject go is known (again): those that wait for it are looked for."""
        held = [each for each in self.by_subject.values() if each.held and each.partition.row.subject == subject]
        for schedule in held:
            schedule.held = False
        if held:
            self.upcoming.begin_again(self.by_subject.values())

    # --- cancel and reschedule --------------------------------------------------------------------

    def cancel(self, subject: str, number: int, due: int) -> bool:
        """A row shall never be delivered; False where it does not wait (any more). Counts once committed."""
        with reading():
            found = self._find(subject, number, due)
        if found is None:
            return False
        schedule, place = found
        self._broker.record(Action.CANCEL, schedule.partition, number, number + 1, due)
        self._settle(schedule, number, due, place)
        return True

    def reschedule(self, subject: str, number: int, due: int, to: int) -> int | None:
        """A row is due at another time: its new number; None where it does not wait (any more)."""
        self.check_time(to)
        broker = self._broker
        with reading():
            found = self._find(subject, number, due)
        if found is None:
            return None
        schedule, place = found
        broker.refuse_when_full()
        self.write()
        with reading():
            frame = self.rows.copy(schedule, number, due, to, place)
        if frame is None:
            return None
        partition = schedule.partition
        base, now = partition.next, broker.clock.now()
        frame.stamp_with(pack_stamp(partition.id, base, now, broker.message_log.durable, broker.epoch))
        offset = broker.append_own(frame)
        partition.appended(base, offset, now, frame.size, 1, broker.epoch)
        broker.touch(partition)
        self._settle(schedule, number, due, place)
        self.upcoming.append(schedule, FrameView(frame.tobytes()), offset, base)
        return base

    def _find(self, subject: str, number: int, due: int) -> tuple[Schedule, BucketedOffset | None] | None:
        """The subject's schedule, if the row waits in it, and where it is filed, if it is."""
        self._broker.partition_of(subject, create=False)
        self._broker.refuse_when_stalled()
        schedule = self.by_subject.get(subject)
        if schedule is None or not 0 <= due < NEVER:
            return None
        if number >= schedule.fresh.base:
            return (schedule, None) if schedule.fresh.due_of(number) == due else None
        place = self._find_filed(schedule, number, due)
        if place is None:
            return None
        self._refuse_more()
        return schedule, place

    def _find_filed(self, schedule: Schedule, number: int, due: int) -> BucketedOffset | None:
        """Where a row waits in a bucket."""
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
        """A row that waits leaves out of turn."""
        self._broker.touch(schedule.partition)
        self.window.remove(due, number, schedule.partition.id)
        if place is None:
            schedule.fresh.settle(np.array([number]))
        else:
            place.bucket.settle(place.run, np.array([place.row]))
            self.filed.drop_finished()

    def _refuse_more(self) -> None:
        """Raise when too many rows that left out of turn are remembered."""
        limit = self._broker.limits.schedule_settled
        if sum(bucket.settled_count for bucket in self.buckets.values()) >= limit:
            raise LimitExceeded(
                f"{limit} messages were cancelled before they were near; cancel more later",
                limit="schedule_settled",
                value=limit,
            )
