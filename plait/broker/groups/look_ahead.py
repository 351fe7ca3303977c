"""What a shared group knows of the rows that it has not begun: their priorities and tenants, as queues of runs.

A group looks ahead where its partition has rows with a priority, or where the group is fair (``fair_by``). It delivers
rows of the highest priority first, and within a priority an equal number of rows of each tenant in turn (round robin
over buckets; every row costs the same, so no deficit remains at the end of a turn). Of ``PRIORITY_SHARE`` rows, one is
of a lower priority while such rows wait, and the lower priorities take turns: no row starves.

Everything here is derived from the log and the group's cursor, in memory only: it is lost at a restart. A queue may
have rows that were begun or are done meanwhile; ``choose`` leaves them out. It has every other row that was examined.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plait.broker.groups.row_classes import NO_TENANT, STRIDE, classes_of
from plait.broker.partitions.partition import Partition
from plait.filter.scan_budget import ScanBudget
from plait.limits import (
    LOOK_AHEAD_RUNS_MAX,
    PRIORITY_SHARE,
)
from plait.storage.logs.consume_log import Record
from plait.storage.logs.frame_traits import PRIORITIES
from plait.storage.logs.log import Log
from plait.storage.shared_cursor import SharedCursor

#: A group looks ahead again once it knows of less than this many runs: a frame of many runs is read a few times only.
LOOK_AHEAD_RUNS_LOW = LOOK_AHEAD_RUNS_MAX // 2
#: Records of the consume log, and rows of a frame, that one step examines: about a millisecond.
LOOK_AHEAD_RECORDS = 4_096
LOOK_AHEAD_ROWS = 1 << 16

#: The highest priority in each set of traits.
_HIGHEST = np.array([max(bits.bit_length() - 1, 0) for bits in range(PRIORITIES + 1)])


class Chosen(NamedTuple):
    """A run of rows of one class that is to be delivered next."""

    priority: int
    bucket: int
    start: int
    end: int


class LookAhead:
    """The rows of one group that no consumer has begun, up to a sequence, by priority and bucket."""

    def __init__(self, cursor: SharedCursor, partition: Partition, log: Log, fair_by: str | None) -> None:
        self._cursor, self._partition, self._log, self._fair_by = cursor, partition, log, fair_by
        #: Priority → bucket → runs, the oldest first; the bucket whose turn is next is first.
        self._levels: dict[int, OrderedDict[int, deque[tuple[int, int]]]] = {}
        #: The number of runs.
        self.runs = 0
        #: Rows below this sequence were examined, or are in ``_again``.
        self.examined = cursor.next
        #: Rows below it that are to be examined.
        self._again = deque((first, last) for first, last, _ in cursor.passed)
        #: What ``choose`` returned since the last ``settle``.
        self._out: list[Chosen] = []
        #: Rows of the highest priority that were delivered while lower ones waited, less the rows that this cost.
        self._owing = 0
        #: Counts the turns of the lower priorities.
        self._turn = 0

    # --- examining ------------------------------------------------------------------------------

    def add(self, start: int, end: int) -> None:
        """Rows that consumers returned and had not begun: they are examined again."""
        if start < self.examined:
            self._again.append((start, min(end, self.examined)))

    def examine(self, budget: ScanBudget) -> bool:
        """Examine rows while the budget has room. Returns False if there are more, and room for what is found."""
        if self.runs >= LOOK_AHEAD_RUNS_LOW:
            return True
        while self.runs < LOOK_AHEAD_RUNS_MAX:
            start, end = self._again[0] if self._again else (self.examined, self._partition.visible)
            if start >= end:
                return True
            if not budget.has_room():
                return False
            stop = self._examine(start, end, budget)
            if not self._again:
                self.examined = stop
            elif stop < end:
                self._again[0] = (stop, end)
            else:
                self._again.popleft()
        return True

    def _examine(self, start: int, end: int, budget: ScanBudget) -> int:
        """Examine rows from ``start`` until ``end`` or until the budget is used up. Returns where this ended."""
        log = self._partition.consume_log
        index = log.find(start)
        records = log.slice(index, min(index + LOOK_AHEAD_RECORDS, len(log)))
        # A gap left by damage belongs to the frame after it, so that each row is in a run.
        ends = np.maximum.accumulate(records["base"] + records["count"]).astype(np.int64)
        records = records[: int(np.searchsorted(ends, end)) + 1]
        ends = np.minimum(ends[: len(records)], end)
        if not len(records) or ends[-1] <= start:
            self._add(0, NO_TENANT, start, end)
            return end
        budget.spend(0, records.nbytes)
        traits = (records["traits"] & np.uint64(PRIORITIES)).astype(np.int64)
        mixed = np.ones(len(records), bool) if self._fair_by is not None else traits & (traits - 1) != 0
        apart = [*np.flatnonzero(mixed).tolist(), len(records)]
        at = 0
        for to in apart:
            if at < to:
                start = self._add_runs(_HIGHEST[traits[at:to]] * STRIDE + NO_TENANT, start, ends[at:to])
                if start < ends[to - 1]:
                    break
            if to == len(records) or (at and not budget.has_room()):
                break
            start, stop = self._examine_frame(Record(*records[to].item()), start, int(ends[to]), budget), int(ends[to])
            if start < stop:
                break
            at = to + 1
        return start

    def _examine_frame(self, record: Record, start: int, end: int, budget: ScanBudget) -> int:
        """Read a frame with rows of several classes. Returns up to where the runs of its rows were added."""
        frame = self._partition.frame(self._log, record, trusted=True)
        first = max(start, record.base)
        stop = min(end, first + LOOK_AHEAD_ROWS)
        if frame is None or not first < stop <= frame.end:
            self._add(0, NO_TENANT, start, end)
            return end
        budget.spend(stop - first, (stop - first) * np.dtype(np.int64).itemsize)
        classes = classes_of(frame, first - record.base, stop - record.base, self._fair_by)
        return self._add_runs(classes, start, np.arange(first + 1, stop + 1))

    def _add_runs(self, classes: npt.NDArray[np.int64], start: int, ends: npt.NDArray[np.int64]) -> int:
        """Add rows from ``start``, in pieces that end at ``ends``. Returns the end of those that there was room for."""
        last = np.append(np.flatnonzero(np.diff(classes)), len(classes) - 1)[: max(LOOK_AHEAD_RUNS_MAX - self.runs, 0)]
        for number, end in zip(classes[last].tolist(), ends[last].tolist(), strict=True):
            self._add(number // STRIDE, number % STRIDE, start, end)
            start = end
        return start

    def _add(self, priority: int, bucket: int, start: int, end: int) -> None:
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = OrderedDict()
        runs = level.get(bucket)
        if runs is None:
            runs = level[bucket] = deque()
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], end)
        elif runs and runs[0][0] >= end:
            # Rows that were returned, and are older than the others.
            runs.appendleft((start, end))
            self.runs += 1
        else:
            runs.append((start, end))
            self.runs += 1

    # --- choosing -------------------------------------------------------------------------------

    def choose(self, count: int, runs: int) -> list[Chosen]:
        """The next rows to deliver: at most ``count`` rows in at most ``runs`` runs. Call ``settle`` next."""
        self._out = []
        waiting = sorted(self._levels, reverse=True)
        lower = waiting[1:]
        if lower and (owed := min(self._owing // (PRIORITY_SHARE - 1), count)):
            self._turn += 1
            count -= self._choose(lower[self._turn % len(lower)], owed, runs)
        for priority in waiting:
            if priority in self._levels:
                count -= self._choose(priority, count, runs)
        return self._out

    def _choose(self, priority: int, count: int, runs: int) -> int:
        """Choose rows of one priority: equal numbers of each bucket. Returns how many."""
        level, left = self._levels[priority], count
        while level and left > 0 and len(self._out) < runs:
            share = max(left // len(level), 1)
            for bucket in list(level)[:left]:
                if len(self._out) >= runs:
                    break
                left -= self._choose_bucket(priority, bucket, share, runs)
                if level[bucket]:
                    level.move_to_end(bucket)
                else:
                    del level[bucket]
        if not level:
            del self._levels[priority]
        return count - left

    def _choose_bucket(self, priority: int, bucket: int, count: int, limit: int) -> int:
        runs, left = self._levels[priority][bucket], count
        while runs and left and len(self._out) < limit:
            start, end = runs.popleft()
            self.runs -= 1
            for first, last in self._cursor.unbegun(start, end):
                stop = min(last, first + left) if len(self._out) < limit else first
                if first < stop:
                    self._out.append(Chosen(priority, bucket, first, stop))
                    left -= stop - first
                if stop < last:
                    runs.appendleft((stop, end))
                    self.runs += 1
                    break
        return count - left

    def settle(self) -> None:
        """Note which of the rows that ``choose`` returned were delivered. The others come first next time."""
        delivered: dict[int, int] = {}
        for priority, bucket, start, end in reversed(self._out):
            rest = self._cursor.unbegun(start, end)
            delivered[priority] = delivered.get(priority, 0) + end - start - sum(last - first for first, last in rest)
            for first, last in reversed(rest):
                self._put_back(priority, bucket, first, last)
        self._out = []
        highest = max((*self._levels, *delivered), default=0)
        high = delivered.pop(highest, 0)
        waits = min(self._levels, default=highest) < highest
        self._owing = max(self._owing + high - (PRIORITY_SHARE - 1) * sum(delivered.values()), 0) if waits else 0

    def _put_back(self, priority: int, bucket: int, start: int, end: int) -> None:
        level = self._levels.setdefault(priority, OrderedDict())
        runs = level.setdefault(bucket, deque())
        if runs and runs[0][0] == end:
            runs[0] = (start, runs[0][1])
        else:
            runs.appendleft((start, end))
            self.runs += 1
        level.move_to_end(bucket, last=False)
