"""The identity of a data directory: a random name, generated on first use and stored in the directory.

It distinguishes two brokers that are both called g1 by mistake, and identifies a broker that returns after a crash.
"""

from __future__ import annotations

import re

from plait import chance
from plait.errors import DataDirError
from plait.storage.disk import Disk

PATH = "identity"
_SIZE = 8


def known_identity(disk: Disk) -> str | None:
    """The identity, or None if the directory has none yet. ``DataDirError`` if the file is damaged."""
    if not disk.exists(PATH):
        return None
    known = disk.read(PATH)
    if not re.fullmatch(rb"[0-9a-f]{%d}" % (2 * _SIZE), known):
        # With a new name, the archiver would see another directory and archive its whole log again.
        raise DataDirError(
            f"{PATH} in the data directory is damaged. If the directory was archived, write its name to the file again "
            f"({2 * _SIZE} hexadecimal digits; the archive's manifest lists it among its sources as <group>-<name>). "
            "Otherwise remove the file; a new one is made"
        )
    return known.decode()


def identity(disk: Disk) -> str:
    """The identity; generated if the directory has none. Blocks until it is durable."""
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
