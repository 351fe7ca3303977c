"""Rows that arrived and that nobody has got yet, in the order of their arrival."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from plait.client.consume.ack_collector import Piece
from plait.client.consume.delivered import DeliveredFrame
from plait.client.types import Message, PartitionName

#: Rows that iteration makes into messages at a time, and asks for where nothing is pulled ahead.
ITERATION_COUNT = 100


class BufferedRows(Protocol):
    """Rows that arrived and that nobody has got yet."""

    #: So many.
    count: int

    def append(self, delivered: DeliveredFrame) -> None:
        """A frame came."""

    def available(self) -> int:
        """How many rows can be handed out now."""

    def take(self, count: int) -> list[Piece]:
        """Up to so many rows, which are the user's now."""

    def next(self) -> Message | None:
        """One row as a message, which is the user's now; None: there is none."""

    def take_back(self, partition: PartitionName | None = None) -> list[Piece]:
        """All rows of a partition (None: of all of them), which nobody gets from here any more."""


class RowBuffer:
    """What the pulls of all partitions brought. Any row may be handed out at any time."""

    __slots__ = ("_frames", "_ready", "count")

    def __init__(self) -> None:
        #: Frames with rows that the user has not got yet.
        self._frames: deque[DeliveredFrame] = deque()
        #: Messages of the first frame that iteration has made already, the next one last.
        self._ready: list[Message] = []
        #: Rows in here.
        self.count = 0

    def append(self, delivered: DeliveredFrame) -> None:
        """A frame came."""
        self._frames.append(delivered)
        self.count += delivered.count

    def available(self) -> int:
        """How many rows can be handed out now."""
        return self.count

    def take(self, count: int) -> list[Piece]:
        """Up to so many rows, which are the user's now."""
        pieces: list[Piece] = []
        self._ready = []
        while count > 0 and self._frames:
            delivered = self._frames[0]
            start = delivered.taken
            stop = min(delivered.count, start + count)
            delivered.taken = stop
            pieces.append((delivered, start, stop))
            count -= stop - start
            self.count -= stop - start
            if stop == delivered.count:
                self._frames.popleft()
        return pieces

    def next(self) -> Message | None:
        """One row as a message, which is the user's now; None: there is none."""
        if not self._frames:
            return None
        delivered = self._frames[0]
        if not self._ready:
            self._ready = delivered.messages(delivered.taken, min(delivered.count, delivered.taken + ITERATION_COUNT))
            self._ready.reverse()
        message = self._ready.pop()
        delivered.taken += 1
        self.count -= 1
        if delivered.taken == delivered.count:
            self._frames.popleft()
        return message

    def take_back(self, partition: PartitionName | None = None) -> list[Piece]:
        """All rows of a partition (None: of all of them), which nobody gets from here any more."""
        chosen = [d for d in self._frames if partition is None or d.partition == partition]
        pieces = [(d, d.taken, d.count) for d in chosen]
        for delivered in chosen:
            self.count -= delivered.count - delivered.taken
            delivered.taken = delivered.count
        if partition is None:
            self._frames.clear()
        else:
            self._frames = deque(d for d in self._frames if d.partition != partition)
        self._ready = []
        return pieces
