"""A log's mark: where its first kept file begins, and up to where it was durable when the mark was written.

Without it a log whose oldest files were deleted looks like one that retention shortened, and bytes that were
overwritten behind the last checkpoint look like a tail that never reached the disk. Retention writes the mark before
it removes files, and the server once a second while the log grows. A mark is 20 bytes, overwritten in place within one
sector: it needs no room on a full disk. It is written after the sync that it tells of, so an old one is true too.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

import msgspec
from crc32c import crc32c

from plait.storage.disk import Disk

SUFFIX: Final = ".mark"
_LAYOUT: Final = Struct("<QQ")
_SIZE: Final = _LAYOUT.size + 4


class DurableMark(msgspec.Struct, frozen=True):
    """What is known of a log beside its files."""

    #: The base of its first file: nothing from here on was removed on purpose.
    start: int
    #: Everything before this offset reached the disk.
    durable: int


def mark_path(directory: str) -> str:
    """The file of the mark of the log in this directory."""
    return directory + SUFFIX


def read_mark(disk: Disk, directory: str) -> DurableMark | None:
    """The mark of a log; None where there is none, or it does not read back."""
    path = mark_path(directory)
    data = disk.read(path) if disk.exists(path) else b""
    if len(data) < _SIZE or crc32c(data[: _LAYOUT.size]) != int.from_bytes(data[_LAYOUT.size : _SIZE], "little"):
        return None
    return DurableMark(*_LAYOUT.unpack_from(data))


def write_mark(disk: Disk, directory: str, mark: DurableMark, *, sync: bool) -> None:
    """Replace the mark. Without ``sync`` a power loss may bring the one before back."""
    data = _LAYOUT.pack(mark.start, mark.durable)
    file = disk.open(mark_path(directory), create=True)
    try:
        file.write([data + crc32c(data).to_bytes(4, "little")], 0)
        if sync:
            file.sync()
    finally:
        file.close()
