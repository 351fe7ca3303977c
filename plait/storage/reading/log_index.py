"""An index of a message log by partition, built from its segment files: the records of a server's consume logs.

A refresh reads only the newest segments; the records of older ones are cached. The files are never changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from plait.storage.catalog import PartitionRow
from plait.storage.logs.consume_log import RECORD, Records
from plait.storage.reading.log_chunks import WantedRows, check_subjects, logical_ends, logical_starts
from plait.storage.reading.log_reader import LogPiece, LogReader, LogWalk

#: The newest segments, which every refresh reads: they contain the end of the log and a torn tail.
OPEN_SEGMENTS: Final = 2

_Epochs = npt.NDArray[np.int64]


@dataclass
class _PieceIndex:
    """Some frames of one partition, in log order."""

    offset: int
    records: Records
    epochs: _Epochs


@dataclass
class IndexedPartition:
    """A partition as found in its frames: the sequences [start, end), except those lost to damage."""

    row: PartitionRow
    start: int
    records: Records
    #: (first sequence, epoch), ascending.
    epochs: list[tuple[int, int]]

    @property
    def end(self) -> int:
        if not len(self.records):
            return self.start
        last = self.records[-1]
        return max(int(last["base"]) + int(last["count"]), self.start)

    def between(self, start: int, end: int) -> Records:
        """The records with rows in [start, end)."""
        bases = self.records["base"]
        first = int(np.searchsorted(bases, np.uint64(start), "right")) - 1
        if first >= 0 and int(bases[first]) + int(self.records["count"][first]) <= start:
            first += 1
        return self.records[max(first, 0) : int(np.searchsorted(bases, np.uint64(end), "left"))]


@dataclass
class _Segment:
    """The frames of each partition in one segment."""

    pieces: dict[int, list[_PieceIndex]] = field(default_factory=dict)


class LogIndex:
    """The wanted partitions as of the last ``refresh``."""

    def __init__(
        self, open_reader: Callable[[], LogReader], wanted: WantedRows, *, fail_on_damage: bool = True
    ) -> None:
        self._open_reader = open_reader
        self._wanted = wanted
        self._fail_on_damage = fail_on_damage
        #: Segment base → segment.
        self._segments: dict[int, _Segment] = {}
        self.partitions: dict[int, IndexedPartition] = {}

    def refresh(self) -> None:
        """Update the index from the present files."""
        reader = self._open_reader()
        bases = [base for base, _ in reader.files]
        self._segments = {base: known for base, known in self._segments.items() if base in bases}
        unknown = next((base for base in bases if base not in self._segments), bases[-1] if bases else 0)
        reader.skip_before(unknown)
        walk = reader.walk(fail_on_damage=self._fail_on_damage)
        self._segments |= _Indexer(walk, self._wanted).run()
        rows = {row.id: row for row in walk.partitions.values() if not row.deleted}
        check_subjects(reader, self._wanted, list(rows.values()))
        starts = logical_starts(reader.checkpoint)
        # If retention removed segments, a partition without frames may have had some, up to these sequences.
        ends = logical_ends(reader.checkpoint) if bases and bases[0] > 0 else {}
        self.partitions = {
            number: self._joined(row, starts.get(number, 0), ends.get(number, 0))
            for number, row in rows.items()
            if self._wanted.covers(row)
        }
        for base in sorted(self._segments)[-OPEN_SEGMENTS:]:
            del self._segments[base]

    def _joined(self, row: PartitionRow, start: int, end: int) -> IndexedPartition:
        """Join the pieces of a partition. Without pieces it starts and ends at its end in the checkpoint."""
        pieces = [piece for base in sorted(self._segments) for piece in self._segments[base].pieces.get(row.id, ())]
        if not pieces:
            return IndexedPartition(row, max(start, end), np.empty(0, RECORD), [])
        records = np.concatenate([piece.records for piece in pieces])
        numbers = np.concatenate([piece.epochs for piece in pieces])
        changes = np.flatnonzero(np.diff(numbers, prepend=numbers[:1] - 1))
        epochs = list(zip(records["base"][changes].tolist(), numbers[changes].tolist(), strict=True))
        return IndexedPartition(row, max(start, int(records["base"][0])), records, epochs)


class _Indexer:
    """Collects the records of wanted frames from a walk."""

    def __init__(self, walk: LogWalk, wanted: WantedRows) -> None:
        self._walk = walk
        self._wanted = wanted
        self._segments: dict[int, _Segment] = {}
        #: Partition → (the expected sequence of its next frame, the log offset of its last frame).
        self._next: dict[int, tuple[int, int]] = {}
        self._end = 0

    def run(self) -> dict[int, _Segment]:
        """Run the walk. Returns segment base → segment, for every segment with frames."""
        for piece in self._walk:
            if piece.offset < self._end:
                self._take_back(piece.offset)
            self._take(piece)
        return self._segments

    def _take_back(self, offset: int) -> None:
        """Drop everything from ``offset`` on: the walk yields it again."""
        for segment in self._segments.values():
            for pieces in segment.pieces.values():
                while pieces and pieces[-1].offset >= offset:
                    pieces.pop()
        self._next.clear()

    def _take(self, piece: LogPiece) -> None:
        segment = self._segments.setdefault(piece.segment_base, _Segment())
        if not piece.frames:
            self._end = piece.offset
            return
        frames = np.array(piece.frames, np.int64)
        positions, sizes, counts, numbers, bases, times, epochs = frames.T
        self._end = piece.segment_base + int(positions[-1] + sizes[-1])
        rows = self._walk.partitions
        for number in np.unique(numbers).tolist():
            if number not in rows or not self._wanted.covers(rows[number]):
                continue
            mine = numbers == number
            records = np.empty(int(mine.sum()), RECORD)
            records["base"], records["offset"] = bases[mine], piece.segment_base + positions[mine]
            records["time"], records["size"], records["count"] = times[mine], sizes[mine], counts[mine]
            self._look_for_missing(number, records)
            segment.pieces.setdefault(number, []).append(_PieceIndex(piece.offset, records, epochs[mine]))

    def _look_for_missing(self, number: int, records: Records) -> None:
        """If rows seem to be missing, have the walk verify that part of the log and yield it again."""
        bases, ends = records["base"].astype(np.int64), (records["base"] + records["count"]).astype(np.int64)
        expected, before = self._next.get(number, (int(bases[0]), int(records["offset"][0])))
        follow = np.concatenate([[expected], ends[:-1]])
        lasts = np.concatenate([[before], records["offset"][:-1].astype(np.int64)])
        wrong = np.flatnonzero((follow != bases) & (records["offset"].astype(np.int64) >= self._walk.verified))
        if len(wrong):
            self._walk.distrust(int(lasts[wrong[0]]))
        self._next[number] = (int(ends[-1]), int(records["offset"][-1]))
