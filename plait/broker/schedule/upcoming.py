"""Finds the delayed rows that are due next, over all buckets and all unbucketed rows.

Only rows that are due soon are sorted (``DueWindow``). For the others, only the earliest due time of each run of a
bucket and of each schedule's unbucketed rows is kept, so they cost nothing until they are nearly due.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from plait.broker.partitions.partition import Partition
from plait.frame.view import FrameView
from plait.storage.schedule.bucket import NEVER, Bucket
from plait.storage.schedule.unbucketed import UnbucketedRows

#: ``bucket`` of unbucketed rows: their number locates them in the message log.
IN_LOG: Final = -1
#: Due time, number and schedule partition of a row, and its bucket, run and row in the run.
SOON: Final = np.dtype(
    [("due", "<i8"), ("number", "<i8"), ("bucket", "<i8"), ("partition", "<u4"), ("run", "<u4"), ("row", "<u4")]
)
SoonRows = npt.NDArray[Any]


def soon_rows(due: Any, number: Any, partition: int, bucket: int = IN_LOG, run: int = 0, row: Any = 0) -> SoonRows:
    """An array of rows of one run, or of unbucketed rows."""
    rows = np.empty(len(due), SOON)
    rows["due"], rows["number"], rows["partition"] = due, number, partition
    rows["bucket"], rows["run"], rows["row"] = bucket, run, row
    return rows


class DueWindow:
    """Rows that are due before ``end``, and possibly some that are due exactly at ``end``."""

    def __init__(self) -> None:
        self._rows: SoonRows = np.empty(0, SOON)
        #: Added and not sorted yet.
        self._added: list[SoonRows] = []
        self._added_due = NEVER
        self.end = 0

    def __len__(self) -> int:
        return len(self._rows) + sum(map(len, self._added))

    @property
    def next_due(self) -> int:
        """Due time of the first row; ``NEVER`` when the window is empty."""
        return min(int(self._rows["due"][0]) if len(self._rows) else NEVER, self._added_due)

    def clear(self) -> None:
        """Remove all rows, and move ``end`` before every due time."""
        self._rows, self._added, self._added_due, self.end = np.empty(0, SOON), [], NEVER, 0

    def add(self, rows: SoonRows) -> None:
        """Add rows in any order."""
        if len(rows):
            self._added.append(rows)
            self._added_due = min(self._added_due, int(rows["due"].min()))

    @property
    def rows(self) -> SoonRows:
        """All rows, sorted by due time."""
        if self._added:
            added = np.concatenate(self._added)
            added = added[np.lexsort((added["number"], added["due"]))]
            if len(added) * 4 > len(self._rows):
                rows = np.concatenate([self._rows, added])
                self._rows = rows[np.lexsort((rows["number"], rows["due"]))]
            else:
                at = np.searchsorted(self._rows["due"], added["due"], "right")
                self._rows = np.insert(self._rows, at, added)
            self._added, self._added_due = [], NEVER
        return self._rows

    def due(self, now: int, count: int) -> SoonRows:
        """The first due rows, at most ``count``; they stay in the window."""
        rows = self.rows
        return rows[: min(int(np.searchsorted(rows["due"], now, "right")), count)]

    def took(self, count: int, kept: SoonRows) -> None:
        """Remove the first ``count`` rows, except for those in ``kept``, which are in order."""
        rest = self.rows[count:]
        self._rows = np.concatenate([kept, rest]) if len(kept) else rest

    def remove(self, due: int, number: int, partition: int) -> bool:
        """Remove one row; False when it is not in the window."""
        rows = self.rows
        low, high = np.searchsorted(rows["due"], due, "left"), np.searchsorted(rows["due"], due, "right")
        same = (rows["number"][low:high] == number) & (rows["partition"][low:high] == partition)
        found = low + np.flatnonzero(same)
        if len(found):
            self._rows = np.delete(rows, found)
        return len(found) > 0

    def remove_partition(self, partition: int, before: int | None = None) -> None:
        """Remove the rows of a schedule partition; with ``before`` only unbucketed ones with lower numbers."""
        rows = self.rows
        gone = rows["partition"] == partition
        if before is not None:
            gone &= (rows["bucket"] == IN_LOG) & (rows["number"] < before)
        if gone.any():
            self._rows = rows[~gone]


#: Rows are sorted at most this long before they are due: sorting fewer rows blocks the loop for less time.
WINDOW_MICROS: Final = 500_000
#: Rows that one turn sorts.
LOAD_MAX: Final = 32_768
#: The longest step of a window that is far behind: two years.
STEP_MAX: Final = 1 << 46
#: Steps of the window in one turn.
STEPS_MAX: Final = 16
#: The heap is not cleaned before it has this many stale entries.
STALE_MAX: Final = 64


class Schedule:
    """The delayed rows of one partition."""

    __slots__ = ("partition", "postponed", "unbucketed")

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.unbucketed = UnbucketedRows(partition.next)
        #: True if due rows wait outside the window, because their target partition is unknown, or because it
        #: does not accept them and the route is not known yet.
        self.postponed = False


class Upcoming:
    """The due window, and when further rows enter it."""

    def __init__(self, buckets: dict[int, Bucket]) -> None:
        self._buckets = buckets
        self.window = DueWindow()
        #: Heap of (due, entry number, schedule): when unbucketed rows enter the window.
        self._expected: list[tuple[int, int, Schedule]] = []
        self._entries = 0
        self._clean_at = STALE_MAX
        #: No row outside the window is due before this.
        self._beyond = NEVER
        #: Microseconds by which the window advances: fewer where many rows are due.
        self._step = WINDOW_MICROS

    @property
    def next(self) -> int | None:
        """When to check again, in microseconds of wall time; None when no row waits."""
        if self.window.next_due == NEVER and self._beyond == NEVER:
            return None
        if len(self.window) >= LOAD_MAX:
            return self.window.next_due
        return min(self.window.next_due, max(self._beyond, self.window.end) - WINDOW_MICROS // 2)

    def wants(self, now: int) -> bool:
        """Whether rows outside the window are nearly due and the window has room."""
        near = self._beyond < now + WINDOW_MICROS and self.window.end <= now + WINDOW_MICROS // 2
        return near and len(self.window) < LOAD_MAX

    def begin_again(self, schedules: Iterable[Schedule]) -> None:
        """Empty the window and recompute the next due times."""
        self.window.clear()
        for bucket in self._buckets.values():
            bucket.put_back()
        for schedule in schedules:
            self.expect_from(schedule, 0)
        self.look_beyond()

    # --- unbucketed rows --------------------------------------------------------------------------

    def append(self, schedule: Schedule, frame: FrameView, offset: int, base: int) -> None:
        """Add a frame of delayed rows, numbered from ``base`` on, that is in the message log."""
        due = schedule.unbucketed.append(frame, offset, base)
        later = due
        if int(due.min()) < self.window.end:
            soon = due < self.window.end
            self.window.add(soon_rows(due[soon], base + np.flatnonzero(soon), schedule.partition.id))
            later = due[~soon]
        if len(later):
            self._expect(schedule, int(later.min()))

    def _expect(self, schedule: Schedule, due: int) -> None:
        """Note that unbucketed rows outside the window are due at this time."""
        if due >= schedule.unbucketed.next_due:
            return
        schedule.unbucketed.next_due = due
        self._beyond = min(self._beyond, due)
        self._entries += 1
        heapq.heappush(self._expected, (due, self._entries, schedule))
        if len(self._expected) > self._clean_at:
            self._expected = [entry for entry in self._expected if entry[0] == entry[2].unbucketed.next_due]
            heapq.heapify(self._expected)
            self._clean_at = 2 * len(self._expected) + STALE_MAX

    def expect_from(self, schedule: Schedule, start: int) -> None:
        """Recompute the next due time of unbucketed rows outside the window: those due at ``start`` or later."""
        values = schedule.unbucketed.due.values
        later = values[(values >= start) & (values != NEVER)]
        schedule.unbucketed.next_due = NEVER
        if len(later):
            self._expect(schedule, int(later.min()))

    # --- advancing the window -------------------------------------------------------------------

    def load(self, now: int) -> None:
        """Move nearly due rows into the window, if there are any."""
        for _ in range(STEPS_MAX):
            if not self.wants(now):
                return
            self._load(now)

    def _load(self, now: int) -> None:
        """Advance the window by one step, which is shortened while it would load too many rows."""
        start = max(self.window.end, self._beyond)
        end = min(now + WINDOW_MICROS, start + self._step)
        count = self._count_before(end)
        while count > LOAD_MAX and end > start + 1:
            end = start + max((end - start) // 8, 1)
            count = self._count_before(end)
        self._step = max(end - start, 1)
        if count > LOAD_MAX:
            # All are due in the same microsecond: load some of them.
            self._load_runs(end, LOAD_MAX)
            self.window.end = start
        else:
            if count < LOAD_MAX // 4:
                # ``end`` is at most ``now + WINDOW_MICROS``, so only a window that is behind takes longer steps.
                self._step = min(2 * self._step, STEP_MAX)
            self._load_runs(end)
            self._load_unbucketed(end)
            self.window.end = end
        self.look_beyond()

    def _count_before(self, end: int) -> int:
        """The number of bucketed rows outside the window that are due before ``end``."""
        count = 0
        for bucket in self._buckets.values():
            for run in np.flatnonzero(bucket.next_due < end).tolist():
                if bucket.open_run(run):
                    count += int(np.searchsorted(bucket.due_of(run), end, "left")) - int(bucket.loaded[run])
        return count

    def _load_runs(self, end: int, limit: int = 1 << 62) -> None:
        for bucket in self._buckets.values():
            for run in np.flatnonzero(bucket.next_due < end).tolist():
                if limit <= 0:
                    return
                if bucket.open_run(run):
                    limit -= self._load_run(bucket, run, end)

    def _load_run(self, bucket: Bucket, run: int, end: int) -> int:
        """Load the rows of a run that are due before ``end`` into the window. Returns their number."""
        due = bucket.due_of(run)
        low = int(bucket.loaded[run])
        high = max(low, int(np.searchsorted(due, end, "left")))
        if high > low:
            row = np.arange(low, high)
            settled = bucket.settled_rows(run, low, high)
            if len(settled):
                row = np.delete(row, settled - low)
            partition = int(bucket.runs["partition"][run])
            self.window.add(soon_rows(due[row], bucket.numbers_of(run)[row], partition, bucket.key, run, row))
            bucket.loaded[run] = high
        bucket.next_due[run] = due[high] if high < len(due) else NEVER
        return high - low

    def _load_unbucketed(self, end: int) -> None:
        while self._expected and self._expected[0][0] < end:
            due, _, schedule = heapq.heappop(self._expected)
            unbucketed = schedule.unbucketed
            if due != unbucketed.next_due:
                continue
            values = unbucketed.due.values
            index = np.flatnonzero((values >= self.window.end) & (values < end))
            self.window.add(soon_rows(values[index], unbucketed.base + index, schedule.partition.id))
            self.expect_from(schedule, end)

    def runs_added(self) -> None:
        """Load the nearly due rows of new runs into the window."""
        # A file that cannot be opened now is not an error here: a later step loads its rows.
        with contextlib.suppress(OSError):
            self._load_runs(self.window.end)
        self.look_beyond()

    def look_beyond(self) -> None:
        """Recompute the due time of the next row outside the window."""
        nexts = [int(bucket.next_due.min()) for bucket in self._buckets.values() if len(bucket.next_due)]
        while self._expected and self._expected[0][0] != self._expected[0][2].unbucketed.next_due:
            heapq.heappop(self._expected)
        if self._expected:
            nexts.append(self._expected[0][0])
        self._beyond = min(nexts, default=NEVER)
