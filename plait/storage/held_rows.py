"""The individual rows of a cursor that its owner holds, as arrays, to find the logical partitions (LPs) they are in.

The ranges of a cursor do not show this, because rows of other cursors lie in the same ranges. The rows are looked up
once, when LPs are to move to another owner. Each LP can then move as soon as its own last row is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plait.limits import LOGICAL_PARTITIONS
from plait.model.logical_partitions import Hashes, Lps, LpSet


class HeldRowArrays(NamedTuple):
    """Rows in ascending order of their sequences."""

    sequences: npt.NDArray[np.int64]
    lps: Lps
    hashes: Hashes

    def where(self, chosen: npt.NDArray[np.bool_] | npt.NDArray[np.int64]) -> HeldRowArrays:
        return HeldRowArrays(self.sequences[chosen], self.lps[chosen], self.hashes[chosen])


class HeldRows:
    """The rows of one cursor that its owner holds, by delivery tag."""

    __slots__ = ("_gone", "_rows", "counts")

    def __init__(self, rows: Mapping[int, HeldRowArrays]) -> None:
        self._rows = dict(rows)
        #: Delivery tag → a mask of its rows: True if a row is no longer held, or was moved to another cursor.
        self._gone = {tag: np.zeros(len(each.lps), bool) for tag, each in rows.items()}
        #: The number of held rows of each LP.
        self.counts = np.zeros(LOGICAL_PARTITIONS, np.int64)
        for each in rows.values():
            self.counts += _counted(each.lps)

    def let_go(self, tag: int, start: int, end: int) -> None:
        rows = self._rows[tag]
        low, high = np.searchsorted(rows.sequences, (start, end)).tolist()
        gone = self._gone[tag][low:high]
        self.counts -= _counted(rows.lps[low:high][~gone])
        gone[:] = True

    def take(self, lps: LpSet, key: int | None) -> HeldRows:
        """Remove the rows of some LPs, or of one key, and return them."""
        taken: dict[int, HeldRowArrays] = {}
        for tag, rows in self._rows.items():
            chosen = lps[rows.lps] if key is None else rows.hashes == np.uint64(key)
            chosen &= ~self._gone[tag]
            self._gone[tag] |= chosen
            taken[tag] = rows.where(chosen)
        part = HeldRows(taken)
        self.counts -= part.counts
        return part


def _counted(lps: Lps) -> npt.NDArray[np.int64]:
    return np.bincount(lps, minlength=LOGICAL_PARTITIONS)
