"""Divides the files of an archive's partitions into units of work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from plait.spark.archiving.manifest import ArchivedFile

#: Rows that one task judges at a time.
BLOCK_COUNT: Final = 1 << 20


@dataclass(frozen=True)
class Unit:
    """Rows of one partition: sequences [low, high) of some files."""

    paths: tuple[str, ...]
    partition: int
    low: int
    high: int


@dataclass
class _Stretch:
    """Files of one partition whose sequences interleave: rows of one file lie between rows of another."""

    files: list[ArchivedFile]
    #: The first and the last sequence.
    first: int
    last: int
    #: The log offset after the last row.
    end: int

    def meets(self, other: _Stretch) -> bool:
        return self.first <= other.last and other.first <= self.last

    def join(self, other: _Stretch) -> None:
        self.files += other.files
        self.first, self.last = min(self.first, other.first), max(self.last, other.last)
        self.end = max(self.end, other.end)


def _stretches(files: list[ArchivedFile], name: str) -> list[_Stretch]:
    """The stretches of one partition, in order of their start in the log."""
    found: list[_Stretch] = []
    near: list[_Stretch] = []
    for file in sorted(files, key=lambda file: (file.start, file.path)):
        new = _Stretch([file], *file.partitions[name], file.end)
        # Stretches that end before this file in the log also have lower sequences.
        near = [other for other in near if other.end > file.start]
        same = [other for other in near if other.meets(new)]
        near = [other for other in near if other not in same[1:]]
        if not same:
            near.append(new)
            found.append(new)
            continue
        for other in [*same[1:], new]:
            same[0].join(other)
            other.files = []
    return [each for each in found if each.files]


def parts_of(files: Mapping[int, tuple[str, list[ArchivedFile]]]) -> list[list[Unit]]:
    """Parts of about ``BLOCK_COUNT`` rows; small units share a part. Each unit has all rows of its sequences.

    ``files``: partition → its name, and the files with its rows.
    """
    parts: list[list[Unit]] = []
    room = 0
    for number, (name, members) in files.items():
        for stretch in _stretches(members, name):
            count = min(sum(file.count for file in stretch.files), stretch.last + 1 - stretch.first)
            pieces = -(-count // BLOCK_COUNT)
            edges = np.linspace(stretch.first, stretch.last + 1, pieces + 1).astype(np.int64).tolist()
            for low, high in pairwise(edges):
                if room <= 0:
                    parts.append([])
                    room = BLOCK_COUNT
                there = [(file.path, file.partitions[name]) for file in stretch.files]
                paths = tuple(path for path, (first, last) in there if first < high and last >= low)
                parts[-1].append(Unit(paths, number, low, high))
                room -= min(count // pieces, high - low)
    return parts
