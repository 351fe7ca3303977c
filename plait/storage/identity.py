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


def identity(disk: Disk) -> str:
    """The directory's name. Blocks until it is durable."""
    if disk.exists(PATH):
        known = disk.read(PATH)
        if not re.fullmatch(rb"[0-9a-f]{%d}" % (2 * _SIZE), known):
            raise DataDirError(f"{PATH} in the data directory is damaged; remove it, and a new one is made")
        return known.decode()
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
