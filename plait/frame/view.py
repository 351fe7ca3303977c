"""Reading frames in place: parsing arbitrary bytes gives a ``FrameView`` or raises ``FrameError``, nothing else.

Parsing checks the header, and that the columns of the directory fill the frame exactly. ``verify`` checks the
checksums; ``validate`` checks everything that a broker must know before it stores a client's frame. Columns are used in
place, not decoded.
"""

from __future__ import annotations

from struct import Struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from crc32c import crc32c

from plait.errors import FrameError
from plait.frame.columns import (
    COMPRESSIBLE,
    ENTRY_SIZE_BITS,
    ENTRY_SIZE_MASK,
    FIXED_TYPES,
    KNOWN_BITS,
    LAYOUTS,
    MANDATORY_BITS,
    ORIGINAL_SIZE_MAX,
    ROW_SIZES_MAX,
    SMALL_COUNT,
    TEXTS,
    TIMES,
    VARIABLE,
    Codec,
    Column,
    check_row_sizes,
    check_text,
    check_times,
    label,
    layout_of,
)
from plait.frame.compression import inflate, memory_size
from plait.frame.header import (
    CRC_OFFSET,
    FLAGS_REFUSED,
    HEADER,
    HEADER_SIZE,
    MAGIC,
    PREVIOUS_OFFSET,
    SEQUENCE_MAX,
    STAMP_CRC_OFFSET,
    STAMP_OFFSET,
    TIME_MAX,
    U64,
    VERSION,
    FrameHeader,
    defect_of,
)
from plait.frame.header_block import HeaderBlock, is_block
from plait.frame.run_tables import (
    I32,
    RUN,
    Offsets,
    RowSelection,
    Runs,
    UInt64s,
    expand_runs,
    read_runs,
    read_selection,
    select_rows,
    wrap_binary,
)
from plait.limits import FRAME_COUNT_MAX, FRAME_SIZE_MAX, PRIORITY_MAX

_unpack_header = HEADER.unpack_from
_REFUSED_COLUMNS = MANDATORY_BITS & ~KNOWN_BITS
_RAW = int(Codec.RAW)
_CONST = int(Codec.CONST)
_PACKED = (int(Codec.ZSTD), int(Codec.LZ4))
_OFFSETS = [Struct(f"<{count + 1}i") for count in range(SMALL_COUNT + 1)]
#: Constants, because Python 3.11 runs a function for each access to an enum member.
_RUNS = int(Column.RUNS)
_BODY = int(Column.BODY)
_KEY = int(Column.KEY)
_KEY_HASH = int(Column.KEY_HASH)
_SELECTION = int(Column.SELECTION)
_HEADERS = int(Column.HEADERS)


class FrameView(FrameHeader):
    """One frame in a buffer. Keeps the buffer alive and copies nothing."""

    __slots__ = ("_inflated", "_selection", "buffer", "compressed", "inflated_size", "places")

    #: (codec, start, end) of each column by number, ascending.
    places: dict[int, tuple[int, int, int]]
    #: True if a column is compressed; slices contain such a column whole.
    compressed: bool
    #: The bytes that inflated columns, and the row form of a header block, take in addition to ``size``.
    inflated_size: int

    def __init__(self, buffer: memoryview | bytes | bytearray, offset: int = 0) -> None:
        room = len(buffer) - offset
        if room < HEADER_SIZE:
            raise FrameError(f"{room} bytes are too few for a frame header")
        (
            magic,
            version,
            flags,
            size,
            count,
            bits,
            self.producer,
            first,
            self.previous,
            self.crc,
            self.partition,
            base,
            store_time,
            self.durable,
            self.epoch,
            self.stamp_crc,
        ) = _unpack_header(buffer, offset)
        # One test for all fields: nearly every frame passes it.
        if (
            magic != MAGIC
            or version != VERSION
            or not HEADER_SIZE < size <= room
            or size > FRAME_SIZE_MAX
            or size & 7
            or not 0 < count <= FRAME_COUNT_MAX
            or flags & FLAGS_REFUSED
            or bits & _REFUSED_COLUMNS
            or first + count > SEQUENCE_MAX
            or base + count > SEQUENCE_MAX
            or not 0 <= store_time <= TIME_MAX
        ):
            raise FrameError(defect_of(buffer, offset, _REFUSED_COLUMNS))
        self.version, self.flags, self.size, self.count, self.column_bits = version, flags, size, count, bits
        self.first, self.base, self.store_time = first, base, store_time
        self.buffer = memoryview(buffer)[offset : offset + size]
        self._inflated: dict[int, memoryview] | None = None
        self._selection: RowSelection | None = None
        numbers, directory, start = LAYOUTS.get(bits) or layout_of(bits)
        if start > size:
            raise FrameError(f"frame of {size} bytes has no room for {len(numbers)} columns")
        self.places = places = {}
        codecs = 0
        # ``strict`` would cost as much as the loop, and both have one item for each bit.
        for number, entry in zip(numbers, directory.unpack_from(buffer, offset + HEADER_SIZE)):  # noqa: B905
            end = start + (entry & ENTRY_SIZE_MASK)
            places[number] = (entry >> ENTRY_SIZE_BITS, start, end)
            start = end + 7 & -8
            codecs |= entry
        if start != size:
            raise FrameError(f"frame columns end at {start}, the frame at {size}")
        self.compressed = codecs >> ENTRY_SIZE_BITS > _CONST
        self.inflated_size = memory_size(self.buffer, places, count) if self.compressed or _HEADERS in places else 0

    # --- checks ---------------------------------------------------------------------------------

    def verify(self) -> FrameView:
        """Check both checksums; ``FrameError`` if one is wrong."""
        buffer = self.buffer
        crc = crc32c(buffer[HEADER_SIZE:], crc32c(buffer[:CRC_OFFSET]))
        if crc != self.crc:
            raise FrameError(f"frame checksum is {crc:#010x}, should be {self.crc:#010x}")
        if crc32c(buffer[STAMP_OFFSET:STAMP_CRC_OFFSET]) != self.stamp_crc:
            self.verify_stamp()
        return self

    def crc_following(self, previous: int) -> int:
        """The checksum of the frame if it were the successor of ``previous``."""
        if previous == self.previous:
            return self.crc
        buffer = self.buffer
        return crc32c(buffer[HEADER_SIZE:], crc32c(bytes(buffer[:PREVIOUS_OFFSET]) + previous.to_bytes(8, "little")))

    def verify_stamp(self) -> FrameView:
        """Check the checksum of the stamp; ``FrameError`` if it is wrong."""
        crc = crc32c(self.buffer[STAMP_OFFSET:STAMP_CRC_OFFSET])
        if crc != self.stamp_crc:
            raise FrameError(f"stamp checksum is {crc:#010x}, should be {self.stamp_crc:#010x}")
        return self

    def validate(self) -> FrameView:
        """Check that any consumer can read every row of every known column; a broker does so before it stores a frame.

        Frees the inflated columns afterwards: a frame that waits takes only its own size.
        """
        self.verify()
        places = self.places
        if _BODY not in places:
            raise FrameError("frame has no body column")
        if _RUNS in places:
            self.runs()
        if _SELECTION in places:
            self.selection()
        elif self.size > ORIGINAL_SIZE_MAX:
            raise FrameError(
                f"frame of {self.size} bytes is over the limit of {ORIGINAL_SIZE_MAX}: no room to slice it"
            )
        if _KEY in places and _KEY_HASH not in places:
            raise FrameError("frame has keys and no key hashes")
        for number, (codec, start, end) in places.items():
            if number == _HEADERS and (block := self.header_block()) is not None:
                if Column.DELIVER_AT in places:
                    raise FrameError("the headers of delayed rows must be in the row form, not a block")
                block.check()
            elif number in VARIABLE:
                if codec == _RAW and self.count <= SMALL_COUNT:
                    _small_offsets(self.buffer[start:end], self.count, number)
                    if number in TEXTS and not bytes(self.buffer[start + 4 * self.count + 4 : end]).isascii():
                        check_text(*self.variable(number), number)
                else:
                    offsets, data = self.variable(number)
                    check_row_sizes(offsets, len(data), number)
                    if number in TEXTS:
                        check_text(offsets, data, number)
                    self._inflated = None
            elif number in TIMES:
                if codec != _CONST or end - start != 8 or U64.unpack_from(self.buffer, start)[0] > TIME_MAX:
                    check_times(self.values(number), number)
            elif number == _KEY_HASH and codec == _RAW and end - start == 8 * self.count:
                # Any 64 bits are a hash.
                continue
            elif number in FIXED_TYPES:
                values = self.values(number)
                if number == Column.PRIORITY and int(values.max()) > PRIORITY_MAX:
                    raise FrameError(f"priority {values.max()} is over {PRIORITY_MAX}")
        return self

    # --- columns --------------------------------------------------------------------------------

    def has(self, column: int) -> bool:
        return column in self.places

    def _place(self, column: int) -> tuple[int, int, int]:
        place = self.places.get(column)
        if place is None:
            raise FrameError(f"frame has no {label(column)} column")
        return place

    def stored(self, column: int) -> memoryview:
        """The stored bytes of a column; ``FrameError`` if the frame does not have it."""
        _, start, end = self._place(column)
        return self.buffer[start:end]

    def selection(self) -> RowSelection | None:
        """The rows of the original frame that this frame contains; None: it is an original."""
        if _SELECTION not in self.places:
            return None
        if self._selection is None:
            self._selection = read_selection(self.places[_SELECTION][0], self.stored(_SELECTION), self.count)
        return self._selection

    def runs(self) -> Runs:
        """The run table, in row order."""
        rows = self._original_count()
        if _RUNS not in self.places:
            return np.array([(self.producer, self.first, rows, 0, self.previous)], RUN)
        return read_runs(self.places[_RUNS][0], self.stored(_RUNS), rows)

    def _original_count(self) -> int:
        """The number of rows of the original frame, or of this frame if it is an original."""
        selection = self.selection()
        return selection.count if selection else self.count

    def _raw(self, column: int) -> tuple[memoryview, int]:
        """The raw bytes of a column and its number of rows. A compressed column has all rows of the original frame."""
        codec, start, end = self._place(column)
        data = self.buffer[start:end]
        if codec == _RAW:
            return data, self.count
        if codec not in _PACKED or column not in COMPRESSIBLE:
            raise FrameError(f"{label(column)} column has codec {codec}, which is not allowed for it")
        count = self._original_count()
        if self._inflated is None:
            self._inflated = {}
        raw = self._inflated.get(column)
        if raw is None:
            raw = self._inflated[column] = inflate(data, Codec(codec))
        return raw, count

    def variable(self, column: int) -> tuple[Offsets, memoryview]:
        """The offsets (starting at 0) and the data of the selected rows of a variable column. Headers: the row form."""
        if column == _HEADERS and (block := self.header_block()) is not None:
            return block.rows()
        raw, count = self._raw(column)
        split = 4 * (count + 1)
        if len(raw) < split:
            raise FrameError(f"{label(column)} column has no room for {count} offsets")
        offsets = np.frombuffer(raw, I32, count + 1)
        data = raw[split:]
        first = int(offsets[0])
        # The offsets ascend and the first is not negative, so no difference of two of them overflows.
        if (
            first < 0
            or int(offsets[-1]) - first != len(data)
            or (count > 1 and bool((offsets[1:] < offsets[:-1]).any()))
        ):
            raise FrameError(f"{label(column)} column has offsets that do not fit its {len(data)} bytes")
        if first:
            offsets = offsets - I32.type(first)
        if self.places[column][0] != _RAW:
            selection = self.selection()
            if selection is not None:
                return select_rows(offsets, data, selection.rows)
        return offsets, data

    def header_block(self) -> HeaderBlock | None:
        """The headers of the rows as columns; None if they are stored in the row form, or if there are none."""
        codec, start, end = self.places.get(_HEADERS, (_CONST, 0, 0))
        if codec != _RAW or not is_block(self.buffer[start:end]):
            return None
        return HeaderBlock.parse(self.buffer[start:end], self.count)

    def values(self, column: int) -> npt.NDArray[Any]:
        """The stored values of a fixed column: one per row, or one for all rows."""
        codec, start, end = self._place(column)
        dtype = FIXED_TYPES[column]
        count = 1 if codec == _CONST else self.count
        if codec not in (_CONST, _RAW) or end - start != dtype.itemsize * count:
            raise FrameError(f"{label(column)} column has {end - start} bytes for {count} values")
        return np.frombuffer(self.buffer[start:end], dtype)

    def fixed(self, column: int) -> npt.NDArray[Any]:
        """The values of a fixed column, one per row."""
        values = self.values(column)
        return values if len(values) == self.count else np.broadcast_to(values, (self.count,))

    def key_hashes(self) -> UInt64s | None:
        """The key hash of each row, or None if no row of the frame has a key."""
        return self.fixed(_KEY_HASH) if _KEY_HASH in self.places else None

    def binary(self, column: int) -> pa.BinaryArray:
        """A variable column as an Arrow array that shares the memory of the frame."""
        offsets, data = self.variable(column)
        return wrap_binary(offsets, data)

    def rows(self, column: int, start: int, stop: int) -> list[bytes]:
        """Rows [start, stop) of a variable column."""
        codec, begin, end = self._place(column)
        if codec == _RAW and self.count <= SMALL_COUNT and column != _HEADERS:
            stored = self.buffer[begin:end]
            offsets = _small_offsets(stored, self.count, column)
            if self.count == 1:
                # The usual frame of a message that was sent alone.
                return [stored[8:].tobytes()][start:stop]
            shift = 4 * (self.count + 1) - offsets[0]
            return [bytes(stored[offsets[i] + shift : offsets[i + 1] + shift]) for i in range(start, stop)]
        rows: list[bytes] = self.binary(column).slice(start, stop - start).to_pylist()
        return rows

    def sequences(self) -> npt.NDArray[np.int64]:
        """The sequence of each row."""
        selection = self.selection() if _SELECTION in self.places else None
        if selection is None:
            return np.arange(self.base, self.base + self.count)
        sequences: npt.NDArray[np.int64] = selection.rows + self.base
        return sequences

    @property
    def end(self) -> int:
        """The sequence after the last row of the frame, or of its original."""
        return self.base + (self._original_count() if _SELECTION in self.places else self.count)

    def message_ids(self) -> tuple[UInt64s, UInt64s]:
        """(producer id, producer sequence) of each row."""
        selection = self.selection()
        producers, numbers = expand_runs(self.runs())
        if selection is not None:
            return producers[selection.rows], numbers[selection.rows]
        return producers, numbers


def _small_offsets(stored: memoryview, count: int, column: int) -> tuple[int, ...]:
    """The offsets of a raw variable column with at most ``SMALL_COUNT`` rows, checked."""
    layout = _OFFSETS[count]
    size = len(stored) - layout.size
    if size < 0:
        raise FrameError(f"{label(column)} column has no room for {count} offsets")
    offsets: tuple[int, ...] = layout.unpack_from(stored)
    first = offsets[0]
    if first < 0 or offsets[-1] - first != size or (count > 1 and list(offsets) != sorted(offsets)):
        raise FrameError(f"{label(column)} column has offsets that do not fit its {size} bytes")
    if size > ROW_SIZES_MAX[column]:
        check_row_sizes(np.array(offsets), size, column)
    return offsets


def frames_in(buffer: memoryview | bytes) -> list[FrameView]:
    """The consecutive frames in a buffer; ``FrameError`` unless they fill it."""
    frames, offset = [], 0
    while offset < len(buffer):
        frame = FrameView(buffer, offset)
        frames.append(frame)
        offset += frame.size
    return frames
