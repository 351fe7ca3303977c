"""The cursors of an ordered group on one partition. Each row belongs to exactly one cursor.

Splits and joins are recorded as events, because later events refer to cursors by number.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from plait.broker.groups.group import Group
from plait.limits import LOGICAL_PARTITIONS
from plait.model.logical_partitions import LpSet, runs_of, single_lp
from plait.storage.cursor import ALL, Cursor
from plait.storage.logs.action_events import Event, Held, Joined, Moved, Returned
from plait.storage.ranges import DueRanges


class CursorSet:
    """Finds the cursor of a row, splits and joins cursors, and replays these changes."""

    def __init__(self, group: Group) -> None:
        self._group = group
        #: All cursors, by number.
        self.all = group.positions = {}
        #: The cursors without a key, by slot; None: the slot is free.
        self._wide: list[Cursor | None] = []
        #: The slot of each logical partition, in 4 bytes; None: all are in slot 0, as in most groups.
        self._slots: array[int] | None = None
        self.by_key: dict[int, Cursor] = {}
        self._next = 1
        self.begin(group.definition.start)

    def begin(self, start: int, number: int = 0) -> int:
        """Replace all cursors by one that continues from ``start``; returns its number."""
        self.all.clear()
        self.by_key.clear()
        first = Cursor(number or self._next, ALL, start)
        self._add(first)
        return first.id

    @property
    def next_number(self) -> int:
        """The number of the next new cursor."""
        return self._next

    def __iter__(self) -> Iterator[Cursor]:
        return iter(self.all.values())

    def of(self, owner: int) -> list[Cursor]:
        """The cursors of an owner, without those of single keys."""
        return [each for each in self.all.values() if each.owner == owner and each.key is None]

    def for_row(self, lp: int, key: int | None) -> Cursor:
        """The cursor that a row belongs to."""
        cursor = self.by_key.get(key) if key is not None and self.by_key else None
        return cursor or self.of_lp(lp)

    def of_lp(self, lp: int) -> Cursor:
        """The cursor of a logical partition's rows, except those of keys with their own cursor."""
        cursor = self._wide[0 if self._slots is None else self._slots[lp]]
        assert cursor is not None
        return cursor

    def parent(self, key: Cursor) -> Cursor:
        """The cursor of a key's logical partition."""
        assert key.key is not None
        return self.of_lp(key.key % LOGICAL_PARTITIONS)

    def is_behind(self, key: Cursor) -> bool:
        """True if a key's cursor has not caught up with the cursor of its logical partition."""
        return bool(key.returned or key.waiting) or key.next < self.parent(key).next

    def holding(self, owner: int) -> list[Cursor]:
        """The cursors with rows that an owner holds."""
        return [each for each in self.all.values() if each.owner == owner and each.held]

    # --- splitting and joining ------------------------------------------------------------------

    def _record(self, event: Event) -> None:
        self._group.journal.event(self._group, event)

    def take_out(self, lps: LpSet) -> list[Cursor]:
        """Cursors of exactly these logical partitions, split off where needed, and the cursors of their keys."""
        cursors = []
        for cursor in self._at(lps):
            inner = cursor.lps & lps
            cursors.append(cursor if np.array_equal(inner, cursor.lps) else self.split(cursor, inner))
        return cursors + [each for each in self.by_key.values() if lps[each.lps].any()]

    def _at(self, lps: LpSet) -> list[Cursor]:
        """The cursors of some logical partitions, each once, without those of single keys."""
        if self._slots is None:
            return [self.of_lp(0)] if lps.any() else []
        slots = np.frombuffer(self._slots, np.uint32)[lps]
        _, firsts = np.unique(slots, return_index=True)
        return [cursor for slot in slots[np.sort(firsts)].tolist() if (cursor := self._wide[slot]) is not None]

    def split(self, cursor: Cursor, lps: LpSet) -> Cursor:
        """Split off a cursor for some of a cursor's logical partitions."""
        part = cursor.split(self._next, lps)
        self._add(part)
        for first, end in runs_of(lps):
            self._record(Moved(cursor.id, first, end, to=part.id))
        return part

    def hold(self, cursor: Cursor, lp: int, key: int) -> Cursor:
        """Split off a cursor for a key."""
        part = cursor.split(self._next, single_lp(lp), key)
        self._add(part)
        self._record(Held(cursor.id, lp, to=part.id, key_hash=key))
        return part

    def join(self, cursor: Cursor, others: list[Cursor]) -> None:
        """Join ``others``, which are at the same position, into ``cursor``."""
        self._join(cursor, others)
        # An ordered group records neither its deliveries nor the ranges that a cursor passed without finding rows of
        # its own, so the join records the full position.
        for other in others:
            self._record(Joined(cursor.id, other.id, cursor.next))
        for piece in [*cursor.returned, *cursor.all_held()]:
            self._record(Returned(piece.attempt, cursor.id, piece.start, piece.end, due=0))
        for due, pieces in cursor.waiting:
            for piece in pieces:
                self._record(Returned(piece.attempt, cursor.id, piece.start, piece.end, due))

    def join_alike(self, cursors: Iterable[Cursor]) -> None:
        """Join the cursors that are at the same position."""
        alike: dict[Any, list[Cursor]] = {}
        for cursor in cursors:
            if (position := cursor.position) is not None:
                alike.setdefault(position, []).append(cursor)
        for first, *others in alike.values():
            if others:
                self.join(first, others)

    def _add(self, part: Cursor) -> None:
        self.all[part.id] = part
        self._next = max(self._next, part.id + 1)
        if part.key is not None:
            self.by_key[part.key] = part
            return
        self._place(part)

    def _place(self, cursor: Cursor) -> None:
        """Assign the cursor's logical partitions to its slot."""
        if cursor.lps.all():
            self._wide, self._slots, cursor.slot = [cursor], None, 0
            return
        if self._slots is None:
            self._slots = array("I", bytes(4 * LOGICAL_PARTITIONS))
        if cursor.slot < 0:
            cursor.slot = self._wide.index(None) if None in self._wide else len(self._wide)
            self._wide[cursor.slot : cursor.slot + 1] = [cursor]
        np.frombuffer(self._slots, np.uint32)[cursor.lps] = cursor.slot

    def _join(self, cursor: Cursor, others: list[Cursor]) -> None:
        cursor.join(others)
        for other in others:
            del self.all[other.id]
            if other.key is not None:
                del self.by_key[other.key]
            else:
                self._wide[other.slot] = None
        if cursor.key is None:
            self._place(cursor)

    # --- replay, checkpoints --------------------------------------------------------------------

    def replay(self, event: Moved | Held | Joined) -> None:
        """Apply an event that a split or a join recorded."""
        cursor = self.all.get(event.cursor)
        if cursor is None:
            return
        if isinstance(event, Moved):
            lps = np.zeros(LOGICAL_PARTITIONS, bool)
            lps[event.start : event.end] = True
            lps &= cursor.lps
            known = self.all.get(event.to)
            part = cursor.split(event.to, lps)
            if known is None:
                self._add(part)
            else:
                # Another event of the same split, for more LPs.
                known.lps = known.lps | part.lps
                known.leave_out(part.without)
                self._add(known)
        elif isinstance(event, Held):
            self._add(cursor.split(event.to, single_lp(event.lp), event.key_hash))
        else:
            other = self.all.get(event.other)
            if other is not None:
                self._join(cursor, [other])
            cursor.next = event.next
            # RETURN events that follow a JOIN restore the cursor's returned and waiting rows. The rows here are
            # outdated, because rows that became due were not recorded.
            cursor.returned.clear()
            cursor.waiting = DueRanges()

    def load(self, cursors: Iterable[Cursor]) -> None:
        """Restore the cursors of a checkpoint."""
        self.all.clear()
        self.by_key.clear()
        for cursor in cursors:
            self._add(cursor)
