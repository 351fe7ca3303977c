"""The events of a simulation: the last ones as text, and a digest of all.

Two runs with equal digests had the same events and sent the same bytes.
"""

from __future__ import annotations

from collections import deque
from zlib import crc32

#: The number of events that are kept as text, to be printed after a failure.
TRACE_SIZE = 400


class Trace:
    """The digest of all events, and the text of the last ones."""

    def __init__(self, size: int = TRACE_SIZE) -> None:
        self._events: deque[tuple[float, str, str]] = deque(maxlen=size)
        self._digest = 0
        self.count = 0

    @property
    def digest(self) -> str:
        """The digest of every event so far."""
        return f"{self.count}-{self._digest:08x}"

    def add(self, time: float, process: str, text: str) -> None:
        """Add an event that is printed after a failure."""
        self._events.append((time, process, text))
        self.mix(f"{time!r} {process} {text}".encode())

    def mix(self, data: bytes) -> None:
        """Add bytes to the digest only."""
        self._digest = crc32(data, self._digest)
        self.count += 1

    def lines(self) -> list[str]:
        """The last events, oldest first."""
        return [f"{time:12.6f}  {process:<12} {text}" for time, process, text in self._events]
