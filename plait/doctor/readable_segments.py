"""Reads every byte of a segment before its mapping is used.

Reading a bad disk block through a mapping kills the process (SIGBUS). A check must survive that and report the place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from plait.storage.logs.segment import Segment, segment_name

BLOCK_SIZE = 4 << 20


class SomeSegments:
    """The log that a scan sees: consecutive readable segments."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.segments: list[Segment] = []


def readable_runs(
    directory: Path, segments: Sequence[Segment], on_read: Callable[[int], None]
) -> tuple[list[SomeSegments], list[tuple[Segment, str]]]:
    """(runs of readable segments, unreadable segments with the reason). ``on_read`` gets log offsets."""
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
    """The reason why the file cannot be read. Empty: it can."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        # The server has removed it; the open mapping still has its bytes.
        return ""
    try:
        for position in range(0, segment.size, BLOCK_SIZE):
            try:
                os.pread(fd, BLOCK_SIZE, position)
            except OSError as error:
                return f"the disk cannot read the block at byte {position} ({error.strerror}): file not checked"
            on_read(segment.base + position)
    finally:
        os.close(fd)
    return ""
