"""What Python itself makes a server wait for: one thread for another, and all of them for the garbage collector."""

from __future__ import annotations

import gc
import sys

#: A thread that computes lets another one go on after this. By default that is 5 ms, for which a loop would wait after
#: each of its system calls while another thread is busy.
SWITCH_SECONDS = 0.0002
#: Objects that are new, young collections, and those after them, before the next generation is looked through. The
#: second generation then has some 20,000 objects. With 200,000 of them, a broker of 100,000 subjects stood for 137 ms.
THRESHOLDS = (5_000, 4, 500)


def keep_pauses_short() -> None:
    """For a server that is ready: what is there by now stays, and is not looked through again and again."""
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
