"""Which sequences of each partition a message log has, by its headers alone: what is missing between them is lost."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from plait.spark.auditing.inputs.events import merged
from plait.storage.reading.log_chunks import WantedRows
from plait.storage.reading.log_reader import FrameHead, LogWalk

Ranges = list[tuple[int, int]]


@dataclass
class Coverage:
    """What the headers of a log say, by partition."""

    #: [start, end) of sequences that are there, ascending.
    ranges: dict[int, Ranges] = field(default_factory=dict)
    #: Those of frames that are asked for.
    wanted: dict[int, Ranges] = field(default_factory=dict)
    #: The first and the last store time.
    times: dict[int, tuple[int, int]] = field(default_factory=dict)
    #: The log offset behind the last frame.
    log_end: int = 0

    def first(self, partition: int) -> int:
        """The lowest sequence that is there."""
        return self.ranges[partition][0][0] if partition in self.ranges else 0

    def end(self, partition: int) -> int:
        """Behind the highest."""
        return self.ranges[partition][-1][1] if partition in self.ranges else 0

    def count(self, partition: int, start: int) -> int:
        """How many rows from ``start`` on are asked for and there."""
        return sum(max(end - max(first, start), 0) for first, end in self.wanted.get(partition, []))

    def missing(self, partition: int, start: int = 0, end: int = 0) -> Ranges:
        """What should be there from ``start`` on and is not, up to the last that is there, or to ``end``."""
        ranges = [(first, last) for first, last in self.ranges.get(partition, []) if last > start]
        edges = [start, *(edge for pair in ranges for edge in pair), end]
        pairs = zip(edges[::2], edges[1::2], strict=True)
        return [(before, following) for before, following in pairs if before < following]


def cover(walk: LogWalk, wanted: WantedRows) -> Coverage:
    """Follow a walk to its end."""
    pieces: list[tuple[int, Coverage]] = []
    #: Partition → (the sequence its next frame should have, the log offset of its last one).
    expected: dict[int, tuple[int, int]] = {}
    for piece in walk:
        while pieces and pieces[-1][0] >= piece.offset:
            # Told again: what was told before does not count.
            pieces.pop()
            expected.clear()
        if piece.frames:
            position, size, *_ = piece.frames[-1]
            found = _piece(piece.frames, wanted)
            found.log_end = piece.segment_base + position + size
            pieces.append((piece.offset, found))
        _look_closer(walk, piece.segment_base, piece.frames, expected)
    total = Coverage()
    for _, each in pieces:
        total.log_end = max(total.log_end, each.log_end)
        for partition, ranges in each.ranges.items():
            total.ranges.setdefault(partition, []).extend(ranges)
            total.wanted.setdefault(partition, []).extend(each.wanted[partition])
            low, high = each.times[partition]
            known = total.times.get(partition, (low, high))
            total.times[partition] = min(known[0], low), max(known[1], high)
    for ranges_of in (total.ranges, total.wanted):
        ranges_of.update({partition: merged(ranges) for partition, ranges in ranges_of.items()})
    return total


def _look_closer(
    walk: LogWalk, segment_base: int, frames: list[FrameHead], expected: dict[int, tuple[int, int]]
) -> None:
    """Where rows seem to be missing the walk is to verify what it passed before the gap is believed."""
    for position, _, count, partition, base, *_ in frames:
        offset = segment_base + position
        following = expected.get(partition)
        if partition and following is not None and following[0] != base and offset >= walk.verified:
            walk.distrust(following[1])
        expected[partition] = (base + count, offset)


def _piece(frames: list[FrameHead], wanted: WantedRows) -> Coverage:
    columns = np.array(frames, np.int64)
    order = np.argsort(columns[:, 3], kind="stable")
    columns = columns[order]
    found = Coverage()
    edges = np.flatnonzero(np.diff(columns[:, 3])) + 1
    for part in np.split(columns, edges):
        partition, times = int(part[0, 3]), part[:, 5]
        chosen = (times >= wanted.time_min) & (times <= wanted.time_max)
        found.ranges[partition] = _joined(part)
        found.wanted[partition] = found.ranges[partition] if chosen.all() else _joined(part[chosen])
        found.times[partition] = int(times.min()), int(times.max())
    return found


def _joined(part: npt.NDArray[np.int64]) -> Ranges:
    """[start, end) of frames that follow on each other."""
    if not len(part):
        return []
    base, ends = part[:, 4], part[:, 4] + part[:, 2]
    apart = np.flatnonzero(base[1:] != ends[:-1])
    starts, stops = base[np.concatenate([[0], apart + 1])], ends[np.concatenate([apart, [len(base) - 1]])]
    return list(zip(starts.tolist(), stops.tolist(), strict=True))
