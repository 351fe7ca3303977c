"""The sequences of each partition that a message log has, from frame headers alone. A gap between them is lost rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from plait.spark.auditing.events import merged
from plait.storage.reading.log_chunks import WantedRows
from plait.storage.reading.log_walk import FrameHeader, LogPiece, LogWalk, survey

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
    total = Coverage()
    for each in survey(walk, wanted.covers, partial(_piece, wanted)):
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


def _piece(wanted: WantedRows, piece: LogPiece, frames: list[FrameHeader]) -> Coverage:
    found = Coverage(log_end=piece.end)
    if not frames:
        return found
    columns = np.array(frames, np.int64)
    order = np.argsort(columns[:, 3], kind="stable")
    columns = columns[order]
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
