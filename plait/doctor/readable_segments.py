"""Reading every byte of a file before it is mapped.

A byte that the disk cannot give back ends a process that reads it through a mapping. A check-up has to survive that,
and to say where it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from plait.storage.logs.log import Segment, segment_name

BLOCK_SIZE = 4 << 20


class SomeSegments:
    """What a scan sees of a log: neighbours that can be read."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.segments: list[Segment] = []


def readable_runs(
    directory: Path, segments: Sequence[Segment], on_read: Callable[[int], None]
) -> tuple[list[SomeSegments], list[tuple[Segment, str]]]:
    """(runs of segments that can be read, segments that cannot with the reason); ``on_read`` gets log offsets."""
    runs: list[SomeSegments] = []
    bad: list[tuple[Segment, str]] = []
    broken = True
    for segment in segments:
        problem = _probe(directory / segment_name(segment.base), segment, on_read)
        if problem:
            bad.append((segment, problem))
        else:
            if broken:
                runs.append(SomeSegments(directory.name))
            runs[-1].segments.append(segment)
        broken = bool(problem)
    return runs, bad


def _probe(path: Path, segment: Segment, on_read: Callable[[int], None]) -> str:
    """What stops the file from being read; empty when nothing does."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        # A server let it go meanwhile; what is open has it still.
        return ""
    try:
        for position in range(0, segment.size, BLOCK_SIZE):
            try:
                os.pread(fd, BLOCK_SIZE, position)
            except OSError as error:
                return f"the disk cannot read byte {position} or one soon after ({error.strerror}): file not checked"
            on_read(segment.base + position)
    finally:
        os.close(fd)
    return ""
