"""Helpers that crash a simulated disk many times, to collect all its possible outcomes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from plait.testing.cached_file import SECTOR_SIZE
from plait.testing.simulated_disk import SimulatedDisk, SimulatedFile

RANDOMS = st.integers(0, 2**32 - 1).map(random.Random)


def durable(disk: SimulatedDisk, path: str, data: bytes = b"") -> SimulatedFile:
    """A new file whose name and contents are durable."""
    file = disk.open(path, create=True)
    file.write([data], 0)
    file.sync()
    disk.sync_directory(path.rpartition("/")[0])
    return file


def outcomes(disk: SimulatedDisk, see: Callable[[SimulatedDisk], Any], tries: int = 400) -> set[Any]:
    """The distinct results of ``see`` after many crashes at this point."""
    rng = random.Random(1)
    return {see(disk.after_crash(rng)) for _ in range(tries)}


def sectors(data: bytes) -> list[bytes]:
    return [data[start : start + SECTOR_SIZE] for start in range(0, len(data), SECTOR_SIZE)]
