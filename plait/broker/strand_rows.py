"""Reading the rows of strands: which lie where, and pieces of frames with just those.

A strand's ranges are of its own rows, so nothing here looks at more rows than are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plait.broker.group import Delivery, Group, Journal
from plait.broker.keys import FrameKeys
from plait.broker.partition import Partition
from plait.broker.strands import Strands
from plait.errors import FrameError
from plait.frame.builder import Buffer
from plait.frame.columns import Column
from plait.frame.slicing import slice_mask, slice_rows
from plait.frame.view import FrameView
from plait.limits import ServerLimits
from plait.storage.action_log import GroupDefinition
from plait.storage.ranges import Ranges
from plait.storage.strand import Strand

STRICT = "strict"
#: Rows that one pull looks at without finding one of its own; it is answered then, and asks again.
LOOK_MAX = 1 << 20

Sequences = npt.NDArray[np.int64]


class Found(NamedTuple):
    """Rows [first, last) of a frame, by sequence; no frame: they cannot be read back."""

    first: int
    last: int
    frame: FrameView | None


class Piece(NamedTuple):
    """Rows from ``first`` to ``last`` of a frame, which was looked at up to ``end``."""

    first: int
    last: int
    end: int
    rows: int
    size: int
    parts: list[Buffer]


class Taking:
    """One pull, while it is served."""

    __slots__ = ("delivery", "looked", "rows", "size")

    def __init__(self, count: int, size: int) -> None:
        self.delivery = Delivery()
        #: It ends with so many rows, and about so many bytes.
        self.rows = count
        self.size = size
        self.looked = 0

    @property
    def room(self) -> int:
        return self.rows - self.delivery.count

    @property
    def more(self) -> bool:
        """There is room for more, and time to look for it."""
        delivery = self.delivery
        return self.room > 0 and (not delivery.count or delivery.size < self.size) and self.looked < LOOK_MAX

    def limit(self, count: int) -> None:
        """At most so many more."""
        self.rows = min(self.rows, self.delivery.count + count)


class StrandRows(Group):
    """An ordered group as far as its rows are concerned."""

    __slots__ = ("strands",)

    def __init__(
        self, definition: GroupDefinition, partition: Partition, limits: ServerLimits, journal: Journal
    ) -> None:
        super().__init__(definition, partition, limits)
        self.strands = Strands(
            definition.start,
            lambda action, strand, start, end, value, attempt: journal.event(
                action, self, strand, start, end, attempt, value
            ),
        )

    @property
    def logs_pulls(self) -> bool:
        """What an owner has not acked is what it needs."""
        return False

    @property
    def strict(self) -> bool:
        """A failed message holds its key."""
        return self.partition.row.settings.order == STRICT

    def _parent(self, strand: Strand) -> Strand:
        return self.strands.by_lp[int(np.flatnonzero(strand.lps)[0])]

    def _cut(self, frame: FrameView, strands: list[Strand], first: int, last: int, taking: Taking) -> Piece | None:
        """The rows of the strands in [first, last) of a frame, as far as there is room; None: there is none."""
        delivery = taking.delivery
        sequences = frame.sequences()
        low, high = np.searchsorted(sequences, [first, last]).tolist()
        taking.looked += high - low
        if strands[0].whole:
            low, high = low, min(high, low + taking.room)
            rows = np.arange(low, high)
        else:
            keys = self.partition.keys.of(frame)
            chosen = strands[0].chooses(keys.lps, keys.hashes)
            for strand in strands[1:]:
                chosen |= strand.chooses(keys.lps, keys.hashes)
            rows = low + np.flatnonzero(chosen[low:high])
            rows = rows[: taking.room]
        if not len(rows):
            return Piece(first, first, last, 0, 0, [])
        end = last if len(rows) < taking.room else int(sequences[rows[-1]]) + 1
        try:
            parts, size = _select(frame, rows)
        except FrameError:
            # Its rows cannot be told apart any more.
            return Piece(first, first, last, 0, 0, [])
        if delivery.count and delivery.size + size > taking.size:
            return None
        return Piece(int(sequences[rows[0]]), int(sequences[rows[-1]]) + 1, end, len(rows), size, parts)

    def _walk(self, journal: Journal, start: int, end: int, *, again: bool) -> Iterator[Found]:
        """The frames with [start, end), those that outlived retention first."""
        kept_until = min(end, self.partition.start)
        if start < kept_until:
            sequences = self.kept.within(start, kept_until)
            places = self.kept.places(sequences.tolist())
            edges = [0, *(np.flatnonzero(np.diff(places)) + 1).tolist(), len(places)] if len(places) else []
            for a, b in pairwise(edges):
                frame = self.frame_of(journal.message_log, journal.kept_log, int(sequences[a]))
                yield Found(int(sequences[a]), int(sequences[b - 1]) + 1, frame)
            start = kept_until
        if start < end:
            for found in self.partition.walk(journal.message_log, start, end, again=again):
                yield Found(*found)

    def _rows(self, journal: Journal, strand: Strand, start: int, end: int) -> Iterator[tuple[Sequences, FrameKeys]]:
        """The sequences of a strand's rows in [start, end), with their keys."""
        for first, last, frame in self._walk(journal, start, end, again=True):
            if frame is None:
                continue
            keys = self.partition.keys.of(frame)
            sequences = frame.sequences()
            chosen = strand.chooses(keys.lps, keys.hashes) & (sequences >= first) & (sequences < last)
            if chosen.any():
                hashes = None if keys.hashes is None else keys.hashes[chosen]
                yield sequences[chosen], FrameKeys(keys.lps[chosen], hashes)

    def _in_hands(self, journal: Journal, strands: list[Strand]) -> dict[int, dict[int, Ranges]]:
        """The rows that are in their owner's hands, one by one: for each logical partition, by tag."""
        found: dict[int, dict[int, Ranges]] = {}
        for strand in strands:
            for tag, held in strand.held.items():
                for start, end, attempt in held:
                    for sequences, keys in self._rows(journal, strand, start, end):
                        for lp, sequence in zip(keys.lps.tolist(), sequences.tolist(), strict=True):
                            rows = found.setdefault(lp, {}).setdefault(tag, Ranges())
                            rows.add(sequence, sequence + 1, attempt)
        return found


def _select(frame: FrameView, rows: npt.NDArray[np.int64]) -> tuple[list[Buffer], int]:
    """Rows of a frame, ascending, as a frame of its own."""
    first, last = int(rows[0]), int(rows[-1]) + 1
    if last - first == len(rows):
        if len(rows) == frame.count:
            return [frame.buffer], frame.size
        if not frame.has(Column.SELECTION):
            piece = slice_rows(frame, first, last)
            return piece.parts, piece.size
    mask = np.zeros(frame.count, bool)
    mask[rows] = True
    piece = slice_mask(frame, mask)
    return piece.parts, piece.size
