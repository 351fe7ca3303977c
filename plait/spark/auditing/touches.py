"""Which events are about which rows: joins the sequence ranges of events with the rows of a block.

The events of an ordered group name cursors. Which cursor a row belongs to changes over the log (``Layout``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from plait.limits import LOGICAL_PARTITIONS
from plait.model.logical_partitions import Lps
from plait.spark.auditing.block_arrays import BlockRows, Events, Numbers
from plait.spark.auditing.group_facts import Change, GroupFacts
from plait.storage.logs.action_events import Action

#: The most pairs of a row and an event in one batch. Bounds the memory for ranges of any length.
PAIRS_MAX: Final = 1 << 21
#: The cursor that a group begins with.
FIRST_CURSOR: Final = 1


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
    by_cursor = group.ordered and group.whole
    steps = _spans(events, group) if by_cursor else iter([(0, len(events))])
    layout = Layout(rows)
    applied = 0
    found: list[tuple[Numbers, Numbers]] = []
    for first, last in steps:
        if by_cursor:
            place = int(events["place"][first]) if first < len(events) else 0
            while applied < len(group.changes) and group.changes[applied][0] < place:
                layout.apply(group.changes[applied])
                applied += 1
        for begin, stop in _batches(low[first:last], high[first:last]):
            which, of = _pairs(low[first + begin : first + stop], high[first + begin : first + stop])
            of += first + begin
            # An event of an older epoch is about a row with the same sequence that was lost in a power failure.
            mine = rows.epochs[which] <= events["epoch"][of]
            if by_cursor:
                mine &= layout.cursors(which) == events["holder"][of]
            found.append((which[mine], of[mine]))
    for change in group.changes[applied:] if by_cursor else ():
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


# --- the cursors of an ordered group ------------------------------------------------------------


class Layout:
    """The cursor of each of some rows, as of one place in the log. ``apply`` advances the place."""

    def __init__(self, rows: BlockRows) -> None:
        self._rows = rows
        #: For each row, the place where its cursor joined another one that had passed the row. Every row that was not
        #: returned by then was done. -1: nowhere.
        self.joined_at = np.full(len(rows), -1, np.int64)
        self._by_lp = np.full(LOGICAL_PARTITIONS, FIRST_CURSOR, np.int64)
        #: Cursor of one key → the key's rows in this block.
        self._rows_of_key: dict[int, Numbers] = {}
        #: For each row the cursor of its key. 0: the key has no cursor of its own. None: no key has one.
        self._by_key: Numbers | None = None
        self._order: Numbers | None = None

    def cursors(self, rows: Numbers) -> Numbers:
        """The cursor of each of these rows."""
        found: Numbers = self._by_lp[self._rows.lps[rows]]
        if self._by_key is None:
            return found
        own = self._by_key[rows]
        return np.where(own, own, found)

    def apply(self, change: Change) -> None:
        """Apply the next change of the log."""
        place, action, number, start, end, value, epoch = change
        if action == Action.MOVE:
            slots = self._by_lp[start:end]
            slots[slots == number] = value
        elif action == Action.HOLD:
            self._hold(value % 2**64, end)
        elif action == Action.JOIN:
            rows = self._rows_of_key.pop(start, None)
            if rows is None:
                self._by_lp[self._by_lp == start] = number
                rows = np.flatnonzero(self.cursors(np.arange(len(self._rows))) == number)
            elif self._by_key is not None:
                self._by_key[rows] = 0
            passed = rows[(self._rows.sequences[rows] < end) & (self._rows.epochs[rows] <= epoch)]
            self.joined_at[passed] = place
        elif action == Action.REWIND:
            if number:
                self._by_lp[:] = number
                self._rows_of_key = {}
                self._by_key = None
            self.joined_at[:] = -1

    def _hold(self, key: int, cursor: int) -> None:
        hashes, wanted = self._rows.hashes, np.uint64(key)
        if self._order is None:
            self._order = np.argsort(hashes, kind="stable")
        low, high = (np.searchsorted(hashes, wanted, side, sorter=self._order) for side in ("left", "right"))
        rows = self._rows_of_key[cursor] = self._order[low:high]
        if len(rows):
            if self._by_key is None:
                self._by_key = np.zeros(len(self._rows), np.int64)
            self._by_key[rows] = cursor


def tenures(lps: Lps, places: Numbers, locks: Sequence[tuple[int, int, int, int]]) -> Numbers:
    """How often an owner had released or lost the LP of each row, up to a place of the action log."""
    owners = np.zeros(LOGICAL_PARTITIONS, np.int64)
    breaks: list[tuple[int, Numbers]] = []
    for place, owner, first, end in locks:
        here = owners[first:end]
        changed = first + np.flatnonzero((here != owner) & (here > 0))
        here[:] = owner
        if len(changed):
            breaks.append((place, changed))
    if not breaks:
        return np.zeros(len(lps), np.int64)
    moments = np.array([place for place, _ in breaks], np.int64)
    width = len(moments) + 1
    # Each change of each LP as one number, ascending by LP, then by place.
    codes = np.sort(np.concatenate([slots * width + index for index, (_, slots) in enumerate(breaks)]))
    mine = (lps.astype(np.int64) % LOGICAL_PARTITIONS) * width
    until = mine + np.searchsorted(moments, places, "right")
    found: Numbers = np.searchsorted(codes, until, "left") - np.searchsorted(codes, mine, "left")
    return found
