"""Logical partitions (LPs): the 1024 slots that order keys hash to.

The hash is part of the format and never changes: xxh3_64 of the key's UTF-8 text (an integer as its decimal text),
modulo 1024. A row without a key still needs an LP, because every row has an owner: its LP is computed from its
sequence. Rows with neighbouring sequences share that LP, so that they are delivered together.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from plait.limits import LOGICAL_PARTITIONS
from plait.model.lp_runs import NumberedRun, Numbers, Run

Hashes = npt.NDArray[np.uint64]
Lps = npt.NDArray[np.uint16]
#: A set of LPs: one boolean for each of the 1024.
LpSet = npt.NDArray[np.bool_]

#: The key hash of a row without a key in a frame where other rows have keys: the hash of the empty text.
NO_KEY_HASH: Final = np.uint64(xxh3_64_intdigest(b""))
_MASK: Final = np.uint64(LOGICAL_PARTITIONS - 1)
#: Keyless rows that share an LP: 2 to this power.
_BLOCK_BITS: Final = np.uint64(6)
_MIX: Final = np.uint64(0x9E37_79B9_7F4A_7C15)
_TOP: Final = np.uint64(64 - LOGICAL_PARTITIONS.bit_length() + 1)


def lp_of_key(key: str) -> int:
    """The LP of a key."""
    return int(xxh3_64_intdigest(key.encode())) % LOGICAL_PARTITIONS


def lps_of_sequences(sequences: npt.NDArray[np.int64]) -> Lps:
    """The LPs of rows without a key."""
    mixed = (sequences.astype(np.uint64) >> _BLOCK_BITS) * _MIX
    return (mixed >> _TOP).astype(np.uint16)


def keyed_lps(hashes: Hashes | None) -> Lps:
    """The LPs of the rows that have a key; rows without one are left out."""
    if hashes is None:
        return np.empty(0, np.uint16)
    lps: Lps = (hashes[hashes != NO_KEY_HASH] & _MASK).astype(np.uint16)
    return lps


def lps_of(sequences: npt.NDArray[np.int64], hashes: Hashes | None) -> Lps:
    """The LP of each row. ``hashes`` is None when no row has a key."""
    if hashes is None:
        return lps_of_sequences(sequences)
    lps: Lps = (hashes & _MASK).astype(np.uint16)
    keyless = hashes == NO_KEY_HASH
    if keyless.any():
        lps[keyless] = lps_of_sequences(sequences[keyless])
    return lps


def lp_set(runs: Iterable[Run]) -> LpSet:
    """The set of the LPs in runs [first, end)."""
    chosen = np.zeros(LOGICAL_PARTITIONS, bool)
    for first, end in runs:
        chosen[first:end] = True
    return chosen


@functools.cache
def single_lp(lp: int) -> LpSet:
    """The set of one LP. The array is cached and shared, so it is read-only."""
    if not 0 <= lp < LOGICAL_PARTITIONS:
        raise ValueError(f"logical partition {lp} does not exist; use 0 to {LOGICAL_PARTITIONS - 1}")
    chosen = lp_set([(lp, lp + 1)])
    chosen.setflags(write=False)
    return chosen


def runs_of(chosen: LpSet) -> list[Run]:
    """The LPs of a set as runs [first, end)."""
    edges = ((chosen[1:] != chosen[:-1]).nonzero()[0] + 1).tolist()
    if chosen[0]:
        edges.insert(0, 0)
    if chosen[-1]:
        edges.append(len(chosen))
    return list(zip(edges[::2], edges[1::2], strict=True))


def runs_with(values: Numbers, chosen: LpSet) -> list[NumberedRun]:
    """The chosen LPs as runs (first, end, value) of equal values."""
    return [(first, end, int(values[first])) for first, end in runs_alike(chosen, values)]


def runs_alike(chosen: LpSet, *values: Numbers) -> list[Run]:
    """The chosen LPs as runs [first, end) in which each of the values stays the same."""
    # Usually the set is empty, or its LPs lie close together.
    first, end = int(chosen.argmax()), len(chosen) - int(chosen[::-1].argmax())
    if not chosen[first]:
        return []
    within = chosen[first + 1 : end] & chosen[first : end - 1]
    cuts = chosen[first + 1 : end] != chosen[first : end - 1]
    for each in values:
        cuts |= within & (each[first + 1 : end] != each[first : end - 1])
    starts = [first, *(cuts.nonzero()[0] + first + 1).tolist()]
    ends = [*starts[1:], end]
    return [run for run, inside in zip(zip(starts, ends, strict=True), chosen[starts].tolist(), strict=True) if inside]
