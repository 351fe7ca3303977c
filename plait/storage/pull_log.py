"""What a group has been handed, and what came of it: the state that the action log's events add up to.

A shared group's position is one scan sequence, ``next``, plus exceptions: what each consumer holds (its *pull log*)
and what was returned and waits for another consumer. The same methods run when an event happens and when it is
replayed, so after a crash the state is exactly what the durable events say.
"""

from __future__ import annotations

from collections.abc import Iterable

from plait.storage.ranges import Range, Ranges


class PullLog:
    """A group's position in one partition."""

    __slots__ = ("held", "next", "returned")

    def __init__(self, start: int) -> None:
        #: Everything below was handed out at least once, or skipped.
        self.next = start
        #: Unacked and in nobody's hands: handed out again before anything new.
        self.returned = Ranges()
        #: consumer id → what it holds.
        self.held: dict[int, Ranges] = {}

    # --- events ---------------------------------------------------------------------------------

    def pulled(self, consumer: int, start: int, end: int, attempt: int) -> None:
        """[start, end) went to a consumer for the ``attempt``-th time."""
        self._pass(start, end)
        self.returned.remove(start, end)
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
        return sum(piece.end - piece.start for piece in settled)

    def nacked(self, consumer: int, start: int, end: int) -> list[Range]:
        """A consumer gives [start, end) back; what it really held of it."""
        held = self.held.get(consumer)
        if held is None:
            return []
        pieces = held.remove(start, end)
        for piece in pieces:
            self.returned.add(*piece)
        if not held:
            del self.held[consumer]
        return pieces

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

    def skipped(self, start: int, end: int) -> int:
        """[start, end) can never be handed out: expired or damaged; how many sequences were not done yet."""
        lost = sum(piece.end - piece.start for piece in self.returned.remove(start, end))
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
        return min([self.next, *firsts])

    @property
    def held_count(self) -> int:
        return sum(held.count for held in self.held.values())

    def ranges_of(self, consumer: int) -> int:
        """Exceptions to the scan position that one consumer makes: what bounds the group's memory."""
        held = self.held.get(consumer)
        return len(held) if held is not None else 0

    def dump(self, *, durable_holds: bool) -> tuple[int, list[Range], dict[int, list[Range]]]:
        """For a checkpoint. A broadcast group logs no pulls: what it holds counts as returned."""
        if durable_holds:
            return self.next, list(self.returned), {k: list(v) for k, v in self.held.items()}
        returned = Ranges(self.returned)
        for held in self.held.values():
            for piece in held:
                returned.add(*piece)
        return self.next, list(returned), {}

    @classmethod
    def load(
        cls, next_sequence: int, returned: Iterable[tuple[int, int, int]], held: dict[int, list[Range]]
    ) -> PullLog:
        """The state of a checkpoint."""
        log = cls(next_sequence)
        log.returned = Ranges(returned)
        log.held = {consumer: Ranges(ranges) for consumer, ranges in held.items()}
        return log
