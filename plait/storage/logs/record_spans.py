"""Arithmetic on consume-log records: how much lies in a range of sequences, where to cut it, what was stored when.

Whole arrays at a time, so that a range of millions of frames is measured in milliseconds. The records may be a broker's
or made from segment files.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from plait.storage.logs.consume_log import Records


def sizes_in(records: Records, start: int, end: int) -> npt.NDArray[np.float64]:
    """Bytes of each record's frame that are of rows in [start, end), as if all its rows were of one size."""
    bases, counts = records["base"].astype(np.int64), records["count"].astype(np.int64)
    inside = np.minimum(bases + counts, end) - np.maximum(bases, start)
    sizes: npt.NDArray[np.float64] = records["size"] * (np.maximum(inside, 0) / counts)
    return sizes


def cut(records: Records, start: int, end: int, size: int) -> list[int]:
    """Where pieces of [start, end) end, each at most about ``size`` bytes and all about equal; the last is ``end``.

    A piece ends where a frame does, so that no frame is cut in two, and has one frame at least.
    """
    reached = np.cumsum(sizes_in(records, start, end))
    total = float(reached[-1]) if len(reached) else 0.0
    pieces = max(-(-int(total) // max(size, 1)), 1)
    if pieces == 1:
        return [end]
    targets = np.arange(1, pieces) * (total / pieces)
    # Half a frame too much is nearer to the target than half a frame too little.
    middles = reached - np.diff(reached, prepend=0.0) / 2
    last = np.clip(np.searchsorted(middles, targets, "right") - 1, 0, None)
    ends = (records["base"] + records["count"]).astype(np.int64)[last]
    return [*np.unique(ends[(ends > start) & (ends < end)]).tolist(), end]


def reach(records: Records, start: int, end: int, size: int) -> int:
    """How far from ``start`` about ``size`` bytes reach: to the end of a frame, one at least, or to ``end``."""
    reached = np.cumsum(sizes_in(records, start, end))
    within = int(np.searchsorted(reached, float(size), "right"))
    if within >= len(records):
        return end
    # The frame that passes the limit is left out, unless it is the first with rows in the range.
    first = int(np.searchsorted(reached, 0.0, "right"))
    record = records[max(within - 1, first)]
    return min(max(int(record["base"]) + int(record["count"]), start), end)


def first_at(records: Records, times: Sequence[int], end: int) -> npt.NDArray[np.int64]:
    """For each time the first sequence that was stored then or later; ``end`` where there is none."""
    # The wall clock may be set back; the first record at or after a time is the first whose running maximum is.
    at = np.searchsorted(np.maximum.accumulate(records["time"]), np.array(times, np.int64), "left")
    found: npt.NDArray[np.int64] = np.minimum(np.append(records["base"].astype(np.int64), end)[at], end)
    return found


def end_before(records: Records, times: Sequence[int], start: int) -> npt.NDArray[np.int64]:
    """For each time the sequence after the last one that was stored before; ``start`` where there is none.

    Not the same as ``first_at`` where the wall clock was set back.
    """
    later = np.minimum.accumulate(records["time"][::-1])[::-1]
    at = np.searchsorted(later, np.array(times, np.int64), "left")
    ends = (records["base"] + records["count"]).astype(np.int64)
    found: npt.NDArray[np.int64] = np.maximum(np.insert(ends, 0, start)[at], start)
    return found
