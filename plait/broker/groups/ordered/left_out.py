"""The rows that the filter of an ordered group leaves out: what the action log must have of them.

An ordered group records no deliveries. So after a restart, rows between the recorded acks of a cursor are delivered
again. Rows that the filter has left out are not: their ranges are recorded, since the filter may be another one by
then. The range of a cursor that a consumer holds contains none of them.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from plait.broker.groups.group import Group
from plait.broker.groups.ordered.frame_pieces import FramePiece
from plait.broker.groups.ordered.row_reader import Sequences
from plait.broker.partitions.frame_search import FrameKeys
from plait.frame.view import FrameView
from plait.storage.cursor import Cursor
from plait.storage.logs.action_events import Filtered


def runs_between(rows: Sequences, others: Sequences) -> list[tuple[int, int]]:
    """The ranges [start, end) that contain all of ``rows`` and none of ``others``, as few as possible."""
    if not len(rows):
        return []
    before = np.searchsorted(others, rows)
    edges = [0, *(np.flatnonzero(np.diff(before)) + 1).tolist(), len(rows)]
    return [(int(rows[a]), int(rows[b - 1]) + 1) for a, b in pairwise(edges)]


class LeftOutRows:
    """Records the rows that one pull leaves out, as few ranges for each cursor as possible."""

    def __init__(self, group: Group) -> None:
        self._group = group
        #: Cursor → the range at the end of what was examined, and its number of rows: the next frame may continue it.
        self._open: dict[int, tuple[int, int, int]] = {}
        self._rows: Sequences = np.empty(0, np.int64)
        self._keys: FrameKeys | None = None
        self._key_hashes: set[int] = set()

    def examined(self, frame: FrameView, piece: FramePiece) -> list[tuple[int, int]]:
        """Note the rows of a frame that the filter leaves out. Returns the ranges of the rows that match."""
        sequences = frame.sequences()
        at = piece.left_out
        assert at is not None
        self._rows, self._keys, self._key_hashes = sequences[at], None, set()
        if len(at):
            keys = self._group.partition.keys.of(frame)
            self._keys = FrameKeys(keys.lps[at], None if keys.hashes is None else keys.hashes[at])
            if keys.hashes is not None:
                self._key_hashes = set(np.unique(keys.hashes[at]).tolist())
        return runs_between(sequences[piece.places], self._rows)

    def add(self, cursor: Cursor, held: list[tuple[int, int]]) -> None:
        """Leave out the cursor's rows among those noted. Its owner holds the ranges ``held`` of the frame."""
        rows = self._rows[:0]
        if self._keys is not None and (cursor.key is None or cursor.key in self._key_hashes):
            rows = self._rows[cursor.chooses(*self._keys)]
        self.note(cursor, rows, held)

    def pull(self, cursor: Cursor, tag: int, rows: Sequences, others: Sequences) -> int:
        """Deliver rows of a cursor and record others as left out. Returns the number of separate ranges."""
        runs = runs_between(rows, others)
        for low, high in runs:
            cursor.pulled(tag, low, high, 1)
        self.note(cursor, others, runs)
        self.record()
        return len(runs)

    def note(self, cursor: Cursor, rows: Sequences, held: list[tuple[int, int]]) -> None:
        """Leave out these rows of a cursor, none of which is in ``held``."""
        before = np.searchsorted(np.array([start for start, _ in held], np.int64), rows)
        edges = [0, *(np.flatnonzero(np.diff(before)) + 1).tolist(), len(rows)] if len(rows) else []
        for a, b in pairwise(edges):
            start, count = int(rows[a]), b - a
            if before[a] == 0 and cursor.id in self._open:
                start, _, more = self._open.pop(cursor.id)
                count += more
            self._record(cursor.id)
            self._open[cursor.id] = start, int(rows[b - 1]) + 1, count
        if held and not (len(rows) and before[-1] == len(held)):
            self._record(cursor.id)

    def record(self) -> None:
        """Record the ranges that are left."""
        for cursor in list(self._open):
            self._record(cursor)

    def _record(self, cursor: int) -> None:
        found = self._open.pop(cursor, None)
        if found is not None:
            start, end, rows = found
            self._group.filtered_count += rows
            self._group.journal.event(self._group, Filtered(cursor, start, end, rows))
