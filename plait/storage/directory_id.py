"""Which data directory this is: a name that was drawn when it was first needed, and stays with its files.

Two brokers that are both called g1 by mistake are told apart by it; one that comes back after a crash is known again.
"""

from __future__ import annotations

import re

from plait import chance
from plait.errors import DataDirError
from plait.storage.disk import Disk

PATH = "identity"
_SIZE = 8


def known_identity(disk: Disk) -> str | None:
    """The directory's name; None where none was needed yet. ``DataDirError`` where it does not read back."""
    if not disk.exists(PATH):
        return None
    known = disk.read(PATH)
    if not re.fullmatch(rb"[0-9a-f]{%d}" % (2 * _SIZE), known):
        # A new name would make it another directory: all of its log would be archived once more.
        raise DataDirError(
            f"{PATH} in the data directory is damaged. If it was archived, write its name there again, "
            f"{2 * _SIZE} hexadecimal digits: the archive's manifest has it among its sources as <group>-<name>. "
            "Otherwise remove the file, and a new one is made"
        )
    return known.decode()


def identity(disk: Disk) -> str:
    """The directory's name, drawn where it has none. Blocks until it is durable."""
    known = known_identity(disk)
    if known is not None:
        return known
    name = chance.token(_SIZE)
    file = disk.open(f"{PATH}.new", create=True)
    try:
        file.write([name.encode()], 0)
        file.truncate(len(name))
        file.sync()
    finally:
        file.close()
    disk.rename(f"{PATH}.new", PATH)
    disk.sync_directory("")
    return name
