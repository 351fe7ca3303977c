"""How far a data directory is archived: a note that an archiver leaves there, for retention to read.

The archiver writes it after its commit, so it never says more than an archive holds. Where it is missing or does not
read back, nothing is archived: what waits for an archive then stays.
"""

from __future__ import annotations

import msgspec
from crc32c import crc32c

from plait.storage.disk import Disk

PATH = "archived.json"


class ArchiveMark(msgspec.Struct, frozen=True):
    """Everything before these log offsets is in an archive, verified."""

    message_offset: int = 0
    action_offset: int = 0
    #: Where, and as of which manifest.
    archive: str = ""
    manifest: int = 0
    #: Of the kept log; an archiver that knew nothing of it left none.
    kept_offset: int = 0


class _Note(msgspec.Struct, frozen=True):
    crc: int
    archived: msgspec.Raw


_decode_note = msgspec.json.Decoder(_Note).decode
_decode = msgspec.json.Decoder(ArchiveMark).decode


def read_archived(disk: Disk) -> ArchiveMark:
    """What the note says; offsets of 0 where there is none that can be believed."""
    try:
        note = _decode_note(disk.read(PATH))
        raw = bytes(note.archived)
        return _decode(raw) if crc32c(raw) == note.crc else ArchiveMark()
    except (OSError, msgspec.MsgspecError):
        return ArchiveMark()


def write_archived(disk: Disk, archived: ArchiveMark) -> ArchiveMark:
    """Leave the note, durably; offsets that an earlier one had further stay. What was written."""
    before = read_archived(disk)
    archived = msgspec.structs.replace(
        archived,
        message_offset=max(before.message_offset, archived.message_offset),
        action_offset=max(before.action_offset, archived.action_offset),
        kept_offset=max(before.kept_offset, archived.kept_offset),
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
