"""Equal shares of the logical partitions (LPs), with as few moves as possible."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from plait.limits import LOGICAL_PARTITIONS
from plait.model.lp_runs import Numbers, Run


def shares(count: int) -> list[Run]:
    """``count`` runs of LPs (1 to 1024 runs) that differ in length by at most one, in order, without gap or overlap."""
    if not 1 <= count <= LOGICAL_PARTITIONS:
        raise ValueError(f"{count} shares of {LOGICAL_PARTITIONS} LPs; use 1 to {LOGICAL_PARTITIONS}")
    edges = [index * LOGICAL_PARTITIONS // count for index in range(count + 1)]
    return list(pairwise(edges))


def balance(
    owners: Numbers, count: int, *, loose: NDArray[np.bool_] | None = None, wished: Numbers | None = None
) -> Numbers:
    """The new owner of each LP, from 0 to ``count`` - 1. The owners' shares differ by at most one LP.

    ``owners`` has the present owner of each LP, or -1 if it has none. As few LPs as possible move: an owner gives away
    only the LPs that exceed its share, and the owners with the most LPs get the larger shares. An owner first gives
    away LPs that are ``loose``. An LP that moves gets its ``wished`` owner while that owner's share has room. The
    result depends only on the arguments. If there are more owners than LPs, some owners get none.
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
    """``owners`` limited to each owner's quota: loose LPs lose their owner first, then the last LPs."""
    ranked = np.argsort(owners, kind="stable") if loose is None else np.lexsort((loose, owners))
    of = owners[ranked]
    # The rank of each LP among the LPs of its owner.
    rank = np.arange(LOGICAL_PARTITIONS) - np.searchsorted(of, of)
    kept = ranked[(of >= 0) & (rank < quota[of])]
    within = np.full(LOGICAL_PARTITIONS, -1, dtype=np.int64)
    within[kept] = owners[kept]
    return within


def _fill(balanced: Numbers, wished: Numbers, quota: Numbers) -> Numbers:
    """Give each LP without an owner to its wished owner, while that owner's quota has room."""
    room = quota - np.bincount(balanced[balanced >= 0], minlength=len(quota))
    return np.where(balanced < 0, _within(np.where(balanced < 0, wished, -1), room), balanced)
