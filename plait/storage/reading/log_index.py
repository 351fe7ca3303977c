"""An index of a message log by partition, built from its segment files: the records of a server's consume logs.

A refresh reads only the newest segments; the records of older ones are cached. The files are never changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from plait.storage.catalog import PartitionRow
from plait.storage.logs.consume_log import RECORD, Records
from plait.storage.reading.log_chunks import WantedRows, check_names, logical_ends, logical_starts
from plait.storage.reading.log_reader import LogReader
from plait.storage.reading.log_walk import FrameHeader, LogPiece, LogWalk, survey

#: The newest segments, which every refresh reads: they contain the end of the log and a torn tail.
OPEN_SEGMENTS: Final = 2

_Epochs = npt.NDArray[np.int64]


#: Partition → the records of its frames, and their epochs, in log order.
_PieceRecords = dict[int, tuple[Records, _Epochs]]


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
        bases = self.records["base"]
        first = int(np.searchsorted(bases, np.uint64(start), "right")) - 1
        if first >= 0 and int(bases[first]) + int(self.records["count"][first]) <= start:
            first += 1
        return self.records[max(first, 0) : int(np.searchsorted(bases, np.uint64(end), "left"))]


class LogIndex:
    """The wanted partitions as of the last ``refresh``."""

    def __init__(
        self, open_reader: Callable[[], LogReader], wanted: WantedRows, *, fail_on_damage: bool = True
    ) -> None:
        self._open_reader = open_reader
        self._wanted = wanted
        self._fail_on_damage = fail_on_damage
        #: Segment base → its pieces.
        self._segments: dict[int, list[_PieceRecords]] = {}
        self.partitions: dict[int, IndexedPartition] = {}

    def refresh(self) -> None:
        """Update the index from the present files."""
        reader = self._open_reader()
        bases = [base for base, _ in reader.files]
        self._segments = {base: known for base, known in self._segments.items() if base in bases}
        unknown = next((base for base in bases if base not in self._segments), bases[-1] if bases else 0)
        reader.skip_before(unknown)
        walk = LogWalk(reader, fail_on_damage=self._fail_on_damage)
        read: dict[int, list[_PieceRecords]] = {}
        for base, records in survey(walk, self._wanted.covers, _records):
            read.setdefault(base, []).append(records)
        self._segments |= read
        rows = {row.id: row for row in walk.partitions.values() if not row.deleted}
        check_names(reader.place, self._wanted, {row.subject for row in rows.values()})
        starts = logical_starts(reader.checkpoint)
        # If retention removed segments, a partition without frames may have had frames, up to these sequences.
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
        pieces = [each[row.id] for base in sorted(self._segments) for each in self._segments[base] if row.id in each]
        if not pieces:
            return IndexedPartition(row, max(start, end), np.empty(0, RECORD), [])
        records = np.concatenate([each for each, _ in pieces])
        numbers = np.concatenate([epochs for _, epochs in pieces])
        changes = np.flatnonzero(np.diff(numbers, prepend=numbers[:1] - 1))
        epochs = list(zip(records["base"][changes].tolist(), numbers[changes].tolist(), strict=True))
        return IndexedPartition(row, max(start, int(records["base"][0])), records, epochs)


def _records(piece: LogPiece, frames: list[FrameHeader]) -> tuple[int, _PieceRecords]:
    """The base of a piece's segment, and the records of its frames."""
    found: _PieceRecords = {}
    if frames:
        positions, sizes, counts, numbers, bases, times, epochs = np.array(frames, np.int64).T
        for number in np.unique(numbers).tolist():
            mine = numbers == number
            records = np.zeros(int(mine.sum()), RECORD)
            records["base"], records["offset"] = bases[mine], piece.segment_base + positions[mine]
            records["time"], records["size"], records["count"] = times[mine], sizes[mine], counts[mine]
            found[number] = records, epochs[mine]
    return piece.segment_base, found
