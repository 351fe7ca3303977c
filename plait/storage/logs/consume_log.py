"""The consume log of one partition: fixed-length records that find a sequence, or a time, in the message log.

Derived: every record repeats the stamp of a frame, so the consume log can be rebuilt from the message log at any time,
and is written only by checkpoints. The records since the last checkpoint are in memory; the rest are in a file, which
is mapped when a reader needs older records.

Promise: finding a record costs a binary search, whatever the backlog. The functions on arrays of records work on whole
arrays, so that a range of millions of frames takes milliseconds.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from plait.errors import FrameError
from plait.frame.view import FrameView
from plait.storage.disk import Disk
from plait.storage.logs.log import Log

#: base sequence, message-log offset, store time, frame size, row count, traits of the frame (``frame_traits.py``).
#: The fields are aligned: NumPy would copy a column of unaligned ones for each search.
RECORD = np.dtype(
    [("base", "<u8"), ("offset", "<u8"), ("time", "<i8"), ("size", "<u4"), ("count", "<u4"), ("traits", "<u8")]
)
RECORD_SIZE = RECORD.itemsize
#: The same fields, for one record.
_PACKED = Struct("<QQqIIQ")
DIRECTORY = "consume"

Records = npt.NDArray[Any]


class Record(NamedTuple):
    """The location of one frame in the message log."""

    base: int
    offset: int
    time: int
    size: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used
    traits: int = 0

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


class ConsumeLog:
    """Records in order of their base sequence. Gaps are sequences that were lost to damage."""

    __slots__ = ("_bases", "_disk", "_file_records", "_maps", "_partition", "_tail", "flushed", "generation")

    def __init__(self, disk: Disk, partition: int, maps: OpenMaps | None = None) -> None:
        self._disk = disk
        self._maps = maps
        self._partition = partition
        #: Counts rewrites of the file. A checkpoint names a generation; files of older generations stay readable.
        self.generation = 0
        self._file_records: Records | None = None
        #: The number of records in the file.
        self.flushed = 0
        #: The records that are not in the file: all fields as in the file, and the base sequences.
        self._tail = bytearray()
        self._bases = array("Q")

    @property
    def path(self) -> str:
        return f"{DIRECTORY}/{self._partition:08d}.{self.generation}"

    def __len__(self) -> int:
        return self.flushed + len(self._bases)

    def append(self, base: int, offset: int, time: int, size: int, count: int, traits: int = 0) -> None:
        """Record that the frame at ``offset`` has ``count`` rows from sequence ``base``."""
        self._bases.append(base)
        self._tail += _PACKED.pack(base, offset, time, size, count, traits)

    # --- finding --------------------------------------------------------------------------------

    def record(self, index: int) -> Record:
        """The record at an index."""
        if index >= self.flushed:
            return Record._make(_PACKED.unpack_from(self._tail, (index - self.flushed) * RECORD_SIZE))
        return Record(*self._stored()[index].item())

    def locate(self, sequence: int) -> tuple[int, Record | None]:
        """The record that contains a sequence, or the first one after it, with its index; (len(), None): none."""
        bases = self._bases
        if bases and sequence >= bases[0]:
            at = bisect_right(bases, sequence) - 1
            record = Record._make(_PACKED.unpack_from(self._tail, at * RECORD_SIZE))
            index = self.flushed + at
        elif self.flushed:
            # A Python int would make numpy convert the whole column first.
            index = max(int(np.searchsorted(self._stored()["base"], np.uint64(sequence), "right")) - 1, 0)
            record = self.record(index)
        elif bases:
            return 0, self.record(0)
        else:
            return 0, None
        if sequence < record.base + record.count:
            return index, record
        return index + 1, self.record(index + 1) if index + 1 < self.flushed + len(bases) else None

    def find(self, sequence: int) -> int:
        """The index of the record that contains a sequence, or of the first one after it; len() if there is none."""
        return self.locate(sequence)[0]

    def find_offset(self, offset: int) -> int:
        """The index of the first record at or after a message-log offset; len() if there is none."""
        if self.flushed:
            at = int(np.searchsorted(self._stored()["offset"], np.uint64(offset), "left"))
            if at < self.flushed:
                return at
        return bisect_left(range(len(self)), offset, self.flushed, key=lambda index: self.record(index).offset)

    def find_time(self, time: int) -> int:
        """The index of the first record stored at or after ``time``; len() if there is none."""
        before = 0
        for records in (self._stored(), self._tail_records(0, len(self._bases))):
            # Store times can step back with the wall clock, so search their running maximum.
            at = int(np.searchsorted(np.maximum.accumulate(records["time"]), np.int64(time), "left"))
            if at < len(records):
                return before + at
            before = self.flushed
        return len(self)

    def slice(self, start: int, stop: int) -> Records:
        if stop <= self.flushed:
            return self._stored()[start:stop]
        tail = self._tail_records(max(start - self.flushed, 0), stop - self.flushed)
        return tail if start >= self.flushed else np.concatenate([self._stored()[start:], tail])

    def _tail_records(self, start: int, stop: int) -> Records:
        # A copy, because a bytearray with a view of it cannot grow; of these records alone, because there may be many.
        return np.frombuffer(self._tail[start * RECORD_SIZE : stop * RECORD_SIZE], RECORD)

    def _stored(self) -> Records:
        if self._file_records is None or len(self._file_records) != self.flushed:
            if not self.flushed:
                return np.empty(0, RECORD)
            file = self._disk.open(self.path)
            try:
                view = file.view()[: self.flushed * RECORD_SIZE]
                self._file_records = np.frombuffer(view, RECORD)
            finally:
                file.close()
            if self._maps is not None:
                self._maps.used(self)
        return self._file_records

    @property
    def mapped(self) -> bool:
        return self._file_records is not None

    def unmap(self) -> None:
        """Drop the map; the next read that needs it makes it again."""
        self._file_records = None

    # --- checkpoint and recovery ----------------------------------------------------------------

    def flush(self) -> tuple[int, bytes]:
        """(records already in the file, bytes of the rest): the arguments of ``write_records`` and ``flushed_to``."""
        return self.flushed, bytes(self._tail)

    def write_records(self, at: int, data: bytes) -> None:
        """Cut the file to ``at`` records and append ``data``, durably. May block; changes no other state."""
        file = self._disk.open(self.path, create=True)
        try:
            if file.size != at * RECORD_SIZE:
                file.truncate(at * RECORD_SIZE)
            if data:
                file.write([data], at * RECORD_SIZE)
            file.sync()
        finally:
            file.close()

    def flushed_to(self, at: int, data: bytes) -> None:
        """Record that ``write_records`` succeeded: the first records of the tail are in the file now."""
        moved = len(data) // RECORD_SIZE
        self.flushed = at + moved
        self._file_records = None
        del self._tail[: len(data)], self._bases[:moved]

    def load(self, generation: int, flushed: int, end_sequence: int) -> bool:
        """Use the first ``flushed`` records of the file that a checkpoint names. False: the log must be rebuilt."""
        self._set(generation, np.empty(0, RECORD))
        if flushed == 0:
            return True
        if not self._disk.exists(self.path):
            return False
        file = self._disk.open(self.path)
        size = file.size
        file.close()
        if size < flushed * RECORD_SIZE:
            return False
        self.flushed = flushed
        if self.record(flushed - 1).end != end_sequence:
            self.flushed = 0
            return False
        return True

    def replace(self, records: Records) -> None:
        """Replace all records; the next checkpoint writes them to a new file."""
        self._set(self.generation + 1, records)

    def _set(self, generation: int, records: Records) -> None:
        self._file_records = None
        self.generation, self.flushed = generation, 0
        self._tail = bytearray(records.tobytes())
        self._bases = array("Q", records["base"].tobytes())


def sizes_in(records: Records, start: int, end: int) -> npt.NDArray[np.float64]:
    """For each frame the bytes of its rows in [start, end), assuming that its rows have equal sizes."""
    bases, counts = records["base"].astype(np.int64), records["count"].astype(np.int64)
    inside = np.minimum(bases + counts, end) - np.maximum(bases, start)
    sizes: npt.NDArray[np.float64] = records["size"] * (np.maximum(inside, 0) / counts)
    return sizes


def cut(records: Records, start: int, end: int, size: int) -> list[int]:
    """The ends of about equal pieces of [start, end), each of about ``size`` bytes at most; the last is ``end``.

    A piece ends at the end of a frame and has at least one frame.
    """
    reached = np.cumsum(sizes_in(records, start, end))
    total = float(reached[-1]) if len(reached) else 0.0
    pieces = max(-(-int(total) // max(size, 1)), 1)
    if pieces == 1:
        return [end]
    targets = np.arange(1, pieces) * (total / pieces)
    # A frame belongs to the piece that contains its middle.
    middles = reached - np.diff(reached, prepend=0.0) / 2
    last = np.clip(np.searchsorted(middles, targets, "right") - 1, 0, None)
    ends = (records["base"] + records["count"]).astype(np.int64)[last]
    return [*np.unique(ends[(ends > start) & (ends < end)]).tolist(), end]


def reach(records: Records, start: int, end: int, size: int) -> int:
    """The end of about ``size`` bytes from ``start``: the end of a frame, after at least one frame, or ``end``."""
    reached = np.cumsum(sizes_in(records, start, end))
    within = int(np.searchsorted(reached, float(size), "right"))
    if within >= len(records):
        return end
    # The frame that exceeds the limit is left out, unless it is the first with rows in the range.
    first = int(np.searchsorted(reached, 0.0, "right"))
    record = records[max(within - 1, first)]
    return min(max(int(record["base"]) + int(record["count"]), start), end)


def first_at(records: Records, times: Sequence[int], end: int) -> npt.NDArray[np.int64]:
    """For each time, the first sequence stored at or after it; ``end`` if there is none."""
    # The wall clock may be set back, so search the running maximum of the times.
    at = np.searchsorted(np.maximum.accumulate(records["time"]), np.array(times, np.int64), "left")
    found: npt.NDArray[np.int64] = np.minimum(np.append(records["base"].astype(np.int64), end)[at], end)
    return found


def end_before(records: Records, times: Sequence[int], start: int) -> npt.NDArray[np.int64]:
    """For each time, the sequence after the last one stored before it; ``start`` if there is none.

    Differs from ``first_at`` if the wall clock was set back.
    """
    later = np.minimum.accumulate(records["time"][::-1])[::-1]
    at = np.searchsorted(later, np.array(times, np.int64), "left")
    ends = (records["base"] + records["count"]).astype(np.int64)
    found: npt.NDArray[np.int64] = np.maximum(np.insert(ends, 0, start)[at], start)
    return found
