"""``ScanBudget``: how much filters may examine in one turn of the broker's loop."""

from __future__ import annotations

from collections.abc import Callable

from plait.limits import FILTER_SCAN_BYTES, FILTER_SCAN_COUNT, FILTER_SCAN_FRAMES, FILTER_SCAN_SECONDS


class ScanBudget:
    """Frames, messages, bytes and time that all filters together may take until ``renew``.

    Ask ``has_room`` before each frame or part of a frame, and call ``spend`` after it. The first question after
    ``renew`` starts the time and is always answered with yes, so every turn examines something.
    """

    __slots__ = ("_count", "_frames", "_monotonic", "_size", "_until", "begun", "on_begin")

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        #: Called when the first frame since ``renew`` is about to be examined.
        self.on_begin: Callable[[], object] = lambda: None
        self._until = 0.0
        self.renew()

    def renew(self) -> None:
        """Begin a new turn."""
        self.begun = False
        self._frames = self._count = self._size = 0

    def has_room(self) -> bool:
        """Whether one more frame, or part of a frame, may be examined in this turn."""
        if not self.begun:
            self.begun = True
            self._until = self._monotonic() + FILTER_SCAN_SECONDS
            self.on_begin()
            return True
        return (
            self._frames < FILTER_SCAN_FRAMES
            and self._count < FILTER_SCAN_COUNT
            and self._size < FILTER_SCAN_BYTES
            and self._monotonic() < self._until
        )

    def spend(self, count: int, size: int) -> None:
        """Record that ``count`` messages of a frame were examined, which take ``size`` bytes of memory."""
        self._frames += 1
        self._count += count
        self._size += size
