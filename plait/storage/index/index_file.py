"""The file of a segment's index: written once, part by part, then mapped and searched.

The header names the segment by its base, its end and the checksums of its last frame: an index of another segment, or
of a segment that was cut and has grown again, is refused. Every block of entries and the table of parts have checksums.
The file gets its name when it is complete and durable.
"""

from __future__ import annotations

from struct import Struct
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from plait.errors import DamageError
from plait.frame.header import CRC_OFFSET, STAMP_CRC_OFFSET
from plait.storage.disk import Buffer, Disk, File
from plait.storage.index.index_part import BLOCK, PRODUCER, BlockSums, IndexPart, SortedEntries

DIRECTORY: Final = "index"
SUFFIX: Final = ".idx"
DRAFT: Final = ".new"
MAGIC: Final = b"PLIX"
VERSION: Final = 1
#: Magic, version; base, end; offset, checksum and stamp checksum of the last frame; position, size and checksum of the
#: table; number of parts; reserved.
_HEADER: Final = Struct("<4sIQQQIIQQIII")
_CRC: Final = Struct("<I")
HEADER_SIZE: Final = 80
assert _HEADER.size + _CRC.size <= HEADER_SIZE
#: Position and number of the key entries, of the id entries and of the producers.
_PART: Final = Struct("<QQQQQQ")
_ENTRY: Final = np.dtype("<u8")


class SegmentFacts(NamedTuple):
    """What identifies the indexed part of a segment: its log offsets, and its last frame."""

    base: int
    end: int
    last: int
    last_crc: int
    last_stamp_crc: int


def index_path(base: int) -> str:
    """The path of the index of the segment that begins at log offset ``base``."""
    return f"{DIRECTORY}/{base:020d}{SUFFIX}"


def base_of(name: str) -> int | None:
    """The base of the segment of an index file; None: the name is not that of an index."""
    number = name.removesuffix(SUFFIX)
    return int(number) if name.endswith(SUFFIX) and number.isdecimal() and len(number) == 20 else None


class IndexWriter:
    """Writes an index part by part. Blocks; the parts can be searched at once, the file counts after ``finish``."""

    def __init__(self, disk: Disk, base: int) -> None:
        self._disk = disk
        self._path = index_path(base)
        self._draft = self._path + DRAFT
        disk.make_directory(DIRECTORY)
        self._file: File = disk.open(self._draft, create=True)
        self._file.truncate(0)
        self._end = HEADER_SIZE
        self._table = b""
        self._sums = b""
        self._parts = 0

    def add(self, part: IndexPart) -> IndexPart:
        """Write a part. Returns it as it is in the file."""
        numbers: list[int] = []
        stored: list[Any] = []
        for array in (part.keys.entries, part.ids.entries, part.producers):
            numbers += [self._end, len(array)]
            self._write(array.data.cast("B") if len(array) else b"")
            stored.append(array.dtype)
        self._table += _PART.pack(*numbers)
        self._parts += 1
        view = self._file.view()
        keys, ids, producers = (
            np.frombuffer(view, dtype, numbers[2 * i + 1], numbers[2 * i]) for i, dtype in enumerate(stored)
        )
        sums = [_sums_of(keys), _sums_of(ids)]
        for each in sums:
            self._sums += each.fences.tobytes() + each.crcs.tobytes() + bytes(-4 * len(each.crcs) & 7)
        return IndexPart(SortedEntries(keys, sums[0]), SortedEntries(ids, sums[1]), producers)

    def _write(self, data: Buffer) -> None:
        if len(data):
            self._file.write([data], self._end)
            self._end += len(data)

    def finish(self, facts: SegmentFacts) -> None:
        """Make the file durable, then give it its name."""
        table = self._table + self._producer_sums() + self._sums
        at = self._end
        self._write(table)
        header = _HEADER.pack(MAGIC, VERSION, *facts, at, len(table), crc32c(table), self._parts, 0)
        self._file.write([header + _CRC.pack(crc32c(header)) + bytes(HEADER_SIZE - len(header) - 4)], 0)
        self._file.sync()
        self._file.close()
        self._disk.rename(self._draft, self._path)
        self._disk.sync_directory(DIRECTORY)

    def _producer_sums(self) -> bytes:
        view = self._file.view()
        crcs = []
        for index in range(self._parts):
            *_, at, count = _PART.unpack_from(self._table, index * _PART.size)
            crcs.append(crc32c(view[at : at + count * PRODUCER.itemsize]))
        return np.array(crcs, "<u4").tobytes() + bytes(-4 * len(crcs) & 7)

    def close(self) -> None:
        """Close the file without giving it its name; the next start removes it."""
        self._file.close()


def _sums_of(entries: npt.NDArray[np.uint64]) -> BlockSums:
    blocks = range(0, len(entries), BLOCK)
    crcs = [crc32c(entries[at : at + BLOCK].data.cast("B")) for at in blocks]
    return BlockSums(entries[::BLOCK].copy(), np.array(crcs, np.uint32))


class IndexFile:
    """A finished index, mapped. Raises ``DamageError`` wherever the file is not what was written."""

    def __init__(self, disk: Disk, base: int) -> None:
        self.path = index_path(base)
        file = disk.open(self.path)
        try:
            self.size = file.size
            # Small files are read: the number of mappings of a process is limited.
            view = file.view() if file.size >= 1 << 20 else memoryview(disk.read(self.path))
        finally:
            file.close()
        self.facts, self.parts = _parse(view, base)

    def matches(self, view: memoryview, base: int, end: int) -> bool:
        """Whether this is the index of a segment with this content, which ends at log offset ``end``."""
        facts = self.facts
        if (facts.base, facts.end) != (base, end):
            return False
        at = facts.last - base
        crcs = _CRC.unpack_from(view, at + CRC_OFFSET) + _CRC.unpack_from(view, at + STAMP_CRC_OFFSET)
        return crcs == (facts.last_crc, facts.last_stamp_crc)

    def verify(self) -> None:
        """Read the whole file; ``DamageError`` if a byte is wrong."""
        for part in self.parts:
            part.keys.verify()
            part.ids.verify()


def _parse(view: memoryview, base: int) -> tuple[SegmentFacts, tuple[IndexPart, ...]]:
    if len(view) < HEADER_SIZE:
        raise DamageError(f"an index of {len(view)} bytes has no header")
    magic, version, *rest = _HEADER.unpack_from(view)
    if magic != MAGIC or _CRC.unpack_from(view, _HEADER.size)[0] != crc32c(view[: _HEADER.size]):
        raise DamageError("the header of an index has a wrong checksum")
    if version != VERSION:
        raise DamageError(f"index version {version} is not {VERSION}")
    facts = SegmentFacts(*rest[:5])
    at, size, crc, count, _ = rest[5:]
    # An index begins at its segment's base and has its last frame inside.
    if facts.base != base or not base <= facts.last < facts.end:
        raise DamageError(f"an index of offsets {facts.base} to {facts.end} has the name of {base}")
    if at + size > len(view) or count * _PART.size > size or crc32c(view[at : at + size]) != crc:
        raise DamageError("the table of an index has a wrong checksum")
    return facts, tuple(_parts_of(view, view[at : at + size], count))


def _parts_of(view: memoryview, table: memoryview, count: int) -> list[IndexPart]:
    places = [_PART.unpack_from(table, index * _PART.size) for index in range(count)]
    at = count * _PART.size
    crcs = np.frombuffer(_cut(table, at, 4 * count), "<u4")
    at += 4 * count + (-4 * count & 7)
    found = []
    for index, (*entries, producers_at, producer_count) in enumerate(places):
        sorted_entries = []
        for position, number in (entries[:2], entries[2:]):
            data = np.frombuffer(_cut(view, position, 8 * number), _ENTRY)
            blocks = -(-number // BLOCK)
            fences = np.frombuffer(_cut(table, at, 8 * blocks), _ENTRY)
            at += 8 * blocks
            sums = np.frombuffer(_cut(table, at, 4 * blocks), "<u4")
            at += 4 * blocks + (-4 * blocks & 7)
            sorted_entries.append(SortedEntries(data, BlockSums(fences, sums)))
        raw = _cut(view, producers_at, producer_count * PRODUCER.itemsize)
        if crc32c(raw) != int(crcs[index]):
            raise DamageError("the producers of an index have a wrong checksum")
        producers = np.frombuffer(raw, PRODUCER)
        ends = producers["start"].astype(np.int64) + producers["count"]
        if len(ends) and int(ends.max()) > len(sorted_entries[1]):
            raise DamageError("the producers of an index have more runs than it has")
        keys, ids = sorted_entries
        found.append(IndexPart(keys, ids, producers))
    return found


def _cut(view: memoryview, at: int, size: int) -> memoryview:
    if at + size > len(view):
        raise DamageError(f"an index of {len(view)} bytes should have {size} bytes at {at}")
    return view[at : at + size]
