"""Logical partitions (LPs): the 1024 slots that order keys hash to; sets of them, a number for each, and equal shares.

The hash is part of the format and never changes: xxh3_64 of the key's UTF-8 text (an integer as its decimal text),
modulo 1024. A row without a key still needs an LP, because every row has an owner: its LP is computed from its
sequence. Rows with neighbouring sequences share that LP, so that they are delivered together.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

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


Hashes = npt.NDArray[np.uint64]
Lps = npt.NDArray[np.uint16]
#: A set of LPs: one boolean for each of the 1024.
LpSet = npt.NDArray[np.bool_]

#: The key hash of a row without a key in a frame where other rows have keys: the hash of the empty text.
NO_KEY_HASH: Final = np.uint64(xxh3_64_intdigest(b""))
_MASK: Final = np.uint64(LOGICAL_PARTITIONS - 1)
#: The lowest bits of a key hash: the LP.
_LP_BITS: Final = np.uint64(LOGICAL_PARTITIONS.bit_length() - 1)
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


def without_lps(hashes: Hashes) -> Hashes:
    """What the hash of a key is in every row: a row that moved after a refusal has another LP in its hash (R6)."""
    return hashes >> _LP_BITS


def restamp(hashes: Hashes, lps: Hashes) -> Hashes:
    """Replace the LP in each hash by one of ``lps`` (R6). The upper bits, which distinguish keys, do not change."""
    keys = without_lps(hashes)
    stamped = keys << _LP_BITS | lps[(keys % np.uint64(len(lps))).astype(np.int64)]
    return np.where(hashes == NO_KEY_HASH, hashes, stamped)


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


class LpNumbers:
    """1024 numbers, immutable."""

    __slots__ = ("_lengths", "values")

    def __init__(self, values: Numbers, lengths: npt.NDArray[np.uint16]) -> None:
        #: The number of each run.
        self.values = values
        self._lengths = lengths

    @classmethod
    def of(cls, numbers: Numbers) -> LpNumbers:
        """Compress an array with the number of each logical partition."""
        edges = (numbers[1:] != numbers[:-1]).nonzero()[0]
        if len(edges):
            lengths = np.empty(len(edges) + 1, np.uint16)
            lengths[:-1], lengths[-1] = edges, LOGICAL_PARTITIONS - 1
            values = numbers[lengths]
            lengths[1:] -= lengths[:-1]
            lengths[0] += 1
            return cls(values, lengths)
        return cls(numbers[:1].copy(), _WHOLE) if numbers[0] else ZEROS

    def array(self) -> Numbers:
        """The number of each logical partition, as a new array that the caller may change."""
        return np.repeat(self.values, self._lengths)

    def any(self) -> bool:
        """True if at least one number is not zero."""
        return bool(self.values.any())

    def same(self, other: LpNumbers) -> bool:
        """True if all 1024 numbers are equal to those of ``other``."""
        equal = self.values.tobytes() == other.values.tobytes()
        return equal and self._lengths.tobytes() == other._lengths.tobytes()


_WHOLE = np.full(1, LOGICAL_PARTITIONS, np.uint16)
#: The number 0 for every logical partition.
ZEROS = LpNumbers(np.zeros(1, np.int64), _WHOLE)


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
