"""The cursor of an ordered group that each row belonged to over time. The group's events name cursors, not rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from plait.limits import LOGICAL_PARTITIONS
from plait.model.logical_partitions import Hashes, Lps
from plait.spark.auditing.group_facts import Change
from plait.spark.auditing.inputs.block_rows import BlockRows, Numbers
from plait.storage.logs.action_log import Action

#: The cursor that a group begins with.
FIRST_CURSOR = 1


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


class Layout:
    """The cursor of each of some rows, as of one place in the log. ``apply`` advances the place."""

    def __init__(self, rows: BlockRows) -> None:
        self._rows = rows
        self._lps: Lps = rows.lps
        self._hashes: Hashes | None = rows.hashes
        #: For each row, the place where its cursor joined another one that had passed the row. Every row that was not
        #: returned by then was done. -1: nowhere.
        self.joined_at = np.full(len(rows), -1, np.int64)
        self._by_lp = np.full(LOGICAL_PARTITIONS, FIRST_CURSOR, np.int64)
        #: Cursor of one key → the key's rows in this block.
        self._rows_of_key: dict[int, npt.NDArray[np.int64]] = {}
        #: For each row the cursor of its key. 0: the key has no cursor of its own. None: no key has one.
        self._by_key: npt.NDArray[np.int64] | None = None
        self._order: npt.NDArray[np.int64] | None = None

    def cursors(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The cursor of each of these rows."""
        found: npt.NDArray[np.int64] = self._by_lp[self._lps[rows]]
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
                rows = np.flatnonzero(self.cursors(np.arange(len(self._lps))) == number)
            elif self._by_key is not None:
                self._by_key[rows] = 0
            passed = rows[(self._rows.sequences[rows] < end) & (self._rows.epochs[rows] <= epoch)]
            self.joined_at[passed] = place
        elif action == Action.RESET:
            self._by_lp[:] = number
            self._rows_of_key = {}
            self._by_key = None
            self.joined_at[:] = -1

    def _hold(self, key: int, cursor: int) -> None:
        rows = self._with_hash(key)
        self._rows_of_key[cursor] = rows
        if len(rows):
            if self._by_key is None:
                self._by_key = np.zeros(len(self._lps), np.int64)
            self._by_key[rows] = cursor

    def _with_hash(self, key: int) -> npt.NDArray[np.int64]:
        if self._hashes is None:
            return np.empty(0, np.int64)
        if self._order is None:
            self._order = np.argsort(self._hashes, kind="stable")
        wanted = np.uint64(key)
        low = np.searchsorted(self._hashes, wanted, "left", sorter=self._order)
        high = np.searchsorted(self._hashes, wanted, "right", sorter=self._order)
        return self._order[low:high]
