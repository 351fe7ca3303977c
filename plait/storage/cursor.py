"""Cursors: the position of a group in a partition, or in some of its logical partitions (LPs).

The position is one sequence, ``next``, plus exceptions: the ranges that are held, ranges that were returned and are to
be delivered again, and ranges that wait for a retry. The same methods apply an event when it happens and when it is
replayed.

A shared group has one cursor, and each consumer holds ranges of it. An ordered group has several cursors, which
together cover every row of the partition. Usually there is one cursor per consumer, for the LPs that the consumer owns,
and one for each key that a failed message holds back, so that the failure delays only that key. The ranges of a cursor
contain only *its* rows: [100, 200) means the rows of this cursor with these sequences; the rows between them belong to
other cursors. So splitting a cursor reads no rows, because both parts keep the same ranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from plait.limits import LOGICAL_PARTITIONS
from plait.model.logical_partitions import Hashes, Lps, LpSet, lp_set, runs_of
from plait.storage.held_rows import HeldRows
from plait.storage.ranges import Due, DueRanges, Range, Ranges, count_of

#: All LPs. Cursors that have all of them share this array.
ALL: LpSet = np.ones(LOGICAL_PARTITIONS, bool)
ALL.setflags(write=False)

#: Shared by all cursors without separate keys: an empty set takes 216 bytes, and there are many cursors.
NO_KEYS: frozenset[int] = frozenset()

#: Cursors with more ranges than this are not compared to find equal positions.
COMPARED_MAX = 256


class CursorState(msgspec.Struct, array_like=True):
    """A cursor in a checkpoint."""

    id: int
    #: None: all.
    lps: list[tuple[int, int]] | None
    #: The hash of the key of a one-key cursor; None: the cursor has all keys except ``without``.
    key: int | None
    without: list[int]
    next: int
    returned: list[Range]
    held: dict[int, list[Range]]
    waiting: list[Due]
    parked: bool
    letter: int


class Cursor:
    """The position of a group in a partition, in a set of LPs, or in one key."""

    __slots__ = (
        "held",
        "held_rows",
        "id",
        "key",
        "leaving",
        "letter",
        "limit",
        "lps",
        "next",
        "owner",
        "parked",
        "passed",
        "returned",
        "slot",
        "untrimmed_until",
        "waiting",
        "without",
    )

    def __init__(self, number: int, lps: LpSet, start: int, key: int | None = None) -> None:
        self.id = number
        #: The LPs of the cursor; for a one-key cursor the LP of the key.
        self.lps = lps
        self.key = key
        #: The index of the cursor in its group; -1: none yet.
        self.slot = -1
        #: Hashes of the keys that have their own cursors; a set as soon as there are any.
        self.without: set[int] | frozenset[int] = NO_KEYS
        #: Every row below this sequence was delivered at least once, or skipped.
        self.next = start
        #: Holder → the ranges that it holds: a consumer; in an ordered group the tag of a delivery to the owner.
        self.held: dict[int, Ranges] = {}
        #: The individual rows in ``held``; None: they were not looked up.
        self.held_rows: HeldRows | None = None
        #: Below this sequence, ``held`` may have parts without a row of the cursor, which no ack removes. 0: none.
        self.untrimmed_until = 0
        #: Rows that are neither acked nor held. They are delivered again before new rows.
        self.returned = Ranges()
        #: Of a ``SharedCursor``: rows below ``next`` that no consumer has begun. None: they are in ``returned``.
        self.passed: Ranges | None = None
        #: Rows that are neither acked nor held, and wait for the due time of their retry.
        self.waiting = DueRanges()
        #: The consumer that has the locks of the LPs; 0: none.
        self.owner = 0
        #: True if the LPs are to move to another consumer: the owner gets no new rows.
        self.leaving = False
        #: The owner wants only rows below this sequence; 0: all.
        self.limit = 0
        #: True if a dead letter holds back the key until an operator resumes or skips the key.
        self.parked = False
        #: The sequence of that dead letter; -1: the dead letter is in the partition that had the key before.
        self.letter = -1

    def chooses(self, lps: Lps, hashes: Hashes | None) -> npt.NDArray[np.bool_]:
        if self.key is not None:
            return np.zeros(len(lps), bool) if hashes is None else hashes == np.uint64(self.key)
        chosen = self.lps[lps]
        if self.without and hashes is not None:
            chosen &= ~np.isin(hashes, np.fromiter(self.without, np.uint64, len(self.without)))
        return chosen

    # --- events ---------------------------------------------------------------------------------

    def pulled(self, holder: int, start: int, end: int, attempt: int) -> None:
        """[start, end) was delivered for the ``attempt``-th time."""
        if start == self.next:
            self.next = end
        else:
            self.settled(start, end)
        held = self.held.get(holder)
        if held is None:
            held = self.held[holder] = Ranges()
        held.add(start, end, attempt)
        self.held_rows = None

    def until(self, end: int) -> int:
        """``end``, or ``limit`` if the owner wants no rows above it."""
        return min(end, self.limit) if self.limit else end

    def held_in(self, holder: int, start: int, end: int) -> list[Range]:
        held = self.held.get(holder)
        return [] if held is None else held.overlap(start, end)

    def let_go(self, holder: int, start: int, end: int) -> list[Range]:
        """The holder no longer has [start, end). Returns the ranges that it had."""
        held = self.held.get(holder)
        if held is None:
            return []
        pieces = held.remove(start, end)
        if not held.length:
            del self.held[holder]
        if self.held_rows is not None:
            for piece in pieces:
                self.held_rows.let_go(holder, piece.start, piece.end)
            self._tidy()
        return pieces

    def _tidy(self) -> None:
        """Clear ``held`` once it contains no row of this cursor."""
        if self.held_rows is not None and not self.held_rows.counts.any():
            self.drop()

    def set_held_rows(self, held_rows: HeldRows) -> None:
        """Set the individual rows that the owner holds, after looking them up."""
        self.held_rows = held_rows
        self._tidy()

    def drop(self) -> None:
        """The owner holds nothing."""
        self.held, self.held_rows, self.untrimmed_until = {}, None, 0

    @property
    def busy(self) -> LpSet:
        """The LPs with rows that the owner holds; all LPs if the rows were not looked up."""
        if not self.held:
            return np.zeros(len(self.lps), bool)
        return self.lps if self.held_rows is None else self.held_rows.counts > 0

    def settled(self, start: int, end: int, holder: int | None = None) -> None:
        """Remove [start, end), which is done, dead or delivered, from all ranges, and move ``next`` past it.

        Rows that ``next`` jumps over become passed or returned rows. A late ack cancels a waiting retry (R11).
        """
        new = max(end - max(start, self.next), 0)
        if new:
            if start > self.next:
                (self.returned if self.passed is None else self.passed).add(self.next, start, 0)
            self.next = end
        if self.passed is not None and self.passed.length and new < end - start:
            self.passed.remove(start, end)
        pieces = self.returned.remove(start, end) if self.returned.length else []
        held = self.held.get(holder) if holder is not None else None
        if held is not None:
            pieces += held.remove(start, end)
            if not held.length:
                del self.held[holder]  # type: ignore[arg-type]
        if self.waiting.length and new + count_of(pieces) < end - start:
            self.waiting.remove(start, end)

    def forget(self, start: int, end: int) -> None:
        """Remove [start, end) from all ranges: its rows belong to another cursor and are done."""
        for holder in list(self.held):
            self.let_go(holder, start, end)
        self.returned.remove(start, end)
        self.waiting.remove(start, end)

    def given_back(self, start: int, end: int, attempt: int, due: int = 0) -> None:
        """[start, end) failed or was returned: it is delivered again when ``due`` (0: at once)."""
        self.settled(start, end)
        if due:
            self.waiting.add(start, end, attempt, due)
        else:
            (self.returned if attempt or self.passed is None else self.passed).add(start, end, attempt)

    def skipped(self, start: int, end: int) -> tuple[list[Range], int]:
        """Skip [start, end). Returns the ranges that were returned or waiting, and how many sequences were not done."""
        lost = [*self.returned.remove(start, end), *self.waiting.remove(start, end)]
        count = count_of(lost)
        if start <= self.next < end:
            count += end - self.next
            self.next = end
        return lost, count

    @property
    def ready(self) -> bool:
        """True if there are rows to deliver again. They are in ``returned`` then."""
        if not self.returned.length and self.waiting.length:
            # One due time at a time, because merging the ranges of many due times would take long.
            self.returned = self.waiting.pop_released() or self.returned
        return self.returned.length > 0

    def return_due(self, now: int) -> bool:
        """Move all rows that are due to ``returned``. True if there is anything to deliver again."""
        self.waiting.release(now)
        while (due := self.waiting.pop_released()) is not None:
            for piece in due:
                self.returned.add(*piece)
        return bool(self.returned)

    def reset(self, sequence: int) -> None:
        """Continue from ``sequence``: held, returned and waiting ranges are dropped."""
        self.next = sequence
        self.held.clear()
        self.returned.clear()
        self.waiting.clear()

    def rewound(self, sequence: int) -> None:
        """Deliver every row from ``sequence`` on again. Rows below it that are not done stay so; none is held."""
        self.returned = self._with_held()
        self.drop()
        for ranges in (self.returned, self.waiting):
            ranges.remove(sequence, self.next)
        self.next = min(self.next, sequence)

    # --- splitting and joining ------------------------------------------------------------------

    def split(self, number: int, lps: LpSet, key: int | None = None) -> Cursor:
        """Split off a cursor for some of the LPs, or for one key."""
        part = Cursor(number, lps, self.next, key)
        part.held = {tag: held.copy() for tag, held in self.held.items()}
        if self.returned:
            part.returned = self.returned.copy()
        if self.waiting:
            part.waiting = DueRanges(self.waiting)
        part.owner, part.leaving, part.limit = self.owner, self.leaving, self.limit
        part.untrimmed_until = self.untrimmed_until
        if key is None:
            self.lps = self.lps & ~lps
            if self.without:
                part.without = {each for each in self.without if lps[each % len(lps)]}
                self.without = self.without - part.without
        else:
            self.leave_out({key})
        if self.held_rows is not None:
            part.held_rows = self.held_rows.take(lps, key)
            self._tidy()
            part._tidy()
        return part

    def leave_out(self, keys: AbstractSet[int]) -> None:
        """These keys have their own cursors from now on."""
        if not isinstance(self.without, set):
            self.without = set(keys) or NO_KEYS
        else:
            self.without |= keys

    @property
    def position(self) -> Any:
        """The position as a value: cursors with equal positions can be joined. None: too many ranges to compare."""
        if self.parked or self.waiting or self.held_rows is not None:
            return None
        if len(self.returned) + sum(map(len, self.held.values())) > COMPARED_MAX:
            return None
        held = tuple((tag, tuple(ranges)) for tag, ranges in sorted(self.held.items()))
        return self.next, self.owner, self.leaving, self.limit, tuple(self.returned), held

    def join(self, others: Sequence[Cursor]) -> None:
        """Take over the rows of other cursors, which have the same position."""
        for other in others:
            if other.key is None:
                self.lps = self.lps | other.lps
                self.leave_out(other.without)
            elif isinstance(self.without, set):
                self.without.discard(other.key)

    # --- derived values -------------------------------------------------------------------------

    @property
    def held_count(self) -> int:
        return sum(held.count for held in self.held.values())

    @property
    def floor(self) -> int:
        """Every row of the cursor below this sequence is done."""
        firsts = [each.first for each in (*self.held.values(), self.returned) if each]
        return min([self.next, *firsts, *([self.waiting.first] if self.waiting else [])])

    def begun(self, start: int, end: int) -> list[Range]:
        """The parts of [start, end) that were delivered and are not done, in no order."""
        pieces = [*self.returned.overlap(start, end), *self.waiting.overlap(start, end)]
        for held in self.held.values():
            pieces += held.overlap(start, end)
        return pieces

    def all_held(self) -> list[Range]:
        return [piece for held in self.held.values() for piece in held]

    def _with_held(self) -> Ranges:
        """The returned and the held ranges."""
        return Ranges([*self.returned, *self.all_held()])

    def dump(self, *, durable_holds: bool) -> CursorState:
        """The state for a checkpoint. Where deliveries are not logged, held ranges are stored as returned ranges."""
        returned, held = (self.returned, self.held) if durable_holds else (self._with_held(), {})
        return CursorState(
            self.id,
            None if self.lps is ALL else runs_of(self.lps),
            self.key,
            sorted(self.without),
            self.next,
            list(returned),
            {holder: list(ranges) for holder, ranges in held.items()},
            list(self.waiting),
            self.parked,
            self.letter,
        )

    @classmethod
    def load(cls, state: CursorState) -> Cursor:
        cursor = cls(state.id, ALL if state.lps is None else lp_set(state.lps), state.next, state.key)
        cursor.without = set(state.without) or NO_KEYS
        cursor.returned = Ranges(state.returned)
        cursor.held = {holder: Ranges(ranges) for holder, ranges in state.held.items()}
        cursor.waiting = DueRanges(state.waiting)
        cursor.parked, cursor.letter = state.parked, state.letter
        return cursor
