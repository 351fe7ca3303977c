"""Back memory with host pages before a measurement.

A virtual machine gets memory from its host page by page, at the first touch, and some hosts take freed pages back at
once. A benchmark would then measure the page faults of the host, which are far slower than anything measured here.
Touching as much memory as a measurement needs, and freeing it, leaves backed pages for every process in the machine.
"""

from __future__ import annotations

import mmap

import psutil

PAGE_SIZE = 4096
#: At most this share of the available memory.
SHARE_MAX = 0.5


def back_memory(size: int) -> None:
    """Touch and free ``size`` bytes."""
    size = min(size, int(psutil.virtual_memory().available * SHARE_MAX)) // PAGE_SIZE * PAGE_SIZE
    if size <= 0:
        return
    with mmap.mmap(-1, size) as memory:
        memory[::PAGE_SIZE] = b"\1" * (size // PAGE_SIZE)
