"""The two tables that a stored frame may have: the producers of its rows, and which rows of its original it contains.

A broker writes them. Readers check them like all other columns: a table that does not fit the rows of its frame is a
``FrameError``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from plait.errors import FrameError
from plait.frame.columns import RUN_SIZE, SELECTION_SIZE, Codec
from plait.frame.header import SEQUENCE_MAX
from plait.limits import FRAME_COUNT_MAX

UInt64s = npt.NDArray[np.uint64]
#: The offsets of a variable column: where each row begins, and where the last one ends.
Offsets = npt.NDArray[np.int32]
I32: Final[np.dtype[np.int32]] = np.dtype("<i4")
_BINARY: Final = pa.binary()
#: The rows of one producer in a joined frame. ``crc`` is the checksum of the frame that the producer sent: it
#: distinguishes a resend from other rows with the same producer sequences. ``crc`` is 0 if rows were cut or gathered.
RUN: Final = np.dtype([("producer", "<u8"), ("first", "<u8"), ("rows", "<u4"), ("crc", "<u4"), ("previous", "<u8")])
assert RUN.itemsize == RUN_SIZE
#: A table of ``RUN``.
Runs = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class RowSelection:
    """The rows of an original frame that a slice contains."""

    #: The number of rows of the original.
    count: int
    #: The selected rows, ascending.
    rows: npt.NDArray[np.int64]


def read_selection(codec: int, data: memoryview, count: int) -> RowSelection:
    """The selection of a frame with ``count`` rows."""
    if codec != Codec.RAW or len(data) < SELECTION_SIZE:
        raise FrameError("row selection is malformed")
    original, first = data[:SELECTION_SIZE].cast("I").tolist()
    if original > FRAME_COUNT_MAX:
        raise FrameError(f"row selection from {original} rows is impossible (limit {FRAME_COUNT_MAX})")
    if len(data) == SELECTION_SIZE:
        if first + count > original:
            raise FrameError(f"row selection {first}+{count} is outside {original} rows")
        return RowSelection(original, np.arange(first, first + count))
    bitmap = np.frombuffer(data[SELECTION_SIZE:], np.uint8)
    if len(bitmap) != (original + 7) // 8:
        raise FrameError(f"row selection bitmap of {len(bitmap)} bytes does not fit {original} rows")
    rows = np.flatnonzero(np.unpackbits(bitmap, count=original, bitorder="little"))
    if len(rows) != count or rows[0] != first:
        raise FrameError(f"row selection marks {len(rows)} rows; the frame has {count}, starting at {first}")
    return RowSelection(original, rows)


def read_runs(codec: int, data: memoryview, count: int) -> Runs:
    """The run table of a frame with ``count`` rows."""
    if codec != Codec.RAW or not data or len(data) % RUN_SIZE:
        raise FrameError("run table is malformed")
    table: Runs = np.frombuffer(data, RUN)
    firsts, counts = table["first"], table["rows"]
    if not counts.all() or counts.max() > FRAME_COUNT_MAX or int(counts.sum()) != count:
        raise FrameError(f"run table does not add up to {count} rows")
    if firsts.max() > SEQUENCE_MAX or (firsts + counts).max() > SEQUENCE_MAX:
        raise FrameError(f"run table has a sequence over the limit of {SEQUENCE_MAX}")
    return table


def expand_runs(table: Runs) -> tuple[UInt64s, UInt64s]:
    """(producer id, producer sequence) of each row of a checked run table."""
    counts = table["rows"].astype(np.int64)
    starts = np.cumsum(counts) - counts
    # Within a run, a row's sequence minus its index is constant; unsigned arithmetic wraps around and back.
    numbers = np.repeat(table["first"] - starts.astype(np.uint64), counts)
    numbers += np.arange(len(numbers), dtype=np.uint64)
    return np.repeat(table["producer"], counts), numbers


def slice_runs(table: Runs, start: int, stop: int) -> Runs:
    """The run table of rows [start, stop)."""
    counts = table["rows"].astype(np.int64)
    ends = np.cumsum(counts)
    begins = ends - counts
    low, high = int(np.searchsorted(ends, start, "right")), int(np.searchsorted(begins, stop, "left"))
    kept = table[low:high].copy()
    skipped = int(start - begins[low])
    kept["first"][0] += np.uint64(skipped)
    kept["rows"][0] -= np.uint32(skipped)
    kept["rows"][-1] -= np.uint32(ends[high - 1] - stop)
    kept["crc"] = 0
    return kept


def runs_of_rows(table: Runs, rows: npt.NDArray[np.int64]) -> Runs:
    """A run table for the same number of rows that identifies only the runs of ``rows``; other runs get producer 0."""
    counts = table["rows"].astype(np.int64)
    used = np.zeros(len(table), bool)
    used[np.searchsorted(np.cumsum(counts), rows, "right")] = True
    # Consecutive runs without a row of ``rows`` are joined.
    begins = np.ones(len(table), bool)
    begins[1:] = used[1:] | used[:-1]
    starts = np.flatnonzero(begins)
    short = np.where(used[starts], table[starts], np.zeros(1, RUN))
    short["rows"] = np.add.reduceat(counts, starts)
    short["crc"] = 0
    return short


def wrap_binary(offsets: Offsets, data: memoryview) -> pa.BinaryArray:
    """An Arrow array that shares existing memory."""
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(_BINARY, len(offsets) - 1, buffers, 0)


def select_rows(offsets: Offsets, data: memoryview, rows: npt.NDArray[np.int64]) -> tuple[Offsets, memoryview]:
    """The offsets and data of some rows of a variable column."""
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows):
        start, end = int(offsets[first]), int(offsets[last + 1])
        return offsets[first : last + 2] - I32.type(start), data[start:end]
    # Not pa.array(rows), which imports pandas: that import may last as long as the whole move of a pull lock.
    index = pa.Array.from_buffers(pa.int64(), len(rows), [None, pa.py_buffer(np.ascontiguousarray(rows, np.int64))])
    array = wrap_binary(offsets, data).take(index)
    _, new_offsets, new_data = array.buffers()
    packed = np.frombuffer(new_offsets, I32, len(rows) + 1)
    return packed, memoryview(new_data or b"").cast("B")[: int(packed[-1])]
