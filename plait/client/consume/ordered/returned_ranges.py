"""Rows that are given back and lie scattered in their frames, in few ranges: by their logical partitions.

Who hands over half of its logical partitions gives back every other row of what it has pulled ahead. "All of these
logical partitions in this range" says that of a whole frame, as far as none of their rows in it is in the user's hands.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from plait.client.consume.failure import EpochRange
from plait.client.consume.ordered.lock_rights import no_lps
from plait.client.consume.ordered.ordered_delivered import OrderedDelivered, RowMask
from plait.model.logical_partitions import runs_of
from plait.wire import messages as m

#: Ranges by the frames that the rows came in; None: of sequences, whatever they came in.
Tagged = dict[OrderedDelivered | None, list[EpochRange]]


class ReturnedRanges(NamedTuple):
    """What can be said of rows by their logical partitions, and the rest."""

    lps: list[m.LpRun]
    ranges: list[EpochRange]
    tags: list[int]
    rest: Tagged


def scoped(tagged: Tagged) -> ReturnedRanges:
    """The same rows by their logical partitions, where that takes fewer ranges."""
    chosen = no_lps()
    masks: dict[OrderedDelivered, RowMask] = {}
    rest: Tagged = {}
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
        # Where a row without a key belongs only the broker knows.
        keyless = frame.tagged(frame.runs(mask & ~frame.keyed))
        if len(some) + len(keyless) >= len(tagged[frame]):
            some, keyless = [], tagged[frame]
        found += some
        tags += [frame.tag] * len(some)
        if keyless:
            rest[frame] = keyless
    return ReturnedRanges(runs_of(chosen), found, tags, rest)


def _between(frame: OrderedDelivered, rows: RowMask, kept: RowMask) -> list[EpochRange]:
    """All of a frame between those that are kept, as far as there are rows in it."""
    edges = np.concatenate([[-1], np.flatnonzero(kept), [frame.count]])
    counts = np.concatenate([[0], np.cumsum(rows)])
    first, end = edges[:-1] + 1, edges[1:]
    some = counts[end] > counts[first]
    return frame.tagged([(a, b, frame.epoch) for a, b in zip(first[some].tolist(), end[some].tolist(), strict=True)])
