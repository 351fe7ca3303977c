"""Settings of glibc's malloc for large buffers.

By default glibc maps each buffer of 128 KiB or more separately. Every receive buffer then takes page faults that cost
ten times as much as receiving into it. Below the thresholds set here, buffers are reused from the heap.
"""

from __future__ import annotations

import ctypes
import os

from plait.limits import MIB

#: From glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
#: The highest value that glibc accepts; the largest frame is smaller.
MMAP_THRESHOLD = 32 * MIB
#: Free heap memory above this is returned to the system.
TRIM_THRESHOLD = 64 * MIB


def keep_buffers() -> bool:
    """Raise the thresholds. Returns False, without effect, when the C library is not glibc."""
    try:
        if not (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc"):
            return False
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, ValueError):
        return False
    mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    mallopt.restype = ctypes.c_int
    return bool(mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD) and mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD))
