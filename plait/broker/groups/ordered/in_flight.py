"""Rows in flight of an ordered group: ranges of its cursors, and single rows where ranges cover rows of other cursors.

Rows are read as arrays, one frame at a time, and turned back into ranges.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from plait.broker.groups.group import Group
from plait.broker.groups.ordered.cursor_set import CursorSet
from plait.broker.groups.ordered.row_reader import RowCounter, RowReader, RowTable, Sequences, lost_ranges, spans_of
from plait.storage.cursor import Cursor
from plait.storage.held_rows import HeldRowArrays, HeldRows
from plait.storage.logs.action_events import Nacked, Skipped
from plait.storage.ranges import Range, Ranges, joined

#: A join writes all ranges of a cursor that are in flight, returned or waiting to the action log. If there are more
#: than this for each key that joins, the keys wait until more keys can join at once.
REJOIN_PIECES = 256
#: A cursor with more returned ranges than this is read row by row when its owner changes, to join the ranges.
COMPACTED_MIN = 64


class InFlightRows(msgspec.Struct, eq=False):
    """An ordered group's operations on held and returned rows."""

    _group: Group
    _cursors: CursorSet
    _reader: RowReader

    # --- row by row ------------------------------------------------------------------------------

    def look_up_held(self) -> None:
        """Look up each held row of the leaving cursors. Other cursors, except those of one key, forget theirs."""
        for cursor in self._cursors:
            if cursor.key is None and not cursor.leaving:
                cursor.held_rows = None
            elif cursor.leaving and cursor.held and cursor.held_rows is None:
                cursor.set_held_rows(self.find_held_rows(cursor))

    def find_held_rows(self, cursor: Cursor) -> HeldRows:
        """The individual rows of a cursor that its owner holds."""
        known = {}
        for tag, held in cursor.held.items():
            placed = [rows.where(attempts >= 0) for rows, attempts in self._rows_with_attempts(cursor, held)]
            known[tag] = HeldRowArrays(*map(np.concatenate, zip(*placed, strict=True)))
        return HeldRows(known)

    def _rows_with_attempts(self, cursor: Cursor, ranges: Ranges) -> Iterator[tuple[HeldRowArrays, Sequences]]:
        """A cursor's rows from range to range, ascending, each with the attempt of its range; -1: between ranges."""
        for start, end in spans_of([(piece.start, piece.end) for piece in ranges]):
            rows = RowTable(list(self._reader.rows(cursor, start, end))).rows
            yield rows, ranges.attempts_of(rows.sequences)

    # --- lost rows -------------------------------------------------------------------------------

    def skip_rows(self, counter: RowCounter, cursor: Cursor, first: int, last: int) -> None:
        """Skip a cursor's rows in [first, last). The event stores their count, since replay cannot count them."""
        group = self._group
        rows = counter.count(cursor, lost_ranges(cursor, first, last))
        self.count_lost(rows, estimated=not counter.exact)
        group.journal.event(group, Skipped(not counter.exact, cursor.id, first, last, lost=rows))
        cursor.skipped(first, last)

    def count_lost(self, rows: int, *, estimated: bool) -> None:
        self._group.lost_count += rows
        self._group.lost_estimated |= estimated and rows > 0

    # --- keeping ranges few ----------------------------------------------------------------------

    def compact_returned(self, cursor: Cursor) -> None:
        """Join a cursor's returned ranges where no other row of the cursor lies between them."""
        if len(cursor.returned) <= COMPACTED_MIN:
            return
        spans = spans_of([(piece.start, piece.end) for piece in cursor.returned])
        readable = sum(len(each) for start, end in spans for each, _ in self._reader.all_rows(start, end))
        if readable < sum(end - start for start, end in spans):
            # Unreadable rows stay in their ranges: they are skipped, with an event, when they are due for delivery.
            return
        placed = self._rows_with_attempts(cursor, cursor.returned)
        cursor.returned = Ranges.of(np.concatenate([_alike(rows.sequences, each) for rows, each in placed], axis=1))

    def rejoin(self, keys: list[Cursor]) -> list[Cursor]:
        """Join keys that have recovered into the cursor of their logical partition; returns the keys that did not join.

        A key has recovered when all its rows are done and it has caught up. Rows of other keys may be in flight. Where
        ranges of the parent cursor cover rows of the key, those rows are removed from the ranges: they are done.
        """
        joining: dict[Cursor, list[Cursor]] = {}
        apart = []
        for key in keys:
            parent = self._cursors.parent(key)
            done = not (key.held or key.returned or key.waiting) and key.next >= parent.next
            if done and (key.owner, key.leaving, key.limit) == (parent.owner, parent.leaving, parent.limit):
                joining.setdefault(parent, []).append(key)
            else:
                apart.append(key)
        for parent, caught_up in joining.items():
            # After a crash a key may be ahead of its parent. The parent moves to the position of the key, and the rows
            # between become returned rows of the parent.
            ahead = max(key.next for key in caught_up)
            joins = [key for key in caught_up if key.next == ahead]
            apart += [key for key in caught_up if key.next < ahead]
            pieces = parent.begun(0, parent.next)
            if (
                len(pieces) > REJOIN_PIECES * len(joins)
                and len(self._cursors.by_key) < self._group.limits.held_keys // 2
            ):
                # The join records each piece again: wait until more keys can join together.
                apart += joins
                continue
            if parent.next < ahead:
                parent.returned.add(parent.next, ahead, 0)
                parent.next = ahead
                pieces = parent.begun(0, ahead)
            if pieces:
                rows = self._reader.table([(piece.start, piece.end) for piece in pieces]).rows
                hashes = np.array([key.key for key in joins], np.uint64)
                for start, end in joined(rows.sequences[np.isin(rows.hashes, hashes)]):
                    parent.forget(start, end)
            self._cursors.join(parent, joins)
        return apart

    def return_rows(self, holding: list[Cursor], clipped: list[tuple[int, int, int]]) -> None:
        """Return the rows of (start, end, tag) ranges, which the owner has not begun. Each row may be a range."""
        by_tag: dict[int, list[tuple[int, int, int]]] = {}
        for start, end, tag in clipped:
            by_tag.setdefault(tag, []).append((start, end, 1))
        for tag, ranges in by_tag.items():
            meant = Ranges(sorted(ranges))
            for cursor in [each for each in holding if tag in each.held]:
                held = cursor.held[tag].copy()
                for rows, found in self._rows_with_attempts(cursor, meant):
                    attempts = np.where(found >= 0, held.attempts_of(rows.sequences), -1)
                    for start, end, _ in _alike(rows.sequences, attempts).T.tolist():
                        for piece in cursor.held_in(tag, start, end):
                            cursor.let_go(tag, piece.start, piece.end)
                            self.return_piece(cursor, piece, 0, counted=False)
                # The held ranges that remain may have no row of the cursor. No ack would remove them: trim them.
                cursor.untrimmed_until = cursor.next

    def return_piece(self, cursor: Cursor, piece: Range, due: int, *, counted: bool = True, now: int = 0) -> None:
        """Record that the owner returned rows: they become deliverable again at ``due`` (0: at once).

        ``now``: the time if they failed, 0 if they did not.
        """
        start, end, attempt = piece
        self._group.journal.event(self._group, Nacked(attempt, not counted, cursor.id, start, end, due))
        cursor.given_back(start, end, attempt - (not counted), due)
        if counted and now:
            self._group.failures.note(start, end, now)

    def trim(self, holding: list[Cursor]) -> None:
        """Trim the held ranges of cursors, where needed."""
        for cursor in holding:
            if cursor.untrimmed_until and (cursor.held_rows is None or not cursor.leaving):
                self._trim_held(cursor)

    def _trim_held(self, cursor: Cursor) -> None:
        """Shrink each held range to the cursor's first and last row in it; remove ranges without a row.

        Ranges are not joined: no ack covers the sequences between two ranges, so they would stay held.
        """
        for tag, held in list(cursor.held.items()):
            starts, ends, attempts = held.columns()
            rows = np.concatenate([rows.sequences for rows, _ in self._rows_with_attempts(cursor, held)])
            low, high = np.searchsorted(rows, (starts, ends))
            some = low < high
            cursor.held[tag] = Ranges.of(np.array([rows[low[some]], rows[high[some] - 1] + 1, attempts[some]]))
            if not some.any():
                del cursor.held[tag]
        if all(held.first >= cursor.untrimmed_until for held in cursor.held.values()):
            cursor.untrimmed_until = 0


def _alike(sequences: Sequences, attempts: Sequences) -> npt.NDArray[np.int64]:
    """(starts, ends, attempts) of consecutive rows with the same attempt, without those with attempt -1."""
    edges = np.flatnonzero(np.diff(attempts, prepend=-2, append=-2))
    first, last = edges[:-1], edges[1:] - 1
    columns = np.array([sequences[first], sequences[last] + 1, attempts[first]])
    return columns[:, columns[2] >= 0]
