"""Whether each key's messages were acked in their order.

Within a block rows are sorted by key and compared; a key's rows in other blocks are stood for by the earliest and the
latest of its acks there.

What an ordered group has handed out is not in the log, and its owner may ack what it has in any order. So of one
partition an ack before an earlier message's counts as wrong where the earlier one was acked by a later owner, or had
failed before. Between partitions that a key moved through it always does: the second one hands out nothing of the key
before the first one is done with it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plait.model.logical_partitions import NO_KEY_HASH
from plait.spark.auditing.inputs.block_rows import BlockRows, Numbers
from plait.spark.auditing.verdicts import NEVER, GroupVerdict


class KeyTimes(NamedTuple):
    """Of each key of a block: when its first ack was, and the last of those that others had to wait for.

    As log offsets or, of an ordered group within a partition, as numbers of owners (``GroupVerdict.tenures``).
    """

    hashes: npt.NDArray[np.uint64]
    #: ``NEVER``: none of it was acked.
    earliest: Numbers
    #: -1: there was nothing to wait for.
    latest: Numbers
    #: Where in the message log its first row is.
    places: Numbers


def out_of_order(rows: BlockRows, verdict: GroupVerdict) -> tuple[Numbers, KeyTimes]:
    """Rows that were acked before an earlier one of their key, and what other blocks have to know."""
    order, key = _by_key(rows, np.arange(len(rows)))
    if not len(order):
        none = np.empty(0, np.int64)
        return none, KeyTimes(np.empty(0, np.uint64), none, none, none)
    at, excused = verdict.acked_at[order], verdict.excused[order]
    if verdict.tenures is None or verdict.failed_at is None:
        waited_for = np.where(excused, -1, at)
        wrong = (at != NEVER) & (_latest_before(key, waited_for) > at)
        times = _times(rows, order, at, waited_for)
        return np.sort(order[wrong]), times
    owner, failed_at = verdict.tenures[order], verdict.failed_at[order]
    owner_of_ack, waited_for = np.where(at == NEVER, NEVER, owner), np.where(excused, -1, owner)
    wrong = _latest_before(key, waited_for) > owner_of_ack
    held_back = ~excused & (failed_at != NEVER)
    failed_before = _latest_before(key, np.where(held_back, NEVER - failed_at, -1)) > NEVER - at
    wrong |= failed_before & (_latest_before(key, np.where(held_back, at, -1)) > at)
    return np.sort(order[wrong & (at != NEVER)]), _times(rows, order, owner_of_ack, waited_for)


def key_times(rows: BlockRows, verdict: GroupVerdict, chosen: Numbers) -> KeyTimes:
    """Of some rows, by log offsets."""
    order, _ = _by_key(rows, chosen)
    at = verdict.acked_at[order]
    return _times(rows, order, at, np.where(verdict.excused[order], -1, at))


def _by_key(rows: BlockRows, chosen: Numbers) -> tuple[Numbers, Numbers]:
    """Rows that have a key, each key's together, and the number of each one's key."""
    none = np.empty(0, np.int64)
    if rows.hashes is None:
        return none, none
    keyed = chosen[rows.hashes[chosen] != NO_KEY_HASH]
    # Rows ascend, and a stable sort leaves them so within each key.
    order = keyed[np.argsort(rows.hashes[keyed], kind="stable")]
    if not len(order):
        return none, none
    hashes = rows.hashes[order]
    return order, np.cumsum(np.concatenate([[True], hashes[1:] != hashes[:-1]])) - 1


def _times(rows: BlockRows, order: Numbers, at: Numbers, waited_for: Numbers) -> KeyTimes:
    none = np.empty(0, np.int64)
    if not len(order):
        return KeyTimes(np.empty(0, np.uint64), none, none, none)
    assert rows.hashes is not None
    hashes = rows.hashes[order]
    starts = np.flatnonzero(np.concatenate([[True], hashes[1:] != hashes[:-1]]))
    places = rows.sequences if rows.places is None else rows.places
    earliest, latest = np.minimum.reduceat(at, starts), np.maximum.reduceat(waited_for, starts)
    return KeyTimes(hashes[starts], earliest, latest, places[order][starts])


def moved_crossings(
    groups: Numbers, hashes: Numbers, partitions: Numbers, facts: tuple[Numbers, Numbers, Numbers]
) -> Numbers:
    """The group of each key and partition in which the key's first ack came before its last one in the partition that
    it came from. ``facts`` are the places in the message log, the earliest and the latest acks."""
    places, earliest, latest = facts
    order = np.lexsort((places, hashes, groups))
    groups, hashes, partitions = groups[order], hashes[order], partitions[order]
    if not len(order):
        return groups
    begins = np.ones(len(order), bool)
    same_key = (groups[1:] == groups[:-1]) & (hashes[1:] == hashes[:-1])
    begins[1:] = ~same_key | (partitions[1:] != partitions[:-1])
    starts = np.flatnonzero(begins)
    times = np.minimum.reduceat(earliest[order], starts), np.maximum.reduceat(latest[order], starts)
    return crossings(groups[starts], hashes[starts], places[order][starts], times)


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
