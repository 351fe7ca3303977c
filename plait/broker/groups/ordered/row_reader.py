"""Reads the rows of a group's partition, and finds and counts the rows of its cursors.

It reads no rows outside the ranges that the caller asks for, except between ranges that are near each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from plait.broker.groups.group import Group
from plait.broker.partitions.frame_search import FrameKeys, keys_in
from plait.broker.partitions.partition import Partition
from plait.frame.view import FrameView
from plait.model.logical_partitions import NO_KEY_HASH
from plait.storage.cursor import Cursor
from plait.storage.held_rows import HeldRowArrays
from plait.storage.ranges import Range

#: Two ranges with at most this many rows between them are read together.
TABLE_GAP = 10_000
#: Rows that one run of retention examines to count the rows that one group loses: about 20 ms.
LOST_COUNTED_MAX: Final = 200_000
#: Rows examined to compute the lag of one group, or what a rewind of it would deliver.
LAG_COUNTED_MAX: Final = 100_000

Sequences = npt.NDArray[np.int64]


#: (first, last, frame): rows [first, last), and the frame that has them; None: they cannot be read.
FoundRows = tuple[int, int, FrameView | None]


class RowTable:
    """Rows by sequence, with their keys."""

    __slots__ = ("rows",)

    def __init__(self, parts: list[tuple[Sequences, FrameKeys]]) -> None:
        hashes = [np.full(len(keys.lps), NO_KEY_HASH) if keys.hashes is None else keys.hashes for _, keys in parts]
        self.rows = HeldRowArrays(
            np.concatenate([np.empty(0, np.int64), *(each for each, _ in parts)]),
            np.concatenate([np.empty(0, np.uint16), *(keys.lps for _, keys in parts)]),
            np.concatenate([np.empty(0, np.uint64), *hashes]),
        )

    def of(self, cursor: Cursor, start: int, end: int) -> tuple[Sequences, FrameKeys] | None:
        """A cursor's rows in [start, end); None: there are none."""
        low, high = np.searchsorted(self.rows.sequences, (start, end)).tolist()
        chosen = cursor.chooses(self.rows.lps[low:high], self.rows.hashes[low:high])
        if not chosen.any():
            return None
        sequences, lps, hashes = self.rows.where(low + np.flatnonzero(chosen))
        return sequences, FrameKeys(lps, hashes)


class RowReader(msgspec.Struct, eq=False):
    """Finds the rows of a group's partition, in the message log or in the retained log."""

    _group: Group

    def walk(self, start: int, end: int, *, again: bool) -> Iterator[FoundRows]:
        """The frames with rows in [start, end). Rows below the partition's start come from the retained log."""
        partition, log = self._group.partition, self._group.journal.message_log
        known = partition.start
        partition.expire_deleted(log)
        retained_until = min(end, partition.start)
        if start < retained_until:
            for found in self._retained_rows(start, retained_until):
                if (lost := max(start, known)) < found[0]:
                    yield lost, found[0], None
                yield found
                start = found[1]
            if (lost := max(start, known)) < retained_until:
                # Rows of a deleted segment that were not retained. A crash lost the event that skips them.
                yield lost, retained_until, None
            start = retained_until
        if start < end:
            yield from partition.walk(log, start, end, again=again)

    def _retained_rows(self, start: int, end: int) -> Iterator[FoundRows]:
        """The frames of the retained log with rows in [start, end)."""
        sequences = self._group.retained.within(start, end)
        places = self._group.retained.places(sequences.tolist())
        edges = [0, *(np.flatnonzero(np.diff(places)) + 1).tolist(), len(places)] if len(places) else []
        for a, b in pairwise(edges):
            yield int(sequences[a]), int(sequences[b - 1]) + 1, self._group.frame_of(int(sequences[a]))

    def rows(self, cursor: Cursor, start: int, end: int) -> Iterator[tuple[Sequences, FrameKeys]]:
        """The sequences of a cursor's rows in [start, end), with their keys."""
        for sequences, keys in self.all_rows(start, end):
            chosen = cursor.chooses(keys.lps, keys.hashes)
            if chosen.any():
                hashes = None if keys.hashes is None else keys.hashes[chosen]
                yield sequences[chosen], FrameKeys(keys.lps[chosen], hashes)

    def count_rows(self, cursor: Cursor, ranges: Iterable[tuple[int, int]]) -> int:
        """How many rows of a cursor lie in [start, end) ranges."""
        return sum(len(rows) for start, end in ranges for rows, _ in self.rows(cursor, start, end))

    def all_rows(self, start: int, end: int) -> Iterator[tuple[Sequences, FrameKeys]]:
        partition, log = self._group.partition, self._group.journal.message_log
        partition.expire_deleted(log)
        retained_until = min(end, partition.start)
        if start < retained_until:
            for first, last, frame in self.walk(start, retained_until, again=True):
                if frame is not None:
                    keys, sequences = partition.keys.of(frame), frame.sequences()
                    low, high = np.searchsorted(sequences, [first, last]).tolist()
                    hashes = None if keys.hashes is None else keys.hashes[low:high]
                    yield sequences[low:high], FrameKeys(keys.lps[low:high], hashes)
        for first, last, keys in keys_in(partition, log, max(start, retained_until), end):
            yield np.arange(first, last), keys

    def table(self, ranges: list[tuple[int, int]]) -> RowTable:
        """All rows of all cursors within ranges, and between ranges that are near each other."""
        return RowTable([found for start, end in spans_of(ranges) for found in self.all_rows(start, end)])


def spans_of(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges, sorted, with those near each other joined."""
    spans: list[tuple[int, int]] = []
    for start, end in sorted(piece for piece in ranges if piece[0] < piece[1]):
        if spans and start <= spans[-1][1] + TABLE_GAP:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        else:
            spans.append((start, end))
    return spans


class Count(NamedTuple):
    """A count of rows; an estimate if not ``exact``."""

    rows: int
    exact: bool


NONE: Final = Count(0, True)


class RowCounter:
    """Counts the rows of a group's cursors in given ranges, and examines at most ``most`` rows in all calls together.

    A cursor's range also covers rows of other cursors, so its length is an upper bound. The length is exact where no
    other cursor can have rows: a partition has rows only of the logical partitions that it accepts or accepted.
    Otherwise the rows are counted by their keys if there are few enough, or estimated from the cursor's share of
    logical partitions.
    """

    def __init__(self, partition: Partition, reader: RowReader, most: int) -> None:
        self._partition = partition
        self._reader = reader
        self._left = most
        self.exact = True

    def count(self, cursor: Cursor, ranges: Iterable[Sequence[int]]) -> int:
        """How many rows of a cursor lie in [start, end) ranges. Clears ``exact`` if the count is an estimate."""
        found = self._count(cursor, [(piece[0], piece[1]) for piece in ranges if piece[0] < piece[1]])
        self.exact &= found.exact
        return found.rows

    def _count(self, cursor: Cursor, ranges: list[tuple[int, int]]) -> Count:
        if not ranges:
            return NONE
        partition = self._partition
        low, length = min(start for start, _ in ranges), sum(end - start for start, end in ranges)
        # Where the rows of each logical partition end in this partition; 0: it never had any.
        ends = np.full(len(cursor.lps), partition.next)
        if partition.accepts is not None and partition.fences is not None:
            ends = np.where(partition.accepts, partition.next, partition.fences)
        there = ends > low
        mine = there & cursor.lps
        if not mine.any():
            return NONE
        if cursor.key is None and not cursor.without and not (there & ~mine).any():
            return Count(length, True)
        if length <= self._left:
            self._left -= length
            return Count(self._reader.count_rows(cursor, ranges), True)
        # The share of a single key is unknown.
        share = 0.0 if cursor.key is not None else int(mine.sum()) / int(there.sum())
        return Count(round(length * share), False)


def lost_ranges(cursor: Cursor, start: int, end: int) -> list[Sequence[int]]:
    """The ranges of [start, end) that a cursor loses if it skips them: those that are neither done nor in flight."""
    pieces: list[Range] = [*cursor.returned.overlap(start, end), *cursor.waiting.overlap(start, end)]
    found: list[Sequence[int]] = [(piece.start, piece.end) for piece in pieces]
    if start <= cursor.next < end:
        found.append((cursor.next, end))
    return found
