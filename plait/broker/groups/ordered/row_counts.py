"""Counts the rows of an ordered group's cursors that are not done.

A cursor's range also covers rows of other cursors, so its length is an upper bound. The length is exact where no other
cursor can have rows: a partition has rows only of the logical partitions that it accepts or accepted. Otherwise the
rows are counted by their keys if there are few enough, or estimated from the cursor's share of logical partitions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from plait.broker.groups.ordered.row_reader import RowReader
from plait.broker.partitions.partition import Partition
from plait.storage.cursor import Cursor
from plait.storage.ranges import Range

#: Rows examined to count what one run of retention takes from one group: about 20 ms.
LOST_COUNTED_MAX: Final = 200_000
#: Rows examined to describe one group.
LAG_COUNTED_MAX: Final = 100_000


class Count(NamedTuple):
    """A count of rows; an estimate if not ``exact``."""

    rows: int
    exact: bool


NONE: Final = Count(0, True)


class RowCounter:
    """Counts rows of one group's cursors and examines at most ``most`` rows in total."""

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
    """The ranges in [start, end) that a cursor has neither done nor in flight."""
    pieces: list[Range] = [*cursor.returned.overlap(start, end), *cursor.waiting.overlap(start, end)]
    found: list[Sequence[int]] = [(piece.start, piece.end) for piece in pieces]
    if start <= cursor.next < end:
        found.append((cursor.next, end))
    return found
