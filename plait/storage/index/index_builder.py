"""``IndexBuilder``: indexes a segment step by step, also while the log appends to it.

A step reads a bounded number of frames and runs in a thread. What is indexed so far can be searched at any time:
``indexed`` is replaced as a whole. Entries are collected in memory, and moved to the file of the index when there are
many. ``finish`` completes the file of a segment that gets no more frames.

Frames that are not intact are left out, as readers leave them out.
"""

from __future__ import annotations

from struct import Struct
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from plait.errors import FrameError
from plait.frame.columns import (
    ENTRY_SIZE_BITS,
    ENTRY_SIZE_MASK,
    LAYOUTS,
    RUN_SIZE,
    SELECTION_BIT,
    Codec,
    Column,
    layout_of,
)
from plait.frame.header import CRC_OFFSET, HEADER_SIZE, PREFIX, STAMP_CRC_OFFSET, U32, pad
from plait.frame.run_tables import RUN
from plait.frame.view import FrameView
from plait.limits import FRAME_COUNT_MAX
from plait.storage.disk import Disk
from plait.storage.index.index_file import DRAFT, IndexWriter, SegmentFacts, index_path
from plait.storage.index.index_part import (
    ID_RUN,
    PACKED_RUN,
    POSITION_MAX,
    UNIT,
    Entries,
    IndexPart,
    distinct,
    joined,
    key_entries,
    part_of,
)

#: Entries of a part in the file. A builder has at most about twice as many in memory, 8 bytes each.
PART_ENTRIES: Final = 1 << 22
#: A step reads at most this many frames and bytes: a few milliseconds.
STEP_FRAMES: Final = 500
STEP_BYTES: Final = 4 << 20

#: prefix, flags, size, count, columns, producer, first, previous, checksum, partition.
_FRAME: Final = Struct("<3sBIIIQQQII")
_U64: Final = np.dtype("<u8")
_RUNS_BIT: Final = 1 << Column.RUNS
_HASH_BIT: Final = 1 << Column.KEY_HASH


class Indexed(NamedTuple):
    """What of a segment is indexed: everything before the log offset ``end``."""

    parts: tuple[IndexPart, ...]
    end: int


class IndexBuilder:
    """Indexes one segment. ``step``, ``publish`` and ``finish`` block; one thread at a time may call them."""

    def __init__(self, disk: Disk, base: int, trusted: int) -> None:
        """Frames before the log offset ``trusted`` are verified; this process verified the others on arrival."""
        self._disk = disk
        self.base = base
        self._trusted = trusted
        self._writer: IndexWriter | None = None
        self._written: list[IndexPart] = []
        self._memory: list[IndexPart] = []
        #: Entries of frames that are not in a part yet.
        self._keys: list[Entries] = []
        self._key_count = 0
        self._runs = bytearray()
        #: The position of the next frame, and of the last one that was indexed.
        self._position = 0
        self._last = -1
        self.indexed = Indexed((), base)
        #: Where the file is until it is finished.
        self.draft = index_path(base) + DRAFT

    @property
    def end(self) -> int:
        """The log offset up to which frames were read."""
        return self.base + self._position

    def step(self, view: memoryview, end: int, frames: int = STEP_FRAMES, size: int = STEP_BYTES) -> bool:
        """Read some more frames of the segment, which is written up to log offset ``end``. False: all are read."""
        limit = min(end - self.base, POSITION_MAX)
        stop = min(limit, self._position + size)
        chunks: list[npt.NDArray[np.uint64]] = []
        places: list[int] = []
        while self._position < stop and frames > 0:
            frames -= 1
            position = self._position
            taken = self._frame(view, position, limit, chunks, places)
            if taken:
                self._last = position
                self._position = position + taken
            else:
                self._position = _next_frame(view, position + UNIT, limit)
        if chunks:
            counts = [len(chunk) for chunk in chunks]
            keys = key_entries(np.concatenate(chunks), 0)
            keys |= np.repeat(np.array(places, np.uint64), counts)
            # Rows of one frame with the same key need one entry.
            self._keys.append(distinct(keys))
            self._key_count += len(self._keys[-1])
        if self._key_count + len(self._runs) // PACKED_RUN.size >= PART_ENTRIES:
            self.publish()
        return self._position < limit

    def _frame(self, view: memoryview, position: int, limit: int, chunks: list[Any], places: list[int]) -> int:
        """Collect the entries of the frame at a position. Returns its size; 0: there is no intact frame."""
        size: int
        if position + HEADER_SIZE > limit:
            return 0
        prefix, _, size, count, bits, producer, first, _, _, partition = _FRAME.unpack_from(view, position)
        if prefix != PREFIX or size <= HEADER_SIZE or size & 7 or position + size > limit:
            return 0
        if self.base + position < self._trusted:
            try:
                FrameView(view, position).verify()
            except FrameError:
                return 0
        if not partition or bits & SELECTION_BIT or not 0 < count <= FRAME_COUNT_MAX:
            # The catalog is not a partition of messages.
            return size
        _, directory, start = LAYOUTS.get(bits) or layout_of(bits)
        at = position + start
        place = position // UNIT
        index = 0
        entries: tuple[int, ...] = ()
        if bits & (_RUNS_BIT | _HASH_BIT):
            entries = directory.unpack_from(view, position + HEADER_SIZE)
        if bits & _RUNS_BIT:
            runs_size = entries[0] & ENTRY_SIZE_MASK
            self._add_runs(view[at : at + runs_size], place)
            at += runs_size + pad(runs_size)
            index = 1
        else:
            self._runs += PACKED_RUN.pack(producer, first, count, place)
        if bits & _HASH_BIT:
            rows = 1 if entries[index] >> ENTRY_SIZE_BITS == Codec.CONST else count
            if at + 8 * rows <= position + size:
                chunks.append(np.frombuffer(view, _U64, rows, at))
                places.append(place)
        return size

    def _add_runs(self, data: memoryview, place: int) -> None:
        """Collect the runs of a joined frame. Runs that continue each other become one."""
        table = np.frombuffer(data, RUN, len(data) // RUN_SIZE)
        begins = np.ones(len(table), bool)
        if len(table) > 1:
            follows = table["first"][:-1] + table["rows"][:-1]
            begins[1:] = (table["producer"][1:] != table["producer"][:-1]) | (table["first"][1:] != follows)
        starts = np.flatnonzero(begins)
        runs = np.empty(len(starts), ID_RUN)
        runs["producer"], runs["first"] = table["producer"][starts], table["first"][starts]
        runs["rows"] = np.add.reduceat(table["rows"], starts) if len(starts) else 0
        runs["place"] = place
        self._runs += runs.tobytes()

    def publish(self) -> None:
        """Make everything that was read searchable."""
        if self._keys or self._runs:
            keys = np.concatenate(self._keys) if self._keys else np.empty(0, _U64)
            self._memory.append(part_of(keys, np.frombuffer(bytes(self._runs), ID_RUN)))
            self._keys, self._key_count, self._runs = [], 0, bytearray()
        if sum(map(_entries_in, self._memory)) >= PART_ENTRIES:
            self._write()
        while len(self._memory) > 1 and _entries_in(self._memory[-2]) < 2 * _entries_in(self._memory[-1]):
            # A part is at least twice as large as the next one, so there are few, and each entry is sorted few times.
            self._memory[-2:] = [joined(self._memory[-2:])]
        self.indexed = Indexed((*self._written, *self._memory), self.end)

    def _write(self) -> None:
        if self._writer is None:
            self._writer = IndexWriter(self._disk, self.base)
        if self._memory:
            self._written.append(self._writer.add(joined(self._memory)))
            self._memory = []

    def finish(self, view: memoryview) -> bool:
        """Complete the file of a segment that is read up to its end. False: it has no intact frame, so no index."""
        self.publish()
        if self._last < 0:
            return False
        self._write()
        assert self._writer is not None
        crcs = [U32.unpack_from(view, self._last + at)[0] for at in (CRC_OFFSET, STAMP_CRC_OFFSET)]
        self._writer.finish(SegmentFacts(self.base, self.end, self.base + self._last, *crcs))
        self._writer = None
        return True

    def close(self) -> None:
        """Give up the index of a segment that is not finished."""
        if self._writer is not None:
            self._writer.close()


def _entries_in(part: IndexPart) -> int:
    return len(part.keys) + len(part.ids)


def _next_frame(view: memoryview, start: int, limit: int) -> int:
    """The position of the next intact frame; ``limit`` if there is none."""
    at = start
    while at < limit:
        piece = bytes(view[at : min(at + STEP_BYTES, limit)])
        found = piece.find(PREFIX)
        while found >= 0:
            if not (at + found) % UNIT:
                try:
                    FrameView(view[:limit], at + found).verify()
                except FrameError:
                    pass
                else:
                    return at + found
            found = piece.find(PREFIX, found + 1)
        at += max(len(piece) - len(PREFIX) + 1, 1)
    return limit
