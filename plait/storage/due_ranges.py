"""Ranges of sequences that wait for a due time.

Ranges with the same due time are stored together, so the cost of most operations depends on the number of different due
times; the rounding of ``due_time`` keeps that number small.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from plait.storage.ranges import Range, Ranges

#: A due time (microseconds) and the ranges that are due then.
Due = tuple[int, list[Range]]


class DueRanges:
    """Disjoint ranges, each with its due time."""

    __slots__ = ("_at", "_known", "_moments", "_released", "length")

    def __init__(self, entries: Iterable[Due] = ()) -> None:
        self._at: dict[int, Ranges] = {}
        #: Heap of future due times. A due time stays in the heap until it has passed, even if all its ranges were
        #: removed.
        self._moments: list[int] = []
        #: The due times in the heap. Not a set: an empty set takes 216 bytes, and most groups have nothing waiting.
        self._known: dict[int, None] = {}
        #: Due times that have passed, the earliest first.
        self._released: list[int] = []
        #: The number of ranges.
        self.length = 0
        for due, ranges in entries:
            for start, end, attempt in ranges:
                self.add(start, end, attempt, due)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Due]:
        return ((due, list(ranges)) for due, ranges in sorted(self._at.items()))

    @property
    def count(self) -> int:
        """The number of sequences."""
        return sum(ranges.count for ranges in self._at.values())

    @property
    def first(self) -> int:
        """The lowest sequence. There must be one."""
        return min(ranges.first for ranges in self._at.values())

    @property
    def next_due(self) -> int | None:
        """The earliest future due time; None when there is none."""
        while self._moments and self._moments[0] not in self._at:
            self._known.pop(heapq.heappop(self._moments), None)
        return self._moments[0] if self._moments else None

    def add(self, start: int, end: int, attempt: int, due: int) -> None:
        """Add [start, end), which must not be present."""
        ranges = self._at.get(due)
        if ranges is None:
            ranges = self._at[due] = Ranges()
            if due not in self._known:
                self._known[due] = None
                heapq.heappush(self._moments, due)
        before = len(ranges)
        ranges.add(start, end, attempt)
        self.length += len(ranges) - before

    def remove(self, start: int, end: int) -> list[Range]:
        """Remove [start, end). Returns the ranges that were present."""
        removed: list[Range] = []
        for due, ranges in list(self._at.items()):
            before = len(ranges)
            if found := ranges.remove(start, end):
                removed += found
                self.length += len(ranges) - before
                if not ranges:
                    del self._at[due]
        return removed

    def overlap(self, start: int, end: int) -> list[Range]:
        """The parts of [start, end) that are present."""
        return [piece for ranges in self._at.values() for piece in ranges.overlap(start, end)]

    def release(self, now: int) -> None:
        """Release all due times up to ``now``."""
        while self._moments and self._moments[0] <= now:
            due = heapq.heappop(self._moments)
            self._known.pop(due, None)
            self._released.append(due)

    def pop_released(self) -> Ranges | None:
        """Remove and return the ranges of the earliest released due time; None when nothing is released."""
        while self._released:
            ranges = self._at.pop(self._released.pop(0), None)
            if ranges is not None:
                self.length -= len(ranges)
                return ranges
        return None

    def clear(self) -> None:
        self._at.clear()
        self._moments.clear()
        self._known.clear()
        self._released.clear()
        self.length = 0
