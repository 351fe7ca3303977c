"""The sequences of each partition that a message log has, from frame headers alone. A gap between them is lost rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from plait.spark.auditing.inputs.events import merged
from plait.storage.reading.log_chunks import WantedRows
from plait.storage.reading.log_reader import FrameHeader, LogWalk

Ranges = list[tuple[int, int]]


@dataclass
class Coverage:
    """The sequences and store times in the frame headers of a log, by partition."""

    #: Ranges [start, end) of the sequences in the log, ascending.
    ranges: dict[int, Ranges] = field(default_factory=dict)
    #: The ranges of the requested frames.
    wanted: dict[int, Ranges] = field(default_factory=dict)
    #: The first and the last store time.
    times: dict[int, tuple[int, int]] = field(default_factory=dict)
    #: The log offset after the last frame.
    log_end: int = 0

    def first(self, partition: int) -> int:
        """The lowest sequence in the log."""
        return self.ranges[partition][0][0] if partition in self.ranges else 0

    def end(self, partition: int) -> int:
        """One past the highest sequence in the log."""
        return self.ranges[partition][-1][1] if partition in self.ranges else 0

    def count(self, partition: int, start: int) -> int:
        """The number of requested rows in the log, from ``start`` on."""
        return sum(max(end - max(first, start), 0) for first, end in self.wanted.get(partition, []))

    def missing(self, partition: int, start: int = 0, end: int = 0) -> Ranges:
        """The ranges from ``start`` on that are not in the log, up to its highest sequence or up to ``end``."""
        ranges = [(first, last) for first, last in self.ranges.get(partition, []) if last > start]
        edges = [start, *(edge for pair in ranges for edge in pair), end]
        pairs = zip(edges[::2], edges[1::2], strict=True)
        return [(before, following) for before, following in pairs if before < following]


def cover(walk: LogWalk, wanted: WantedRows) -> Coverage:
    """Run a walk to its end and collect its headers."""
    pieces: list[tuple[int, Coverage]] = []
    #: Partition → (the sequence its next frame should have, the log offset of its last one).
    expected: dict[int, tuple[int, int]] = {}
    for piece in walk:
        while pieces and pieces[-1][0] >= piece.offset:
            # The walk went back to verify: this piece replaces the earlier ones from its offset on.
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
    walk: LogWalk, segment_base: int, frames: list[FrameHeader], expected: dict[int, tuple[int, int]]
) -> None:
    """Where rows seem to be missing, make the walk verify the frames that it passed, before the gap counts."""
    for position, _, count, partition, base, *_ in frames:
        offset = segment_base + position
        following = expected.get(partition)
        if partition and following is not None and following[0] != base and offset >= walk.verified:
            walk.distrust(following[1])
        expected[partition] = (base + count, offset)


def _piece(frames: list[FrameHeader], wanted: WantedRows) -> Coverage:
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
    """Ranges [start, end) of consecutive frames."""
    if not len(part):
        return []
    base, ends = part[:, 4], part[:, 4] + part[:, 2]
    apart = np.flatnonzero(base[1:] != ends[:-1])
    starts, stops = base[np.concatenate([[0], apart + 1])], ends[np.concatenate([apart, [len(base) - 1]])]
    return list(zip(starts.tolist(), stops.tolist(), strict=True))
