"""One simulated file: its contents in the page cache and on the medium.

Reads and views see every write in order. Writes reach the medium with a sync, or by themselves at any moment before:
each change is therefore recorded, as whole sectors as the cache showed them, until a sync settles it.
A crash then picks, per sector, any of the states it had since the last sync, and for the file's size any size
it had, or a sector boundary on the way there.

A cut is different: it frees the sectors above it. If it survives, none of their older states can come back;
if it is lost, what was later written above it is lost too, and so is every later change of the size.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal, NamedTuple

#: A disk writes this much or nothing of it.
SECTOR_SIZE = 512

#: What a crash leaves of the unsynced changes: a random choice, nothing, or everything.
Keep = Literal["random", "none", "all"]

#: How likely a change survives; drawn once per file and crash, so that nearly everything, nearly nothing and
#: the mixtures between are all common outcomes, however many sectors there are.
SURVIVAL_ODDS = (0.0, 0.1, 0.5, 0.9, 1.0)
#: How often the survivors are instead all changes before one moment, as an orderly write-back leaves them.
IN_ORDER_ODDS = 0.25
#: Settled changes are folded into the medium's image when they outgrow it, and at least this.
FOLD_SIZE_MIN = 64 * 1024


class UnsyncedChange(NamedTuple):
    """One unsynced change of a file."""

    number: int
    #: Where ``data`` belongs; a multiple of the sector size.
    offset: int
    #: Whole sectors, as the cache showed them right after the change.
    data: bytes
    #: The file's size after the change.
    size: int
    #: The file became shorter.
    cut: bool


class CachedFile:
    """The contents of one file, shared by all its handles."""

    def __init__(self, content: bytes = b"") -> None:
        self.size = len(content)
        #: Bytes from the beginning that have space on the disk; a file that was extended by ``truncate`` has less.
        self.reserved = self.size
        #: Changes made so far; a sync covers those below the value it saw when it began.
        self.changes = 0
        self._unsynced: list[UnsyncedChange] = []
        self._medium = content
        self._settled: list[UnsyncedChange] = []
        self._settled_size = 0
        # Until the first write or view the cache is these bytes, shared with other disks.
        self._frozen = content
        # Grown buffers are replaced, since a viewed one cannot be resized. The replaced ones are written too,
        # so that their views still show later writes; doubling keeps them smaller than the current one.
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
        """Cut, or extend with zeros."""
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
        """The changes below ``until`` are on the medium."""
        covered, self._unsynced = _split(self._unsynced, until)
        self._settled += covered
        self._settled_size += sum(len(change.data) for change in covered)
        if self._settled_size > max(FOLD_SIZE_MIN, len(self._medium)):
            self._fold()

    def fail_sync(self, until: int, rng: random.Random) -> None:
        """Some of the changes below ``until`` are on the medium; none of them will ever be written again.

        The cache still shows all of them, as on Linux. Cuts survive: they are not data to be written back.
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
        """The current buffer, made to hold at least ``size``; beyond the file's size it is zero."""
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
        """The contents that certainly survive a crash."""
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
