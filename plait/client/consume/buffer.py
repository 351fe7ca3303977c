"""The rows that were delivered and not yet handed to the user, in the order of their arrival."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from plait.client.consume.ack_collector import Piece
from plait.client.consume.delivered import DeliveredFrame
from plait.client.types import Message, PartitionName

#: Rows that iteration converts to messages at a time, and pulls at a time where nothing is prefetched.
ITERATION_COUNT = 100


class BufferedRows(Protocol):
    """A buffer of rows that are delivered and not yet handed to the user."""

    #: The number of rows in the buffer.
    count: int

    def append(self, delivered: DeliveredFrame) -> None:
        """Add a delivered frame."""

    def available(self) -> int:
        """The number of rows that can be handed out now."""

    def take(self, count: int) -> list[Piece]:
        """Hand up to ``count`` rows to the user."""

    def next(self) -> Message | None:
        """Hand one row to the user, as a message; None: there is none."""

    def take_back(self, partition: PartitionName | None = None) -> list[Piece]:
        """Remove and return all rows of a partition (None: of all partitions)."""


class RowBuffer:
    """The buffer of a shared consumer: rows of all its partitions. Any row may be handed out at any time."""

    __slots__ = ("_frames", "_ready", "count")

    def __init__(self) -> None:
        #: Frames with rows that are not handed out yet.
        self._frames: deque[DeliveredFrame] = deque()
        #: Messages of the first frame that iteration has converted already, in reverse order.
        self._ready: list[Message] = []
        #: The number of rows in the buffer.
        self.count = 0

    def append(self, delivered: DeliveredFrame) -> None:
        """Add a delivered frame."""
        self._frames.append(delivered)
        self.count += delivered.count

    def available(self) -> int:
        """The number of rows that can be handed out now."""
        return self.count

    def take(self, count: int) -> list[Piece]:
        """Hand up to ``count`` rows to the user."""
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
        """Hand one row to the user, as a message; None: there is none."""
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
        """Remove and return all rows of a partition (None: of all partitions)."""
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
