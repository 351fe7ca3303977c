"""The small files of a data directory: its identity, the archive mark, and the durable marks of its logs."""

from __future__ import annotations

import re
from struct import Struct
from typing import Final

import msgspec
from crc32c import crc32c

from plait import chance
from plait.errors import DataDirError
from plait.storage.disk import Disk

IDENTITY: Final = "identity"
ARCHIVED: Final = "archived.json"
_IDENTITY_SIZE: Final = 8
_DURABLE: Final = Struct("<QQ")
_DURABLE_SIZE: Final = _DURABLE.size + 4


def write_file(disk: Disk, path: str, data: bytes, *, sync: bool = True) -> None:
    """Write a file, durably with ``sync``. An earlier file that is not larger is overwritten in place."""
    file = disk.open(path, create=True)
    try:
        if file.size > len(data):
            file.truncate(0)
        file.write([data], 0)
        if sync:
            file.sync()
    finally:
        file.close()


def replace_file(disk: Disk, path: str, data: bytes, *, draft: str = "") -> None:
    """Write a file durably and atomically: write ``draft``, a path in the same directory, then rename it."""
    draft = draft or f"{path}.new"
    write_file(disk, draft, data)
    disk.rename(draft, path)
    disk.sync_directory(path.rpartition("/")[0])


# --- the identity -------------------------------------------------------------------------------


def known_identity(disk: Disk) -> str | None:
    """The identity, or None if the directory has none yet. ``DataDirError`` if the file is damaged."""
    if not disk.exists(IDENTITY):
        return None
    known = disk.read(IDENTITY)
    if not re.fullmatch(rb"[0-9a-f]{%d}" % (2 * _IDENTITY_SIZE), known):
        # With a new identity, the archiver would treat the directory as another one and archive its whole log again.
        raise DataDirError(
            f"{IDENTITY} in the data directory is damaged. If the directory was archived, write its identity to the "
            f"file again ({2 * _IDENTITY_SIZE} hexadecimal digits; the archive's manifest has it among its sources, as "
            "<group>-<identity>). Otherwise remove the file; a new one is made"
        )
    return known.decode()


def identity(disk: Disk) -> str:
    """The random name of a data directory, generated on first use. Blocks until it is durable.

    It distinguishes two brokers that are both called g1 by mistake, and identifies a broker that returns after a crash.
    """
    known = known_identity(disk)
    if known is None:
        known = chance.token(_IDENTITY_SIZE)
        replace_file(disk, IDENTITY, known.encode())
    return known


# --- the archive mark ---------------------------------------------------------------------------


class ArchiveMark(msgspec.Struct, frozen=True):
    """Everything before these log offsets is in an archive and verified: retention may delete it.

    The archiver writes the mark after its commit, so the mark never claims more than the archive has. A missing or
    unreadable mark means that nothing is archived: retention then keeps everything that waits for an archive.
    """

    message_offset: int = 0
    action_offset: int = 0
    #: The location of the archive, and the number of its manifest.
    archive: str = ""
    manifest: int = 0
    #: The offset in the retained log.
    retained_offset: int = 0


class _Note(msgspec.Struct, frozen=True):
    crc: int
    archived: msgspec.Raw


_decode_note = msgspec.json.Decoder(_Note).decode
_decode = msgspec.json.Decoder(ArchiveMark).decode


def read_archived(disk: Disk) -> ArchiveMark:
    """The archive mark; all offsets are 0 if it is missing or damaged."""
    try:
        note = _decode_note(disk.read(ARCHIVED))
        raw = bytes(note.archived)
        return _decode(raw) if crc32c(raw) == note.crc else ArchiveMark()
    except (OSError, msgspec.MsgspecError):
        return ArchiveMark()


def write_archived(disk: Disk, archived: ArchiveMark) -> ArchiveMark:
    """Write the mark durably and return it. An offset never decreases: the larger of the old and the new is stored."""
    before = read_archived(disk)
    archived = msgspec.structs.replace(
        archived,
        message_offset=max(before.message_offset, archived.message_offset),
        action_offset=max(before.action_offset, archived.action_offset),
        retained_offset=max(before.retained_offset, archived.retained_offset),
    )
    if archived != before:
        raw = msgspec.json.encode(archived)
        replace_file(disk, ARCHIVED, msgspec.json.encode(_Note(crc32c(raw), msgspec.Raw(raw))))
    return archived


# --- durable marks ------------------------------------------------------------------------------


class DurableMark(msgspec.Struct, frozen=True):
    """The start of a log and an offset up to which it is durable.

    Without the mark, a log whose oldest files were deleted by mistake looks like one that retention shortened. Damage
    to bytes that were appended after the last checkpoint looks like a torn tail. Retention writes the mark before it
    removes files, and the server writes it once a second while the log grows. A mark is 20 bytes, overwritten in place
    within one sector, so it needs no space on a full disk. It is written after the sync that it records, so an old mark
    is still correct.
    """

    #: The base of the first file: retention removed nothing from this offset on.
    start: int
    #: Everything before this offset is durable.
    durable: int


def mark_path(directory: str) -> str:
    """The path of the mark of the log in ``directory``."""
    return f"{directory}.mark"


def read_mark(disk: Disk, directory: str) -> DurableMark | None:
    """The mark of a log, or None if it is missing or damaged."""
    path = mark_path(directory)
    data = disk.read(path) if disk.exists(path) else b""
    crc = int.from_bytes(data[_DURABLE.size : _DURABLE_SIZE], "little")
    if len(data) < _DURABLE_SIZE or crc32c(data[: _DURABLE.size]) != crc:
        return None
    return DurableMark(*_DURABLE.unpack_from(data))


def write_mark(disk: Disk, directory: str, mark: DurableMark, *, sync: bool) -> None:
    """Replace the mark. Without ``sync``, a power loss may restore the previous mark."""
    data = _DURABLE.pack(mark.start, mark.durable)
    write_file(disk, mark_path(directory), data + crc32c(data).to_bytes(4, "little"), sync=sync)
