"""Pieces of frames for the pulls of an ordered group: which rows belong to its cursors, and cutting them out."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from plait.broker.groups.filtered_rows import may_scan
from plait.broker.groups.group import Group
from plait.broker.groups.ordered.row_reader import Sequences
from plait.broker.partitions.frame_search import FrameKeys
from plait.broker.partitions.partition import Delivery
from plait.errors import FrameError
from plait.frame.builder import Buffer
from plait.frame.columns import Column
from plait.frame.slicing import slice_mask, slice_rows
from plait.frame.view import FrameView
from plait.limits import LOGICAL_PARTITIONS
from plait.model.logical_partitions import LpSet
from plait.storage.cursor import Cursor

#: The most rows that one pull examines. A pull that found none by then gets an empty delivery; the consumer pulls
#: again.
LOOK_MAX = 1 << 20
#: The most separate ranges that one pull delivers of the rows that match a filter.
RUNS_MAX = 4_096


class FramePiece(NamedTuple):
    """Chosen rows of a frame, with sequences in [first, last). The frame was examined up to ``end``."""

    first: int
    last: int
    end: int
    rows: int
    size: int
    #: ``size``, and what its compressed columns inflate to.
    weight: int
    parts: list[Buffer]
    #: The indexes of the rows in the frame.
    places: Sequences
    #: The indexes of the cursors' rows below ``end`` that the group's filter leaves out; None: it has none.
    left_out: Sequences | None = None


class RowTake(msgspec.Struct, eq=False):
    """One pull, while it is served. It ends at this many rows, or about this many bytes."""

    rows: int
    size: int
    delivery: Delivery
    looked: int = 0
    #: Of a group with a filter: how many separate ranges it delivers.
    runs: int = 0
    #: The group, if it has a filter.
    filtered: Group | None = None
    #: True if a piece did not fit, so that the pull ends. The next pull delivers this piece first, whatever its size.
    full: bool = False

    @property
    def more(self) -> bool:
        """True if there is room for more rows, and the pull has not examined too many."""
        delivery = self.delivery
        fits = not self.full and (not delivery.count or delivery.weight < self.size)
        within = self.looked < LOOK_MAX and self.runs < RUNS_MAX
        return fits and delivery.count < self.rows and within and (self.filtered is None or may_scan(self.filtered))

    def limit(self, count: int) -> None:
        """Take at most ``count`` more rows."""
        self.rows = min(self.rows, self.delivery.count + count)


class Chooser:
    """Tells which rows belong to any of several cursors."""

    __slots__ = ("_keys", "_lps", "_without", "all")

    def __init__(self, cursors: list[Cursor]) -> None:
        self._lps: LpSet = np.zeros(LOGICAL_PARTITIONS, bool)
        without: set[int] = set()
        keys: set[int] = set()
        for cursor in cursors:
            if cursor.key is None:
                self._lps |= cursor.lps
                without.update(cursor.without)
            else:
                keys.add(cursor.key)
        without -= keys
        self._without = np.fromiter(without, np.uint64, len(without))
        # Keys whose logical partitions are in ``_lps`` are chosen with these.
        self._keys = np.fromiter(keys, np.uint64, len(keys))
        self._keys = self._keys[~self._lps[self._keys % LOGICAL_PARTITIONS]]
        #: True if every row belongs to one of the cursors.
        self.all = not len(self._without) and bool(self._lps.all())

    def __call__(self, keys: FrameKeys) -> npt.NDArray[np.bool_]:
        chosen: npt.NDArray[np.bool_] = self._lps[keys.lps]
        if keys.hashes is not None:
            if len(self._without):
                chosen &= ~np.isin(keys.hashes, self._without)
            if len(self._keys):
                chosen |= np.isin(keys.hashes, self._keys)
        return chosen


def cut_out(frame: FrameView, sequences: Sequences, rows: Sequences, end: int, taking: RowTake) -> FramePiece | None:
    """Cut rows of a frame, in ascending order, into a new frame; None: it does not fit.

    The piece is empty if there are no rows, or if the frame is damaged: its rows cannot be separated.
    """
    nothing = FramePiece(0, 0, end, 0, 0, 0, [], rows[:0])
    if not len(rows):
        return nothing
    first, last = int(rows[0]), int(rows[-1]) + 1
    adjacent = last - first == len(rows)
    if adjacent and len(rows) == frame.count:
        parts: list[Buffer] = [frame.buffer]
        size = frame.size
    else:
        try:
            if adjacent and not frame.has(Column.SELECTION):
                piece = slice_rows(frame, first, last)
            else:
                mask = np.zeros(frame.count, bool)
                mask[rows] = True
                piece = slice_mask(frame, mask)
        except FrameError:
            return nothing
        parts, size = piece.parts, piece.size
    weight = size + frame.inflated_size
    if taking.delivery.count and taking.delivery.weight + weight > taking.size:
        taking.full = True
        return None
    begin, stop = int(sequences[first]), int(sequences[last - 1]) + 1
    return FramePiece(begin, stop, end, len(rows), size, weight, parts, rows)


def cut_matching(
    frame: FrameView,
    sequences: Sequences,
    chosen: Sequences,
    matching: npt.NDArray[np.bool_],
    last: int,
    taking: RowTake,
) -> FramePiece | None:
    """Cut those of the chosen rows of a frame that match, up to the room of the pull; None: they do not fit.

    A chosen row that does not match separates two ranges of the rows that do.
    """
    first_of_range = matching & ~np.concatenate(([False], matching[:-1]))
    ranges = np.cumsum(first_of_range)[matching]
    rows = chosen[matching][ranges <= RUNS_MAX - taking.runs][: taking.rows - taking.delivery.count]
    end = last if len(rows) == len(ranges) else int(sequences[rows[-1]]) + 1
    piece = cut_out(frame, sequences, rows, end, taking)
    if piece is None:
        return None
    others = chosen[~matching]
    return piece._replace(left_out=others[: np.searchsorted(sequences[others], end)])
