"""Chance, behind one door: whatever Plait leaves to it is drawn here.

It comes from the operating system, so nobody can guess it and a forked child has its own. A simulation puts a seeded
source in its place while one of its processes runs; then the run repeats exactly.
"""

from __future__ import annotations

import os
import random

_MACHINE = random.SystemRandom()
_source: random.Random = _MACHINE


def use(source: random.Random | None) -> random.Random | None:
    """Draw from another source from now on (None: the operating system's); the one before, to put it back."""
    global _source
    before = None if _source is _MACHINE else _source
    _source = _MACHINE if source is None else source
    return before


def bits(count: int) -> int:
    """A number of so many random bits."""
    return _source.getrandbits(count)


def token(size: int) -> str:
    """So many random bytes as hexadecimal text."""
    return f"{_source.getrandbits(8 * size):0{2 * size}x}"


def uniform(low: float, high: float) -> float:
    """A number between the two."""
    return _source.uniform(low, high)


def process_number() -> int:
    """The number of this process, for names that people read; a simulated process has one of its own."""
    return os.getpid() if _source is _MACHINE else _source.randrange(1, 1 << 22)
