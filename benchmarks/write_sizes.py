"""The cost of a MiB in the page cache, by the size of one write: why `RealFile.write` cuts its data (docs/adr/0017).

``python -m benchmarks.write_sizes``. Each turn allocates a new file, as a log does, and writes it once from its start.
Files stay until the end, so that none reuses the memory of another. The order of sizes changes every round.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from pathlib import Path

from plait.limits import KIB, MIB

SIZES = [32 * KIB, 64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, MIB, 2 * MIB, 8 * MIB]


def written(path: Path, size: int, total: int) -> float:
    """Milliseconds per MiB."""
    piece = os.urandom(size)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        os.posix_fallocate(fd, 0, total)
        os.fdatasync(fd)
        started = time.perf_counter()
        for offset in range(0, total, size):
            os.pwrite(fd, piece, offset)
        seconds = time.perf_counter() - started
        os.fdatasync(fd)
    finally:
        os.close(fd)
    return seconds * 1000 / (total / MIB)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.write_sizes", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mib", type=int, default=128, help="size of each file; a multiple of 8")
    arguments = parser.parse_args()
    found: dict[int, list[float]] = {size: [] for size in SIZES}
    with tempfile.TemporaryDirectory(prefix="plait-bench-") as directory:
        for turn in range(arguments.rounds):
            for size in random.sample(SIZES, len(SIZES)):
                found[size].append(written(Path(directory, f"{turn}-{size}"), size, arguments.mib * MIB))
    for size, costs in found.items():
        print(f"{size // KIB:5} KiB per call: {', '.join(f'{cost:.2f}' for cost in costs)} ms per MiB")


if __name__ == "__main__":
    main()
