"""Sets of sequence ranges, each with its number of attempts; ranges that wait for a due time; failed rows.

The cost of every operation depends on the number of ranges, never on the number of sequences in them.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plait.frame.header import SEQUENCE_MAX


class Range(NamedTuple):
    """Sequences [start, end), delivered ``attempt`` times so far."""

    start: int
    end: int
    attempt: int


def joined(sequences: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """The runs [start, end) of consecutive numbers in ascending sequences."""
    if not len(sequences):
        return []
    edges = [0, *(np.flatnonzero(np.diff(sequences) != 1) + 1).tolist(), len(sequences)]
    return [(int(sequences[a]), int(sequences[b - 1]) + 1) for a, b in pairwise(edges)]


class Ranges:
    """Disjoint ranges in ascending order; neighbours with the same attempt are joined."""

    __slots__ = ("_attempts", "_ends", "_gone", "_starts", "length")

    def __init__(self, ranges: Iterable[tuple[int, int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._attempts: list[int] = []
        #: The number of removed entries at the start of the lists. They are deleted in batches, because a deletion at
        #: the start of a list takes time proportional to its length.
        self._gone = 0
        #: The number of ranges.
        self.length = 0
        for start, end, attempt in ranges:
            self.add(start, end, attempt)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Range]:
        return iter(self._slice(self._gone, len(self._starts)))

    def _slice(self, low: int, high: int) -> list[Range]:
        return list(map(Range, self._starts[low:high], self._ends[low:high], self._attempts[low:high]))

    @property
    def count(self) -> int:
        return sum(self._ends[self._gone :]) - sum(self._starts[self._gone :])

    @property
    def first(self) -> int:
        """The lowest sequence. There must be one."""
        return self._starts[self._gone]

    def add(self, start: int, end: int, attempt: int) -> None:
        """Add [start, end); where it overlaps, the new attempt replaces the old one."""
        if start >= end:
            return
        if not self.length and self._gone:
            self.clear()
        if not self.length or start >= self._ends[-1]:
            if self.length and start == self._ends[-1] and attempt == self._attempts[-1]:
                self._ends[-1] = end
            else:
                self._starts.append(start)
                self._ends.append(end)
                self._attempts.append(attempt)
                self.length += 1
            return
        self.remove(start, end)
        at = bisect_left(self._starts, start, self._gone)
        if at > self._gone and self._ends[at - 1] == start and self._attempts[at - 1] == attempt:
            at -= 1
            self._ends[at] = end
        else:
            self._starts.insert(at, start)
            self._ends.insert(at, end)
            self._attempts.insert(at, attempt)
            self.length += 1
        if at + 1 < len(self._starts) and self._starts[at + 1] == end and self._attempts[at + 1] == attempt:
            self._ends[at] = self._ends[at + 1]
            self._delete(at + 1, at + 2)
            self.length -= 1

    def remove(self, start: int, end: int) -> list[Range]:
        """Remove [start, end). Returns the ranges that were present."""
        if not self.length:
            return []
        if self.length == 1 and start <= self._starts[-1] and self._ends[-1] <= end:
            # There is one range, and all of it is removed: the most common case.
            removed = [Range(self._starts[-1], self._ends[-1], self._attempts[-1])]
            self._gone, self.length = len(self._starts), 0
            return removed
        low, high = self._between(start, end)
        if low >= high:
            return []
        removed = self._cut(low, high, start, end)
        before = (self._starts[low], start, self._attempts[low])
        after = (end, self._ends[high - 1], self._attempts[high - 1])
        rest = [piece for piece in (before, after) if piece[0] < piece[1]]
        self.length += len(rest) - (high - low)
        if low == self._gone and not rest:
            self._forget(high)
            return removed
        self._starts[low:high] = [piece[0] for piece in rest]
        self._ends[low:high] = [piece[1] for piece in rest]
        self._attempts[low:high] = [piece[2] for piece in rest]
        return removed

    def _between(self, start: int, end: int) -> tuple[int, int]:
        """The indexes [low, high) of the ranges that overlap [start, end)."""
        if start >= end:
            return 0, 0
        low = bisect_right(self._ends, start, self._gone)
        return low, bisect_left(self._starts, end, low)

    def _cut(self, low: int, high: int, start: int, end: int) -> list[Range]:
        return [
            Range(max(self._starts[i], start), min(self._ends[i], end), self._attempts[i]) for i in range(low, high)
        ]

    def _forget(self, until: int) -> None:
        """Remove the lowest ranges, up to index ``until``."""
        self._gone = until
        if self._gone > 32 and self._gone * 2 > len(self._starts):
            self._gone = 0
            self._delete(0, until)

    def head(self) -> Range:
        """The lowest range. There must be one."""
        return Range(self._starts[self._gone], self._ends[self._gone], self._attempts[self._gone])

    def heads(self, end: int, count: int) -> list[Range]:
        """The lowest ranges below ``end``, at most ``count``; the last one is cut at ``end``."""
        high = min(bisect_left(self._starts, end, self._gone), self._gone + count)
        heads = self._slice(self._gone, high)
        if heads and heads[-1].end > end:
            heads[-1] = Range(heads[-1].start, end, heads[-1].attempt)
        return heads

    def after(self, start: int, count: int) -> list[Range]:
        """The lowest ranges from ``start`` on, at most ``count``; the first one is cut at ``start``."""
        low = bisect_right(self._ends, start, self._gone)
        found = self._slice(low, low + count)
        if found and found[0].start < start:
            found[0] = Range(start, found[0].end, found[0].attempt)
        return found

    def overlap(self, start: int, end: int) -> list[Range]:
        return self._cut(*self._between(start, end), start, end)

    def columns(self) -> npt.NDArray[np.int64]:
        columns = (self._starts, self._ends, self._attempts)
        return np.array([column[self._gone :] for column in columns], "<i8")

    def attempts_of(self, sequences: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The attempt of the range that each sequence is in; -1 if it is in none."""
        starts, ends, attempts = self.columns()
        at = np.searchsorted(starts, sequences, "right") - 1
        return np.where((at >= 0) & (sequences < ends[at]), attempts[at], -1)

    @classmethod
    def of(cls, columns: npt.NDArray[np.int64]) -> Ranges:
        """The inverse of ``columns``. Ranges must ascend, and neighbours with equal attempts must be joined."""
        ranges = cls()
        ranges._starts, ranges._ends, ranges._attempts = columns.tolist()
        ranges.length = len(ranges._starts)
        return ranges

    def copy(self) -> Ranges:
        copy = Ranges()
        copy._starts, copy._ends, copy._attempts = self._starts[:], self._ends[:], self._attempts[:]
        copy._gone, copy.length = self._gone, self.length
        return copy

    def pack(self) -> bytes:
        """All ranges as little-endian 64-bit numbers: starts, ends, attempts."""
        return self.columns().tobytes()

    @classmethod
    def unpack(cls, data: bytes) -> Ranges:
        return cls.of(np.frombuffer(data, "<i8").reshape(3, -1))

    def clear(self) -> None:
        self._gone = self.length = 0
        self._delete(0, len(self._starts))

    def _delete(self, low: int, high: int) -> None:
        del self._starts[low:high]
        del self._ends[low:high]
        del self._attempts[low:high]


def count_of(pieces: list[Range]) -> int:
    count = 0
    for start, end, _ in pieces:
        count += end - start
    return count


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
        return [piece for ranges in self._at.values() for piece in ranges.overlap(start, end)]

    def release(self, now: int) -> None:
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


class Failures:
    """Failed rows of one group in one partition. In ordered groups too, the ranges contain failed rows only."""

    __slots__ = ("dead", "failing", "resent")

    def __init__(self) -> None:
        #: Dead letters: not delivered again unless an operator resends them.
        self.dead = Ranges()
        #: Failed rows. The attempt of a range is the time of its first failure, in seconds since 1970.
        self.failing = Ranges()
        #: Dead letters that were resent. The attempts of a range are those before the resend, which no longer count.
        self.resent = Ranges()

    def note(self, start: int, end: int, time: int) -> None:
        """Record ``time`` as the first failure of [start, end), except where one is recorded."""
        for first, last, _ in self.failing.overlap(start, end):
            if start < first:
                self.failing.add(start, first, time // 1_000_000)
            start = last
        self.failing.add(start, end, time // 1_000_000)

    def forget(self, start: int, end: int) -> None:
        """Forget [start, end), which is done or skipped."""
        self.failing.remove(start, end)
        self.resent.remove(start, end)

    def bury(self, start: int, end: int, attempt: int, time: int) -> None:
        """Record that [start, end) became dead letters."""
        self.note(start, end, time)
        self.resent.remove(start, end)
        self.dead.add(start, end, attempt)

    def revive(self, start: int, end: int, passed: int) -> list[Range]:
        """Record that the dead letters in [start, end) are resent; their attempts start from 0 again.

        Returns the ranges to deliver again. They end at ``passed``, because the cursor delivers later rows anyway.
        """
        letters = self.dead.remove(start, end)
        again = [Range(first, min(last, passed), attempt) for first, last, attempt in letters if first < passed]
        for piece in again:
            self.resent.add(*piece)
        return again

    def purge(self, start: int, end: int) -> int:
        """Remove the dead letters in [start, end), which are purged. Returns the number of sequences."""
        letters = self.dead.remove(start, end)
        for first, last, _ in letters:
            self.failing.remove(first, last)
        return count_of(letters)

    def reset(self) -> None:
        """Forget all failures except dead letters, because the group continues from another sequence."""
        self.resent.clear()
        self.failing = Ranges(piece for start, end, _ in self.dead for piece in self.failing.overlap(start, end))

    def rewound(self, sequence: int, *, skipping: bool) -> None:
        """Forget all failures from ``sequence`` on. ``skipping``: below it too, except dead letters."""
        self.dead.remove(sequence, SEQUENCE_MAX)
        if skipping:
            self.reset()
        else:
            self.resent.remove(sequence, SEQUENCE_MAX)
            self.failing.remove(sequence, SEQUENCE_MAX)

    def dump(self) -> tuple[bytes, bytes, bytes]:
        return self.dead.pack(), self.failing.pack(), self.resent.pack()

    def load(self, state: tuple[bytes, bytes, bytes]) -> None:
        self.dead, self.failing, self.resent = map(Ranges.unpack, state)
