"""Expresses returned rows that are scattered over their frames in few ranges, by their logical partitions.

A consumer that gives up half of its LPs returns about every other row that it has prefetched. "All rows of these LPs in
this range" covers a whole frame, provided that the user holds none of those rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from plait.client.consume.failure import EpochRange
from plait.client.consume.ordered.lock_rights import no_lps
from plait.client.consume.ordered.ordered_delivered import OrderedDelivered
from plait.client.consume.row_runs import RowMask, mask_runs
from plait.model.logical_partitions import runs_of
from plait.wire import messages as m

#: Ranges by the frame that delivered the rows; under None: plain sequence ranges, valid without a frame's tag.
RangesByFrame = dict[OrderedDelivered | None, list[EpochRange]]


class ReturnedRanges(NamedTuple):
    """Returned rows: ranges that mean all their rows of ``lps``, the tag of each, and the other ranges by frame."""

    lps: list[m.LpRun]
    ranges: list[EpochRange]
    tags: list[int]
    rest: RangesByFrame


def by_logical_partitions(tagged: RangesByFrame) -> ReturnedRanges:
    """Express returned rows by their LPs, for each frame where that takes fewer ranges."""
    chosen = no_lps()
    masks: dict[OrderedDelivered, RowMask] = {}
    rest: RangesByFrame = {}
    for frame, ranges in tagged.items():
        if frame is None or frame.keyed is None:
            rest[frame] = ranges
        else:
            masks[frame] = mask = frame.mask_in(ranges)
            chosen[frame.lps[mask & frame.keyed]] = True
    found: list[EpochRange] = []
    tags: list[int] = []
    for frame, mask in masks.items():
        assert frame.keyed is not None
        some = _between(frame, mask & frame.keyed, ~mask & (chosen[frame.lps] | ~frame.keyed))
        # Only the broker knows the LP of a row without a key.
        keyless = frame.tagged(mask_runs(mask & ~frame.keyed))
        if len(some) + len(keyless) >= len(tagged[frame]):
            some, keyless = [], tagged[frame]
        found += some
        tags += [frame.tag] * len(some)
        if keyless:
            rest[frame] = keyless
    return ReturnedRanges(runs_of(chosen), found, tags, rest)


def _between(frame: OrderedDelivered, rows: RowMask, excluded: RowMask) -> list[EpochRange]:
    """The ranges of a frame between the ``excluded`` rows that contain any of ``rows``."""
    edges = np.concatenate([[-1], np.flatnonzero(excluded), [frame.count]])
    counts = np.concatenate([[0], np.cumsum(rows)])
    first, end = edges[:-1] + 1, edges[1:]
    some = counts[end] > counts[first]
    return frame.tagged(list(zip(first[some].tolist(), end[some].tolist(), strict=True)))
