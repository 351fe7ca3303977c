"""The pull log: the position of a shared group in one partition, as the events of the action log define it.

The position is one sequence, ``next``, plus exceptions: the ranges that each consumer holds, ranges that were returned
and are to be delivered again, ranges that failed and wait for a retry, and dead letters. The same methods apply an
event when it happens and when it is replayed, so after a crash the state is exactly that of the durable events.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from plait.storage.due_ranges import Due, DueRanges
from plait.storage.ranges import Range, Ranges


class PullLogState(msgspec.Struct, array_like=True):
    """A pull log in a checkpoint."""

    next: int
    returned: list[Range]
    held: dict[int, list[Range]]
    waiting: list[Due]
    dead: bytes
    failing: bytes
    resent: bytes


class PullLog:
    """A group's position in one partition."""

    __slots__ = ("dead", "failing", "held", "next", "resent", "returned", "waiting")

    def __init__(self, start: int) -> None:
        #: Every row below was delivered at least once, or skipped.
        self.next = start
        #: Unacked and not held: delivered again before new rows.
        self.returned = Ranges()
        #: Consumer id → the ranges that it holds.
        self.held: dict[int, Ranges] = {}
        #: Unacked, not held, and not due yet.
        self.waiting = DueRanges()
        #: Dead letters: not delivered again unless an operator resends them.
        self.dead = Ranges()
        #: When each range failed first: seconds since 1970, in the place of the attempt.
        self.failing = Ranges()
        #: Dead letters that were resent, with the attempts they had: later attempts count from there.
        self.resent = Ranges()

    # --- events ---------------------------------------------------------------------------------

    def pulled(self, consumer: int, start: int, end: int, attempt: int) -> None:
        """[start, end) was delivered to a consumer for the ``attempt``-th time."""
        new = end - max(start, self.next)
        if start == self.next:
            self.next = end
        else:
            self._pass(start, end)
        again = self.returned.remove(start, end) if self.returned.length else []
        if self.waiting.length and max(new, 0) + count_of(again) < end - start:
            # The range was due. Replay has no clock: the pull event implies it.
            self.waiting.remove(start, end)
        if self.dead.length:
            # A reset moved ``next`` back before it: it is no dead letter any more.
            self.dead.remove(start, end)
        held = self.held.get(consumer)
        if held is None:
            held = self.held[consumer] = Ranges()
        held.add(start, end, attempt)

    def acked(self, consumer: int, start: int, end: int) -> int:
        """[start, end) is done, whether or not the consumer still holds it. Returns the number of sequences settled."""
        settled = self._settle(consumer, start, end)
        if self.dead.length:
            # A late ack: the row ran out of attempts because its consumer was taken for lost.
            settled += count_of(self.dead.remove(start, end))
        if self.failing.length:
            self.failing.remove(start, end)
            self.resent.remove(start, end)
        return settled

    def nacked(self, consumer: int, start: int, end: int, due: int, time: int, *, counted: bool = True) -> list[Range]:
        """A consumer nacks or returns [start, end) at ``time``; it is delivered again when ``due`` (0: at once).

        Returns the parts that the consumer held. ``counted=False``: handling had not begun, so it was no attempt.
        """
        held = self.held.get(consumer)
        if held is None:
            return []
        pieces = held.remove(start, end)
        for begin, stop, attempt in pieces:
            attempt -= not counted
            if due:
                self.waiting.add(begin, stop, attempt, due)
            else:
                self.returned.add(begin, stop, attempt)
            if counted:
                self.note_failure(begin, stop, time)
        if not held:
            del self.held[consumer]
        return pieces

    def untaken(self, start: int, end: int, attempt: int) -> None:
        """[start, end) counted as done on delivery and is returned: its consumer never began to handle it."""
        # After a reset to an earlier sequence, ``next`` will reach the rest anyway.
        self.returned.add(start, min(end, self.next), attempt)

    def note_failure(self, start: int, end: int, time: int) -> None:
        """Record ``time`` as the first failure of [start, end), except where one is recorded."""
        known = self.failing.overlap(start, end)
        for first, last, _ in known:
            if start < first:
                self.failing.add(start, first, time // 1_000_000)
            start = last
        self.failing.add(start, end, time // 1_000_000)

    def pulled_heads(self, consumer: int, heads: list[Range]) -> None:
        """``heads``, the lowest ranges of ``returned``, were delivered to a consumer again."""
        self.returned.remove(heads[0].start, heads[-1].end)
        held = self.held.get(consumer)
        if held is None:
            held = self.held[consumer] = Ranges()
        for start, end, attempt in heads:
            held.add(start, end, attempt + 1)

    def return_due(self, now: int) -> bool:
        """Release the ranges that are due. True if there is anything to deliver again."""
        self.waiting.release(now)
        return self.ready

    @property
    def ready(self) -> bool:
        """True if there is something to deliver again; it is in ``returned`` then."""
        if not self.returned.length and self.waiting.length:
            # One due time at a time, without merging: joining many ranges with many others would take long.
            due = self.waiting.pop_released()
            if due is not None:
                self.returned = due
        return self.returned.length > 0

    def offline(self, consumer: int, time: int) -> int:
        """A consumer is gone: all its ranges are returned. Returns the number of sequences."""
        held = self.held.pop(consumer, None)
        if held is None:
            return 0
        for piece in held:
            self.returned.add(*piece)
            self.note_failure(piece.start, piece.end, time)
        return held.count

    def buried(self, consumer: int, start: int, end: int, attempt: int, time: int) -> None:
        """[start, end), which a consumer held, became dead letters."""
        self._settle(consumer, start, end)
        self.note_failure(start, end, time)
        self.resent.remove(start, end)
        self.dead.add(start, end, attempt)

    def revived(self, start: int, end: int) -> int:
        """The dead letters in [start, end) are resent, and their attempts count from 0 again.

        Returns the number of sequences.
        """
        pieces = self.dead.remove(start, end)
        for first, last, attempt in pieces:
            # After a reset to an earlier sequence, ``next`` will reach it anyway.
            last = min(last, self.next)
            self.returned.add(first, last, attempt)
            self.resent.add(first, last, attempt)
        return count_of(pieces)

    def purged(self, start: int, end: int) -> int:
        """The dead letters in [start, end) are purged. Returns the number of sequences."""
        pieces = self.dead.remove(start, end)
        for first, last, _ in pieces:
            self.failing.remove(first, last)
        return count_of(pieces)

    def reset(self, sequence: int) -> None:
        """The group continues from ``sequence``. Held, returned and waiting ranges are dropped; dead letters stay."""
        self.next = sequence
        self.returned.clear()
        self.held.clear()
        self.waiting.clear()
        self.resent.clear()
        self.failing = Ranges(piece for start, end, _ in self.dead for piece in self.failing.overlap(start, end))

    def skipped(self, start: int, end: int) -> int:
        """[start, end) is expired or damaged and cannot be delivered. Returns the number of sequences not done yet."""
        pieces = [*self.returned.remove(start, end), *self.waiting.remove(start, end)]
        for first, last, _ in pieces if self.failing else ():
            self.failing.remove(first, last)
            self.resent.remove(first, last)
        lost = count_of(pieces)
        if start <= self.next < end:
            lost += end - self.next
            self.next = end
        return lost

    def _settle(self, consumer: int, start: int, end: int) -> int:
        """Remove [start, end) from the consumer's ranges, ``returned`` and ``waiting``.

        Returns the number of sequences removed.
        """
        if end > self.next:
            self._pass(start, end)
        settled = self.returned.remove(start, end) if self.returned.length else []
        held = self.held.get(consumer)
        if held is not None:
            settled += held.remove(start, end)
            if not held.length:
                del self.held[consumer]
        if self.waiting.length and count_of(settled) < end - start:
            # A late ack or nack cancels the retry that waits (R11).
            settled += self.waiting.remove(start, end)
        return count_of(settled)

    def _pass(self, start: int, end: int) -> None:
        """Move ``next`` past ``end``. Rows that it jumps over lost their pull event in a crash: they are returned."""
        if end > self.next:
            if start > self.next:
                if self.dead:
                    # As in ``pulled``: a reset moved ``next`` back before it.
                    self.dead.remove(self.next, start)
                self.returned.add(self.next, start, 0)
            self.next = end

    # --- derived values -------------------------------------------------------------------------

    @property
    def floor(self) -> int:
        """Every row below this sequence is done or dead."""
        firsts = [held.first for held in self.held.values() if held]
        if self.returned:
            firsts.append(self.returned.first)
        if self.waiting:
            firsts.append(self.waiting.first)
        return min([self.next, *firsts])

    @property
    def held_count(self) -> int:
        return sum(held.count for held in self.held.values())

    def begun(self, start: int, end: int) -> list[Range]:
        """The parts of [start, end) that were delivered and are neither done nor dead, in no order."""
        pieces = [*self.returned.overlap(start, end), *self.waiting.overlap(start, end)]
        for held in self.held.values():
            pieces += held.overlap(start, end)
        return pieces

    def ranges_of(self, consumer: int) -> int:
        """The number of ranges that one consumer holds, which bounds the group's memory."""
        held = self.held.get(consumer)
        return len(held) if held is not None else 0

    def dump(self, *, durable_holds: bool) -> PullLogState:
        """The state for a checkpoint. A broadcast group logs no pulls: its held ranges count as returned."""
        returned, held = self.returned, self.held
        if not durable_holds:
            returned, held = Ranges(returned), {}
            for ranges in self.held.values():
                for piece in ranges:
                    returned.add(*piece)
        return PullLogState(
            self.next,
            list(returned),
            {consumer: list(ranges) for consumer, ranges in held.items()},
            list(self.waiting),
            self.dead.pack(),
            self.failing.pack(),
            self.resent.pack(),
        )

    @classmethod
    def load(cls, state: PullLogState) -> PullLog:
        """Restore a pull log from a checkpoint."""
        log = cls(state.next)
        log.waiting = DueRanges(state.waiting)
        log.returned = Ranges(state.returned)
        log.held = {consumer: Ranges(ranges) for consumer, ranges in state.held.items()}
        log.dead, log.failing, log.resent = map(Ranges.unpack, (state.dead, state.failing, state.resent))
        return log


def count_of(pieces: Iterable[Range]) -> int:
    """The number of sequences in the ranges."""
    count = 0
    for start, end, _ in pieces:
        count += end - start
    return count
