"""One simulated file: its contents in the page cache and on the medium.

Reads and views see every write at once. A write reaches the medium with the next sync, or at any moment before it. So
the file records each change until a sync makes it durable: the whole sectors that it changed, with their new contents.
A crash chooses at random, for each sector, one of the states that the sector had since the last sync. For the file's
size it chooses one of the sizes since the last sync, or a sector boundary between two of them.

A cut makes the file shorter and frees the sectors above the new size. If the cut survives the crash, older states of
those sectors cannot come back. If the cut is lost, later writes above it and all later changes of the size are lost
as well.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal, NamedTuple

#: The disk writes a sector of this size either completely or not at all.
SECTOR_SIZE = 512

#: Which unsynced changes survive a crash: a random choice, none, or all.
Keep = Literal["random", "none", "all"]

#: Probabilities that an unsynced change survives. Each crash chooses one of them for each file. So in files of any size
#: it is common that nearly all changes survive, that nearly none survive, and that about half of them survive.
SURVIVAL_ODDS = (0.0, 0.1, 0.5, 0.9, 1.0)
#: The probability that a crash instead keeps exactly the changes before one moment, as if the disk wrote them in order.
IN_ORDER_ODDS = 0.25
#: Synced changes are applied to the medium's contents when they are larger than those contents and than this size.
FOLD_SIZE_MIN = 64 * 1024


class UnsyncedChange(NamedTuple):
    """One unsynced change of a file."""

    number: int
    #: The offset of ``data`` in the file; a multiple of the sector size.
    offset: int
    #: The changed sectors, with their contents right after the change.
    data: bytes
    #: The file's size after the change.
    size: int
    #: True if the change made the file shorter.
    cut: bool


class CachedFile:
    """The contents of one file, shared by all its handles."""

    def __init__(self, content: bytes = b"") -> None:
        self.size = len(content)
        #: The first ``reserved`` bytes of the file have space on the disk. The rest, which a ``truncate`` added, has
        #: none.
        self.reserved = self.size
        #: The number of changes so far. A sync makes the changes durable whose number is below its value at the sync's
        #: start.
        self.changes = 0
        self._unsynced: list[UnsyncedChange] = []
        self._medium = content
        self._settled: list[UnsyncedChange] = []
        self._settled_size = 0
        # The contents until the first write or view. Copies of the disk share these bytes.
        self._frozen = content
        # The last buffer is the current one. A buffer with views cannot be resized, so a larger buffer follows it.
        # Writes also go to the earlier buffers, so that their views show them. Each buffer is at least twice as large
        # as the one before, so the earlier buffers together are smaller than the current one.
        self._buffers: list[bytearray] = []
        self._viewed = False

    def read(self) -> bytes:
        if not self._buffers:
            return self._frozen
        return bytes(memoryview(self._buffers[-1])[: self.size])

    def view(self, size: int) -> memoryview:
        buffer = self._buffer(size)
        self._viewed = True
        return memoryview(buffer)[:size].toreadonly()

    def write(self, data: bytes, offset: int) -> None:
        if not data:
            return
        end = offset + len(data)
        current = self._buffer(end)
        for buffer in self._buffers:
            room = min(end, len(buffer)) - offset
            if room > 0:
                buffer[offset : offset + room] = data if room == len(data) else data[:room]
        self.size = max(self.size, end)
        self.reserved = max(self.reserved, end)
        start = offset - offset % SECTOR_SIZE
        self._record(start, bytes(memoryview(current)[start : _whole_sectors(end)]))

    def resize(self, size: int) -> None:
        """Make the file shorter, or extend it with zeros."""
        if size > self.size:
            self._buffer(size)
            self.size = size
            self._record(0, b"")
        elif size < self.size:
            current = self._buffer(self.size)
            for buffer in self._buffers:
                end = min(self.size, len(buffer))
                if end > size:
                    buffer[size:end] = bytes(end - size)
            self.size = size
            self.reserved = min(self.reserved, size)
            start = size - size % SECTOR_SIZE
            self._record(start, bytes(memoryview(current)[start : _whole_sectors(size)]), cut=True)

    def sync(self, until: int) -> None:
        """Make the changes with numbers below ``until`` durable."""
        covered, self._unsynced = _split(self._unsynced, until)
        self._settled += covered
        self._settled_size += sum(len(change.data) for change in covered)
        if self._settled_size > max(FOLD_SIZE_MIN, len(self._medium)):
            self._fold()

    def fail_sync(self, until: int, rng: random.Random) -> None:
        """Let a sync fail: a random part of the changes with numbers below ``until`` reaches the medium.

        The others are never written to the medium, although the cache still shows them, as on Linux. Cuts always
        survive, because they are not data that must be written back.
        """
        covered, self._unsynced = _split(self._unsynced, until)
        self._medium = _survivors(self._fold(), covered, rng, cuts_survive=True)

    def after_crash(self, rng: random.Random, keep: Keep) -> CachedFile:
        content = self._fold()
        if self._unsynced and keep == "all":
            content = _all(content, self._unsynced)
        elif self._unsynced and keep == "random":
            content = _survivors(content, self._unsynced, rng)
        return self._with_space(CachedFile(content))

    def copy(self) -> CachedFile:
        other = self._with_space(CachedFile(self.read()))
        other.changes = self.changes
        other._unsynced = self._unsynced.copy()
        other._medium = self._fold()
        return other

    def _with_space(self, other: CachedFile) -> CachedFile:
        other.reserved = min(self.reserved, other.size)
        return other

    def flip_bit(self, offset: int, bit: int) -> None:
        """Flip a bit in the cache, on the medium and in the unsynced changes."""
        mask = 1 << bit
        self._buffer(self.size)
        for buffer in self._buffers:
            if offset < len(buffer):
                buffer[offset] ^= mask
        self._medium = _flipped(self._fold(), offset, mask)
        self._unsynced = [
            change._replace(data=_flipped(change.data, offset - change.offset, mask)) for change in self._unsynced
        ]

    def _record(self, offset: int, data: bytes, *, cut: bool = False) -> None:
        self._unsynced.append(UnsyncedChange(self.changes, offset, data, self.size, cut))
        self.changes += 1

    def _buffer(self, size: int) -> bytearray:
        """Return the current buffer, grown to at least ``size``. Its bytes beyond the file's size are zero."""
        if not self._buffers:
            self._buffers.append(_zeros_after(self._frozen, max(size, self.size)))
            self._frozen = b""
        elif len(self._buffers[-1]) < size:
            grown = _zeros_after(self._buffers[-1], max(size, 2 * len(self._buffers[-1])))
            if not self._viewed:
                self._buffers.pop()
            self._buffers.append(grown)
            self._viewed = False
        return self._buffers[-1]

    def _fold(self) -> bytes:
        """Apply the synced changes to the medium, and return its contents: those that survive every crash."""
        if self._settled:
            self._medium = _all(self._medium, self._settled)
            self._settled = []
            self._settled_size = 0
        return self._medium


def _whole_sectors(size: int) -> int:
    return -(-size // SECTOR_SIZE) * SECTOR_SIZE


def _zeros_after(content: bytes | bytearray, size: int) -> bytearray:
    buffer = bytearray(_whole_sectors(size))
    buffer[: len(content)] = content
    return buffer


def _split(changes: list[UnsyncedChange], until: int) -> tuple[list[UnsyncedChange], list[UnsyncedChange]]:
    covered = [change for change in changes if change.number < until]
    return covered, changes[len(covered) :]


def _flipped(content: bytes, offset: int, mask: int) -> bytes:
    if not 0 <= offset < len(content):
        return content
    return content[:offset] + bytes((content[offset] ^ mask,)) + content[offset + 1 :]


def _fit(image: bytearray, size: int) -> None:
    if len(image) > size:
        del image[size:]
    else:
        image.extend(bytes(size - len(image)))


def _put(image: bytearray, offset: int, data: bytes) -> None:
    if data:
        if len(image) < offset:
            _fit(image, offset)
        image[offset : offset + len(data)] = data


def _all(medium: bytes, changes: Sequence[UnsyncedChange]) -> bytes:
    image = bytearray(medium)
    for change in changes:
        _put(image, change.offset, change.data)
        _fit(image, change.size)
    return bytes(image)


def _survivors(
    medium: bytes, changes: Sequence[UnsyncedChange], rng: random.Random, *, cuts_survive: bool = False
) -> bytes:
    odds = rng.choice(SURVIVAL_ODDS)
    if not cuts_survive and rng.random() < IN_ORDER_ODDS:
        return _all(medium, changes[: rng.randrange(len(changes) + 1)])
    if odds == 1.0:
        return _all(medium, changes)
    image = bytearray(medium)
    sizes = [len(image)]
    states: dict[int, list[bytes]] = {}
    lost_above: int | None = None
    for change in changes:
        if change.cut:
            if lost_above is None and (cuts_survive or rng.random() < odds):
                del image[change.size :]
                sizes = [change.size]
                _cut_states(states, change.size)
            else:
                lost_above = change.size if lost_above is None else min(lost_above, change.size)
        elif lost_above is None and change.size != sizes[-1]:
            sizes.append(change.size)
        for start in range(0, len(change.data), SECTOR_SIZE):
            offset = change.offset + start
            if lost_above is None or offset < lost_above:
                states.setdefault(offset, []).append(change.data[start : start + SECTOR_SIZE])
    size = sizes[-1] if rng.random() < odds else _earlier_size(sizes, rng)
    for offset, history in states.items():
        if offset >= size:
            continue
        if rng.random() < odds:
            _put(image, offset, history[-1])
        elif (age := rng.randrange(len(history))) > 0:
            _put(image, offset, history[-1 - age])
    _fit(image, size)
    return bytes(image)


def _cut_states(states: dict[int, list[bytes]], size: int) -> None:
    for offset in [offset for offset in states if offset + SECTOR_SIZE > size]:
        history = states.pop(offset)
        if offset < size:
            states[offset] = [state[: size - offset].ljust(SECTOR_SIZE, b"\0") for state in history]


def _earlier_size(sizes: Sequence[int], rng: random.Random) -> int:
    step = rng.randrange(len(sizes))
    if step == 0:
        return sizes[0]
    low, high = sizes[step - 1], sizes[step]
    return max(low, rng.randint(low // SECTOR_SIZE, high // SECTOR_SIZE) * SECTOR_SIZE)
