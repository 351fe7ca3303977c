"""What a group has been handed, and what came of it: the state that the action log's events add up to.

A shared group's position is one scan sequence, ``next``, plus exceptions: what each consumer holds (its *pull log*),
what was returned and is to be handed out again, what failed and waits for its next attempt, and what is out of
attempts. The same methods run when an event happens and when it is replayed, so after a crash the state is exactly
what the durable events say.
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
        #: Everything below was handed out at least once, or skipped.
        self.next = start
        #: Unacked and in nobody's hands: handed out again before anything new.
        self.returned = Ranges()
        #: consumer id → what it holds.
        self.held: dict[int, Ranges] = {}
        #: Unacked, in nobody's hands, and not due yet.
        self.waiting = DueRanges()
        #: Out of attempts: handed out no more, until somebody asks for it.
        self.dead = Ranges()
        #: When each range failed first, in seconds since 1970 (in place of an attempt).
        self.failing = Ranges()
        #: What was dead and is handed out again; attempts count from where they stood then.
        self.resent = Ranges()

    # --- events ---------------------------------------------------------------------------------

    def pulled(self, consumer: int, start: int, end: int, attempt: int) -> None:
        """[start, end) went to a consumer for the ``attempt``-th time."""
        fresh = end - max(start, self.next)
        self._pass(start, end)
        again = self.returned.remove(start, end)
        if self.waiting and max(fresh, 0) + count_of(again) < end - start:
            # It was due: replay, which has no clock, learns it from here.
            self.waiting.remove(start, end)
        if self.dead:
            # A reset went back before it: it is alive again.
            self.dead.remove(start, end)
        held = self.held.get(consumer)
        if held is None:
            held = self.held[consumer] = Ranges()
        held.add(start, end, attempt)

    def acked(self, consumer: int, start: int, end: int) -> int:
        """[start, end) is done, whoever was to get it next; how many sequences that settled."""
        settled = self._settle(consumer, start, end)
        if self.dead:
            # It came late: its consumer was taken for lost once too often.
            settled += count_of(self.dead.remove(start, end))
        if self.failing:
            self.failing.remove(start, end)
            self.resent.remove(start, end)
        return settled

    def nacked(self, consumer: int, start: int, end: int, due: int, time: int, *, counted: bool = True) -> list[Range]:
        """A consumer gives [start, end) back at ``time``, to be handed out when ``due`` (0: at once); what it held.

        Not ``counted``: nobody began with it, so that was no attempt.
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
        """[start, end) counted as done when it was handed out, and is given back: its consumer never began with it."""
        # Behind a reset to an earlier place the scan comes by anyway.
        self.returned.add(start, min(end, self.next), attempt)

    def note_failure(self, start: int, end: int, time: int) -> None:
        """Remember since when, unless it is known."""
        known = self.failing.overlap(start, end)
        for first, last, _ in known:
            if start < first:
                self.failing.add(start, first, time // 1_000_000)
            start = last
        self.failing.add(start, end, time // 1_000_000)

    def pulled_heads(self, consumer: int, heads: list[Range]) -> None:
        """``heads``, which are the lowest of ``returned``, went to a consumer once more."""
        self.returned.remove(heads[0].start, heads[-1].end)
        held = self.held.get(consumer)
        if held is None:
            held = self.held[consumer] = Ranges()
        for start, end, attempt in heads:
            held.add(start, end, attempt + 1)

    def return_due(self, now: int) -> bool:
        """What has waited long enough may be handed out; whether there is anything."""
        self.waiting.release(now)
        return self.ready

    @property
    def ready(self) -> bool:
        """There is something to hand out again, which is in ``returned`` then."""
        if not self.returned and self.waiting:
            # Moment by moment, and each as it is: joining many ranges with many others would take long.
            due = self.waiting.pop_released()
            if due is not None:
                self.returned = due
        return bool(self.returned)

    def offline(self, consumer: int, time: int) -> int:
        """A consumer is gone: everything it held is returned; how many sequences."""
        held = self.held.pop(consumer, None)
        if held is None:
            return 0
        for piece in held:
            self.returned.add(*piece)
            self.note_failure(piece.start, piece.end, time)
        return held.count

    def buried(self, consumer: int, start: int, end: int, attempt: int, time: int) -> None:
        """[start, end), which a consumer held, is out of attempts."""
        self._settle(consumer, start, end)
        self.note_failure(start, end, time)
        self.resent.remove(start, end)
        self.dead.add(start, end, attempt)

    def revived(self, start: int, end: int) -> int:
        """What is dead in [start, end) is handed out again, and attempts count anew; how many sequences."""
        pieces = self.dead.remove(start, end)
        for first, last, attempt in pieces:
            # Where a reset went back before it, the scan comes by anyway.
            last = min(last, self.next)
            self.returned.add(first, last, attempt)
            self.resent.add(first, last, attempt)
        return count_of(pieces)

    def purged(self, start: int, end: int) -> int:
        """What is dead in [start, end) is forgotten; how many sequences."""
        pieces = self.dead.remove(start, end)
        for first, last, _ in pieces:
            self.failing.remove(first, last)
        return count_of(pieces)

    def reset(self, sequence: int) -> None:
        """The group goes on from ``sequence``; what was held or returned is forgotten, what is dead stays."""
        self.next = sequence
        self.returned.clear()
        self.held.clear()
        self.waiting.clear()
        self.resent.clear()
        self.failing = Ranges(piece for start, end, _ in self.dead for piece in self.failing.overlap(start, end))

    def skipped(self, start: int, end: int) -> int:
        """[start, end) can never be handed out: expired or damaged; how many sequences were not done yet."""
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
        """[start, end) is in nobody's hands, and nobody is to get it; how many sequences that is new for."""
        self._pass(start, end)
        settled = self.returned.remove(start, end)
        held = self.held.get(consumer)
        if held is not None:
            settled += held.remove(start, end)
            if not held:
                del self.held[consumer]
        if self.waiting and count_of(settled) < end - start:
            # It came late: the next attempt is called off (R11).
            settled += self.waiting.remove(start, end)
        return count_of(settled)

    def _pass(self, start: int, end: int) -> None:
        """Move the scan past ``end``; what it jumps over was lost with an event and is handed out again."""
        if end > self.next:
            if start > self.next:
                if self.dead:
                    # As where it is handed out: a reset went back before it.
                    self.dead.remove(self.next, start)
                self.returned.add(self.next, start, 0)
            self.next = end

    # --- what follows from them -----------------------------------------------------------------

    @property
    def floor(self) -> int:
        """Everything below is done, or dead."""
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
        """What was handed out and is neither done nor dead in [start, end); in no order."""
        pieces = [*self.returned.overlap(start, end), *self.waiting.overlap(start, end)]
        for held in self.held.values():
            pieces += held.overlap(start, end)
        return pieces

    def ranges_of(self, consumer: int) -> int:
        """Exceptions to the scan position that one consumer makes: what bounds the group's memory."""
        held = self.held.get(consumer)
        return len(held) if held is not None else 0

    def dump(self, *, durable_holds: bool) -> PullLogState:
        """For a checkpoint. A broadcast group logs no pulls: what it holds counts as returned."""
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
        """The state of a checkpoint."""
        log = cls(state.next)
        log.waiting = DueRanges(state.waiting)
        log.returned = Ranges(state.returned)
        log.held = {consumer: Ranges(ranges) for consumer, ranges in state.held.items()}
        log.dead, log.failing, log.resent = map(Ranges.unpack, (state.dead, state.failing, state.resent))
        return log


def count_of(pieces: Iterable[Range]) -> int:
    """How many sequences the ranges hold."""
    return sum(piece.end - piece.start for piece in pieces)
