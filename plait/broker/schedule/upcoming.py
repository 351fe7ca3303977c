"""Which delayed rows are due next, over all buckets and all that is not filed yet.

Only rows that are due within seconds are in order (``DueWindow``). Of all others it is known when the next one of each run
of a bucket is due, and the next one of each subject's rows that are not filed: that costs nothing until they are near.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import numpy as np

from plait.broker.schedule.due_window import DueWindow, soon_rows
from plait.frame.view import FrameView
from plait.storage.schedule.bucket import NEVER, Bucket

if TYPE_CHECKING:
    from plait.broker.schedule.schedules import Schedule

#: Rows are put in order at most this long before they are due: the fewer, the shorter the loop is held up by it.
WINDOW_MICROS: Final = 500_000
#: Rows that are put in order in one turn.
LOAD_MAX: Final = 32_768
#: The longest step of the window, when it has fallen far behind: two years.
STEP_MAX: Final = 1 << 46
#: Steps in one turn.
STEPS_MAX: Final = 16
#: Entries that count no more which may stand among the others, at least.
STALE_MAX: Final = 64


class Upcoming:
    """The window, and what comes into it when."""

    def __init__(self, buckets: dict[int, Bucket]) -> None:
        self._buckets = buckets
        self.window = DueWindow()
        #: (due, number, schedule): when rows that are not filed come into the window.
        self._expected: list[tuple[int, int, Schedule]] = []
        self._entries = 0
        self._clean_at = STALE_MAX
        #: No row outside the window is due before this.
        self._beyond = NEVER
        #: How much time the window moves on by: less where many rows are due.
        self._step = WINDOW_MICROS

    @property
    def next(self) -> int | None:
        """When to look next, in microseconds of wall time; None: there is nothing to wait for."""
        if self.window.next_due == NEVER and self._beyond == NEVER:
            return None
        if len(self.window) >= LOAD_MAX:
            return self.window.next_due
        return min(self.window.next_due, max(self._beyond, self.window.end) - WINDOW_MICROS // 2)

    def wants(self, now: int) -> bool:
        """Rows are near that are not in the window."""
        near = self._beyond < now + WINDOW_MICROS and self.window.end <= now + WINDOW_MICROS // 2
        return near and len(self.window) < LOAD_MAX

    def is_ahead(self, now: int) -> bool:
        """The window ends where it would never have come to: the clock was set back."""
        return self.window.end > now + 2 * WINDOW_MICROS

    def begin_again(self, schedules: Iterable[Schedule]) -> None:
        """Nothing is in the window: find out anew what is near."""
        self.window.clear()
        for bucket in self._buckets.values():
            bucket.put_back()
        for schedule in schedules:
            self.expect_from(schedule, 0)
        self.look_beyond()

    # --- rows that are not filed ------------------------------------------------------------------

    def append(self, schedule: Schedule, frame: FrameView, offset: int, base: int) -> None:
        """A frame of delayed rows, numbered from ``base`` on, is in the message log."""
        due = schedule.fresh.append(frame, offset, base)
        later = due
        if int(due.min()) < self.window.end:
            soon = due < self.window.end
            self.window.add(soon_rows(due[soon], base + np.flatnonzero(soon), schedule.partition.id))
            later = due[~soon]
        if len(later):
            self._expect(schedule, int(later.min()))

    def _expect(self, schedule: Schedule, due: int) -> None:
        """Rows that are not filed are due then, and not in the window."""
        if due >= schedule.fresh.next_due:
            return
        schedule.fresh.next_due = due
        self._beyond = min(self._beyond, due)
        self._entries += 1
        heapq.heappush(self._expected, (due, self._entries, schedule))
        if len(self._expected) > self._clean_at:
            self._expected = [entry for entry in self._expected if entry[0] == entry[2].fresh.next_due]
            heapq.heapify(self._expected)
            self._clean_at = 2 * len(self._expected) + STALE_MAX

    def expect_from(self, schedule: Schedule, start: int) -> None:
        """Rows that are not filed and due before ``start`` are in the window, others are not."""
        values = schedule.fresh.due.values
        later = values[(values >= start) & (values != NEVER)]
        schedule.fresh.next_due = NEVER
        if len(later):
            self._expect(schedule, int(later.min()))

    # --- moving on ------------------------------------------------------------------------------

    def load(self, now: int) -> None:
        """Bring more rows into the window, if there is need to."""
        for _ in range(STEPS_MAX):
            if not self.wants(now):
                return
            self._load(now)

    def _load(self, now: int) -> None:
        """Bring the rows of the next moments into the window, of which there may be many."""
        start = max(self.window.end, self._beyond)
        end = min(now + WINDOW_MICROS, start + self._step)
        count = self._count_before(end)
        while count > LOAD_MAX and end > start + 1:
            end = start + max((end - start) // 8, 1)
            count = self._count_before(end)
        self._step = max(end - start, 1)
        if count > LOAD_MAX:
            # All are due in the same microsecond: some of them.
            self._load_runs(end, LOAD_MAX)
            self.window.end = start
        else:
            if count < LOAD_MAX // 4:
                # Never past what is near: only what is late is caught up with in longer steps.
                self._step = min(2 * self._step, STEP_MAX)
            self._load_runs(end)
            self._load_unfiled(end)
            self.window.end = end
        self.look_beyond()

    def _count_before(self, end: int) -> int:
        """Filed rows outside the window that are due before ``end``."""
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
        """Rows of a run that are due before ``end`` come into the window; how many."""
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

    def _load_unfiled(self, end: int) -> None:
        while self._expected and self._expected[0][0] < end:
            due, _, schedule = heapq.heappop(self._expected)
            fresh = schedule.fresh
            if due != fresh.next_due:
                continue
            values = fresh.due.values
            index = np.flatnonzero((values >= self.window.end) & (values < end))
            self.window.add(soon_rows(values[index], fresh.base + index, schedule.partition.id))
            self.expect_from(schedule, end)

    def runs_added(self) -> None:
        """Buckets have new runs: those of their rows that are due soon belong in the window."""
        # A file that cannot be opened now is no reason to fail here: what is not in the window is looked for again.
        with contextlib.suppress(OSError):
            self._load_runs(self.window.end)
        self.look_beyond()

    def look_beyond(self) -> None:
        """Find out anew when the next row outside the window is due."""
        nexts = [int(bucket.next_due.min()) for bucket in self._buckets.values() if len(bucket.next_due)]
        while self._expected and self._expected[0][0] != self._expected[0][2].fresh.next_due:
            heapq.heappop(self._expected)
        if self._expected:
            nexts.append(self._expected[0][0])
        self._beyond = min(nexts, default=NEVER)
