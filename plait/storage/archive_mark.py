"""The archive mark: a note in a data directory that records how far its logs are archived. Retention reads it.

The archiver writes the mark after its commit, so the mark never claims more than the archive has. A missing or
unreadable mark means that nothing is archived: retention then keeps everything that waits for an archive.
"""

from __future__ import annotations

import msgspec
from crc32c import crc32c

from plait.storage.disk import Disk

PATH = "archived.json"


class ArchiveMark(msgspec.Struct, frozen=True):
    """Everything before these log offsets is in an archive and verified."""

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
        note = _decode_note(disk.read(PATH))
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
    if archived == before:
        return before
    raw = msgspec.json.encode(archived)
    data = msgspec.json.encode(_Note(crc32c(raw), msgspec.Raw(raw)))
    file = disk.open(f"{PATH}.new", create=True)
    try:
        file.write([data], 0)
        file.truncate(len(data))
        file.sync()
    finally:
        file.close()
    disk.rename(f"{PATH}.new", PATH)
    disk.sync_directory("")
    return archived
