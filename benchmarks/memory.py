"""Memory that is really there before the clock runs.

A virtual machine gets its memory from the host at the first touch, page by page, and on some hosts gives freed pages
back at once: what is then measured is the host's page faults, at a fraction of the speed of anything here. Touching
as much as a measurement is about to use, and freeing it, leaves pages that are backed for everybody in it.
"""

from __future__ import annotations

import mmap

import psutil

PAGE_SIZE = 4096
#: Never more than this share of what is available.
SHARE_MAX = 0.5


def back_memory(size: int) -> None:
    """Touch and free ``size`` bytes."""
    size = min(size, int(psutil.virtual_memory().available * SHARE_MAX)) // PAGE_SIZE * PAGE_SIZE
    if size <= 0:
        return
    with mmap.mmap(-1, size) as memory:
        memory[::PAGE_SIZE] = b"\1" * (size // PAGE_SIZE)
