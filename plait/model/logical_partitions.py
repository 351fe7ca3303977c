"""Logical partitions: the 1024 slots that order keys hash to.

The rule is frozen: xxh3_64 of the key's UTF-8 text (an integer as its decimal text), modulo 1024. A row without a key
has no slot of its own. Where one is needed, because every row has an owner, its sequence gives one; neighbours share
it, so that they can be handed out together.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from plait.frame.columns import Column
from plait.frame.view import FrameView
from plait.limits import LOGICAL_PARTITIONS

Hashes = npt.NDArray[np.uint64]
Lps = npt.NDArray[np.uint16]
#: Which of the logical partitions: 1024 of them.
LpSet = npt.NDArray[np.bool_]

#: What a keyless row has among rows with keys: the hash of no text, as clients write it.
NO_KEY_HASH: Final = np.uint64(xxh3_64_intdigest(b""))
_MASK: Final = np.uint64(LOGICAL_PARTITIONS - 1)
#: Keyless rows that stand together, as a power of two.
_BLOCK_BITS: Final = np.uint64(6)
_MIX: Final = np.uint64(0x9E37_79B9_7F4A_7C15)
_TOP: Final = np.uint64(64 - LOGICAL_PARTITIONS.bit_length() + 1)


def lp_of_key(key: str) -> int:
    """The slot of a key."""
    return int(xxh3_64_intdigest(key.encode())) % LOGICAL_PARTITIONS


def lps_of_sequences(sequences: npt.NDArray[np.int64]) -> Lps:
    """The slots of rows that have no key."""
    mixed = (sequences.astype(np.uint64) >> _BLOCK_BITS) * _MIX
    return (mixed >> _TOP).astype(np.uint16)


def key_hashes(frame: FrameView) -> Hashes | None:
    """The hash of each row's key; None: no row has one."""
    return frame.fixed(Column.KEY_HASH) if frame.has(Column.KEY_HASH) else None


def lps_of(sequences: npt.NDArray[np.int64], hashes: Hashes | None) -> Lps:
    """The slot of each row."""
    if hashes is None:
        return lps_of_sequences(sequences)
    lps = (hashes & _MASK).astype(np.uint16)
    keyless = hashes == NO_KEY_HASH
    if keyless.any():
        lps[keyless] = lps_of_sequences(sequences[keyless])
    return lps


def keyed_lps(frame: FrameView) -> Lps:
    """The slots of those rows that have keys."""
    hashes = key_hashes(frame)
    if hashes is None:
        return np.empty(0, np.uint16)
    lps: Lps = (hashes[hashes != NO_KEY_HASH] & _MASK).astype(np.uint16)
    return lps


def lp_set(runs: Iterable[tuple[int, int]]) -> LpSet:
    """The slots of runs [first, end)."""
    chosen = np.zeros(LOGICAL_PARTITIONS, bool)
    for first, end in runs:
        chosen[first:end] = True
    return chosen


@functools.cache
def single_lp(lp: int) -> LpSet:
    """One slot. All that ask share it, so it cannot be written to."""
    if not 0 <= lp < LOGICAL_PARTITIONS:
        raise ValueError(f"there is no logical partition {lp}")
    chosen = lp_set([(lp, lp + 1)])
    chosen.setflags(write=False)
    return chosen


def runs_of(chosen: LpSet) -> list[tuple[int, int]]:
    """The slots as runs [first, end)."""
    edges = ((chosen[1:] != chosen[:-1]).nonzero()[0] + 1).tolist()
    if chosen[0]:
        edges.insert(0, 0)
    if chosen[-1]:
        edges.append(len(chosen))
    return list(zip(edges[::2], edges[1::2], strict=True))


def runs_with(values: npt.NDArray[np.int64], chosen: LpSet) -> list[tuple[int, int, int]]:
    """The chosen slots as runs [first, end) of one value."""
    return [(first, end, int(values[first])) for first, end in runs_alike(chosen, values)]


def runs_alike(chosen: LpSet, *values: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """The chosen slots as runs [first, end) on which none of the values changes."""
    # Mostly there are none, or few that lie together.
    first, end = int(chosen.argmax()), len(chosen) - int(chosen[::-1].argmax())
    if not chosen[first]:
        return []
    within = chosen[first + 1 : end] & chosen[first : end - 1]
    cuts = chosen[first + 1 : end] != chosen[first : end - 1]
    for each in values:
        cuts |= within & (each[first + 1 : end] != each[first : end - 1])
    starts = [first, *(cuts.nonzero()[0] + first + 1).tolist()]
    ends = [*starts[1:], end]
    return [run for run, mine in zip(zip(starts, ends, strict=True), chosen[starts].tolist(), strict=True) if mine]
