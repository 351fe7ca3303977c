"""Whether each key's messages were acked in their order.

Within a block rows are sorted by key and compared; a key's rows in other blocks are stood for by the earliest and the
latest of its acks there.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plait.frame.lp import NO_KEY_HASH
from plait.spark.auditing.judging import NEVER, Verdict
from plait.spark.auditing.rows import Numbers, Rows


class KeyTimes(NamedTuple):
    """Of each key of a block: when its first ack was, and the last of those that others had to wait for."""

    hashes: npt.NDArray[np.uint64]
    #: ``NEVER``: none of it was acked.
    earliest: Numbers
    #: -1: there was nothing to wait for.
    latest: Numbers


def out_of_order(rows: Rows, verdict: Verdict) -> tuple[Numbers, KeyTimes]:
    """Rows that were acked before an earlier one of their key, and what other blocks have to know."""
    none = np.empty(0, np.int64)
    if rows.hashes is None:
        return none, KeyTimes(np.empty(0, np.uint64), none, none)
    keyed = np.flatnonzero(rows.hashes != NO_KEY_HASH)
    # Rows ascend, and a stable sort leaves them so within each key.
    order = keyed[np.argsort(rows.hashes[keyed], kind="stable")]
    if not len(order):
        return none, KeyTimes(np.empty(0, np.uint64), none, none)
    hashes, at = rows.hashes[order], verdict.acked_at[order]
    begins = np.concatenate([[True], hashes[1:] != hashes[:-1]])
    starts = np.flatnonzero(begins)
    key = np.cumsum(begins) - 1
    waited_for = np.where(verdict.excused[order], -1, at)
    wrong = (at != NEVER) & (_latest_before(key, waited_for) > at)
    times = KeyTimes(hashes[starts], np.minimum.reduceat(at, starts), np.maximum.reduceat(waited_for, starts))
    return np.sort(order[wrong]), times


def crossings(groups: Numbers, hashes: Numbers, firsts: Numbers, times: tuple[Numbers, Numbers]) -> Numbers:
    """The group of each key and block in which the key's first ack came before its last one of an earlier block.

    ``firsts`` are the first sequences of the blocks, ``times`` the earliest and latest acks (``KeyTimes``).
    """
    order = np.lexsort((firsts, hashes, groups))
    groups, hashes = groups[order], hashes[order]
    earliest, latest = (each[order] for each in times)
    begins = np.ones(len(order), bool)
    begins[1:] = (groups[1:] != groups[:-1]) | (hashes[1:] != hashes[:-1])
    wrong = (earliest != NEVER) & (_latest_before(np.cumsum(begins) - 1, latest) > earliest)
    found: Numbers = groups[wrong]
    return found


def _latest_before(keys: Numbers, places: Numbers) -> Numbers:
    """For each row the highest place of those before it that have its key; -1: there are none. Keys ascend."""
    if not len(keys):
        return places
    # The running maximum of all keys at once: places as ranks, with the key's number above them.
    ranks, rank = np.unique(np.concatenate([[-1], places]), return_inverse=True)
    span = len(ranks)
    running = np.maximum.accumulate(keys * span + rank[1:]) - keys * span
    before = np.zeros(len(keys), np.int64)
    before[1:] = np.where(keys[1:] == keys[:-1], running[:-1], 0)
    found: Numbers = ranks[before]
    return found
