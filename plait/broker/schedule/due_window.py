"""The delayed rows that are due next, in the order they are due: all that are due before a moment that moves on."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from plait.storage.schedule.bucket import NEVER

#: ``bucket`` of rows that are in the message log alone: their number is where they are.
IN_LOG: Final = -1
#: When a row is due, its number and schedule partition, and its bucket, run and row.
SOON: Final = np.dtype(
    [("due", "<i8"), ("number", "<i8"), ("bucket", "<i8"), ("partition", "<u4"), ("run", "<u4"), ("row", "<u4")]
)
SoonRows = npt.NDArray[Any]


def soon_rows(due: Any, number: Any, partition: int, bucket: int = IN_LOG, run: int = 0, row: Any = 0) -> SoonRows:
    """Rows of one run, or of none."""
    rows = np.empty(len(due), SOON)
    rows["due"], rows["number"], rows["partition"] = due, number, partition
    rows["bucket"], rows["run"], rows["row"] = bucket, run, row
    return rows


class DueWindow:
    """Rows due before ``end``; of those due at it, some."""

    def __init__(self) -> None:
        self._rows: SoonRows = np.empty(0, SOON)
        #: Added and not put in order yet.
        self._added: list[SoonRows] = []
        self._added_due = NEVER
        self.end = 0

    def __len__(self) -> int:
        return len(self._rows) + sum(map(len, self._added))

    @property
    def next_due(self) -> int:
        """When the first row is due; ``NEVER`` where there is none."""
        return min(int(self._rows["due"][0]) if len(self._rows) else NEVER, self._added_due)

    def clear(self) -> None:
        """All rows go, and it ends before all others."""
        self._rows, self._added, self._added_due, self.end = np.empty(0, SOON), [], NEVER, 0

    def add(self, rows: SoonRows) -> None:
        """More rows, in any order."""
        if len(rows):
            self._added.append(rows)
            self._added_due = min(self._added_due, int(rows["due"].min()))

    @property
    def rows(self) -> SoonRows:
        """All rows in order."""
        if self._added:
            added = np.concatenate(self._added)
            added = added[np.lexsort((added["number"], added["due"]))]
            if len(added) * 4 > len(self._rows):
                rows = np.concatenate([self._rows, added])
                self._rows = rows[np.lexsort((rows["number"], rows["due"]))]
            else:
                at = np.searchsorted(self._rows["due"], added["due"], "right")
                self._rows = np.insert(self._rows, at, added)
            self._added, self._added_due = [], NEVER
        return self._rows

    def due(self, now: int, count: int) -> SoonRows:
        """The first rows that are due, at most ``count``; they stay."""
        rows = self.rows
        return rows[: min(int(np.searchsorted(rows["due"], now, "right")), count)]

    def took(self, count: int, left: SoonRows) -> None:
        """The first ``count`` rows left, but for some of them, which are given in their order."""
        rest = self.rows[count:]
        self._rows = np.concatenate([left, rest]) if len(left) else rest

    def remove(self, due: int, number: int, partition: int) -> bool:
        """One row goes; False where it is not here."""
        rows = self.rows
        low, high = np.searchsorted(rows["due"], due, "left"), np.searchsorted(rows["due"], due, "right")
        same = (rows["number"][low:high] == number) & (rows["partition"][low:high] == partition)
        found = low + np.flatnonzero(same)
        if len(found):
            self._rows = np.delete(rows, found)
        return len(found) > 0

    def remove_partition(self, partition: int, before: int | None = None) -> None:
        """The rows of a schedule partition go; with ``before`` only those in the log alone with lower numbers."""
        rows = self.rows
        gone = rows["partition"] == partition
        if before is not None:
            gone &= (rows["bucket"] == IN_LOG) & (rows["number"] < before)
        if gone.any():
            self._rows = rows[~gone]
