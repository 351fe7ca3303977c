"""Delivers due rows: appends them to the partition that the route leads to, a limited number in each turn."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from plait.broker.catalog import Catalog
from plait.broker.commit import Commit
from plait.broker.partitions.partition import Partition
from plait.broker.schedule.due_rows import DELIVER_SIZE_MAX, DueRows, reading
from plait.broker.schedule.forwards import Forwards
from plait.broker.schedule.schedules import Schedules
from plait.broker.schedule.upcoming import WINDOW_MICROS, Schedule
from plait.broker.turn import Turn, write_messages
from plait.errors import DiskFull, FlowControl, FrameError, InvalidArgument, ReadOnly, StorageFailed
from plait.frame.builder import pack_stamp
from plait.frame.columns import Column
from plait.frame.gather import Gathered
from plait.frame.places import Int64s
from plait.frame.view import FrameView
from plait.model.retry_policy import WAIT_SECONDS_MAX
from plait.storage.catalog import HALF, SCHEDULE
from plait.storage.logs.frame_traits import TRAIT_COLUMNS, traits_of

#: Rows that one turn delivers: the loop serves other requests too.
DELIVER_MAX: Final = 8_192
#: Time between two turns that deliver, so that rows that are due together are delivered together.
TURN_SECONDS: Final = 0.004
#: Time until the next attempt, after the broker could not append due rows (full disk, flow control, read-only).
RETRY_SECONDS: Final = 1.0
#: The clock of a sender may be ahead of the broker's clock by this.
AHEAD_SECONDS: Final = 60.0
#: The latest possible due time, in microseconds from now.
_AHEAD_MAX: Final = int((WAIT_SECONDS_MAX + AHEAD_SECONDS) * 1_000_000)


def check_delayed(partition: Partition, frame: FrameView, now: int) -> None:
    """Refuse a received frame with a deliver-at column in the wrong partition, or with an impossible due time."""
    delayed = frame.has(Column.DELIVER_AT)
    if partition.row.kind == HALF:
        raise FrameError("a frame of half messages needs a note column that names its producer group")
    if partition.row.kind != SCHEDULE:
        if delayed:
            raise FrameError("a frame with due times belongs in the subject's schedule partition; send it there")
    elif not delayed:
        raise FrameError("a frame without due times belongs in the subject's own partition; send it there")
    else:
        check_due(int(frame.values(Column.DELIVER_AT).max()), now)


def check_due(due: int, now: int) -> None:
    """Refuse an impossible due time."""
    if due - now > _AHEAD_MAX or due < 0:
        raise InvalidArgument(
            f"a delay of {(due - now) / 1e6:.0f} seconds is over the limit of {WAIT_SECONDS_MAX:.0f}; deliver earlier"
        )


class DueDelivery:
    """Delivers the due rows of a broker, at the end of a turn."""

    def __init__(
        self, turn: Turn, catalog: Catalog, schedules: Schedules, due_rows: DueRows, forwards: Forwards
    ) -> None:
        self._turn = turn
        self._catalog = catalog
        self._schedules = schedules
        self.by_name: Mapping[str, object] = schedules.by_name
        self._upcoming = schedules.upcoming
        self._window = schedules.window
        self._due_rows = due_rows
        self._forwards = forwards
        self.take_in = schedules.take_in
        #: True if rows are due: the next commit delivers them.
        self.ready = False
        #: Monotonic times: when the next delivering turn is due, and until when deliveries pause after an error.
        self._turn_at = self._held_until = 0.0
        #: The last reported reason why nothing is delivered.
        self._stall_reason = ""

    @property
    def next_deadline(self) -> float | None:
        """When to check for due rows, on the monotonic clock."""
        due = self._upcoming.next
        if due is None:
            return None
        clock = self._turn.clock
        return max(clock.monotonic() + max(due - clock.now(), 0) / 1_000_000, self._turn_at)

    def look(self) -> bool:
        """Set and return ``ready``: whether ``run`` has work to do."""
        clock = self._turn.clock
        now = clock.now()
        if self._window.end > now + 2 * WINDOW_MICROS:
            # The clock was set back.
            self._upcoming.begin_again(self._schedules.by_name.values())
        due = self._window.next_due <= now or self._upcoming.wants(now)
        self.ready = due and clock.monotonic() >= self._held_until
        return self.ready

    def run(self, now: int, commit: Commit) -> None:
        """Deliver due rows. Rows that find no space on the disk stay and are tried again."""
        try:
            self._turn.refuse_when_full()
            write_messages(self._turn)
            self._deliver_all(now, commit)
            self._stall_reason = ""
        except OSError as error:
            self._hold()
            self._turn.disk_error(error)
        except FlowControl as error:
            self._hold()
            if self._stall_reason != str(error):
                self._stall_reason = str(error)
                self._schedules.notice(f"delivery of delayed messages is paused: {error}")
        except (DiskFull, ReadOnly):
            self._hold()
        except StorageFailed:
            # ``broker.turn.failed`` is set, and the server stops.
            pass

    def _hold(self) -> None:
        self.ready = False
        self._turn_at = self._held_until = self._turn.clock.monotonic() + RETRY_SECONDS

    def _deliver_all(self, now: int, commit: Commit) -> None:
        self.ready = False
        clock = self._turn.clock
        self._turn_at = clock.monotonic() + TURN_SECONDS
        with reading():
            self._upcoming.load(now)
        rows = self._window.due(now, DELIVER_MAX)
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
            # The subject with the earliest due row is first. Rows that do not fit in the room stay in the window.
            for mine in sorted(subjects, key=lambda mine: int(mine[0])):
                schedule = self._schedules.by_partition[int(partitions[mine[0]])]
                if not schedule.postponed:
                    room -= self._deliver(schedule, rows, mine, now, commit, kept, room)
                if schedule.postponed:
                    # These rows leave the window, and enter it again when the route is known.
                    kept[mine] = False
                if room <= 0:
                    break
        finally:
            self._window.took(len(rows), rows[kept])
            self._schedules.drop_finished()

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
        """Deliver the rows of one partition that fit in ``room``, and clear their bits in ``kept``.

        Returns their size, or ``room`` if the first one does not fit. Each row follows the current route (R20): to this
        partition, or to a forward partition for another one.
        """
        name = schedule.partition.row.name
        target = self._catalog.subjects.get(name)
        if target is None:
            schedule.postponed = True
            self._schedules.notice(
                f"delayed messages of {name!r} cannot be delivered: the definition of their partition is damaged"
            )
            return 0
        mine, lost = self._due_rows.readable(schedule, rows, mine)
        kept[lost] = False
        if not len(mine):
            return 0
        with reading():
            mine, gathered, size = self._due_rows.gather(schedule, rows, mine, room)
        if gathered is None:
            return room
        if target.accepts is None:
            self._append(schedule, target, gathered, rows, mine, now, commit, kept)
            return size
        parts = self._forwards.split(target, gathered.key_hashes, rows["number"][mine])
        if parts is None:
            schedule.postponed = True
            return 0
        if len(parts) == 1:
            self._append(schedule, parts[0][0], gathered, rows, mine, now, commit, kept)
            return size
        for partition, which in parts:
            with reading():
                some, gathered, _ = self._due_rows.gather(schedule, rows, mine[which])
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
        """Append rows to a partition, and settle them: the frames name their numbers, so replay settles them too."""
        turn, log = self._turn, self._turn.message_log
        chosen = rows[mine]
        for start, stop, frame in self._due_rows.frames(gathered, chosen, target):
            log.place_for(frame.size)
            base = target.next
            frame.stamp_with(pack_stamp(target.id, base, now, log.durable, turn.epoch))
            offset = log.append(frame.parts, frame.size)
            traits = traits_of(FrameView(frame.tobytes())) if frame.tail_columns & TRAIT_COLUMNS else 0
            target.appended(base, offset, now, frame.size, frame.count, turn.epoch, traits)
            commit.partitions[target] = target.next
            turn.touch(target)
            kept[mine[start:stop]] = False
            self._due_rows.settle(schedule, chosen[start:stop], in_order=in_turn)
