"""The two tables a stored frame may carry: whose rows it holds, and which rows of its original.

Both are written by a broker and read by everybody, so they are checked like everything else: a table that does not
fit the frame's rows is a ``FrameError``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plait.errors import FrameError
from plait.frame.columns import RUN_SIZE, SELECTION_SIZE, Codec
from plait.frame.header import SEQUENCE_MAX
from plait.limits import FRAME_COUNT_MAX

UInt64s = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Selection:
    """Which rows of an original frame a sliced one holds."""

    #: Rows of the original.
    count: int
    #: The selected ones, ascending.
    rows: npt.NDArray[np.int64]


def read_selection(codec: int, data: memoryview, count: int) -> Selection:
    """The selection of a frame with ``count`` rows."""
    if codec != Codec.RAW or len(data) < SELECTION_SIZE:
        raise FrameError("row selection is malformed")
    original, first = data[:SELECTION_SIZE].cast("I").tolist()
    if original > FRAME_COUNT_MAX:
        raise FrameError(f"row selection from {original} rows is impossible (limit {FRAME_COUNT_MAX})")
    if len(data) == SELECTION_SIZE:
        if first + count > original:
            raise FrameError(f"row selection {first}+{count} is outside {original} rows")
        return Selection(original, np.arange(first, first + count))
    bitmap = np.frombuffer(data[SELECTION_SIZE:], np.uint8)
    if len(bitmap) != (original + 7) // 8:
        raise FrameError(f"row selection bitmap of {len(bitmap)} bytes does not fit {original} rows")
    rows = np.flatnonzero(np.unpackbits(bitmap, count=original, bitorder="little"))
    if len(rows) != count or rows[0] != first:
        raise FrameError(f"row selection marks {len(rows)} rows, the frame has {count} from {first} on")
    return Selection(original, rows)


def read_runs(codec: int, data: memoryview, count: int) -> UInt64s:
    """(producer, first sequence, rows, previous sequence) of each part of ``count`` rows."""
    if codec != Codec.RAW or not data or len(data) % RUN_SIZE:
        raise FrameError("run table is malformed")
    table: UInt64s = np.frombuffer(data, "<u8").reshape(-1, 4)
    firsts, counts = table[:, 1], table[:, 2]
    if not counts.all() or counts.max() > FRAME_COUNT_MAX or int(counts.sum()) != count:
        raise FrameError(f"run table does not add up to {count} rows")
    if firsts.max() > SEQUENCE_MAX or (firsts + counts).max() > SEQUENCE_MAX:
        raise FrameError(f"run table has a sequence over the limit of {SEQUENCE_MAX}")
    return table


def expand_runs(table: UInt64s) -> tuple[UInt64s, UInt64s]:
    """(producer id, producer sequence) of each row of a run table that was checked."""
    counts = table[:, 2].astype(np.int64)
    starts = np.cumsum(counts) - counts
    # A row's sequence minus its place is the same within a run; unsigned arithmetic wraps around and back.
    numbers = np.repeat(table[:, 1] - starts.astype(np.uint64), counts)
    numbers += np.arange(len(numbers), dtype=np.uint64)
    return np.repeat(table[:, 0], counts), numbers


def slice_runs(table: UInt64s, start: int, stop: int) -> UInt64s:
    """The run table of rows [start, stop)."""
    counts = table[:, 2].astype(np.int64)
    ends = np.cumsum(counts)
    begins = ends - counts
    low, high = int(np.searchsorted(ends, start, "right")), int(np.searchsorted(begins, stop, "left"))
    kept = table[low:high].copy()
    skipped = np.uint64(start - begins[low])
    kept[0, 1] += skipped
    kept[0, 2] -= skipped
    kept[-1, 2] -= np.uint64(ends[high - 1] - stop)
    return kept


def runs_of_rows(table: UInt64s, rows: npt.NDArray[np.int64]) -> UInt64s:
    """A run table for the same number of rows, in which only ``rows`` are told whose they are."""
    counts = table[:, 2].astype(np.int64)
    used = np.zeros(len(table), bool)
    used[np.searchsorted(np.cumsum(counts), rows, "right")] = True
    # Neighbours that nobody asks about become one.
    begins = np.ones(len(table), bool)
    begins[1:] = used[1:] | used[:-1]
    starts = np.flatnonzero(begins)
    short = table[starts]
    short[:, 2] = np.add.reduceat(counts, starts)
    short[~used[starts]] *= np.array([0, 0, 1, 0], np.uint64)
    return short
