"""Ranges of a log that hold only copied frames, which are not read again; adjacent ranges are merged."""

from __future__ import annotations


class CopiedRanges:
    """Disjoint ranges of offsets that grow. Adding one takes constant time.

    The operating system frees only large pieces of memory. So ``take`` returns the whole merged range that a frame
    extends, not only the frame.
    """

    __slots__ = ("_ends", "_grown", "_starts")

    def __init__(self) -> None:
        #: The start of each range → its end, and the end → the start.
        self._ends: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        #: The starts of the ranges that are new or have grown since the last ``take``, oldest first.
        self._grown: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, start: int, end: int) -> None:
        """Add [start, end). It must not overlap with an earlier range."""
        start = self._starts.pop(start, start)
        if end in self._ends:
            self._grown.pop(end, None)
            end = self._ends.pop(end)
        self._ends[start] = end
        self._starts[end] = start
        self._grown[start] = None

    def take(self) -> list[tuple[int, int]]:
        """The ranges that are new or have grown since the last call."""
        grown, self._grown = self._grown, {}
        return [(start, self._ends[start]) for start in grown]

    def clear(self) -> None:
        """Forget all ranges."""
        self._ends.clear()
        self._starts.clear()
        self._grown.clear()
