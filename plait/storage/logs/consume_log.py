"""The consume log of one partition: fixed-length records that find a sequence, or a time, in the message log.

Derived: every record repeats the stamp of a frame, so the consume log can be rebuilt from the message log at any time,
and is written only by checkpoints. The records since the last checkpoint are in memory; the rest are in a file, which
is mapped when a reader needs older records.

Promise: finding a record costs a binary search, whatever the backlog.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from plait.errors import FrameError
from plait.frame.view import FrameView
from plait.storage.disk import Disk
from plait.storage.logs.log import Log

#: base sequence, message-log offset, store time, frame size, row count.
RECORD = np.dtype([("base", "<u8"), ("offset", "<u8"), ("time", "<i8"), ("size", "<u4"), ("count", "<u4")])
DIRECTORY = "consume"

Records = npt.NDArray[Any]


class Record(NamedTuple):
    """The location of one frame in the message log."""

    base: int
    offset: int
    time: int
    size: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used

    @property
    def end(self) -> int:
        """The sequence after its last row."""
        return self.base + self.count


def stored_frame(log: Log, partition: int, record: Record, *, verify: bool = True) -> FrameView:
    """The frame of a record; ``FrameError`` or ``DamageError`` if it is damaged or the log has another one there."""
    frame = FrameView(log.view(record.offset, record.size))
    if verify:
        frame.verify()
    if (frame.partition, frame.base, frame.count) != (partition, record.base, record.count):
        raise FrameError("the log has another frame at this offset")
    return frame


def partition_of(path: str) -> int | None:
    """The id of the partition that a consume log file belongs to; None: the path is not a consume log file."""
    directory, _, name = path.rpartition("/")
    number, _, generation = name.partition(".")
    return int(number) if directory == DIRECTORY and number.isdecimal() and generation.isdecimal() else None


class OpenMaps:
    """The consume logs whose file is mapped. If there are too many, the least recently used one is unmapped."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._logs: OrderedDict[ConsumeLog, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._logs)

    def used(self, log: ConsumeLog) -> None:
        """Record that ``log`` was mapped or read."""
        self._logs[log] = None
        self._logs.move_to_end(log)
        if len(self._logs) > self._limit:
            oldest, _ = self._logs.popitem(last=False)
            oldest.unmap()

    def closed(self, log: ConsumeLog) -> None:
        self._logs.pop(log, None)


class ConsumeLog:
    """Records in order of their base sequence. Gaps are sequences that were lost to damage."""

    __slots__ = (
        "_bases",
        "_counts",
        "_disk",
        "_file_records",
        "_maps",
        "_offsets",
        "_partition",
        "_sizes",
        "_times",
        "flushed",
        "generation",
    )

    def __init__(self, disk: Disk, partition: int, maps: OpenMaps | None = None) -> None:
        self._disk = disk
        self._maps = maps
        self._partition = partition
        #: Counts rewrites of the file. A checkpoint names a generation; files of older generations stay readable.
        self.generation = 0
        self._file_records: Records | None = None
        #: The number of records in the file.
        self.flushed = 0
        self._clear_tail()

    def _clear_tail(self) -> None:
        self._bases = array("Q")
        self._offsets = array("Q")
        self._times = array("q")
        self._sizes = array("I")
        self._counts = array("I")

    @property
    def path(self) -> str:
        """The file of this generation."""
        return f"{DIRECTORY}/{self._partition:08d}.{self.generation}"

    def __len__(self) -> int:
        return self.flushed + len(self._bases)

    def append(self, base: int, offset: int, time: int, size: int, count: int) -> None:
        """Record that the frame at ``offset`` has ``count`` rows from sequence ``base``."""
        self._bases.append(base)
        self._offsets.append(offset)
        self._times.append(time)
        self._sizes.append(size)
        self._counts.append(count)

    # --- finding --------------------------------------------------------------------------------

    def record(self, index: int) -> Record:
        """The record at an index."""
        tail = index - self.flushed
        if tail >= 0:
            return Record(
                self._bases[tail],
                self._offsets[tail],
                self._times[tail],
                self._sizes[tail],
                self._counts[tail],
            )
        return Record(*self._stored()[index].item())

    def find(self, sequence: int) -> int:
        """The index of the record that contains a sequence, or of the first one after it; len() if there is none."""
        if self._bases and sequence >= self._bases[0]:
            index = bisect_right(self._bases, sequence) - 1
            if sequence >= self._bases[index] + self._counts[index]:
                index += 1
            return self.flushed + index
        if self.flushed == 0:
            return 0
        stored = self._stored()
        # A Python int would make numpy convert the whole column first.
        index = int(np.searchsorted(stored["base"], np.uint64(sequence), "right")) - 1
        if index < 0:
            return 0
        return index + 1 if sequence >= Record(*stored[index].item()).end else index

    def find_offset(self, offset: int) -> int:
        """The index of the first record at or after a message-log offset; len() if there is none."""
        if self.flushed:
            at = int(np.searchsorted(self._stored()["offset"], np.uint64(offset), "left"))
            if at < self.flushed:
                return at
        return self.flushed + bisect_left(self._offsets, offset)

    def find_time(self, time: int) -> int:
        """The index of the first record stored at or after ``time``; len() if there is none."""
        if self.flushed:
            times = self._stored()["time"]
            # Store times can step back with the wall clock, so search their running maximum.
            at = int(np.searchsorted(np.maximum.accumulate(times), np.int64(time), "left"))
            if at < self.flushed:
                return at
        for tail, stored_at in enumerate(self._times):
            if stored_at >= time:
                return self.flushed + tail
        return len(self)

    def slice(self, start: int, stop: int) -> Records:
        """Records [start, stop) as one array."""
        stop = min(stop, len(self))
        if start >= self.flushed:
            return self._tail_records(start - self.flushed, stop - self.flushed)
        if stop <= self.flushed:
            return self._stored()[start:stop]
        return np.concatenate([self._stored()[start:], self._tail_records(0, stop - self.flushed)])

    def _tail_records(self, start: int, stop: int) -> Records:
        records = np.empty(max(stop - start, 0), RECORD)
        records["base"] = self._bases[start:stop]
        records["offset"] = self._offsets[start:stop]
        records["time"] = self._times[start:stop]
        records["size"] = self._sizes[start:stop]
        records["count"] = self._counts[start:stop]
        return records

    def _stored(self) -> Records:
        if self._file_records is None or len(self._file_records) != self.flushed:
            file = self._disk.open(self.path)
            try:
                view = file.view()[: self.flushed * RECORD.itemsize]
                self._file_records = np.frombuffer(view, RECORD)
            finally:
                file.close()
            if self._maps is not None:
                self._maps.used(self)
        return self._file_records

    @property
    def mapped(self) -> bool:
        """True if the file is mapped."""
        return self._file_records is not None

    def unmap(self) -> None:
        """Drop the map; the next read that needs it makes it again."""
        self._file_records = None
        if self._maps is not None:
            self._maps.closed(self)

    # --- checkpoint and recovery ----------------------------------------------------------------

    def flush(self) -> tuple[int, bytes]:
        """(records already in the file, bytes of the rest): the arguments of ``write_records`` and ``flushed_to``."""
        return self.flushed, self._tail_records(0, len(self._bases)).tobytes()

    def write_records(self, at: int, data: bytes) -> None:
        """Cut the file to ``at`` records and append ``data``, durably. May block; changes no other state."""
        file = self._disk.open(self.path, create=True)
        try:
            if file.size != at * RECORD.itemsize:
                file.truncate(at * RECORD.itemsize)
            if data:
                file.write([data], at * RECORD.itemsize)
            file.sync()
        finally:
            file.close()

    def flushed_to(self, at: int, data: bytes) -> None:
        """Record that ``write_records`` succeeded: the first records of the tail are in the file now."""
        moved = len(data) // RECORD.itemsize
        self.flushed = at + moved
        self._file_records = None
        for column in (self._bases, self._offsets, self._times, self._sizes, self._counts):
            del column[:moved]

    def load(self, generation: int, flushed: int, end_sequence: int) -> bool:
        """Use the first ``flushed`` records of the file that a checkpoint names. False: the log must be rebuilt."""
        self._clear_tail()
        self._file_records = None
        self.generation = generation
        self.flushed = 0
        if flushed == 0:
            return True
        if not self._disk.exists(self.path):
            return False
        file = self._disk.open(self.path)
        size = file.size
        file.close()
        if size < flushed * RECORD.itemsize:
            return False
        self.flushed = flushed
        if self.record(flushed - 1).end != end_sequence:
            self.flushed = 0
            return False
        return True

    def replace(self, records: Records) -> None:
        """Replace all records; the next checkpoint writes them to a new file."""
        self._file_records = None
        self.generation += 1
        self.flushed = 0
        self._clear_tail()
        self._bases.frombytes(records["base"].tobytes())
        self._offsets.frombytes(records["offset"].tobytes())
        self._times.frombytes(records["time"].tobytes())
        self._sizes.frombytes(records["size"].tobytes())
        self._counts.frombytes(records["count"].tobytes())

    def remove(self) -> None:
        """Delete the file."""
        self.unmap()
        self._disk.remove(self.path)
