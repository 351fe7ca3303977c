"""Delayed rows that are in the message log and in no bucket yet: when each is due, and where its frame is.

Rows are known by their schedule numbers, which are the sequences of their schedule partition: one after another, so a
row's due time is found by its place in an array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from plait.frame.columns import Column
from plait.frame.gather import PLACE, Int64s, place_of
from plait.frame.view import FrameView
from plait.storage.schedule.bucket import NEVER

#: The first number of a frame, its size, whether it was found whole since it was written, and its place in the log.
FRAME: Final = np.dtype([("base", "<i8"), ("size", "<u4"), ("whole", "?"), ("place", PLACE)])
Frames = npt.NDArray[Any]


class UnbucketedFrame(msgspec.Struct, array_like=True):
    """Rows of a schedule partition that a checkpoint left in the message log."""

    partition: int
    base: int
    count: int
    #: A bit a row: it waits.
    waiting: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[UnbucketedFrame])
#: The checkpoint shard that holds them.
UNFILED_SHARD: Final = "unfiled"


def encode_unfiled(unfiled: Sequence[UnbucketedFrame]) -> bytes:
    return _encoder.encode(unfiled)


def decode_unfiled(data: bytes) -> list[UnbucketedFrame]:
    return _decoder.decode(data)


class Grown:
    """An array that grows at its end and is cut off at its front."""

    __slots__ = ("_array", "_count")

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._array: npt.NDArray[Any] = np.empty(0, dtype)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def values(self) -> npt.NDArray[Any]:
        """What is in it, to be changed in place."""
        return self._array[: self._count]

    def extend(self, values: npt.NDArray[Any] | int, count: int) -> npt.NDArray[Any]:
        """``count`` more values, or the same one that often; the new part."""
        end = self._count + count
        if end > len(self._array):
            grown = np.empty(max(end, 2 * self._count, 16), self._array.dtype)
            grown[: self._count] = self.values
            self._array = grown
        part = self._array[self._count : end]
        part[:] = values
        self._count = end
        return part

    def drop(self, count: int) -> None:
        """The first ``count`` values go."""
        self._array = self.values[count:].copy()
        self._count = len(self._array)


class UnbucketedRows:
    """The rows of one schedule partition from number ``base`` on."""

    __slots__ = ("base", "due", "frames", "next_due", "waiting")

    def __init__(self, base: int) -> None:
        self.base = base
        #: By number; ``NEVER`` for rows that have left, and for numbers that were lost to damage.
        self.due = Grown(np.dtype(np.int64))
        self.frames = Grown(FRAME)
        #: No row that is not in the window is due before this.
        self.next_due = NEVER
        self.waiting = 0

    @property
    def end(self) -> int:
        """The number that the next row gets."""
        return self.base + len(self.due)

    def append(self, frame: FrameView, offset: int, base: int) -> Int64s:
        """A frame is in the message log at ``offset``, numbered from ``base`` on; when its rows are due."""
        if not len(self.due):
            self.base = max(self.base, base)
        elif base > self.end:
            self.due.extend(NEVER, base - self.end)
        due = self.due.extend(frame.values(Column.DELIVER_AT), frame.count)
        record = np.zeros(1, FRAME)
        record["base"], record["size"] = base, frame.size
        record["place"] = np.frombuffer(place_of(frame, offset), PLACE)
        self.frames.extend(record, 1)
        self.waiting += frame.count
        return due

    def due_of(self, number: int) -> int:
        """When a row is due; ``NEVER`` if it has left or is not here."""
        return int(self.due.values[number - self.base]) if self.base <= number < self.end else NEVER

    def settle(self, numbers: npt.NDArray[Any]) -> int:
        """Rows leave; how many of them had not left before."""
        index = numbers.astype(np.int64) - self.base
        index = np.unique(index[(index >= 0) & (index < len(self.due))])
        due = self.due.values
        count = int((due[index] != NEVER).sum())
        due[index] = NEVER
        self.waiting -= count
        return count

    def filed(self, end: int) -> None:
        """Rows before ``end`` are in buckets now."""
        frames = self.frames.values
        self.frames.drop(int(np.searchsorted(frames["base"], end, "left")))
        self.due.drop(end - self.base)
        self.base = end
        self.waiting = int((self.due.values != NEVER).sum())

    def frame_end(self, rows: int) -> int:
        """The number after the last whole frame of the first ``rows`` rows."""
        if rows >= len(self.due):
            return self.end
        bases = self.frames.values["base"]
        at = int(np.searchsorted(bases, self.base + max(rows, 0), "right")) - 1
        return max(int(bases[at]), self.base) if at >= 0 else self.base

    def first(self, end: int) -> tuple[Int64s, Frames]:
        """(due times, frames) of the rows before number ``end``, copied."""
        frames = self.frames.values
        return self.due.values[: end - self.base].copy(), frames[: np.searchsorted(frames["base"], end)].copy()

    def unfiled(self, partition: int, start: int) -> UnbucketedFrame:
        """The rows from number ``start`` on, for a checkpoint."""
        due = self.due.values[start - self.base :]
        return UnbucketedFrame(partition, start, len(due), np.packbits(due != NEVER, bitorder="little").tobytes())

    def offsets_from(self, start: int) -> Int64s:
        """Where in the message log the frames are that begin with number ``start`` or a later one."""
        frames = self.frames.values
        offsets: Int64s = frames["place"]["at"][np.searchsorted(frames["base"], start) :]
        return offsets

    def keep_only(self, unfiled: UnbucketedFrame) -> None:
        """Of the rows that a checkpoint left in the log, those that it says have left do not wait."""
        waiting = np.unpackbits(np.frombuffer(unfiled.waiting, np.uint8), count=unfiled.count, bitorder="little")
        left = unfiled.base + np.flatnonzero(waiting == 0)
        self.settle(left)

    def locate(self, numbers: Int64s) -> tuple[Int64s, Int64s]:
        """(frame, row) of each number."""
        bases = self.frames.values["base"]
        index = np.searchsorted(bases, numbers, "right") - 1
        return index, numbers - bases[index]
