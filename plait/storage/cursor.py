"""Strands: how far an ordered group has come with some logical partitions, or with one key.

A group's position in a partition is that of its strands, which hold every row between them: most often one strand a
consumer, with the logical partitions that it owns; and one for each key that failed and holds its place, so that it
costs nothing but itself. A strand's ranges are of *its* rows: [100, 200) are those of its rows that lie there, whatever
else does. So it is split without looking at a row: both halves keep the ranges.

What is handed out is not recorded; a strand that is replayed has been told what was settled, and takes everything else
for not handed out.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from plait.model.logical_partitions import Hashes, Lps, LpSet, lp_set, runs_of
from plait.storage.due_ranges import Due, DueRanges
from plait.storage.held_rows import HeldRows
from plait.storage.ranges import Range, Ranges

#: Shared by strands without keys apart: an empty set takes 216 bytes, and there are many strands.
NO_KEYS: frozenset[int] = frozenset()

#: Ranges that are compared to find strands that have come equally far; with more it can wait.
COMPARED_MAX = 256


class CursorState(msgspec.Struct, array_like=True):
    """A strand in a checkpoint."""

    id: int
    lps: list[tuple[int, int]]
    #: The hash of the one key that it is of; None: of all but ``without``.
    key: int | None
    without: list[int]
    next: int
    returned: list[Range]
    waiting: list[Due]
    parked: bool
    letter: int = -1


class Cursor:
    """See the module."""

    __slots__ = (
        "hands",
        "held",
        "id",
        "key",
        "leaving",
        "letter",
        "limit",
        "loose_until",
        "lps",
        "next",
        "owner",
        "parked",
        "returned",
        "slot",
        "waiting",
        "without",
    )

    def __init__(self, number: int, lps: LpSet, start: int, key: int | None = None) -> None:
        self.id = number
        #: Its logical partitions; that of its key, if it is of one.
        self.lps = lps
        self.key = key
        #: Where its group has it among those of logical partitions; -1: nowhere yet.
        self.slot = -1
        #: Keys that have strands of their own; a set as soon as there are any.
        self.without: set[int] | frozenset[int] = NO_KEYS
        #: Everything below was handed out at least once, or skipped.
        self.next = start
        #: In its owner's hands, by the tag under which it was handed out: rows that were handed out together.
        self.held: dict[int, Ranges] = {}
        #: The rows of that, one by one; None: nobody had to know.
        self.hands: HeldRows | None = None
        #: Below, parts of these ranges without a row of it are spoken of by nobody: they are to be left out (0: none).
        self.loose_until = 0
        #: Unacked and in nobody's hands: handed out again before anything new.
        self.returned = Ranges()
        #: The same, and not due yet.
        self.waiting = DueRanges()
        #: The consumer that has the lock; 0: nobody has.
        self.owner = 0
        #: Somebody else is to have it: its owner gets nothing new.
        self.leaving = False
        #: Its owner wants what is below only; 0: all.
        self.limit = 0
        #: A dead letter holds the key's place until somebody decides what becomes of it.
        self.parked = False
        #: The sequence of that letter; -1: it is where the key's rows were before.
        self.letter = -1

    def chooses(self, lps: Lps, hashes: Hashes | None) -> npt.NDArray[np.bool_]:
        """Which rows are its own."""
        if self.key is not None:
            return np.zeros(len(lps), bool) if hashes is None else hashes == np.uint64(self.key)
        chosen = self.lps[lps]
        if self.without and hashes is not None:
            chosen &= ~np.isin(hashes, np.fromiter(self.without, np.uint64, len(self.without)))
        return chosen

    # --- events ---------------------------------------------------------------------------------

    def pulled(self, start: int, end: int, attempt: int, tag: int) -> None:
        """[start, end) went to its owner for the ``attempt``-th time."""
        self._take(start, end)
        held = self.held.get(tag)
        if held is None:
            held = self.held[tag] = Ranges()
        held.add(start, end, attempt)
        self.hands = None

    def until(self, end: int) -> int:
        """What is wanted of [.., end) ends here."""
        return min(end, self.limit) if self.limit else end

    def in_hands(self, tag: int, start: int, end: int) -> list[Range]:
        """What its owner was handed under a tag, in [start, end)."""
        held = self.held.get(tag)
        return [] if held is None else held.overlap(start, end)

    def let_go(self, tag: int, start: int, end: int) -> None:
        """None of that is in its owner's hands any more."""
        held = self.held.get(tag)
        if held is not None:
            for piece in held.remove(start, end):
                if self.hands is not None:
                    self.hands.let_go(tag, piece.start, piece.end)
            if not held:
                del self.held[tag]
            self._tidy()

    def _tidy(self) -> None:
        """What is left of ranges in which no row of it is in anybody's hands is nothing."""
        if self.hands is not None and not self.hands.counts.any():
            self.drop()

    def knows(self, hands: HeldRows) -> None:
        """The rows in its owner's hands were looked up."""
        self.hands = hands
        self._tidy()

    def drop(self) -> None:
        """Nothing is in its owner's hands."""
        self.held, self.hands, self.loose_until = {}, None, 0

    @property
    def busy(self) -> LpSet:
        """Its logical partitions that have rows in its owner's hands; without ``hands`` all may."""
        if not self.held:
            return np.zeros(len(self.lps), bool)
        return self.lps if self.hands is None else self.hands.counts > 0

    def settled(self, start: int, end: int) -> None:
        """[start, end) is done, or dead."""
        self._take(start, end)

    def forget(self, start: int, end: int) -> None:
        """[start, end) is done, and was another strand's: it is in none of the ranges any more."""
        for tag in list(self.held):
            self.let_go(tag, start, end)
        self.returned.remove(start, end)
        self.waiting.remove(start, end)

    def given_back(self, start: int, end: int, attempt: int, due: int = 0) -> None:
        """[start, end) failed, or nobody began with it: it is handed out again when ``due`` (0: at once)."""
        self._take(start, end)
        if due:
            self.waiting.add(start, end, attempt, due)
        else:
            self.returned.add(start, end, attempt)

    def skipped(self, start: int, end: int) -> int:
        """[start, end) can never be handed out; how many sequences, of whomever, were not done yet."""
        lost = [*self.returned.remove(start, end), *self.waiting.remove(start, end)]
        count = sum(piece.end - piece.start for piece in lost)
        if start <= self.next < end:
            count += end - self.next
            self.next = end
        return count

    def _take(self, start: int, end: int) -> None:
        """[start, end) is nowhere; what the scan jumps over was not told of and is handed out again."""
        if end > self.next:
            if start > self.next:
                self.returned.add(self.next, start, 0)
            self.next = end
        if self.returned:
            self.returned.remove(start, end)
        if self.waiting:
            self.waiting.remove(start, end)

    def return_due(self, now: int) -> bool:
        """What has waited long enough may be handed out; whether there is anything."""
        self.waiting.release(now)
        while (due := self.waiting.pop_released()) is not None:
            for piece in due:
                self.returned.add(*piece)
        return bool(self.returned)

    # --- splitting and joining ------------------------------------------------------------------

    def split(self, number: int, lps: LpSet, key: int | None = None) -> Cursor:
        """A strand of its own for some of its logical partitions, or for one key."""
        part = Cursor(number, lps, self.next, key)
        part.held = {tag: held.copy() for tag, held in self.held.items()}
        if self.returned:
            part.returned = self.returned.copy()
        if self.waiting:
            part.waiting = DueRanges(self.waiting)
        part.owner, part.leaving, part.limit = self.owner, self.leaving, self.limit
        part.loose_until = self.loose_until
        if key is None:
            self.lps = self.lps & ~lps
            if self.without:
                part.without = {each for each in self.without if lps[each % len(lps)]}
                self.without = self.without - part.without
        else:
            self.leave_out({key})
        if self.hands is not None:
            part.hands = self.hands.take(lps, key)
            self._tidy()
            part._tidy()
        return part

    def leave_out(self, keys: AbstractSet[int]) -> None:
        """These keys have strands of their own."""
        if not isinstance(self.without, set):
            self.without = set(keys) or NO_KEYS
        else:
            self.without |= keys

    @property
    def standing(self) -> Any:
        """How far it has come: those with the same may be one strand. None: too much is open to compare."""
        if self.parked or self.waiting or self.hands is not None:
            return None
        if len(self.returned) + sum(map(len, self.held.values())) > COMPARED_MAX:
            return None
        held = tuple((tag, tuple(ranges)) for tag, ranges in sorted(self.held.items()))
        return self.next, self.owner, self.leaving, self.limit, tuple(self.returned), held

    def join(self, others: Sequence[Cursor]) -> None:
        """Take over the rows of others, which have come equally far."""
        for other in others:
            if other.key is None:
                self.lps = self.lps | other.lps
                self.leave_out(other.without)
            elif isinstance(self.without, set):
                self.without.discard(other.key)

    # --- what follows ---------------------------------------------------------------------------

    @property
    def floor(self) -> int:
        """Everything of it that is below is done."""
        firsts = [each.first for each in (*self.held.values(), self.returned) if each]
        if self.waiting:
            firsts.append(self.waiting.first)
        return min([self.next, *firsts])

    def begun(self, start: int, end: int) -> list[Range]:
        """What was handed out and is not done in [start, end); in no order."""
        pieces = [*self.returned.overlap(start, end), *self.waiting.overlap(start, end)]
        for held in self.held.values():
            pieces += held.overlap(start, end)
        return pieces

    def all_held(self) -> list[Range]:
        """What is in its owner's hands."""
        return [piece for held in self.held.values() for piece in held]

    def dump(self) -> CursorState:
        """For a checkpoint: what is held was not recorded, so a start takes it for returned."""
        returned = self.returned.copy()
        for piece in self.all_held():
            returned.add(*piece)
        return CursorState(
            self.id,
            runs_of(self.lps),
            self.key,
            sorted(self.without),
            self.next,
            list(returned),
            list(self.waiting),
            self.parked,
            self.letter,
        )

    @classmethod
    def load(cls, state: CursorState) -> Cursor:
        """The state of a checkpoint."""
        strand = cls(state.id, lp_set(state.lps), state.next, state.key)
        strand.without = set(state.without) or NO_KEYS
        strand.returned = Ranges(state.returned)
        strand.waiting = DueRanges(state.waiting)
        strand.parked, strand.letter = state.parked, state.letter
        return strand
