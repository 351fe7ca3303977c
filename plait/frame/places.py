"""Rows of stored frames, found by arithmetic.

The *place* of a frame in a buffer (a mapped file) is a fixed-length record with the positions of its columns. Rows are
found by arithmetic on arrays of places. The cost depends on the number of rows taken, not on the number of frames or on
the other rows of these frames. The caller has verified the frames.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute  # Needed to take rows. Imported at start-up, not when the first message is due.

from plait.frame.builder import Buffer
from plait.frame.columns import FIXED_TYPES, FIXED_WIDTHS, RUN_SIZE, VARIABLE, Codec, Column
from plait.frame.header import pad
from plait.frame.header_block import is_block
from plait.frame.run_tables import RUN, UInt64s, expand_runs
from plait.frame.view import FrameView

Int64s = npt.NDArray[np.int64]
#: Records of type ``PLACE``.
Places = npt.NDArray[Any]

#: Returns the flattened columns of a frame and its place in them (``flatten``).
FlatOf = Callable[[FrameView], tuple[bytes, Places]]

#: The columns in a place, in the order of their positions.
_PLACED: Final = (
    Column.RUNS,
    Column.KEY_HASH,
    Column.SEND_TIME,
    Column.DELIVER_AT,
    Column.KEY,
    Column.BODY,
    Column.PRIORITY,
    Column.TO_GROUP,
    Column.TAGS,
    Column.HEADERS,
    Column.SCHEDULE,
)
_INDEX: Final = {int(column): index for index, column in enumerate(_PLACED)}
_PLACED_BITS: Final = sum(1 << column for column in _PLACED)
#: Set in the ``bits`` of a place if rows cannot be found in the stored frame: it must be flattened first (``flatten``).
FLATTEN_BIT: Final = 1 << 31
#: ``at``: the position of the frame in the buffer; ``consts``: the columns with one value for all rows; ``positions``
#: are relative to ``at``.
PLACE: Final = np.dtype(
    [
        ("at", "<i8"),
        ("producer", "<u8"),
        ("first", "<u8"),
        ("bits", "<u4"),
        ("consts", "<u4"),
        ("count", "<u4"),
        ("positions", "<u4", (len(_PLACED),)),
    ]
)
_PLACE: Final = Struct(f"<qQQIII{len(_PLACED)}I")
assert _PLACE.size == PLACE.itemsize
#: Pieces with a larger average size are copied one by one, others together.
PIECE_SIZE: Final = 1024
_LARGE: Final = pa.large_binary()


def place_of(frame: FrameView, at: int) -> bytes:
    """The ``PLACE`` record of a frame at position ``at``."""
    bits = frame.column_bits & _PLACED_BITS
    consts = 0
    positions = [0] * len(_PLACED)
    for number, (codec, start, end) in frame.places.items():
        index = _INDEX.get(number)
        if index is None:
            continue
        positions[index] = start
        if codec == Codec.CONST:
            consts |= 1 << number
        elif codec != Codec.RAW or (number == Column.HEADERS and is_block(frame.buffer[start:end])):
            bits |= FLATTEN_BIT
        if number == Column.RUNS and end - start != RUN_SIZE * frame.count:
            bits |= FLATTEN_BIT
    return _PLACE.pack(at, frame.producer, frame.first, bits, consts, frame.count, *positions)


def flatten(frame: FrameView) -> tuple[bytes, Places]:
    """A buffer with the inflated columns of a frame and a run table with an entry per row; and the place in it."""
    pieces: list[Buffer] = []
    positions = [0] * len(_PLACED)
    consts = 0
    size = 0
    for number, (codec, start, end) in frame.places.items():
        index = _INDEX.get(number)
        if index is None:
            continue
        column: list[Buffer] = [frame.buffer[start:end]]
        if number in VARIABLE:
            offsets, data = frame.variable(number)
            column = [offsets.tobytes(), data]
        elif number == Column.RUNS:
            column = [rows_as_runs(*expand_runs(frame.runs()))]
        elif codec == Codec.CONST:
            consts |= 1 << number
        positions[index] = size
        length = sum(map(len, column))
        pieces += [*column, bytes(pad(length))]
        size += length + pad(length)
    bits = frame.column_bits & _PLACED_BITS
    record = _PLACE.pack(0, frame.producer, frame.first, bits, consts, frame.count, *positions)
    return b"".join(pieces), np.frombuffer(record, PLACE)


class RowPicks:
    """Rows of frames in one buffer: row ``rows[i]`` of the frame at ``places[index[i]]``."""

    def __init__(
        self,
        buffer: Buffer,
        places: Places,
        index: npt.NDArray[np.integer[Any]],
        rows: npt.NDArray[np.integer[Any]],
        *,
        packed: bool = False,
    ) -> None:
        """``packed``: True if the rows were compressed in their frame."""
        self.packed = packed
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(buffer, np.uint8)
        size = len(self._bytes)
        self._words: UInt64s = self._bytes[: size & ~7].view("<u8")
        self._offsets: npt.NDArray[np.int32] = self._bytes[: size & ~3].view("<i4")
        self._places = places
        self._index = index
        self._rows: Int64s = rows.astype(np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def bits(self) -> npt.NDArray[np.uint32]:
        """The column bits of the frame of each row."""
        bits: npt.NDArray[np.uint32] = self._places["bits"][self._index]
        return bits

    def _at(self, column: int) -> Int64s:
        at: Int64s = self._places["at"] + self._places["positions"][:, _INDEX[column]]
        found: Int64s = at[self._index]
        return found

    def _has(self, column: int) -> npt.NDArray[np.bool_]:
        has: npt.NDArray[np.bool_] = (self._places["bits"] >> np.uint32(column) & 1).astype(bool)
        found: npt.NDArray[np.bool_] = has[self._index]
        return found

    def ids(self) -> tuple[UInt64s, UInt64s]:
        """(producer, producer sequence) of each row."""
        producers: UInt64s = self._places["producer"][self._index]
        numbers: UInt64s = self._places["first"][self._index] + self._rows.astype(np.uint64)
        joined = self._has(Column.RUNS)
        if joined.any():
            entry = (self._at(Column.RUNS)[joined] >> 3) + 4 * self._rows[joined]
            producers[joined] = self._words[entry]
            numbers[joined] = self._words[entry + 1]
        return producers, numbers

    def fixed(self, column: int, absent: int = 0) -> npt.NDArray[Any]:
        """The value of each row; ``absent`` if its frame does not have the column."""
        values = np.full(len(self._rows), absent, FIXED_TYPES[column])
        has = self._has(column)
        if not has.any():
            return values
        const = (self._places["consts"] >> np.uint32(column) & 1)[self._index]
        row = np.where(const, 0, self._rows)[has]
        at = self._at(column)[has]
        if FIXED_WIDTHS[column] == 1:
            values[has] = self._bytes[at + row]
        else:
            values[has] = self._words[(at >> 3) + row].view(FIXED_TYPES[column])
        return values

    def spans(self, column: int) -> tuple[Int64s, Int64s]:
        """(position, length) of each row of a variable column; length 0 if its frame does not have the column."""
        starts = np.zeros(len(self._rows), np.int64)
        lengths = np.zeros(len(self._rows), np.int64)
        has = self._has(column)
        if has.any():
            at, row = self._at(column)[has], self._rows[has]
            offset = at >> 2
            begin = self._offsets[offset + row].astype(np.int64)
            lengths[has] = self._offsets[offset + row + 1] - begin
            count = self._places["count"].astype(np.int64)[self._index[has]]
            starts[has] = at + 4 * (count + 1) + begin - self._offsets[offset]
        return starts, lengths

    def sizes(self) -> Int64s:
        """The size of each row in all variable columns."""
        sizes = np.zeros(len(self._rows), np.int64)
        for column in VARIABLE:
            sizes += self.spans(column)[1]
        return sizes

    def data(self, starts: Int64s, lengths: Int64s) -> bytes:
        """The bytes of ``spans``, concatenated."""
        return take_spans(self._bytes, starts, lengths)


def column_of(buffer: Buffer, place: Any, column: int) -> npt.NDArray[Any]:
    """A raw fixed column of a frame, as a view of the buffer."""
    at = int(place["at"]) + int(place["positions"][_INDEX[column]])
    return np.frombuffer(buffer, FIXED_TYPES[column], int(place["count"]), at)


def row_sets(
    buffer: Buffer, places: Places, index: Int64s, rows: Int64s, flat_of: FlatOf | None = None
) -> tuple[list[RowPicks], Int64s]:
    """Rows ``rows`` of the frames ``places[index]`` as sets, and for each row of the sets its index in ``rows``.

    ``flat_of`` replaces ``flatten``; it may cache the results.
    """
    flat = (places["bits"][index] & FLATTEN_BIT) != 0
    if not flat.any():
        return [RowPicks(buffer, places, index, rows)], np.arange(len(rows))
    plain = np.flatnonzero(~flat)
    sets, which = [RowPicks(buffer, places, index[plain], rows[plain])], [plain]
    for number in np.unique(index[flat]).tolist():
        mine = np.flatnonzero(index == number)
        frame = FrameView(buffer, int(places["at"][number]))
        memory, place = (flat_of or flatten)(frame)
        sets.append(RowPicks(memory, place, np.zeros(len(mine), np.int64), rows[mine], packed=frame.compressed))
        which.append(mine)
    return sets, np.concatenate(which)


def take_spans(source: npt.NDArray[np.uint8], starts: Int64s, lengths: Int64s) -> bytes:
    """Pieces of memory, concatenated."""
    filled = lengths > 0
    starts, lengths = starts[filled], lengths[filled]
    if not len(starts):
        return b""
    ends = starts + lengths
    # Adjacent spans are one piece.
    first = np.flatnonzero(np.concatenate(([True], starts[1:] != ends[:-1])))
    if int(lengths.sum()) >= PIECE_SIZE * len(first):
        memory = source.data
        last = np.concatenate((first[1:], [len(ends)])) - 1
        return b"".join([memory[a:b] for a, b in zip(starts[first].tolist(), ends[last].tolist(), strict=True)])
    # The pieces and the gaps between them form an Arrow array, in memory order; taking its rows copies the pieces.
    places, which = np.unique(starts, return_inverse=True)
    edges = np.empty(2 * len(places), np.int64)
    edges[0::2] = places
    edges[1::2][which] = ends
    array = pa.Array.from_buffers(_LARGE, len(edges) - 1, [None, pa.py_buffer(edges), pa.py_buffer(source)], 0)
    # Wrapped here: ``pa.array`` would import pandas.
    chosen = pa.Array.from_buffers(pa.int64(), len(which), [None, pa.py_buffer(2 * which.astype(np.int64))])
    data: bytes = array.take(chosen).buffers()[2].to_pybytes()
    return data[: int(lengths.sum())]


def rows_as_runs(producers: UInt64s, numbers: UInt64s) -> bytes:
    """A run table with an entry per row."""
    table = np.zeros(len(producers), RUN)
    table["producer"], table["first"], table["rows"] = producers, numbers, 1
    return table.tobytes()
