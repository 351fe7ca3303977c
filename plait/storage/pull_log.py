"""What a group has been handed, and what came of it: the state that the action log's events add up to.

A shared group's position is one scan sequence, ``next``, plus exceptions: what each consumer holds (its *pull log*),
what was returned and is to be handed out again, and what failed and waits for its next attempt. The same methods run
when an event happens and when it is replayed, so after a crash the state is exactly what the durable events say.
"""

from __future__ import annotations

from collections.abc import Iterable

from plait.storage.ranges import Range, Ranges
from plait.storage.waiting import Due, Waiting


class PullLog:
    """A group's position in one partition."""

    __slots__ = ("held", "next", "returned", "waiting")

    def __init__(self, start: int) -> None:
        #: Everything below was handed out at least once, or skipped.
        self.next = start
        #: Unacked and in nobody's hands: handed out again before anything new.
        self.returned = Ranges()
        #: consumer id → what it holds.
        self.held: dict[int, Ranges] = {}
        #: Unacked, in nobody's hands, and not due yet.
        self.waiting = Waiting()

    # --- events ---------------------------------------------------------------------------------

    def pulled(self, consumer: int, start: int, end: int, attempt: int) -> None:
        """[start, end) went to a consumer for the ``attempt``-th time."""
        fresh = end - max(start, self.next)
        self._pass(start, end)
        again = self.returned.remove(start, end)
        if self.waiting and max(fresh, 0) + _count(again) < end - start:
            # It was due: replay, which has no clock, learns it from here.
            self.waiting.remove(start, end)
        held = self.held.get(consumer)
        if held is None:
            held = self.held[consumer] = Ranges()
        held.add(start, end, attempt)

    def acked(self, consumer: int, start: int, end: int) -> int:
        """[start, end) is done, whoever was to get it next; how many sequences that settled."""
        self._pass(start, end)
        settled = self.returned.remove(start, end)
        held = self.held.get(consumer)
        if held is not None:
            settled += held.remove(start, end)
            if not held:
                del self.held[consumer]
        if self.waiting and _count(settled) < end - start:
            # It came late: the next attempt is called off (R11).
            settled += self.waiting.remove(start, end)
        return _count(settled)

    def nacked(self, consumer: int, start: int, end: int, due: int = 0) -> list[Range]:
        """A consumer gives [start, end) back, to be handed out when ``due`` (0: at once); what it really held."""
        held = self.held.get(consumer)
        if held is None:
            return []
        pieces = held.remove(start, end)
        for piece in pieces:
            if due:
                self.waiting.add(*piece, due)
            else:
                self.returned.add(*piece)
        if not held:
            del self.held[consumer]
        return pieces

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

    def offline(self, consumer: int) -> int:
        """A consumer is gone: everything it held is returned; how many sequences."""
        held = self.held.pop(consumer, None)
        if held is None:
            return 0
        for piece in held:
            self.returned.add(*piece)
        return held.count

    def reset(self, sequence: int) -> None:
        """The group goes on from ``sequence``; what was held or returned is forgotten."""
        self.next = sequence
        self.returned.clear()
        self.held.clear()
        self.waiting.clear()

    def skipped(self, start: int, end: int) -> int:
        """[start, end) can never be handed out: expired or damaged; how many sequences were not done yet."""
        lost = _count(self.returned.remove(start, end)) + _count(self.waiting.remove(start, end))
        if start <= self.next < end:
            lost += end - self.next
            self.next = end
        return lost

    def _pass(self, start: int, end: int) -> None:
        """Move the scan past ``end``; what it jumps over was lost with an event and is handed out again."""
        if end > self.next:
            if start > self.next:
                self.returned.add(self.next, start, 0)
            self.next = end

    # --- what follows from them -----------------------------------------------------------------

    @property
    def floor(self) -> int:
        """Everything below is done."""
        firsts = [held.first for held in self.held.values() if held]
        if self.returned:
            firsts.append(self.returned.first)
        if self.waiting:
            firsts.append(self.waiting.first)
        return min([self.next, *firsts])

    @property
    def held_count(self) -> int:
        return sum(held.count for held in self.held.values())

    def ranges_of(self, consumer: int) -> int:
        """Exceptions to the scan position that one consumer makes: what bounds the group's memory."""
        held = self.held.get(consumer)
        return len(held) if held is not None else 0

    def dump(self, *, durable_holds: bool) -> tuple[int, list[Range], dict[int, list[Range]], list[Due]]:
        """For a checkpoint. A broadcast group logs no pulls: what it holds counts as returned."""
        waiting = list(self.waiting)
        if durable_holds:
            return self.next, list(self.returned), {k: list(v) for k, v in self.held.items()}, waiting
        returned = Ranges(self.returned)
        for held in self.held.values():
            for piece in held:
                returned.add(*piece)
        return self.next, list(returned), {}, waiting

    @classmethod
    def load(
        cls,
        next_sequence: int,
        returned: Iterable[tuple[int, int, int]],
        held: dict[int, list[Range]],
        waiting: list[Due],
    ) -> PullLog:
        """The state of a checkpoint."""
        log = cls(next_sequence)
        log.waiting = Waiting(waiting)
        log.returned = Ranges(returned)
        log.held = {consumer: Ranges(ranges) for consumer, ranges in held.items()}
        return log


def _count(pieces: list[Range]) -> int:
    return sum(piece.end - piece.start for piece in pieces)
