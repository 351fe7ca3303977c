"""Whether each key's messages were acked in their order.

Within a block, rows are sorted by key and compared. The rows of a key in another block are represented by the earliest
and the latest of its acks there.

The log does not record deliveries of an ordered group, and the owner may ack the rows that it holds in any order. So
within one partition, an ack that precedes the ack of an earlier message is wrong only if a later owner acked the
earlier message, or if the earlier message had failed before. Between two partitions that a key moved through, such an
ack is always wrong, because the second partition delivers no row of the key before the first partition is done with it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plait.model.logical_partitions import NO_KEY_HASH
from plait.spark.auditing.block_arrays import BlockRows, Numbers, begins_of
from plait.spark.auditing.verdicts import NEVER, GroupVerdict


class KeyTimes(NamedTuple):
    """For each key of a block: its first ack, and the last ack that later messages of the key had to wait for.

    Acks are log offsets or, for an ordered group within a partition, numbers of owners (``GroupVerdict.tenures``).
    """

    hashes: npt.NDArray[np.uint64]
    #: ``NEVER``: no message of the key was acked.
    earliest: Numbers
    #: -1: no message had to be waited for.
    latest: Numbers
    #: The place of its first row in the message log.
    places: Numbers


def out_of_order(rows: BlockRows, verdict: GroupVerdict) -> tuple[Numbers, KeyTimes]:
    """Rows that were acked before an earlier row of their key, and the key times for other blocks."""
    order, key = _by_key(rows, np.arange(len(rows)))
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
    """The key times of some rows, as log offsets."""
    order, _ = _by_key(rows, chosen)
    at = verdict.acked_at[order]
    return _times(rows, order, at, np.where(verdict.excused[order], -1, at))


def _by_key(rows: BlockRows, chosen: Numbers) -> tuple[Numbers, Numbers]:
    """The rows that have a key, sorted by key, and for each the number of its key."""
    keyed = chosen[rows.hashes[chosen] != NO_KEY_HASH]
    # Rows ascend; a stable sort keeps that order within each key.
    order = keyed[np.argsort(rows.hashes[keyed], kind="stable")]
    return order, np.cumsum(begins_of(rows.hashes[order])) - 1


def _times(rows: BlockRows, order: Numbers, at: Numbers, waited_for: Numbers) -> KeyTimes:
    hashes = rows.hashes[order]
    starts = np.flatnonzero(begins_of(hashes))
    places = rows.sequences if rows.places is None else rows.places
    earliest, latest = np.minimum.reduceat(at, starts), np.maximum.reduceat(waited_for, starts)
    return KeyTimes(hashes[starts], earliest, latest, places[order][starts])


def moved_crossings(
    groups: Numbers, hashes: Numbers, partitions: Numbers, facts: tuple[Numbers, Numbers, Numbers]
) -> Numbers:
    """The group of each key and partition that breaks the order: the key's first ack there precedes its last ack in the
    partition that the key moved from. ``facts``: places in the message log, earliest acks, latest acks."""
    places, earliest, latest = facts
    order = np.lexsort((places, hashes, groups))
    groups, hashes, partitions = groups[order], hashes[order], partitions[order]
    starts = np.flatnonzero(begins_of(groups, hashes, partitions))
    times = np.minimum.reduceat(earliest[order], starts), np.maximum.reduceat(latest[order], starts)
    return crossings(groups[starts], hashes[starts], places[order][starts], times)


def crossings(groups: Numbers, hashes: Numbers, firsts: Numbers, times: tuple[Numbers, Numbers]) -> Numbers:
    """The group of each key and block that breaks the order: the first ack precedes the last ack of an earlier block.

    ``firsts`` are the first sequences of the blocks, ``times`` the earliest and latest acks (``KeyTimes``).
    """
    order = np.lexsort((firsts, hashes, groups))
    groups, hashes = groups[order], hashes[order]
    earliest, latest = (each[order] for each in times)
    wrong = (earliest != NEVER) & (_latest_before(np.cumsum(begins_of(groups, hashes)) - 1, latest) > earliest)
    found: Numbers = groups[wrong]
    return found


def _latest_before(keys: Numbers, places: Numbers) -> Numbers:
    """For each row the highest place among the rows before it that have the same key. -1: none. Keys ascend."""
    if not len(keys):
        return places
    # One running maximum for all keys: places become ranks, and the key's number is the high-order part.
    ranks, rank = np.unique(np.concatenate([[-1], places]), return_inverse=True)
    span = len(ranks)
    running = np.maximum.accumulate(keys * span + rank[1:]) - keys * span
    before = np.zeros(len(keys), np.int64)
    before[1:] = np.where(keys[1:] == keys[:-1], running[:-1], 0)
    found: Numbers = ranks[before]
    return found
