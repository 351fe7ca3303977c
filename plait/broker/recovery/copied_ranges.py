"""Where in a log frames stand that nobody will look at again, neighbours as one."""

from __future__ import annotations


class CopiedRanges:
    """Disjoint ranges of offsets that grow; the cost of each that comes does not depend on how many there are.

    The system lets go of memory in large pieces, or not at all: so a frame is named again together with those that it
    came to lie beside.
    """

    __slots__ = ("_ends", "_grown", "_starts")

    def __init__(self) -> None:
        #: The start of each range → its end, and the other way round.
        self._ends: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        #: The starts of those that are new or larger than when they were last taken, oldest first.
        self._grown: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, start: int, end: int) -> None:
        """[start, end) as well: it overlaps with none that is there."""
        start = self._starts.pop(start, start)
        if end in self._ends:
            self._grown.pop(end, None)
            end = self._ends.pop(end)
        self._ends[start] = end
        self._starts[end] = start
        self._grown[start] = None

    def take(self) -> list[tuple[int, int]]:
        """Those that have grown since the last time."""
        grown, self._grown = self._grown, {}
        return [(start, self._ends[start]) for start in grown]

    def clear(self) -> None:
        """From here on nothing has a neighbour."""
        self._ends.clear()
        self._starts.clear()
        self._grown.clear()
