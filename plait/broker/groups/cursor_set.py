"""All strands of an ordered group on one partition: between them they have every row, and no row twice.

Splitting and joining are events, as later ones name strands by number.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from plait.limits import LOGICAL_PARTITIONS
from plait.model.logical_partitions import LpSet, runs_of, single_lp
from plait.storage.cursor import Cursor, CursorState
from plait.storage.due_ranges import DueRanges
from plait.storage.logs.action_log import Action

#: All logical partitions, for the strands that have them.
ALL: LpSet = np.ones(LOGICAL_PARTITIONS, bool)
ALL.setflags(write=False)

#: Records (action, strand, start, end, value, attempt).
Tell = Callable[[Action, int, int, int, int, int], None]


class CursorSet:
    """See the module."""

    def __init__(self, start: int, tell: Tell) -> None:
        self._tell = tell
        self._all: dict[int, Cursor] = {}
        #: The strands of logical partitions, by their slots...
        self._wide: list[Cursor | None] = []
        #: ...and the slot of each logical partition, in 4 bytes; None: all are in slot 0, as in most groups.
        self._slots: array[int] | None = None
        self.by_key: dict[int, Cursor] = {}
        self._next = 1
        self.begin(start)

    def begin(self, start: int, number: int = 0) -> int:
        """Go on from ``start`` with one strand, whatever was before; its number."""
        self._all, self.by_key = {}, {}
        first = Cursor(number or self._next, ALL, start)
        self._add(first)
        return first.id

    def _number(self) -> int:
        number = self._next
        self._next += 1
        return number

    def __iter__(self) -> Iterator[Cursor]:
        return iter(self._all.values())

    def get(self, number: int) -> Cursor | None:
        return self._all.get(number)

    def of(self, owner: int) -> list[Cursor]:
        """Those of an owner's logical partitions, without those of single keys."""
        return [each for each in self._all.values() if each.owner == owner and each.key is None]

    def keys_of(self, owner: int) -> list[Cursor]:
        """Those of single keys in an owner's logical partitions."""
        return [each for each in self.by_key.values() if each.owner == owner] if self.by_key else []

    def for_row(self, lp: int, key: int | None) -> Cursor:
        """The strand that a row belongs to."""
        strand = self.by_key.get(key) if key is not None and self.by_key else None
        return strand or self.of_lp(lp)

    def of_lp(self, lp: int) -> Cursor:
        """The strand of a logical partition's rows, but for keys that have one of their own."""
        strand = self._wide[0 if self._slots is None else self._slots[lp]]
        assert strand is not None
        return strand

    # --- splitting and joining ------------------------------------------------------------------

    def take_out(self, lps: LpSet) -> list[Cursor]:
        """The strands of just these logical partitions, split off where that is needed; with those of their keys."""
        strands = []
        for strand in self._at(lps):
            inner = strand.lps & lps
            strands.append(strand if np.array_equal(inner, strand.lps) else self.split(strand, inner))
        return strands + [each for each in self.by_key.values() if lps[each.lps].any()]

    def _at(self, lps: LpSet) -> list[Cursor]:
        """Those of logical partitions, each once."""
        if self._slots is None:
            return [self.of_lp(0)] if lps.any() else []
        slots = np.frombuffer(self._slots, np.uint32)[lps]
        _, firsts = np.unique(slots, return_index=True)
        return [strand for slot in slots[np.sort(firsts)].tolist() if (strand := self._wide[slot]) is not None]

    def split(self, strand: Cursor, lps: LpSet) -> Cursor:
        """A strand of its own for some of a strand's logical partitions."""
        part = strand.split(self._number(), lps)
        self._add(part)
        for first, end in runs_of(lps):
            self._tell(Action.MOVE, strand.id, first, end, part.id, 0)
        return part

    def hold(self, strand: Cursor, lp: int, key: int) -> Cursor:
        """A strand of its own for a key."""
        part = strand.split(self._number(), single_lp(lp), key)
        self._add(part)
        self._tell(Action.HOLD, strand.id, lp, part.id, _signed(key), 0)
        return part

    def join(self, strand: Cursor, others: list[Cursor]) -> None:
        """``others`` have come as far as ``strand`` and become parts of it."""
        self._join(strand, others)
        # What was handed out was not told, nor where one had no rows: so it is told where all are now.
        for other in others:
            self._tell(Action.JOIN, strand.id, other.id, strand.next, 0, 0)
        for piece in [*strand.returned, *strand.all_held()]:
            self._tell(Action.RETURN, strand.id, piece.start, piece.end, 0, piece.attempt)
        for due, pieces in strand.waiting:
            for piece in pieces:
                self._tell(Action.RETURN, strand.id, piece.start, piece.end, due, piece.attempt)

    def join_alike(self, strands: Iterable[Cursor]) -> None:
        """Make one of those of logical partitions that have come equally far."""
        alike: dict[Any, list[Cursor]] = {}
        for strand in strands:
            if (standing := strand.standing) is not None:
                alike.setdefault(standing, []).append(strand)
        for first, *others in alike.values():
            if others:
                self.join(first, others)

    def _add(self, part: Cursor) -> None:
        self._all[part.id] = part
        self._next = max(self._next, part.id + 1)
        if part.key is not None:
            self.by_key[part.key] = part
            return
        self._place(part)

    def _place(self, strand: Cursor) -> None:
        """Its logical partitions are a strand's now."""
        if strand.lps.all():
            self._wide, self._slots, strand.slot = [strand], None, 0
            return
        if self._slots is None:
            self._slots = array("I", bytes(4 * LOGICAL_PARTITIONS))
        if strand.slot < 0:
            strand.slot = self._wide.index(None) if None in self._wide else len(self._wide)
            self._wide[strand.slot : strand.slot + 1] = [strand]
        np.frombuffer(self._slots, np.uint32)[strand.lps] = strand.slot

    def _join(self, strand: Cursor, others: list[Cursor]) -> None:
        strand.join(others)
        for other in others:
            del self._all[other.id]
            if other.key is not None:
                del self.by_key[other.key]
            else:
                self._wide[other.slot] = None
        if strand.key is None:
            self._place(strand)

    # --- replay, checkpoints --------------------------------------------------------------------

    def replay(self, action: int, number: int, start: int, end: int, value: int) -> None:
        """Apply an event of ``Tell``."""
        strand = self._all.get(number)
        if strand is None:
            return
        if action == Action.MOVE:
            lps = np.zeros(LOGICAL_PARTITIONS, bool)
            lps[start:end] = True
            lps &= strand.lps
            known = self._all.get(value)
            if known is None:
                self._add(strand.split(value, lps))
            else:
                # Another run of the same split.
                part = strand.split(value, lps)
                known.lps = known.lps | part.lps
                known.leave_out(part.without)
                self._add(known)
        elif action == Action.HOLD:
            self._add(strand.split(end, single_lp(start), value % 2**64))
        elif action == Action.JOIN:
            other = self._all.get(start)
            if other is not None:
                self._join(strand, [other])
            strand.next = end
            # Nothing waited in any of them, or they had not been joined: what was due meanwhile was not told.
            strand.returned.clear()
            strand.waiting = DueRanges()

    def dump(self) -> list[CursorState]:
        return [strand.dump() for strand in self._all.values()]

    def load(self, states: list[CursorState]) -> None:
        """The state of a checkpoint."""
        self._all, self.by_key = {}, {}
        for state in states:
            self._add(Cursor.load(state))


def _signed(key: int) -> int:
    """An unsigned number as events have it."""
    return key - 2**64 if key >= 2**63 else key
