"""Hands rows from the loop to blocking callers.

The loop adds fetched rows, and callers take them from any thread, so an interrupted call loses no row. The loop takes
rows back when the consumer loses the right to handle them. Each row is taken once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

from plait.client.consume.delivered import DeliveredFrame, Piece
from plait.client.types import Message, PartitionName


class RowHandover:
    """Rows that the loop fetched and no caller has taken. Thread-safe."""

    def __init__(self, may_go: Callable[[DeliveredFrame], bool] | None = None) -> None:
        #: Returns whether rows of a frame may be taken now.
        self._may_go = may_go
        self._pieces: deque[Piece] = deque()
        #: Messages of the first piece in reverse order, decoded together.
        self._ready: list[Message] = []
        self._lock = threading.Lock()
        self._stopped = False

    def __bool__(self) -> bool:
        """True if there are rows."""
        return bool(self._pieces)

    def add(self, pieces: Iterable[Piece]) -> None:
        """Add rows for the next callers."""
        with self._lock:
            self._pieces.extend(pieces)

    def take(self, count: int) -> list[Piece]:
        """Take up to ``count`` rows."""
        taken: list[Piece] = []
        with self._lock:
            self._ready = []
            while count > 0 and self._takeable():
                delivered, start, stop = self._pieces.popleft()
                middle = min(stop, start + count)
                taken.append((delivered, start, middle))
                count -= middle - start
                if middle < stop:
                    self._pieces.appendleft((delivered, middle, stop))
        return taken

    def next(self) -> Message | None:
        """Take one row as a message; None if there is none."""
        with self._lock:
            if not self._takeable():
                return None
            delivered, start, stop = self._pieces.popleft()
            if not self._ready:
                self._ready = delivered.messages(start, stop)
                self._ready.reverse()
            message = self._ready.pop()
            if start + 1 < stop:
                self._pieces.appendleft((delivered, start + 1, stop))
            return message

    def _takeable(self) -> bool:
        """True if there are rows and the first may be taken."""
        if not self._pieces or self._stopped:
            return False
        return self._may_go is None or self._may_go(self._pieces[0][0])

    def stop(self) -> None:
        """Give out no more rows. ``take_back`` still returns them."""
        with self._lock:
            self._stopped = True

    def take_back(self, partition: PartitionName | None = None) -> list[Piece]:
        """Remove and return the rows of a partition (None: of all)."""
        with self._lock:
            pieces = [piece for piece in self._pieces if partition is None or piece[0].partition == partition]
            self._pieces = deque(p for p in self._pieces if partition is not None and p[0].partition != partition)
            self._ready = []
        return pieces
