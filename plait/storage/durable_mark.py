"""The durable mark of a log: the offset of its first file, and an offset up to which the log was durable.

Without the mark, a log whose oldest files were deleted by mistake looks like one that retention shortened, and bytes
that were overwritten after the last checkpoint look like a torn tail. Retention writes the mark before it removes
files, and the server writes it once a second while the log grows. A mark is 20 bytes, overwritten in place within one
sector, so it needs no space on a full disk. It is written after the sync that it records, so an old mark is still
correct.
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
    """The start of a log and an offset up to which it is durable."""

    #: The base of the first file: retention removed nothing from this offset on.
    start: int
    #: Everything before this offset is durable.
    durable: int


def mark_path(directory: str) -> str:
    """The path of the mark of the log in ``directory``."""
    return directory + SUFFIX


def read_mark(disk: Disk, directory: str) -> DurableMark | None:
    """The mark of a log, or None if it is missing or damaged."""
    path = mark_path(directory)
    data = disk.read(path) if disk.exists(path) else b""
    if len(data) < _SIZE or crc32c(data[: _LAYOUT.size]) != int.from_bytes(data[_LAYOUT.size : _SIZE], "little"):
        return None
    return DurableMark(*_LAYOUT.unpack_from(data))


def write_mark(disk: Disk, directory: str, mark: DurableMark, *, sync: bool) -> None:
    """Replace the mark. Without ``sync`` the previous mark may be back after a power loss."""
    data = _LAYOUT.pack(mark.start, mark.durable)
    file = disk.open(mark_path(directory), create=True)
    try:
        file.write([data + crc32c(data).to_bytes(4, "little")], 0)
        if sync:
            file.sync()
    finally:
        file.close()
