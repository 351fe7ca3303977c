"""Arithmetic on consume-log records: the bytes in a range of sequences, where to cut it, and what was stored when.

The functions work on whole arrays, so that a range of millions of frames takes milliseconds. The records come from a
broker, or are made from segment files.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from plait.storage.logs.consume_log import Records


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
