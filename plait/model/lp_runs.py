"""A number for each logical partition (LP), made from runs of LPs. Sets of LPs are in ``logical_partitions``."""

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


def edges(*columns: NDArray[np.generic]) -> Numbers:
    """The first LP of each run in which every column is constant, then the end of the last run."""
    changes = np.zeros(LOGICAL_PARTITIONS + 1, dtype=np.bool_)
    changes[[0, -1]] = True
    for column in columns:
        changes[1:-1] |= column[1:] != column[:-1]
    return changes.nonzero()[0]
