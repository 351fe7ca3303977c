"""Which events are about which rows: joins the sequence ranges of events with the rows of a block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from plait.spark.auditing.group_facts import GroupFacts
from plait.spark.auditing.inputs.block_rows import BlockRows, Numbers
from plait.spark.auditing.inputs.cursor_layout import Layout
from plait.spark.auditing.inputs.events import Events

#: The most pairs of a row and an event in one batch. Bounds the memory for ranges of any length.
PAIRS_MAX: Final = 1 << 21


@dataclass(frozen=True)
class Touches:
    """Pairs of a row and an event about it, sorted by row, then in log order."""

    rows: Numbers
    events: Numbers
    #: Of an ordered group, for each row, the place where its cursor joined another (``Layout.joined_at``).
    joined_at: Numbers | None = None


def touches(rows: BlockRows, events: Events, group: GroupFacts) -> Touches:
    """Join a group's events about rows, in log order, with some rows."""
    low = np.searchsorted(rows.sequences, events["start"])
    high = np.searchsorted(rows.sequences, events["end"])
    # Events of an ordered group name a cursor and apply only to its rows. The cursor of a row changes over the log.
    steps = _spans(events, group) if group.ordered and group.whole else iter([(0, len(events))])
    layout = Layout(rows)
    applied = 0
    found: list[tuple[Numbers, Numbers]] = []
    for first, last in steps:
        if group.ordered and group.whole:
            place = int(events["place"][first]) if first < len(events) else 0
            while applied < len(group.changes) and group.changes[applied][0] < place:
                layout.apply(group.changes[applied])
                applied += 1
        for begin, stop in _batches(low[first:last], high[first:last]):
            which, of = _pairs(low[first + begin : first + stop], high[first + begin : first + stop])
            of += first + begin
            # A row lost in a power failure had the same sequence: an event of an older epoch is about that row.
            mine = rows.epochs[which] <= events["epoch"][of]
            if group.ordered and group.whole:
                same = layout.cursors(which) == events["consumer"][of]
                mine &= same if rows.loose is None else same | rows.loose[which]
            found.append((which[mine], of[mine]))
    for change in group.changes[applied:] if group.ordered and group.whole else ():
        layout.apply(change)
    none = np.empty(0, np.int64)
    which, of = (np.concatenate([none, *each]) for each in zip(*found, strict=True)) if found else (none, none)
    order = np.argsort(which, kind="stable")
    return Touches(which[order], of[order], layout.joined_at if group.ordered else None)


def _spans(events: Events, group: GroupFacts) -> Iterator[tuple[int, int]]:
    """Ranges [first, last) of events between which no cursor changed."""
    places = np.array([change[0] for change in group.changes], np.int64)
    epoch = np.searchsorted(places, events["place"])
    edges = [0, *(np.flatnonzero(np.diff(epoch)) + 1).tolist(), len(events)]
    return pairwise(edges)


def _batches(low: Numbers, high: Numbers) -> Iterator[tuple[int, int]]:
    """Ranges [begin, stop) of events with at most ``PAIRS_MAX`` pairs, or one event that has more."""
    total = np.cumsum(high - low)
    begin = 0
    while begin < len(low):
        done = int(total[begin - 1]) if begin else 0
        stop = max(int(np.searchsorted(total, done + PAIRS_MAX, "right")), begin + 1)
        yield begin, stop
        begin = stop


def _pairs(low: Numbers, high: Numbers) -> tuple[Numbers, Numbers]:
    """Each row of each range [low, high), and the number of its range."""
    counts = high - low
    of = np.repeat(np.arange(len(low)), counts)
    which = np.arange(int(counts.sum())) + np.repeat(low - (np.cumsum(counts) - counts), counts)
    return which, of
