"""The tasks of an archiver, each for one piece of a log or of an archive. A task returns `TaskFacts`.

Spark only schedules the tasks: the bytes go from the segment files through Arrow into the archive inside one Python
process, and never through Java. A task that runs twice leaves two sets of files, and the manifest names one of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa
from crc32c import crc32c

from plait.errors import ArchiveError, FrameError, PlaitError
from plait.frame.view import FrameView
from plait.limits import MIB
from plait.spark.archiving.archive_files import first_line
from plait.spark.archiving.array_views import arranged, joined, log_order
from plait.spark.archiving.event_tables import ACTION_SCHEMA, Names, action_batches, death_table
from plait.spark.archiving.file_writer import (
    COPY_SIZE,
    DAY_MICROS,
    MESSAGE_SCHEMA,
    FileWriter,
    check_file,
    day_of,
    file_crc,
    read_batches,
)
from plait.spark.archiving.manifest import (
    ACTIONS,
    MESSAGES,
    Archive,
    ArchivedFile,
    ArchivedSource,
    FileKind,
    RawSegment,
)
from plait.spark.runtime.worker import prepare_worker
from plait.spark.source.spark_columns import one_batch
from plait.storage.catalog import PartitionRow
from plait.storage.disk import RealDisk
from plait.storage.logs.action_log import GroupDefinition
from plait.storage.logs.recovery import LogScan
from plait.storage.reading.action_reader import ActionPart, read_actions
from plait.storage.reading.log_chunks import ChunkPartition, LogChunk, WantedRows, extend, read_chunk
from plait.storage.reading.log_reader import MappedLog, MappedSegment, damage_error, map_segment

#: Bytes of frames, stored and inflated, that a task collects before it writes files.
HELD_SIZE_MAX: Final = 256 * MIB
#: Rows that a task collects before it writes files. A short message takes ten times its size as sorted columns.
HELD_COUNT_MAX: Final = 1_500_000
#: Of files that are merged, before compression. A file of half the size of a task is large enough.
SMALL_SIZE_MAX: Final = 64 * MIB
MERGED_SIZE_MAX: Final = 128 * MIB


class TaskFacts(msgspec.Struct):
    """The result of a task."""

    files: list[ArchivedFile] = []
    #: ``name@group`` → rows that were written and read back.
    counts: dict[str, int] = {}
    #: A partition's number → the sequences [first, end) that were written, ascending.
    ranges: dict[int, list[tuple[int, int]]] = {}
    raw: list[RawSegment] = []
    #: (code, message) of the error that ended the task.
    error: tuple[str, str] | None = None


# --- messages -----------------------------------------------------------------------------------


class Collector:
    """Collects frames in log order and writes one file for each subject and day whenever it holds the maximum."""

    def __init__(self, writer: FileWriter, group: str, offsets: tuple[int, int]) -> None:
        self._writer = writer
        self._group = group
        self._offsets = offsets
        #: (subject, day) → partition → its frames.
        self._frames: dict[tuple[str, int], dict[str, list[tuple[ChunkPartition, FrameView]]]] = {}
        self._held = 0
        self._count = 0
        self.facts = TaskFacts()

    def add(self, partition: ChunkPartition, view: FrameView) -> None:
        size = view.size + view.inflated_size
        if self._held + size > HELD_SIZE_MAX or self._count + view.count > HELD_COUNT_MAX:
            self.flush()
        self._held += size
        self._count += view.count
        file_key = (partition.subject, view.store_time // DAY_MICROS)
        name = f"{partition.name}@{self._group}"
        self._frames.setdefault(file_key, {}).setdefault(name, []).append((partition, view))

    def flush(self) -> None:
        """Write all collected frames."""
        for (subject, day), partitions in self._frames.items():
            batches: list[pa.RecordBatch] = []
            ranges: dict[str, tuple[int, int]] = {}
            for name, members in partitions.items():
                batch = one_batch(members, MESSAGE_SCHEMA, self._group)
                views = [view for _, view in members]
                ranges[name] = (min(view.base for view in views), max(view.base + view.count - 1 for view in views))
                self.facts.counts[name] = self.facts.counts.get(name, 0) + batch.num_rows
                batches.append(batch)
            rows, date = joined(batches), day_of(day)
            file = self._writer.write(MESSAGES, date, rows, self._offsets, subject=subject, partitions=ranges)
            self.facts.files.append(file)
        self._frames, self._held, self._count = {}, 0, 0


@dataclass(frozen=True)
class MessageTask:
    """Archives one chunk of a message log."""

    data: str
    group: str
    chunk: LogChunk
    #: Log offset of the segment's first byte.
    base: int
    wanted: WantedRows
    fail_on_damage: bool

    @property
    def weight(self) -> int:
        return self.chunk.size

    def expected(self) -> dict[str, int]:
        """Number of rows of each partition, from the frame headers of the log."""
        counts: dict[str, int] = {}
        for number, pieces in self.chunk.ranges.items():
            name = f"{self.chunk.partitions[number].name}@{self.group}"
            counts[name] = counts.get(name, 0) + sum(end - first for first, end in pieces)
        return counts

    def run(self, writer: FileWriter) -> TaskFacts:
        chunk = self.chunk
        disk = RealDisk(self.data, read_only=True)
        collector = Collector(writer, self.group, (self.base + chunk.start, self.base + chunk.end))
        ranges = collector.facts.ranges
        try:
            frames = read_chunk(disk, self.data, chunk, self.wanted, fail_on_damage=self.fail_on_damage)
            for partition, view in frames:
                extend(ranges.setdefault(view.partition, []), view.base, view.base + view.count)
                collector.add(partition, view)
            collector.flush()
        except FrameError as error:
            size = chunk.end - chunk.start
            raise damage_error(self.data, chunk.segment, chunk.start, size, str(error)) from error
        return collector.facts


# --- events -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EventTask:
    """Archives one part of an action log, or the deaths in one part of a retained log: one file for each day."""

    kind: FileKind
    data: str
    group: str
    part: ActionPart
    partitions: Mapping[int, PartitionRow]
    wanted: WantedRows
    #: Group number → definition, for the groups that the action log defines. An action log defines its groups itself.
    groups: Mapping[int, GroupDefinition] = field(default_factory=dict)

    @property
    def weight(self) -> int:
        return self.part.end - self.part.start

    def run(self, writer: FileWriter) -> TaskFacts:
        part = self.part
        try:
            table = self._table()
        except FrameError as error:
            raise damage_error(
                self.data, part.segment, part.start - part.base, part.end - part.start, str(error)
            ) from error
        facts = TaskFacts()
        days = table.column("time").cast(pa.int64()).to_numpy() // DAY_MICROS
        for day in np.unique(days).tolist():
            rows = joined(table.filter(pa.array(days == day)).to_batches())
            facts.files.append(writer.write(self.kind, day_of(day), rows, (part.start, part.end)))
        return facts

    def _table(self) -> pa.Table:
        part = self.part
        names = Names(self.partitions, self.group, self.groups)
        is_action = self.kind == ACTIONS
        frames = read_actions(RealDisk(self.data, read_only=True), self.data, part, alone=not is_action)
        if not is_action:
            return death_table(frames, names, self.wanted)
        batches = action_batches(frames, names, start=part.start, first=part.first)
        return pa.Table.from_batches(batches, ACTION_SCHEMA)


# --- whole segments -----------------------------------------------------------------------------


@dataclass(frozen=True)
class RawTask:
    """Copies one segment file unchanged."""

    data: str
    segment: str
    start: int
    end: int
    #: The path of the copy, relative to the archive.
    target: str
    fail_on_damage: bool

    @property
    def weight(self) -> int:
        return self.end - self.start

    def run(self, writer: FileWriter) -> TaskFacts:
        archive = writer.archive
        disk = RealDisk(self.data, read_only=True)
        view = map_segment(disk, self.data, self.segment)
        if self.fail_on_damage:
            self._check_frames(view)
        directory, _, name = self.target.rpartition("/")
        archive.make_directory(directory)
        aside = f"{directory}/{writer.name(name)}"
        crc = 0
        with archive.files.open_output_stream(archive.path(aside)) as stream:
            for start in range(0, len(view), COPY_SIZE):
                piece = view[start : start + COPY_SIZE]
                crc = crc32c(piece, crc)
                stream.write(piece)
        if file_crc(archive, aside) != crc:
            raise ArchiveError(f"{archive.location}/{self.target} does not read back as it was written; run again")
        archive.make_durable(aside)
        archive.files.move(archive.path(aside), archive.path(self.target))
        segment = RawSegment(path=self.target, start=self.start, end=self.end, size=len(view), crc=crc)
        return TaskFacts(raw=[segment])

    def _check_frames(self, view: memoryview) -> None:
        """Verify all frames. The segment is complete, so a frame that does not verify is damage."""
        segment = MappedSegment(self.segment, self.start, view, len(view))
        scan = LogScan(MappedLog(self.data, [segment]), self.start, self.start, stamps_durable=False)
        for _ in scan:
            pass
        for damage in scan.damages[:1]:
            raise damage_error(self.data, self.segment, damage.offset - self.start, damage.size, damage.reason)


# --- archived files -----------------------------------------------------------------------------


@dataclass(frozen=True)
class VerifyTask:
    """Compares some files with the manifest."""

    files: tuple[ArchivedFile | RawSegment, ...]

    @property
    def weight(self) -> int:
        return sum(file.size for file in self.files)

    def run(self, writer: FileWriter) -> TaskFacts:
        for file in self.files:
            check_file(writer.archive, file)
        return TaskFacts()


@dataclass(frozen=True)
class CompactTask:
    """Merges small files of one source, kind, subject and day into one file."""

    files: tuple[ArchivedFile, ...]

    @property
    def weight(self) -> int:
        return sum(file.size for file in self.files)

    def run(self, writer: FileWriter) -> TaskFacts:
        first = self.files[0]
        batches: list[pa.RecordBatch] = []
        partitions: dict[str, tuple[int, int]] = {}
        for file in self.files:
            check_file(writer.archive, file)
            batches += read_batches(writer.archive, file.path)
            for name, (low, high) in file.partitions.items():
                known = partitions.get(name, (low, high))
                partitions[name] = (min(low, known[0]), max(high, known[1]))
        rows = joined(batches)
        if first.kind == MESSAGES:
            rows = arranged(rows, log_order(rows))
        offsets = (min(file.start for file in self.files), max(file.end for file in self.files))
        merged = writer.write(first.kind, first.date, rows, offsets, subject=first.subject, partitions=partitions)
        return TaskFacts(files=[merged])


def compaction_tasks(files: list[ArchivedFile], sources: Mapping[str, ArchivedSource]) -> list[CompactTask]:
    """The merges of small files: a log with many subjects leaves many, and one costs a reader as much as a large file.

    Consecutive files of one source, kind, subject and day are merged, oldest first, up to the size of a task. No merge
    spans a file that is left alone, so rows keep the order of the log, and no row is rewritten more than a few times.
    No file has rows of two lives of a subject, since the sequences of each life start at 0.
    """
    later_lives = _later_lives(files, sources)
    series: dict[tuple[str, str, str, str, int], list[ArchivedFile]] = {}
    for file in files:
        life = bisect_right(later_lives.get((file.source, file.kind, file.subject), []), file.start)
        series.setdefault((file.source, file.kind, file.subject, file.date, life), []).append(file)
    tasks: list[CompactTask] = []
    for members in series.values():
        taken: list[ArchivedFile] = []
        size = 0
        for file in sorted(members, key=lambda file: (file.start, file.end, file.path)):
            large = file.raw_size >= SMALL_SIZE_MAX
            if taken and (large or size + file.raw_size > MERGED_SIZE_MAX):
                tasks.append(CompactTask(tuple(taken)))
                taken, size = [], 0
            if not large:
                taken.append(file)
                size += file.raw_size
        tasks.append(CompactTask(tuple(taken)))
    return [task for task in tasks if len(task.files) > 1]


def _later_lives(
    files: list[ArchivedFile], sources: Mapping[str, ArchivedSource]
) -> dict[tuple[str, str, str], list[int]]:
    """(source, kind, subject) → the message log offsets at which later lives of its partitions begin, ascending."""
    found: dict[tuple[str, str, str], set[int]] = {}
    for file in files:
        for name in file.partitions:
            later = sources[file.source].lives.get(name, [])[1:]
            if later and file.kind == MESSAGES:
                found.setdefault((file.source, file.kind, file.subject), set()).update(life.offset for life in later)
    return {key: sorted(offsets) for key, offsets in found.items()}


ArchiveTask = MessageTask | EventTask | RawTask | CompactTask | VerifyTask


# --- running tasks ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """The tasks of one commit; Spark calls it in its workers."""

    #: The address of the archive.
    archive: str
    number: int
    source: str
    tasks: tuple[ArchiveTask, ...]

    def __call__(self, numbers: Iterable[int]) -> Iterator[bytes]:
        prepare_worker()
        for number in numbers:
            yield msgspec.msgpack.encode(self.run(self.tasks[number]))

    def run(self, task: ArchiveTask) -> TaskFacts:
        """Run one task in this process. An expected error is part of the facts, so that the driver can raise it without
        a Java stack trace."""
        try:
            return task.run(FileWriter(Archive.at(self.archive), self.number, self.source))
        except PlaitError as error:
            return TaskFacts(error=(error.code, error.message))
        except (pa.ArrowException, OSError) as error:
            # A full disk, a missing permission, a file system that does not answer.
            reason = f"cannot write to {self.archive}: {first_line(error)}"
            remedy = "nothing was committed. Fix the cause and run again"
            return TaskFacts(error=(ArchiveError.code, f"{reason}; {remedy}"))
