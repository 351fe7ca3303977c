"""Whether a partition's messages were stored as their producers sent them, independent of consumer groups.

It checks three promises:

- No row of an LP is stored at or after the *fence* of the LP, where no route leads any more.
- No message is stored twice.
- On a ``strict`` subject, the messages of one key and one producer are stored in the order of sending.

Within a block, rows are sorted and compared with their neighbours. Between blocks, small facts are compared: the
producer sequences of a block, 64 to a fact, and the lowest and the highest producer sequence of each key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from plait.limits import LOGICAL_PARTITIONS
from plait.model.logical_partitions import NO_KEY_HASH, Lps, lp_set
from plait.spark.auditing.block_arrays import BlockRows, Flags, Numbers, UInt64s, begins_of

#: One fact has 2 ** WINDOW_BITS producer sequences, one bit each.
WINDOW_BITS = 6
_MIX = np.uint64(0x9E37_79B9_7F4A_7C15)
_BEYOND = np.iinfo(np.int64).max


class Windows(NamedTuple):
    """The message ids of a block, as bit sets."""

    producers: UInt64s
    #: A window is the producer sequences [64 * window, 64 * window + 64); ``bits`` has those that the block has.
    windows: Numbers
    bits: UInt64s


class KeyNumbers(NamedTuple):
    """For each key and producer of a block: a hash of both, and the lowest and highest producer sequence."""

    hashes: UInt64s
    least: Numbers
    greatest: Numbers


def astray(
    sequences: Numbers,
    lps: Lps,
    taken: Sequence[tuple[int, list[tuple[int, int]]]],
    fences: Sequence[tuple[int, int, int]],
) -> Flags:
    """True for rows of LPs that the partition did not accept when the rows were stored.

    ``taken``: (sequence, the LPs whose rows the partition accepts from that sequence on). ``fences``: (first, end,
    sequence): the partition accepts no rows of the LPs [first, end) from that sequence on.
    """
    ends = np.full(LOGICAL_PARTITIONS, _BEYOND)
    for first, end, fence in fences:
        ends[first:end] = fence
    slots = lps.astype(np.int64) % LOGICAL_PARTITIONS
    found: Flags = sequences >= ends[slots]
    since = np.searchsorted([start for start, _ in taken], sequences, "right") - 1
    for index in np.unique(since[since >= 0]).tolist():
        mine = since == index
        found[mine] |= ~lp_set(taken[index][1])[slots[mine]]
    return found


def judge_stored(rows: BlockRows, *, strict: bool) -> dict[str, Numbers]:
    """Row numbers of the broken promises, by name."""
    found = {"behind_fence": np.flatnonzero(rows.astray)}
    producers, numbers = rows.ids
    if _ascend(producers, numbers):
        return found
    order = np.lexsort((numbers, producers))
    # Rows ascend and the sort is stable: of two equal ids the second one is the duplicate.
    same = (producers[order][1:] == producers[order][:-1]) & (numbers[order][1:] == numbers[order][:-1])
    found["stored_twice"] = np.sort(order[1:][same])
    if strict:
        chosen = _of_keys(rows)
        keys, numbers = _mixed(rows, chosen), numbers[chosen]
        order = np.argsort(keys, kind="stable")
        before, now = order[:-1], order[1:]
        wrong = (keys[before] == keys[now]) & (numbers[now] < numbers[before])
        found["stored_out_of_order"] = np.sort(chosen[now[wrong]])
    return found


def windows_of(rows: BlockRows) -> Windows:
    """The message ids of a block, by which duplicates in other blocks are found."""
    producers, numbers = rows.ids
    windows = (numbers >> np.uint64(WINDOW_BITS)).astype(np.int64)
    bits = np.uint64(1) << (numbers & np.uint64((1 << WINDOW_BITS) - 1))
    if not _ascend(producers, numbers):
        order = np.lexsort((windows, producers))
        producers, windows, bits = producers[order], windows[order], bits[order]
    starts = np.flatnonzero(begins_of(producers, windows))
    return Windows(producers[starts], windows[starts], np.bitwise_or.reduceat(bits, starts))


def stored_again(ids: Numbers, producers: Numbers, windows: Numbers, bits: Numbers) -> Numbers:
    """For each duplicate of a message in another block, the number of its subject (from ``ids``)."""
    order = np.lexsort((windows, producers, ids))
    ids, producers, windows = ids[order], producers[order], windows[order]
    there = bits[order].view(np.uint64)
    starts = np.flatnonzero(begins_of(ids, producers, windows))
    counts = np.add.reduceat(np.bitwise_count(there).astype(np.int64), starts)
    again = counts - np.bitwise_count(np.bitwise_or.reduceat(there, starts))
    return np.repeat(ids[starts], again)


def key_numbers(rows: BlockRows) -> KeyNumbers:
    """The producer sequences of each key, by which keys stored out of order across blocks are found."""
    chosen = _of_keys(rows)
    keys, numbers = _mixed(rows, chosen), rows.ids[1][chosen].astype(np.int64)
    order = np.argsort(keys, kind="stable")
    keys, numbers = keys[order], numbers[order]
    starts = np.flatnonzero(begins_of(keys))
    return KeyNumbers(keys[starts], np.minimum.reduceat(numbers, starts), np.maximum.reduceat(numbers, starts))


def _ascend(producers: UInt64s, numbers: UInt64s) -> bool:
    """Whether all rows are of one producer and in order, as in most blocks of a partition with one producer."""
    return bool((producers == producers[:1]).all() and (numbers[1:] > numbers[:-1]).all())


def _of_keys(rows: BlockRows) -> Numbers:
    """Rows for which the order of sending is promised: they have a key and were neither delayed nor sent one-way."""
    return np.flatnonzero((rows.hashes != NO_KEY_HASH) & ~rows.unordered)


def _mixed(rows: BlockRows, chosen: Numbers) -> UInt64s:
    """A hash of key and producer for each row."""
    mixed: UInt64s = rows.hashes[chosen] ^ (rows.ids[0][chosen] * _MIX)
    return mixed
