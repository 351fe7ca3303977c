"""Rows of a frame as runs, as masks and as row numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

RowMask = npt.NDArray[np.bool_]
#: Rows [first, end) of a frame.
Run = tuple[int, int]
#: One row, a slice of rows, or a mask over all rows.
RowSelection = int | slice | RowMask

#: Greater than any index of ``first_indexes``.
NEVER = np.iinfo(np.int64).max


def runs_in(numbers: npt.NDArray[np.int64]) -> list[Run]:
    """Ascending numbers as runs [first, end)."""
    if not len(numbers):
        return []
    first, last = int(numbers[0]), int(numbers[-1])
    if last - first < len(numbers):
        return [(first, last + 1)]
    breaks = np.flatnonzero(np.diff(numbers) != 1)
    starts = numbers[np.append(0, breaks + 1)]
    ends = numbers[np.append(breaks, len(numbers) - 1)] + 1
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def mask_runs(mask: RowMask) -> list[Run]:
    """The marked rows as runs."""
    return runs_in(np.flatnonzero(mask))


def rows_of(runs: list[Run]) -> npt.NDArray[np.int64]:
    """The row numbers of runs."""
    if not runs:
        return np.empty(0, np.int64)
    first, end = np.array(runs).T
    before = np.cumsum(end - first) - (end - first)
    rows: npt.NDArray[np.int64] = np.repeat(first - before, end - first) + np.arange(before[-1] + end[-1] - first[-1])
    return rows


def mask_of(rows: npt.NDArray[np.int64], count: int) -> RowMask:
    """A mask of these rows among ``count``."""
    mask = np.zeros(count, bool)
    mask[rows] = True
    return mask


def first_indexes(items: Sequence[RowSelection], count: int) -> npt.NDArray[np.int64]:
    """For each of ``count`` rows the index of the first item that contains it; ``NEVER``: none does."""
    first = np.full(count, NEVER)
    # Reversed: the earlier index overwrites the later one.
    rows = [(item, number) for number, item in enumerate(items) if isinstance(item, int)][::-1]
    if rows:
        at, numbers = np.array(rows).T
        first[at] = numbers
    for number, item in enumerate(items):
        if not isinstance(item, int):
            first[item] = np.minimum(first[item], number)
    return first
