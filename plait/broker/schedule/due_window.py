"""The due window: the delayed rows that are due before a moving end, sorted by due time."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from plait.storage.schedule.bucket import NEVER

#: ``bucket`` of unbucketed rows: their number locates them in the message log.
IN_LOG: Final = -1
#: Due time, number and schedule partition of a row, and its bucket, run and row in the run.
SOON: Final = np.dtype(
    [("due", "<i8"), ("number", "<i8"), ("bucket", "<i8"), ("partition", "<u4"), ("run", "<u4"), ("row", "<u4")]
)
SoonRows = npt.NDArray[Any]


def soon_rows(due: Any, number: Any, partition: int, bucket: int = IN_LOG, run: int = 0, row: Any = 0) -> SoonRows:
    """An array of rows of one run, or of unbucketed rows."""
    rows = np.empty(len(due), SOON)
    rows["due"], rows["number"], rows["partition"] = due, number, partition
    rows["bucket"], rows["run"], rows["row"] = bucket, run, row
    return rows


class DueWindow:
    """Rows that are due before ``end``, and possibly some that are due exactly then."""

    def __init__(self) -> None:
        self._rows: SoonRows = np.empty(0, SOON)
        #: Added and not sorted yet.
        self._added: list[SoonRows] = []
        self._added_due = NEVER
        self.end = 0

    def __len__(self) -> int:
        return len(self._rows) + sum(map(len, self._added))

    @property
    def next_due(self) -> int:
        """Due time of the first row; ``NEVER`` when the window is empty."""
        return min(int(self._rows["due"][0]) if len(self._rows) else NEVER, self._added_due)

    def clear(self) -> None:
        """Remove all rows, and move ``end`` before every due time."""
        self._rows, self._added, self._added_due, self.end = np.empty(0, SOON), [], NEVER, 0

    def add(self, rows: SoonRows) -> None:
        """Add rows in any order."""
        if len(rows):
            self._added.append(rows)
            self._added_due = min(self._added_due, int(rows["due"].min()))

    @property
    def rows(self) -> SoonRows:
        """All rows, sorted by due time."""
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
        """The first due rows, at most ``count``; they stay in the window."""
        rows = self.rows
        return rows[: min(int(np.searchsorted(rows["due"], now, "right")), count)]

    def took(self, count: int, left: SoonRows) -> None:
        """Remove the first ``count`` rows, except for those in ``left``, which are in order."""
        rest = self.rows[count:]
        self._rows = np.concatenate([left, rest]) if len(left) else rest

    def remove(self, due: int, number: int, partition: int) -> bool:
        """Remove one row; False when it is not in the window."""
        rows = self.rows
        low, high = np.searchsorted(rows["due"], due, "left"), np.searchsorted(rows["due"], due, "right")
        same = (rows["number"][low:high] == number) & (rows["partition"][low:high] == partition)
        found = low + np.flatnonzero(same)
        if len(found):
            self._rows = np.delete(rows, found)
        return len(found) > 0

    def remove_partition(self, partition: int, before: int | None = None) -> None:
        """Remove the rows of a schedule partition; with ``before`` only unbucketed ones with lower numbers."""
        rows = self.rows
        gone = rows["partition"] == partition
        if before is not None:
            gone &= (rows["bucket"] == IN_LOG) & (rows["number"] < before)
        if gone.any():
            self._rows = rows[~gone]
