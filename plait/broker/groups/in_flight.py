"""What is in the hands of a group's owners: ranges of strands, and where it matters, rows one by one.

Rows are looked at as arrays, a frame at a time, and ranges are made of them again.
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

#: Pieces of a strand in flight, failed or given back that are recorded again for each key that joins it.
REJOIN_PIECES = 256
#: Ranges that came back from which on a strand is looked at row by row when its owner changes.
SIFTED_MIN = 64


class InFlightRows(RowReader):
    """See the module."""

    __slots__ = ()

    def _holding(self, owner: int) -> list[Cursor]:
        return [each for each in self.strands if each.owner == owner and each.held]

    def _clipped(self, ranges: list[tuple[int, int, int]], tags: Sequence[int]) -> list[tuple[int, int, int]]:
        """(start, end, tag) of what can be meant by (start, end, epoch) ranges."""
        visible = self.partition.visible
        return [
            (*self.partition.clip_to_epoch(start, min(end, visible), epoch), tag)
            for (start, end, epoch), tag in zip(ranges, tags or repeat(0), strict=False)
        ]

    @staticmethod
    def _reached(holding: list[Cursor], tag: int, start: int, end: int) -> list[tuple[Cursor, Range]]:
        """What of [start, end) an owner was handed under a tag, and which of the strands that it holds it is of."""
        return [(strand, piece) for strand in holding for piece in strand.in_hands(tag, start, end)]

    # --- as far as it is wanted ------------------------------------------------------------------

    def _ask(self, consumer: int, wants: list[tuple[int, int, int]]) -> None:
        """A consumer wants (first, end) up to a place."""
        self.asked[consumer] = ZEROS
        if any(until for _, _, until in wants):
            limits = np.zeros(LOGICAL_PARTITIONS, np.int64)
            for first, end, until in wants:
                limits[first:end] = until
            self.asked[consumer] = LpNumbers.of(limits)

    def _limit(self, owner: int) -> None:
        """What is an owner's is handed out as far as it asked for it."""
        asked, mine = self.asked.get(owner, ZEROS), self.strands.of(owner)
        if not asked.any() and not any(strand.limit for strand in mine):
            return
        limits = asked.array()
        changed = np.zeros(LOGICAL_PARTITIONS, bool)
        for strand in mine:
            changed |= strand.lps & (limits != strand.limit)
        for limit in np.unique(limits[changed]).tolist():
            for strand in self.strands.take_out(changed & (limits == limit)):
                strand.limit = limit

    def reopened(self, lps: LpSet, sequence: int) -> None:
        """The partition takes these again from a place on. Who asked before goes by a route that does not know of it:
        it gets nothing behind that place until it asks again.
        """
        if self.definition.affinity:
            return
        # In a partition without rows nothing is before it.
        place = sequence or -1
        for owner, asked in list(self.asked.items()):
            limits = asked.array()
            self.asked[owner] = LpNumbers.of(np.where(lps & ((limits == 0) | (limits > sequence)), place, limits))
            self._limit(owner)

    # --- row by row ------------------------------------------------------------------------------

    def _look_up(self, journal: Journal) -> None:
        """What is leaving is known row by row; of other strands nobody needs to know it."""
        for strand in self.strands:
            if strand.key is None and not strand.leaving:
                strand.hands = None
            elif strand.leaving and strand.held and strand.hands is None:
                strand.knows(self._know(journal, strand))

    def _know(self, journal: Journal, strand: Cursor) -> HeldRows:
        """The rows of a strand in its owner's hands, one by one."""
        known = {}
        for tag, held in strand.held.items():
            placed = [rows.where(attempts >= 0) for rows, attempts in self._placed(journal, strand, held)]
            known[tag] = HeldRowArrays(*map(np.concatenate, zip(*placed, strict=True)))
        return HeldRows(known)

    def _placed(self, journal: Journal, strand: Cursor, ranges: Ranges) -> Iterator[tuple[HeldRowArrays, Sequences]]:
        """A strand's rows in ranges and between them, ascending, and the attempt of the range of each; -1: in none."""
        for start, end in spans_of([(piece.start, piece.end) for piece in ranges]):
            rows = RowTable(list(self._rows(journal, strand, start, end))).rows
            yield rows, ranges.attempts_of(rows.sequences)

    # --- in few ranges ---------------------------------------------------------------------------

    def _sift(self, journal: Journal, strand: Cursor) -> None:
        """What came back to a strand row by row becomes ranges that end where a row of it has not come back."""
        if len(strand.returned) <= SIFTED_MIN:
            return
        spans = spans_of([(piece.start, piece.end) for piece in strand.returned])
        readable = sum(len(each) for start, end in spans for each, _ in self._all_rows(journal, start, end))
        if readable < sum(end - start for start, end in spans):
            # What does not read back is to be told of when its turn comes.
            return
        placed = self._placed(journal, strand, strand.returned)
        strand.returned = Ranges.of(np.concatenate([_alike(rows.sequences, each) for rows, each in placed], axis=1))

    def _rejoin(self, keys: list[Cursor], journal: Journal) -> list[Cursor]:
        """Keys that failed, whose rows are all done and that have caught up, are no strands of their own any more.

        What else is in flight does not matter. The ranges of the strand that they join may reach over their rows, which
        are taken out of it: they are done. The keys that stay apart are returned.
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
            # After a crash a key may have come further: what it passed comes back to the others.
            ahead = max(key.next for key in caught_up)
            those = [key for key in caught_up if key.next == ahead]
            apart += [key for key in caught_up if key.next < ahead]
            pieces = parent.begun(0, parent.next)
            if len(pieces) > REJOIN_PIECES * len(those) and len(self.strands.by_key) < self.limits.held_keys // 2:
                # Each piece is recorded again: that is for more keys at a time.
                apart += those
                continue
            if parent.next < ahead:
                parent.returned.add(parent.next, ahead, 0)
                parent.next = ahead
                pieces = parent.begun(0, ahead)
            if pieces:
                rows = self._table(journal, [(piece.start, piece.end) for piece in pieces]).rows
                hashes = np.array([key.key for key in those], np.uint64)
                for start, end in joined(rows.sequences[np.isin(rows.hashes, hashes)]):
                    parent.forget(start, end)
            self.strands.join(parent, those)
        return apart

    def _given_back(self, holding: list[Cursor], clipped: list[tuple[int, int, int]], journal: Journal) -> int:
        """Nobody began with the rows of (start, end, tag) ranges; how many sequences. There may be a range for each."""
        count = 0
        by_tag: dict[int, list[tuple[int, int, int]]] = {}
        for start, end, tag in clipped:
            by_tag.setdefault(tag, []).append((start, end, 1))
        for tag, those_of_tag in by_tag.items():
            meant = Ranges(sorted(those_of_tag))
            for strand in [each for each in holding if tag in each.held]:
                held = strand.held[tag].copy()
                for rows, those in self._placed(journal, strand, meant):
                    attempts = np.where(those >= 0, held.attempts_of(rows.sequences), -1)
                    for start, end, _ in _alike(rows.sequences, attempts).T.tolist():
                        for piece in strand.in_hands(tag, start, end):
                            strand.let_go(tag, piece.start, piece.end)
                            self._give_back(strand, piece, 0, journal, counted=False)
                            count += piece.end - piece.start
                # Nobody speaks any more of what lies there between its rows.
                strand.loose_until = strand.next
        return count

    def _give_back(
        self, strand: Cursor, piece: Range, due: int, journal: Journal, *, counted: bool = True, now: int = 0
    ) -> None:
        flags = 0 if counted else FLAG_UNCOUNTED
        journal.event(Action.NACK, self, strand.id, *piece, due, flags)
        strand.given_back(piece.start, piece.end, piece.attempt - (not counted), due)
        if counted and now:
            self.pull_log.note_failure(piece.start, piece.end, now)

    def _tighten_all(self, consumer: AttachedConsumer, journal: Journal) -> None:
        for strand in self._holding(consumer.id):
            if strand.loose_until and (strand.hands is None or not strand.leaving):
                self._tighten(journal, strand)

    def _tighten(self, journal: Journal, strand: Cursor) -> None:
        """Leave out what is in hands by name only: what lies before a strand's first row in a range or behind its last.

        Ranges are not joined: what is said of their rows does not reach from one to the next.
        """
        for tag, held in list(strand.held.items()):
            starts, ends, attempts = held.columns()
            rows = np.concatenate([rows.sequences for rows, _ in self._placed(journal, strand, held)])
            low, high = np.searchsorted(rows, (starts, ends))
            some = low < high
            strand.held[tag] = Ranges.of(np.array([rows[low[some]], rows[high[some] - 1] + 1, attempts[some]]))
            if not some.any():
                del strand.held[tag]
        if all(held.first >= strand.loose_until for held in strand.held.values()):
            strand.loose_until = 0


def _alike(sequences: Sequences, attempts: Sequences) -> npt.NDArray[np.int64]:
    """(starts, ends, attempts) of neighbours on one attempt, from the first to the last; -1: left out."""
    edges = np.flatnonzero(np.diff(attempts, prepend=-2, append=-2))
    first, last = edges[:-1], edges[1:] - 1
    columns = np.array([sequences[first], sequences[last] + 1, attempts[first]])
    return columns[:, columns[2] >= 0]
