"""Numbers for each logical partition (LP), and runs of LPs with the same number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from plait.limits import LOGICAL_PARTITIONS

#: LPs [first, end).
Run = tuple[int, int]
#: LPs [first, end) and the number that they share: a partition's index, a fence or an epoch.
NumberedRun = tuple[int, int, int]
#: A number for each LP.
Numbers = NDArray[np.int64]


def spread(runs: Sequence[NumberedRun], missing: int = -1) -> Numbers:
    """The number of each LP; ``missing`` for an LP that is in no run."""
    numbers = np.full(LOGICAL_PARTITIONS, missing, dtype=np.int64)
    for first, end, number in runs:
        numbers[first:end] = number
    return numbers


def mark(runs: Sequence[Run]) -> NDArray[np.bool_]:
    """For each LP, whether it is in one of the runs."""
    marked = np.zeros(LOGICAL_PARTITIONS, dtype=np.bool_)
    for first, end in runs:
        marked[first:end] = True
    return marked


def edges(*columns: NDArray[np.generic]) -> Numbers:
    """The first LP of each run in which every column is constant, then the end of the last run."""
    changes = np.ones(LOGICAL_PARTITIONS + 1, dtype=np.bool_)
    inner = changes[1:-1]
    np.not_equal(columns[0][1:], columns[0][:-1], out=inner)
    for column in columns[1:]:
        inner |= column[1:] != column[:-1]
    return changes.nonzero()[0]


def cut(*columns: NDArray[np.generic]) -> list[int]:
    """``edges`` as a list of ints."""
    return list(edges(*columns).tolist())


def runs_where(marked: NDArray[np.bool_]) -> list[Run]:
    """The runs of LPs that are marked."""
    edges = np.flatnonzero(np.diff(marked, prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def runs_of(numbers: Numbers) -> list[NumberedRun]:
    """The runs of LPs with equal numbers; LPs with a negative number are left out."""
    edges = cut(numbers)
    values = numbers[edges[:-1]].tolist()
    return [run for run in zip(edges, edges[1:], values, strict=False) if run[2] >= 0]
