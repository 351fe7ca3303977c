"""How many rows an ordered group has not done: what its strands' ranges hold of *their* rows.

A strand's range reaches over rows of other strands, so its length says too much. It is exact where no other strand can
have rows there: a partition has rows only of the logical partitions that it takes or took. Otherwise rows are counted
by their keys, if there are not too many of them, or estimated by the strand's share of the logical partitions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from plait.storage.cursor import Cursor
from plait.storage.ranges import Range

if TYPE_CHECKING:
    from plait.broker.groups.row_reader import RowReader
    from plait.broker.groups.shared_group import Journal

#: Rows that are looked at to count what retention takes from one group in one run: some 20 ms.
LOST_COUNTED_MAX: Final = 200_000
#: Rows that are looked at to describe one group.
LAG_COUNTED_MAX: Final = 100_000


class Count(NamedTuple):
    """So many rows; not ``exact``: about so many."""

    rows: int
    exact: bool


NONE: Final = Count(0, True)


class RowCounter:
    """Counts rows of one group's strands, and looks at ``most`` of them altogether."""

    def __init__(self, group: RowReader, journal: Journal | None, most: int) -> None:
        """``journal``: None if no row is to be looked at."""
        self._group = group
        self._journal = journal
        self._left = most
        self.exact = True

    def count(self, strand: Cursor, ranges: Iterable[Sequence[int]]) -> int:
        """How many rows of a strand lie in [start, end) ranges; ``exact`` says whether all counts so far are."""
        found = self._count(strand, [(piece[0], piece[1]) for piece in ranges if piece[0] < piece[1]])
        self.exact &= found.exact
        return found.rows

    def _count(self, strand: Cursor, ranges: list[tuple[int, int]]) -> Count:
        if not ranges:
            return NONE
        group, partition = self._group, self._group.partition
        low, length = min(start for start, _ in ranges), sum(end - start for start, end in ranges)
        # Where the rows of each logical partition end here, 0 for one that never was here.
        ends = np.full(len(strand.lps), partition.next)
        if partition.accepts is not None and partition.fences is not None:
            ends = np.where(partition.accepts, partition.next, partition.fences)
        there = ends > low
        mine = there & strand.lps
        if not mine.any():
            return NONE
        if strand.key is None and not strand.without and not (there & ~mine).any():
            return Count(length, True)
        if self._journal is not None and length <= self._left:
            self._left -= length
            return Count(group.count_rows(self._journal, strand, ranges), True)
        # A key's share is anybody's guess.
        share = 0.0 if strand.key is not None else int(mine.sum()) / int(there.sum())
        return Count(round(length * share), False)


def lost_ranges(strand: Cursor, start: int, end: int) -> list[Sequence[int]]:
    """What a strand has not done of [start, end), and does not have in flight."""
    pieces: list[Range] = [*strand.returned.overlap(start, end), *strand.waiting.overlap(start, end)]
    found: list[Sequence[int]] = [(piece.start, piece.end) for piece in pieces]
    if start <= strand.next < end:
        found.append((strand.next, end))
    return found
