"""Unbucketed rows: delayed rows in the message log that are not yet in a bucket, with due times and frame locations.

A row is identified by its schedule number, which is its sequence in the schedule partition. The numbers are
consecutive, so they index an array of due times.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from plait.frame.columns import Column
from plait.frame.places import PLACE, Int64s, place_of
from plait.frame.view import FrameView
from plait.storage.schedule.bucket import NEVER

#: The first schedule number of a frame, the size of the frame, whether the frame was verified since it was written, and
#: its place in the log.
FRAME: Final = np.dtype([("base", "<i8"), ("size", "<u4"), ("whole", "?"), ("place", PLACE)])
Frames = npt.NDArray[Any]


class UnbucketedFrame(msgspec.Struct, array_like=True):
    """Rows of a schedule partition that a checkpoint left in the message log."""

    partition: int
    base: int
    count: int
    #: A bit for each row: set if the row still waits.
    waiting: bytes


#: The checkpoint shard of the unbucketed rows. The name is part of the checkpoint format.
UNBUCKETED_SHARD: Final = "unbucketed"


class UnbucketedCopy(NamedTuple):
    """Unbucketed rows of one schedule partition from number ``base`` on, copied when the checkpoint began."""

    partition: int
    base: int
    due: Int64s
    frames: Frames

    @property
    def end(self) -> int:
        return self.base + len(self.due)


class Grown:
    """An array that grows at the end and is cut at the front."""

    __slots__ = ("_array", "_count")

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._array: npt.NDArray[Any] = np.empty(0, dtype)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def values(self) -> npt.NDArray[Any]:
        """The values; they may be changed in place."""
        return self._array[: self._count]

    def extend(self, values: npt.NDArray[Any] | int, count: int) -> npt.NDArray[Any]:
        """Append ``count`` values, or one value ``count`` times. Returns the new part."""
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
        self._array = self.values[count:].copy()
        self._count = len(self._array)


class UnbucketedRows:
    """The unbucketed rows of one schedule partition, from number ``base`` on."""

    __slots__ = ("base", "due", "frames", "next_due", "waiting")

    def __init__(self, base: int) -> None:
        self.base = base
        #: The due time of each number; ``NEVER`` for rows that have left, and for numbers lost to damage.
        self.due = Grown(np.dtype(np.int64))
        self.frames = Grown(FRAME)
        #: No row outside the due window is due before this.
        self.next_due = NEVER
        self.waiting = 0

    @property
    def end(self) -> int:
        return self.base + len(self.due)

    def append(self, frame: FrameView, offset: int, base: int) -> Int64s:
        """Add a frame of the message log at ``offset``, numbered from ``base``. Returns the due times of its rows."""
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
        """The due time of a row; ``NEVER`` if it has left or is not here."""
        return int(self.due.values[number - self.base]) if self.base <= number < self.end else NEVER

    def settle(self, numbers: npt.NDArray[Any]) -> int:
        """Record that rows leave. Returns how many of them had not left before."""
        index = numbers.astype(np.int64) - self.base
        index = np.unique(index[(index >= 0) & (index < len(self.due))])
        due = self.due.values
        count = int((due[index] != NEVER).sum())
        due[index] = NEVER
        self.waiting -= count
        return count

    def bucketed(self, end: int) -> None:
        """Drop the rows before ``end``, which are in buckets now."""
        frames = self.frames.values
        self.frames.drop(int(np.searchsorted(frames["base"], end, "left")))
        self.due.drop(end - self.base)
        self.base = end
        self.waiting = int((self.due.values != NEVER).sum())

    def split(self, partition: int, rows: int) -> tuple[UnbucketedCopy, UnbucketedFrame | None, int]:
        """A copy of the whole frames in the first ``rows`` rows, for a checkpoint that moves them to buckets.

        Also returns the state of the rest (None: there is none), and the message-log offset of its first frame.
        """
        frames, due = self.frames.values, self.due.values
        at = len(frames)
        if rows < len(due):
            at = max(int(np.searchsorted(frames["base"], self.base + max(rows, 0), "right")) - 1, 0)
        if at == len(frames):
            return UnbucketedCopy(partition, self.base, due.copy(), frames.copy()), None, 0
        end = max(int(frames["base"][at]), self.base)
        copy = UnbucketedCopy(partition, self.base, due[: end - self.base].copy(), frames[:at].copy())
        rest = due[end - self.base :]
        waiting = np.packbits(rest != NEVER, bitorder="little").tobytes()
        return copy, UnbucketedFrame(partition, end, len(rest), waiting), int(frames["place"]["at"][at])

    def keep_only(self, saved: UnbucketedFrame) -> None:
        """Restore the state from a checkpoint: remove the rows that had left before it."""
        waiting = np.unpackbits(np.frombuffer(saved.waiting, np.uint8), count=saved.count, bitorder="little")
        left = saved.base + np.flatnonzero(waiting == 0)
        self.settle(left)

    def locate(self, numbers: Int64s) -> tuple[Int64s, Int64s]:
        bases = self.frames.values["base"]
        index = np.searchsorted(bases, numbers, "right") - 1
        return index, numbers - bases[index]
