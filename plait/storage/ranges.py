"""Sets of sequence ranges with the number of the attempt they are on.

The cost of every operation depends on how many ranges there are, never on how many sequences they hold.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Range(NamedTuple):
    """Sequences [start, end), delivered ``attempt`` times so far."""

    start: int
    end: int
    attempt: int


class Ranges:
    """Disjoint ranges in ascending order; neighbours with the same attempt are joined."""

    __slots__ = ("_attempts", "_ends", "_starts")

    def __init__(self, ranges: Iterable[tuple[int, int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._attempts: list[int] = []
        for start, end, attempt in ranges:
            self.add(start, end, attempt)

    def __len__(self) -> int:
        return len(self._starts)

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __iter__(self) -> Iterator[Range]:
        return map(Range, self._starts, self._ends, self._attempts)

    @property
    def count(self) -> int:
        """How many sequences all ranges hold."""
        return sum(self._ends) - sum(self._starts)

    @property
    def first(self) -> int:
        """The lowest sequence; only when there is one."""
        return self._starts[0]

    def add(self, start: int, end: int, attempt: int) -> None:
        """Put [start, end) in; where it overlaps, the new attempt replaces the old."""
        if start >= end:
            return
        if not self._starts or start >= self._ends[-1]:
            if self._starts and start == self._ends[-1] and attempt == self._attempts[-1]:
                self._ends[-1] = end
            else:
                self._starts.append(start)
                self._ends.append(end)
                self._attempts.append(attempt)
            return
        self.remove(start, end)
        at = bisect_left(self._starts, start)
        if at > 0 and self._ends[at - 1] == start and self._attempts[at - 1] == attempt:
            at -= 1
            self._ends[at] = end
        else:
            self._starts.insert(at, start)
            self._ends.insert(at, end)
            self._attempts.insert(at, attempt)
        if at + 1 < len(self._starts) and self._starts[at + 1] == end and self._attempts[at + 1] == attempt:
            self._ends[at] = self._ends[at + 1]
            self._delete(at + 1, at + 2)

    def remove(self, start: int, end: int) -> list[Range]:
        """Take [start, end) out; what was there."""
        if start >= end:
            return []
        low = bisect_right(self._ends, start)
        high = bisect_left(self._starts, end, low)
        if low >= high:
            return []
        removed = [
            Range(max(self._starts[i], start), min(self._ends[i], end), self._attempts[i]) for i in range(low, high)
        ]
        before = (self._starts[low], start, self._attempts[low])
        after = (end, self._ends[high - 1], self._attempts[high - 1])
        rest = [piece for piece in (before, after) if piece[0] < piece[1]]
        self._starts[low:high] = [piece[0] for piece in rest]
        self._ends[low:high] = [piece[1] for piece in rest]
        self._attempts[low:high] = [piece[2] for piece in rest]
        return removed

    def head(self) -> Range:
        """The lowest range; only when there is one."""
        return Range(self._starts[0], self._ends[0], self._attempts[0])

    def heads(self, end: int, count: int) -> list[Range]:
        """The lowest ranges below ``end``, at most ``count``; the last one is cut there."""
        high = min(bisect_left(self._starts, end), count)
        heads = list(map(Range, self._starts[:high], self._ends[:high], self._attempts[:high]))
        if heads and heads[-1].end > end:
            heads[-1] = Range(heads[-1].start, end, heads[-1].attempt)
        return heads

    def overlap(self, start: int, end: int) -> list[Range]:
        """The parts of [start, end) that are in the set."""
        if start >= end:
            return []
        low = bisect_right(self._ends, start)
        high = bisect_left(self._starts, end, low)
        return [
            Range(max(self._starts[i], start), min(self._ends[i], end), self._attempts[i]) for i in range(low, high)
        ]

    def clear(self) -> None:
        self._delete(0, len(self._starts))

    def _delete(self, low: int, high: int) -> None:
        del self._starts[low:high]
        del self._ends[low:high]
        del self._attempts[low:high]
