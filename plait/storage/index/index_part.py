"""``IndexPart``: where a part of a segment has the messages of a key, and of a producer.

An entry is a number of 64 bits whose low half is the position of a frame in its segment, in units of 8 bytes. The high
half is the upper half of a key hash, or a producer sequence relative to the first one of its producer. Sorted entries
are searched by halving. A key occurs once for each frame that has rows of it. Different keys can have the same entry,
so the caller compares the keys in the frame.
"""

from __future__ import annotations

from struct import Struct
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from plait.errors import DamageError

Entries = npt.NDArray[np.uint64]
Positions = npt.NDArray[np.int64]
#: The producers of a part. A producer has a record for each 2³² of its sequences: ``base`` is the first sequence, its
#: entries are [start, start + count), and no run has more than ``rows`` rows.
PRODUCER: Final = np.dtype(
    [("producer", "<u8"), ("base", "<u8"), ("start", "<u4"), ("count", "<u4"), ("rows", "<u4"), ("unused", "<u4")]
)
#: Runs as a builder collects them.
ID_RUN: Final = np.dtype([("producer", "<u8"), ("first", "<u8"), ("rows", "<u4"), ("place", "<u4")])
PACKED_RUN: Final = Struct("<QQII")
assert PACKED_RUN.size == ID_RUN.itemsize
#: Frames begin at multiples of 8 bytes.
UNIT: Final = 8
#: A position in these units has 32 bits.
POSITION_MAX: Final = UNIT << 32
#: Entries that have one checksum: a search reads one or two such blocks.
BLOCK: Final = 4096
_HALF: Final = np.uint64(32)
_LOW: Final = np.uint64(0xFFFF_FFFF)


class BlockSums(NamedTuple):
    """The first entry and the checksum of each block of entries in a file."""

    fences: Entries
    crcs: npt.NDArray[np.uint32]


class SortedEntries:
    """Ascending entries, in memory or in a mapped file whose blocks are verified when they are first read."""

    __slots__ = ("_sums", "_verified", "entries")

    def __init__(self, entries: Entries, sums: BlockSums | None = None) -> None:
        self.entries = entries
        self._sums = sums
        self._verified = bytearray(0 if sums is None else len(sums.crcs))

    def __len__(self) -> int:
        return len(self.entries)

    def between(self, low: int, high: int, start: int, end: int, limit: int) -> tuple[Positions, bool]:
        """The positions of entries [low, high] among those numbered [start, end), at most ``limit``; True: all."""
        first = self._find(low, "left", start, end)
        last = self._find(high, "right", start, end)
        whole = last - first <= limit
        last = min(last, first + limit)
        if self._sums is not None and last > first:
            for block in range(first // BLOCK, (last - 1) // BLOCK + 1):
                self._verify(block)
        places = self.entries[first:last] & _LOW
        return places.astype(np.int64) * UNIT, whole

    def _find(self, value: int, side: Any, start: int, end: int) -> int:
        wanted = np.uint64(value)
        if self._sums is not None and start < end:
            first, last = start // BLOCK, (end - 1) // BLOCK
            block = first + int(np.searchsorted(self._sums.fences[first + 1 : last + 1], wanted, side))
            self._verify(block)
            start, end = max(start, block * BLOCK), min(end, (block + 1) * BLOCK)
        return start + int(np.searchsorted(self.entries[start:end], wanted, side))

    def _verify(self, block: int) -> None:
        assert self._sums is not None
        if self._verified[block]:
            return
        entries = self.entries[block * BLOCK : (block + 1) * BLOCK]
        if crc32c(entries.data.cast("B")) != int(self._sums.crcs[block]):
            raise DamageError(f"block {block} of an index has a wrong checksum")
        self._verified[block] = 1

    def verify(self) -> None:
        """Check every block; ``DamageError`` if one is wrong."""
        for block in range(len(self._verified)):
            self._verify(block)


class IndexPart:
    """The keys and the message ids of consecutive frames of one segment."""

    __slots__ = ("ids", "keys", "producers")

    def __init__(self, keys: SortedEntries, ids: SortedEntries, producers: npt.NDArray[Any]) -> None:
        self.keys = keys
        self.ids = ids
        self.producers = producers

    def key(self, key_hash: int, position: int, limit: int) -> tuple[Positions, bool]:
        """Positions of frames that may have rows of a key, ascending from ``position`` on: at most ``limit``.

        True: these are all; otherwise there may be more after the last one.
        """
        low = key_hash >> 32 << 32
        return self.keys.between(low | position // UNIT, low | 0xFFFF_FFFF, 0, len(self.keys), limit)

    def message_id(self, producer: int, number: int, limit: int) -> Positions:
        """Positions of frames that may have a message: at most ``limit``, those with the nearest first sequences."""
        found = [np.empty(0, np.int64)]
        table, wanted = self.producers, np.uint64(producer)
        first = int(np.searchsorted(table["producer"], wanted, "left"))
        last = int(np.searchsorted(table["producer"], wanted, "right"))
        for _, base, start, count, rows, _ in table[first:last].tolist():
            low, high = number - rows + 1 - base, number - base
            if high < 0 or low >> 32 > 0:
                continue
            low, high = max(low, 0) << 32, min(high, 0xFFFF_FFFF) << 32 | 0xFFFF_FFFF
            positions, _ = self.ids.between(low, high, start, start + count, count)
            found.append(positions[-limit:])
        return np.unique(np.concatenate(found))


def key_entries(hashes: npt.NDArray[np.uint64], position: int) -> Entries:
    """The entries of the rows of one frame, in row order."""
    return (hashes >> _HALF << _HALF) | np.uint64(position // UNIT)


def distinct(entries: Entries) -> Entries:
    """Sorted entries, each once. Sorts ``entries`` in place."""
    entries.sort()
    if len(entries) < 2:
        return entries
    fresh = np.empty(len(entries), bool)
    fresh[0] = True
    np.not_equal(entries[1:], entries[:-1], out=fresh[1:])
    return entries if bool(fresh.all()) else entries[fresh]


def part_of(keys: Entries, runs: npt.NDArray[Any]) -> IndexPart:
    """A part in memory, from unsorted key entries (which are sorted in place) and the runs of the frames."""
    runs = runs[np.lexsort((runs["first"], runs["producer"]))]
    if not len(runs):
        return IndexPart(SortedEntries(distinct(keys)), SortedEntries(np.empty(0, np.uint64)), np.empty(0, PRODUCER))
    begins = np.ones(len(runs), bool)
    begins[1:] = runs["producer"][1:] != runs["producer"][:-1]
    index = np.cumsum(begins) - 1
    # A sequence is stored relative to the first one of its producer, in 32 bits.
    high = (runs["first"] - runs["first"][begins][index]) >> _HALF
    begins[1:] |= high[1:] != high[:-1]
    starts = np.flatnonzero(begins)
    bases = runs["first"][starts]
    counts = np.diff(np.append(starts, len(runs)))
    producers = np.zeros(len(starts), PRODUCER)
    producers["producer"], producers["base"] = runs["producer"][starts], bases
    producers["start"], producers["count"] = starts, counts
    producers["rows"] = np.maximum.reduceat(runs["rows"], starts)
    ids = (runs["first"] - np.repeat(bases, counts)) << _HALF | runs["place"].astype(np.uint64)
    # Runs with the same first sequence (copies of a message) are in any order so far.
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True) if _has_copies(ids) else ():
        ids[start : start + count].sort()
    return IndexPart(SortedEntries(distinct(keys)), SortedEntries(ids), producers)


def _has_copies(ids: Entries) -> bool:
    return len(ids) > 1 and bool((ids[1:] >> _HALF == ids[:-1] >> _HALF).any())


def joined(parts: list[IndexPart]) -> IndexPart:
    """One part in memory with the entries of several."""
    return part_of(np.concatenate([part.keys.entries for part in parts]), np.concatenate([*map(_runs_of, parts)]))


def _runs_of(part: IndexPart) -> npt.NDArray[Any]:
    """The runs of a part; each with the largest number of rows of its producer."""
    counts = part.producers["count"].astype(np.int64)
    runs = np.empty(len(part.ids), ID_RUN)
    runs["producer"] = np.repeat(part.producers["producer"], counts)
    runs["first"] = np.repeat(part.producers["base"], counts) + (part.ids.entries >> _HALF)
    runs["rows"] = np.repeat(part.producers["rows"], counts)
    runs["place"] = part.ids.entries & _LOW
    return runs
