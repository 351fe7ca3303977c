"""Checks the consume logs against the message log: each record must match a frame, and each frame has a record."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from plait.broker.recovery.shards import PartitionState
from plait.doctor.findings import CheckReport
from plait.frame.view import FrameView
from plait.storage.disk import RealDisk
from plait.storage.logs.consume_log import DIRECTORY, RECORD, ConsumeLog, Record
from plait.storage.logs.frame_traits import traits_of
from plait.storage.logs.recovery import Damage

PART = "consume log"
#: Larger files are mapped, smaller ones read: the number of mappings of a process is limited.
MAPPED_SIZE_MIN = 1 << 20
#: Records decoded at a time.
_BLOCK = 1024
#: Records without a frame that are remembered per log. More are only counted.
_REMEMBERED = 1000


class Problem(msgspec.Struct):
    """The problems of one consume log: the first one, and their number."""

    first: str = ""
    count: int = 0

    def add(self, what: str) -> None:
        self.first = self.first or what
        self.count += 1


class RecordWalk:
    """The records of one partition, in order, matched with the frames of the message log."""

    def __init__(self, path: str, records: Any, start: int) -> None:
        self.path = path
        self._records = records
        self._next = start
        self._block: list[tuple[int, int, int, int, int, int]] = []
        self._at = 0
        self.problem = Problem()
        #: Records without a frame: the frame is lost, or the record is wrong.
        self.orphans: list[Record] = []
        self.orphan_count = 0

    def peek(self) -> Record | None:
        if self._at >= len(self._block):
            self._block = self._records[self._next : self._next + _BLOCK].tolist()
            self._next += len(self._block)
            self._at = 0
            if not self._block:
                return None
        return Record(*self._block[self._at])

    def take(self) -> None:
        self._at += 1

    def orphan(self, record: Record) -> None:
        self.orphan_count += 1
        if len(self.orphans) < _REMEMBERED:
            self.orphans.append(record)


class ConsumeCheck:
    """Compares the records with the frames. Call ``frame`` for each frame in order, then ``finish``."""

    def __init__(
        self,
        disk: RealDisk,
        partitions: dict[int, PartitionState],
        covered: dict[int, int],
        log_start: int,
        report: CheckReport,
    ) -> None:
        #: Partition → the offset up to which its frames have a record in the file.
        self._covered = covered
        self._report = report
        self._cursors: dict[int, RecordWalk] = {}
        for entry in partitions.values():
            log = ConsumeLog(disk, entry.row.id)
            log.generation = entry.generation
            report.consume_logs += 1
            if entry.flushed:
                self._cursors[entry.row.id] = self._open(disk, log.path, entry.flushed, log_start)
            else:
                self._cursors[entry.row.id] = RecordWalk(log.path, np.empty(0, RECORD), 0)

    def _open(self, disk: RealDisk, path: str, count: int, log_start: int) -> RecordWalk:
        wanted = count * RECORD.itemsize
        try:
            file = disk.open(path)
        except FileNotFoundError:
            cursor = RecordWalk(path, np.empty(0, RECORD), 0)
            if not self._report.in_use:
                cursor.problem.add("the file is missing")
            return cursor
        try:
            size = file.size
            data = file.view() if size >= MAPPED_SIZE_MIN else disk.read(path)
        finally:
            file.close()
        records = np.frombuffer(data, RECORD, min(count, size // RECORD.itemsize))
        # A Python int would make numpy convert the whole column first.
        cursor = RecordWalk(path, records, int(np.searchsorted(records["offset"], np.uint64(log_start), "left")))
        if size < wanted:
            cursor.problem.add(f"has {size} bytes, {wanted} according to the checkpoint")
        return cursor

    def frame(self, offset: int, frame: FrameView) -> None:
        """Compare the next frame of the message log with its record."""
        cursor = self._cursors.get(frame.partition)
        if cursor is None or offset >= self._covered[frame.partition]:
            return
        record = cursor.peek()
        while record is not None and record.offset < offset:
            cursor.orphan(record)
            cursor.take()
            record = cursor.peek()
        if record is None or record.offset > offset:
            cursor.problem.add(f"has no record of sequence {frame.base}")
            return
        cursor.take()
        if record != (frame.base, offset, frame.store_time, frame.size, frame.count, traits_of(frame)):
            cursor.problem.add(f"the record of sequence {frame.base} differs from the frame")

    def finish(self, damages: list[Damage]) -> None:
        """Add the findings, after all frames. Records of damaged frames are not a problem of the consume log."""
        for _, cursor in sorted(self._cursors.items()):
            while (record := cursor.peek()) is not None:
                cursor.orphan(record)
                cursor.take()
            wrong = [record for record in cursor.orphans if not _explained(record, damages)]
            if wrong:
                cursor.problem.add(f"the record of sequence {wrong[0].base} points to no frame")
                cursor.problem.count += len(wrong) - 1
            if cursor.problem.count:
                self._add_finding(cursor)

    def _add_finding(self, cursor: RecordWalk) -> None:
        problem = cursor.problem
        more = f" ({problem.count} such places)" if problem.count > 1 else ""
        self._report.consume_logs_damaged += 1
        harm = "no message is lost, but reads of this subject may fail or skip until it is rebuilt"
        advice = f"stop the server, delete {cursor.path}, start it again: {DIRECTORY}/ is rebuilt from the message log"
        self._report.add("damaged", PART, cursor.path, problem.first + more, harm, advice)


def _explained(record: Record, damages: list[Damage]) -> bool:
    return any(d.offset < record.offset + record.size and record.offset < d.offset + d.size for d in damages)
