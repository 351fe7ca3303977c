"""Reads frames in place: arbitrary bytes give a ``FrameView`` or ``FrameError``, nothing else.

Parsing checks the header and that the directory fills the frame exactly. ``verify`` checks the checksums,
``validate`` everything a broker must know before it stores somebody's frame. Columns are wrapped, not decoded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from crc32c import crc32c

from plait.errors import FrameError
from plait.frame.codec import inflate
from plait.frame.columns import (
    ENTRY_SIZE,
    ENTRY_SIZE_BITS,
    ENTRY_SIZE_MASK,
    FIXED_WIDTHS,
    KNOWN_BITS,
    MANDATORY_BITS,
    RUN_SIZE,
    SELECTION_SIZE,
    VARIABLE,
    Codec,
    Column,
)
from plait.frame.header import (
    CRC_OFFSET,
    FLAGS_KNOWN,
    FLAGS_MANDATORY,
    HEADER,
    HEADER_SIZE,
    MAGIC,
    STAMP_CRC_OFFSET,
    STAMP_OFFSET,
    VERSION,
    pad,
)
from plait.limits import FRAME_COUNT_MAX, FRAME_SIZE_MAX, KEY_SIZE_MAX

UInt64s = npt.NDArray[np.uint64]

_COLUMNS_OF: dict[int, tuple[int, ...]] = {}


def _columns_of(bits: int) -> tuple[int, ...]:
    """The column numbers of a bit set; remembered, as a log has few different ones."""
    known = _COLUMNS_OF.get(bits)
    if known is None:
        known = tuple(n for n in range(32) if bits >> n & 1)
        if len(_COLUMNS_OF) < 256:
            _COLUMNS_OF[bits] = known
    return known


class Stored(NamedTuple):
    """A column as it stands in the frame."""

    codec: int
    data: memoryview


class Selection(NamedTuple):
    """Which rows of an original frame a sliced one holds."""

    count: int
    rows: npt.NDArray[np.int64]


class FrameView:
    """One frame inside a buffer; keeps the buffer alive and copies nothing."""

    __slots__ = (
        "_inflated",
        "_places",
        "base",
        "buffer",
        "column_bits",
        "count",
        "crc",
        "durable",
        "epoch",
        "first",
        "flags",
        "partition",
        "previous",
        "producer",
        "size",
        "stamp_crc",
        "store_time",
        "version",
    )

    def __init__(self, buffer: memoryview | bytes | bytearray, offset: int = 0) -> None:
        room = len(buffer) - offset
        if room < HEADER_SIZE:
            raise FrameError(f"{room} bytes are too few for a frame header")
        (
            magic,
            self.version,
            self.flags,
            self.size,
            self.count,
            self.column_bits,
            self.producer,
            self.first,
            self.previous,
            self.crc,
            self.partition,
            self.base,
            self.store_time,
            self.durable,
            self.epoch,
            self.stamp_crc,
        ) = HEADER.unpack_from(buffer, offset)
        if magic != MAGIC:
            raise FrameError(f"no frame here: magic is {magic!r}")
        if self.version != VERSION:
            raise FrameError(f"frame version {self.version} is not {VERSION}; a newer Plait wrote it")
        size = self.size
        if not HEADER_SIZE < size <= FRAME_SIZE_MAX or size & 7:
            raise FrameError(f"frame size {size} is impossible (limit {FRAME_SIZE_MAX})")
        if size > room:
            raise FrameError(f"frame of {size} bytes is cut off after {room}")
        if not 0 < self.count <= FRAME_COUNT_MAX:
            raise FrameError(f"frame count {self.count} is impossible (limit {FRAME_COUNT_MAX})")
        if self.flags & FLAGS_MANDATORY & ~FLAGS_KNOWN:
            raise FrameError(f"frame flags {self.flags:#x} are not known; a newer Plait wrote it")
        bits = self.column_bits
        if bits & MANDATORY_BITS & ~KNOWN_BITS:
            raise FrameError(f"frame columns {bits:#x} are not known; a newer Plait wrote it")
        self.buffer = memoryview(buffer)[offset : offset + size]
        self._inflated: dict[int, memoryview] | None = None
        self._places = self._read_directory(bits, size)

    def _read_directory(self, bits: int, size: int) -> dict[int, tuple[int, int, int]]:
        numbers = _columns_of(bits)
        start = HEADER_SIZE + ENTRY_SIZE * len(numbers)
        if start > size:
            raise FrameError(f"frame of {size} bytes has no room for {len(numbers)} columns")
        entries = self.buffer[HEADER_SIZE:start].cast("I").tolist()
        start += pad(start)
        places = {}
        for number, entry in zip(numbers, entries, strict=True):
            length = entry & ENTRY_SIZE_MASK
            places[number] = (entry >> ENTRY_SIZE_BITS, start, start + length)
            start += length + (-length & 7)
        if start != size:
            raise FrameError(f"frame columns end at {start}, the frame at {size}")
        return places

    # --- checks ---------------------------------------------------------------------------------

    def verify(self) -> FrameView:
        """Both checksums hold, or ``FrameError``."""
        crc = crc32c(self.buffer[HEADER_SIZE:], crc32c(self.buffer[:CRC_OFFSET]))
        if crc != self.crc:
            raise FrameError(f"frame checksum is {crc:#010x}, should be {self.crc:#010x}")
        return self.verify_stamp()

    def verify_stamp(self) -> FrameView:
        """The broker's part is intact, or ``FrameError``."""
        crc = crc32c(self.buffer[STAMP_OFFSET:STAMP_CRC_OFFSET])
        if crc != self.stamp_crc:
            raise FrameError(f"stamp checksum is {crc:#010x}, should be {self.stamp_crc:#010x}")
        return self

    def validate(self) -> FrameView:
        """Every column can be read by any consumer: what a broker checks before it stores a frame."""
        self.verify()
        if Column.BODY not in self._places:
            raise FrameError("frame has no body column")
        if Column.RUNS in self._places:
            self.runs()
        if Column.SELECTION in self._places:
            self.selection()
        for number in self._places:
            if number in VARIABLE:
                self.variable(number)
            elif number in FIXED_WIDTHS:
                self.fixed(number)
        if Column.KEY in self._places:
            offsets, _ = self.variable(Column.KEY)
            if int(np.diff(offsets).max()) > KEY_SIZE_MAX:
                raise FrameError(f"an order key is longer than {KEY_SIZE_MAX} bytes")
            if Column.KEY_HASH not in self._places:
                raise FrameError("frame has keys and no key hashes")
        return self

    # --- columns --------------------------------------------------------------------------------

    def has(self, column: int) -> bool:
        return column in self._places

    @property
    def compressed(self) -> bool:
        """Some column travels whole whatever rows are selected."""
        return any(codec >= Codec.ZSTD for codec, _, _ in self._places.values())

    def stored(self, column: int) -> Stored:
        codec, start, end = self._places[column]
        return Stored(codec, self.buffer[start:end])

    def columns(self) -> list[tuple[int, Stored]]:
        """All columns as they stand, unknown skippable ones included."""
        return [(number, self.stored(number)) for number in self._places]

    def selection(self) -> Selection | None:
        """The rows of the original frame that this one holds; None: it is an original."""
        if Column.SELECTION not in self._places:
            return None
        codec, data = self.stored(Column.SELECTION)
        if codec != Codec.RAW or len(data) < SELECTION_SIZE:
            raise FrameError("row selection is malformed")
        original, first = data[:SELECTION_SIZE].cast("I").tolist()
        if original > FRAME_COUNT_MAX or original < self.count:
            raise FrameError(f"row selection of {self.count} from {original} rows is impossible")
        if len(data) == SELECTION_SIZE:
            if first + self.count > original:
                raise FrameError(f"row selection {first}+{self.count} is outside {original} rows")
            return Selection(original, np.arange(first, first + self.count))
        bitmap = np.frombuffer(data[SELECTION_SIZE:], np.uint8)
        if len(bitmap) != (original + 7) // 8:
            raise FrameError("row selection bitmap has the wrong size")
        rows = np.flatnonzero(np.unpackbits(bitmap, count=original, bitorder="little"))
        if len(rows) != self.count:
            raise FrameError(f"row selection marks {len(rows)} rows, the frame has {self.count}")
        return Selection(original, rows)

    def runs(self) -> UInt64s:
        """(producer, first sequence, rows, previous sequence) of each producer's part, in row order."""
        selection = self.selection()
        rows = selection.count if selection else self.count
        if Column.RUNS not in self._places:
            return np.array([[self.producer, self.first, rows, self.previous]], np.uint64)
        codec, data = self.stored(Column.RUNS)
        if codec != Codec.RAW or not data or len(data) % RUN_SIZE:
            raise FrameError("run table is malformed")
        table = np.frombuffer(data, "<u8").reshape(-1, 4)
        counts = table[:, 2]
        if int(counts.max()) > FRAME_COUNT_MAX or int(counts.sum()) != rows:
            raise FrameError(f"run table does not add up to {rows} rows")
        return table

    def _raw(self, column: int) -> tuple[memoryview, int]:
        """A column's raw bytes and its number of rows, which for a compressed one is the original frame's."""
        codec, start, end = self._places[column]
        data = self.buffer[start:end]
        if codec == Codec.RAW:
            return data, self.count
        if codec not in (Codec.ZSTD, Codec.LZ4):
            raise FrameError(f"column {column} has unknown codec {codec}")
        selection = self.selection()
        count = selection.count if selection else self.count
        if self._inflated is None:
            self._inflated = {}
        raw = self._inflated.get(column)
        if raw is None:
            raw = self._inflated[column] = inflate(data, Codec(codec))
        return raw, count

    def variable(self, column: int) -> tuple[npt.NDArray[np.int32], memoryview]:
        """Offsets (starting at 0) and data of a variable column, rows selected."""
        raw, count = self._raw(column)
        split = 4 * (count + 1)
        if len(raw) < split:
            raise FrameError(f"column {column} has no room for {count} offsets")
        offsets = np.frombuffer(raw[:split], "<i4")
        first = int(offsets[0])
        if first:
            if first < 0:
                raise FrameError(f"column {column} has a negative offset")
            offsets = offsets - np.int32(first)
        data = raw[split:]
        if int(offsets[-1]) != len(data) or (count > 1 and bool((offsets[1:] < offsets[:-1]).any())):
            raise FrameError(f"column {column} has offsets that do not fit its {len(data)} bytes")
        if count != self.count or self._places[column][0] != Codec.RAW:
            return self._select_variable(offsets, data)
        return offsets, data

    def _select_variable(
        self, offsets: npt.NDArray[np.int32], data: memoryview
    ) -> tuple[npt.NDArray[np.int32], memoryview]:
        selection = self.selection()
        if selection is None:
            return offsets, data
        array = wrap_binary(offsets, data).take(pa.array(selection.rows))
        if isinstance(array, pa.ChunkedArray):
            array = array.combine_chunks()
        _, new_offsets, new_data = array.buffers()
        packed = np.frombuffer(new_offsets, "<i4")[: self.count + 1]
        return packed, memoryview(new_data or b"").cast("B")[: int(packed[-1])]

    def fixed(self, column: int) -> npt.NDArray[Any]:
        """Values of a fixed column, one a row."""
        width = FIXED_WIDTHS[column]
        dtype = {Column.KEY_HASH: "<u8", Column.PRIORITY: "u1"}.get(Column(column), "<i8")
        codec, start, end = self._places[column]
        if codec == Codec.CONST:
            if end - start != width:
                raise FrameError(f"constant column {column} has {end - start} bytes, not {width}")
            value = np.frombuffer(self.buffer[start:end], dtype)
            return np.broadcast_to(value, (self.count,))
        if codec != Codec.RAW or end - start != width * self.count:
            raise FrameError(f"column {column} has {end - start} bytes for {self.count} rows")
        return np.frombuffer(self.buffer[start:end], dtype)

    def binary(self, column: int) -> pa.BinaryArray:
        """A variable column as an Arrow array over the frame's own memory."""
        offsets, data = self.variable(column)
        return wrap_binary(offsets, data)

    def sequences(self) -> npt.NDArray[np.int64]:
        """The sequence of each row."""
        selection = self.selection()
        if selection is not None:
            return selection.rows + self.base
        return np.arange(self.base, self.base + self.count)

    @property
    def end(self) -> int:
        """The sequence after the last row of the frame, or of its original."""
        selection = self.selection() if Column.SELECTION in self._places else None
        return self.base + (selection.count if selection else self.count)

    def message_ids(self) -> tuple[UInt64s, UInt64s]:
        """(producer id, producer sequence) of each row."""
        selection = self.selection()
        rows = selection.count if selection else self.count
        if Column.RUNS in self._places:
            table = self.runs()
            counts = table[:, 2].astype(np.int64)
            producers = np.repeat(table[:, 0], counts)
            starts = np.cumsum(counts) - counts
            within = np.arange(rows, dtype=np.int64) - np.repeat(starts, counts)
            numbers = np.repeat(table[:, 1], counts) + within.astype(np.uint64)
        else:
            producers = np.full(rows, self.producer, np.uint64)
            numbers = np.arange(rows, dtype=np.uint64) + np.uint64(self.first)
        if selection is not None:
            return producers[selection.rows], numbers[selection.rows]
        return producers, numbers


def wrap_binary(offsets: npt.NDArray[np.int32], data: memoryview) -> pa.BinaryArray:
    """An Arrow array over existing memory."""
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers)


def frames_in(buffer: memoryview | bytes) -> list[FrameView]:
    """All frames that stand one after another in a buffer; ``FrameError`` unless they fill it."""
    frames = []
    offset = 0
    while offset < len(buffer):
        frame = FrameView(buffer, offset)
        frames.append(frame)
        offset += frame.size
    return frames
