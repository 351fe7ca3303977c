"""Rows in an owner's hands, known one by one, as arrays: which of its logical partitions have any.

A strand's ranges do not say that, as other strands' rows lie in them. It is looked up once, when somebody else is to
have the logical partitions, so that each passes on with its own last row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plait.limits import LOGICAL_PARTITIONS
from plait.model.logical_partitions import Hashes, Lps, LpSet


class HeldRowArrays(NamedTuple):
    """Rows by sequence, ascending."""

    sequences: npt.NDArray[np.int64]
    lps: Lps
    hashes: Hashes

    def where(self, chosen: npt.NDArray[np.bool_] | npt.NDArray[np.int64]) -> HeldRowArrays:
        """Some of them."""
        return HeldRowArrays(self.sequences[chosen], self.lps[chosen], self.hashes[chosen])


class HeldRows:
    """See the module."""

    __slots__ = ("_gone", "_rows", "counts")

    def __init__(self, rows: Mapping[int, HeldRowArrays]) -> None:
        """Rows by the tag under which they were handed out."""
        self._rows = dict(rows)
        #: Let go of, or taken out.
        self._gone = {tag: np.zeros(len(each.lps), bool) for tag, each in rows.items()}
        #: How many there are of each logical partition.
        self.counts = np.zeros(LOGICAL_PARTITIONS, np.int64)
        for each in rows.values():
            self.counts += _counted(each.lps)

    def let_go(self, tag: int, start: int, end: int) -> None:
        """Those in [start, end) are not in its hands any more."""
        rows = self._rows[tag]
        low, high = np.searchsorted(rows.sequences, (start, end)).tolist()
        gone = self._gone[tag][low:high]
        self.counts -= _counted(rows.lps[low:high][~gone])
        gone[:] = True

    def take(self, lps: LpSet, key: int | None) -> HeldRows:
        """Take out the rows of some logical partitions, or of one key."""
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
