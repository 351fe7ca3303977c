"""Rows between the loop and blocking callers.

The loop puts them here for a caller that has not asked for them yet, so that an interrupted call loses nothing. Threads
take them, and the loop takes back what is not theirs any more: each row goes to one of them alone.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

from plait.client.consume.ack_collector import Piece
from plait.client.consume.delivered import DeliveredFrame
from plait.client.types import Message, PartitionName


class RowHandover:
    """Safe to use from any thread."""

    def __init__(self, may_go: Callable[[DeliveredFrame], bool] | None = None) -> None:
        #: Says whether rows of a frame may be taken now.
        self._may_go = may_go
        self._pieces: deque[Piece] = deque()
        #: Messages of the first piece that were made already, the next one last.
        self._ready: list[Message] = []
        self._lock = threading.Lock()
        self._stopped = False

    def __bool__(self) -> bool:
        """There is something that nobody has taken."""
        return bool(self._pieces)

    def add(self, pieces: Iterable[Piece]) -> None:
        """For whoever asks next."""
        with self._lock:
            self._pieces.extend(pieces)

    def take(self, count: int) -> list[Piece]:
        """Up to so many rows."""
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
        """One row as a message; None where there is none."""
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
        """The first rows may be taken."""
        if not self._pieces or self._stopped:
            return False
        return self._may_go is None or self._may_go(self._pieces[0][0])

    def stop(self) -> None:
        """Nobody gets anything any more; what is here is given back."""
        with self._lock:
            self._stopped = True

    def take_back(self, partition: PartitionName | None = None) -> list[Piece]:
        """What nobody has taken of a partition (None: of any), which nobody can take any more."""
        with self._lock:
            pieces = [piece for piece in self._pieces if partition is None or piece[0].partition == partition]
            self._pieces = deque(p for p in self._pieces if partition is not None and p[0].partition != partition)
            self._ready = []
        return pieces
