"""What glibc does with large buffers.

By default a buffer of 128 KiB and more is a mapping of its own, and every receive buffer faults its pages anew, at ten
times the cost of receiving into it. Below these thresholds buffers come from, and go back to, memory that stays.
"""

from __future__ import annotations

import ctypes
import os

from plait.limits import MIB

#: glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
#: The most that glibc takes; the largest frame stays below it.
MMAP_THRESHOLD = 32 * MIB
#: Free memory beyond this goes back to the system.
TRIM_THRESHOLD = 64 * MIB


def keep_buffers() -> bool:
    """Raise the thresholds; False where this is not glibc, and nothing was done."""
    try:
        if not (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc"):
            return False
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, ValueError):
        return False
    mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    mallopt.restype = ctypes.c_int
    return bool(mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD) and mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD))
