"""Random numbers: the only module of Plait that draws them.

They come from the operating system, so they are unpredictable and a forked child draws different ones. A simulation
installs a seeded source while one of its processes runs, so that a run can be repeated exactly.
"""

from __future__ import annotations

import os
import random

_MACHINE = random.SystemRandom()
_source: random.Random = _MACHINE


def use(source: random.Random | None) -> random.Random | None:
    """Draw from ``source`` (None: the operating system). Returns the source used before, so that it can be restored."""
    global _source
    before = None if _source is _MACHINE else _source
    _source = _MACHINE if source is None else source
    return before


def bits(count: int) -> int:
    return _source.getrandbits(count)


def token(size: int) -> str:
    """``size`` random bytes as hexadecimal text."""
    return f"{_source.getrandbits(8 * size):0{2 * size}x}"


def uniform(low: float, high: float) -> float:
    return _source.uniform(low, high)


def process_number() -> int:
    """The id of this process, for names that people read; a random number in a simulated process."""
    return os.getpid() if _source is _MACHINE else _source.randrange(1, 1 << 22)
