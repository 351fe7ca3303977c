"""Fair shares of the logical partitions, with as few moves as there can be."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from plait.limits import LOGICAL_PARTITIONS
from plait.model.lp_runs import Numbers, Run


def shares(count: int) -> list[Run]:
    """The LPs of each of ``count`` equals, from 1 to 1024: in order, without gap or overlap."""
    if not 1 <= count <= LOGICAL_PARTITIONS:
        raise ValueError(f"{count} shares of {LOGICAL_PARTITIONS} LPs")
    edges = [index * LOGICAL_PARTITIONS // count for index in range(count + 1)]
    return list(pairwise(edges))


def balance(
    owners: Numbers, count: int, *, loose: NDArray[np.bool_] | None = None, wished: Numbers | None = None
) -> Numbers:
    """For each LP one of the owners 0 to ``count`` - 1, whose shares differ by one at most.

    ``owners`` has who owns it now, -1 for nobody. As many as can be stay where they are: an owner gives away only what
    is over its share, and the larger shares go to those that own the most. Of what it owns it gives away first
    what is ``loose``; what has to move goes where it is ``wished`` as far as shares allow. The same input gives the
    same output. More owners than LPs: some have none.
    """
    counts = np.bincount(owners[owners >= 0], minlength=count)
    small, larger = divmod(LOGICAL_PARTITIONS, count)
    quota = np.full(count, small, dtype=np.int64)
    quota[np.argsort(-counts, kind="stable")[:larger]] += 1
    balanced = _within(owners, quota, loose)
    if wished is not None:
        balanced = _fill(balanced, wished, quota)
    left = quota - np.bincount(balanced[balanced >= 0], minlength=count)
    balanced[balanced < 0] = np.repeat(np.arange(count), left)
    return balanced


def _within(owners: Numbers, quota: Numbers, loose: NDArray[np.bool_] | None = None) -> Numbers:
    """``owners`` with nobody above the quota: of what somebody has too much of, the loose ones and the last go."""
    ranked = np.argsort(owners, kind="stable") if loose is None else np.lexsort((loose, owners))
    of = owners[ranked]
    # How many of the same owner come before it.
    rank = np.arange(LOGICAL_PARTITIONS) - np.searchsorted(of, of)
    kept = ranked[(of >= 0) & (rank < quota[of])]
    within = np.full(LOGICAL_PARTITIONS, -1, dtype=np.int64)
    within[kept] = owners[kept]
    return within


def _fill(balanced: Numbers, wished: Numbers, quota: Numbers) -> Numbers:
    """What has no owner goes where it is wished, while there is room."""
    room = quota - np.bincount(balanced[balanced >= 0], minlength=len(quota))
    return np.where(balanced < 0, _within(np.where(balanced < 0, wished, -1), room), balanced)
