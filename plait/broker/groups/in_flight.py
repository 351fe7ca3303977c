"""Rows in flight of an ordered group: ranges of its cursors, and individual rows where they matter.

Rows are read as arrays, one frame at a time, and turned back into ranges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat

import numpy as np
import numpy.typing as npt

from plait.broker.groups.row_reader import RowReader, RowTable, Sequences, spans_of
from plait.broker.groups.shared_group import AttachedConsumer, Journal
from plait.limits import LOGICAL_PARTITIONS
from plait.model.logical_partitions import LpSet
from plait.model.lp_numbers import ZEROS, LpNumbers
from plait.storage.cursor import Cursor
from plait.storage.held_rows import HeldRowArrays, HeldRows
from plait.storage.logs.action_log import FLAG_UNCOUNTED, Action
from plait.storage.ranges import Range, Ranges, joined

#: A key rejoins a cursor that has at most this many ranges in flight, returned or waiting: the join records all of
#: them again. More ranges need more keys that join together.
REJOIN_PIECES = 256
#: A cursor with more returned ranges than this is read row by row when its owner changes, to join the ranges.
COMPACTED_MIN = 64


class InFlightRows(RowReader):
    """An ordered group's operations on held and returned rows."""

    __slots__ = ()

    def _holding(self, owner: int) -> list[Cursor]:
        return [each for each in self.cursors if each.owner == owner and each.held]

    def _clipped(self, ranges: list[tuple[int, int, int]], tags: Sequence[int]) -> list[tuple[int, int, int]]:
        """(start, end, tag) of the visible rows that (start, end, epoch) ranges refer to."""
        visible = self.partition.visible
        return [
            (*self.partition.clip_to_epoch(start, min(end, visible), epoch), tag)
            for (start, end, epoch), tag in zip(ranges, tags or repeat(0), strict=False)
        ]

    @staticmethod
    def _reached(holding: list[Cursor], tag: int, start: int, end: int) -> list[tuple[Cursor, Range]]:
        """The ranges in [start, end) that an owner received under a tag, each with its cursor."""
        return [(cursor, piece) for cursor in holding for piece in cursor.held_in(tag, start, end)]

    # --- limits of delivery ----------------------------------------------------------------------

    def _set_wanted_until(self, consumer: int, wants: list[tuple[int, int, int]]) -> None:
        """Record (first, end, until): the sequence up to which a consumer wants rows of logical partitions."""
        self.wanted_until[consumer] = ZEROS
        if any(until for _, _, until in wants):
            limits = np.zeros(LOGICAL_PARTITIONS, np.int64)
            for first, end, until in wants:
                limits[first:end] = until
            self.wanted_until[consumer] = LpNumbers.of(limits)

    def _limit(self, owner: int) -> None:
        """Set the limits of an owner's cursors to the sequences that it asked for."""
        wanted, mine = self.wanted_until.get(owner, ZEROS), self.cursors.of(owner)
        if not wanted.any() and not any(cursor.limit for cursor in mine):
            return
        limits = wanted.array()
        changed = np.zeros(LOGICAL_PARTITIONS, bool)
        for cursor in mine:
            changed |= cursor.lps & (limits != cursor.limit)
        for limit in np.unique(limits[changed]).tolist():
            for cursor in self.cursors.take_out(changed & (limits == limit)):
                cursor.limit = limit

    def reopened(self, lps: LpSet, sequence: int) -> None:
        """The partition accepts rows of these logical partitions again, from ``sequence`` on.

        Owners that asked before have an older route. They get no rows from ``sequence`` on until they ask again.
        """
        if self.definition.affinity:
            return
        # 0 means no limit. -1 delivers nothing, which is right for a partition without rows.
        place = sequence or -1
        for owner, wanted in list(self.wanted_until.items()):
            limits = wanted.array()
            self.wanted_until[owner] = LpNumbers.of(
                np.where(lps & ((limits == 0) | (limits > sequence)), place, limits)
            )
            self._limit(owner)

    # --- row by row ------------------------------------------------------------------------------

    def _look_up_held(self, journal: Journal) -> None:
        """Find the held rows of cursors that are leaving; discard those of cursors that are not."""
        for cursor in self.cursors:
            if cursor.key is None and not cursor.leaving:
                cursor.held_rows = None
            elif cursor.leaving and cursor.held and cursor.held_rows is None:
                cursor.set_held_rows(self._find_held_rows(journal, cursor))

    def _find_held_rows(self, journal: Journal, cursor: Cursor) -> HeldRows:
        """The individual rows of a cursor that its owner holds."""
        known = {}
        for tag, held in cursor.held.items():
            placed = [rows.where(attempts >= 0) for rows, attempts in self._rows_with_attempts(journal, cursor, held)]
            known[tag] = HeldRowArrays(*map(np.concatenate, zip(*placed, strict=True)))
        return HeldRows(known)

    def _rows_with_attempts(
        self, journal: Journal, cursor: Cursor, ranges: Ranges
    ) -> Iterator[tuple[HeldRowArrays, Sequences]]:
        """A cursor's rows in and between ranges, ascending, each with the attempt of its range; -1: in no range."""
        for start, end in spans_of([(piece.start, piece.end) for piece in ranges]):
            rows = RowTable(list(self._rows(journal, cursor, start, end))).rows
            yield rows, ranges.attempts_of(rows.sequences)

    # --- keeping ranges few ----------------------------------------------------------------------

    def _compact_returned(self, journal: Journal, cursor: Cursor) -> None:
        """Join a cursor's returned ranges where no other row of the cursor lies between them."""
        if len(cursor.returned) <= COMPACTED_MIN:
            return
        spans = spans_of([(piece.start, piece.end) for piece in cursor.returned])
        readable = sum(len(each) for start, end in spans for each, _ in self._all_rows(journal, start, end))
        if readable < sum(end - start for start, end in spans):
            # Unreadable rows stay in their ranges: they are skipped, with an event, when their turn comes.
            return
        placed = self._rows_with_attempts(journal, cursor, cursor.returned)
        cursor.returned = Ranges.of(np.concatenate([_alike(rows.sequences, each) for rows, each in placed], axis=1))

    def _rejoin(self, keys: list[Cursor], journal: Journal) -> list[Cursor]:
        """Join keys that have recovered into the cursor of their logical partition; returns the keys that did not join.

        A key has recovered when all its rows are done and it has caught up. Other rows may be in flight. The ranges of
        the parent cursor may cover rows of the key, which are done: they are taken out of these ranges.
        """
        joining: dict[Cursor, list[Cursor]] = {}
        apart = []
        for key in keys:
            parent = self._parent(key)
            done = not (key.held or key.returned or key.waiting) and key.next >= parent.next
            if done and (key.owner, key.leaving, key.limit) == (parent.owner, parent.leaving, parent.limit):
                joining.setdefault(parent, []).append(key)
            else:
                apart.append(key)
        for parent, caught_up in joining.items():
            # After a crash a key may be ahead of its parent. Rows that the key passed are returned to the parent.
            ahead = max(key.next for key in caught_up)
            joins = [key for key in caught_up if key.next == ahead]
            apart += [key for key in caught_up if key.next < ahead]
            pieces = parent.begun(0, parent.next)
            if len(pieces) > REJOIN_PIECES * len(joins) and len(self.cursors.by_key) < self.limits.held_keys // 2:
                # The join records each piece again: wait until more keys can join together.
                apart += joins
                continue
            if parent.next < ahead:
                parent.returned.add(parent.next, ahead, 0)
                parent.next = ahead
                pieces = parent.begun(0, ahead)
            if pieces:
                rows = self._table(journal, [(piece.start, piece.end) for piece in pieces]).rows
                hashes = np.array([key.key for key in joins], np.uint64)
                for start, end in joined(rows.sequences[np.isin(rows.hashes, hashes)]):
                    parent.forget(start, end)
            self.cursors.join(parent, joins)
        return apart

    def _return_rows(self, holding: list[Cursor], clipped: list[tuple[int, int, int]], journal: Journal) -> int:
        """Return the rows of (start, end, tag) ranges, which were not started; how many sequences.

        There may be one range for each row.
        """
        count = 0
        by_tag: dict[int, list[tuple[int, int, int]]] = {}
        for start, end, tag in clipped:
            by_tag.setdefault(tag, []).append((start, end, 1))
        for tag, ranges in by_tag.items():
            meant = Ranges(sorted(ranges))
            for cursor in [each for each in holding if tag in each.held]:
                held = cursor.held[tag].copy()
                for rows, found in self._rows_with_attempts(journal, cursor, meant):
                    attempts = np.where(found >= 0, held.attempts_of(rows.sequences), -1)
                    for start, end, _ in _alike(rows.sequences, attempts).T.tolist():
                        for piece in cursor.held_in(tag, start, end):
                            cursor.let_go(tag, piece.start, piece.end)
                            self._return_piece(cursor, piece, 0, journal, counted=False)
                            count += piece.end - piece.start
                # No ack will cover what lies between the returned rows, so the held ranges need trimming.
                cursor.untrimmed_until = cursor.next
        return count

    def _return_piece(
        self, cursor: Cursor, piece: Range, due: int, journal: Journal, *, counted: bool = True, now: int = 0
    ) -> None:
        flags = 0 if counted else FLAG_UNCOUNTED
        journal.event(Action.NACK, self, cursor.id, *piece, due, flags)
        cursor.given_back(piece.start, piece.end, piece.attempt - (not counted), due)
        if counted and now:
            self.pull_log.note_failure(piece.start, piece.end, now)

    def _trim_all_held(self, consumer: AttachedConsumer, journal: Journal) -> None:
        for cursor in self._holding(consumer.id):
            if cursor.untrimmed_until and (cursor.held_rows is None or not cursor.leaving):
                self._trim_held(journal, cursor)

    def _trim_held(self, journal: Journal, cursor: Cursor) -> None:
        """Shrink each held range to the cursor's first and last row in it; remove ranges without a row.

        Ranges are not joined: an ack does not reach from one range to the next.
        """
        for tag, held in list(cursor.held.items()):
            starts, ends, attempts = held.columns()
            rows = np.concatenate([rows.sequences for rows, _ in self._rows_with_attempts(journal, cursor, held)])
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
