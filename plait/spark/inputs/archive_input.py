"""The input for an archive: reads the Parquet files that its newest manifest names, with the columns of the source.

The manifest records for each file its subject, day, partitions, sequences, times and keys, so files that filters
exclude are not opened. It records for each partition which sequences are archived, in which epochs. An archive is
therefore read between offsets, and as a stream while it grows, from its manifest; the driver opens a file only to find
a time within it. An archive keeps the messages of deleted subjects and of expired ones, and has a span for each life of
a partition.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from plait.client.read.surveyor import PartitionSpan, SpanRange
from plait.errors import ArchiveError, InvalidArgument
from plait.spark.archiving.archive_files import DIRECTORY
from plait.spark.archiving.manifest import MESSAGES, Archive, ArchivedFile, ArchiveManifest, PartitionLife
from plait.spark.auditing.block_arrays import without
from plait.spark.inputs.parquet_files import ArchiveReadTask, FilePart, read_columns
from plait.spark.source.offsets import report
from plait.spark.source.read_options import ReadOptions
from plait.storage.disk import RealDisk
from plait.storage.logs import consume_log as arithmetic
from plait.storage.logs.consume_log import RECORD, Records
from plait.storage.reading.log_chunks import CHUNK_SIZE, WantedRows, check_names

#: Options that apply to logs only.
_LOG_ONLY: Final = ("group", "failOnDamage")


def is_archive(path: str) -> bool:
    """Whether the path has a manifest, or is a URI, where no server has its logs."""
    return "://" in path or RealDisk(path, read_only=True).exists(DIRECTORY)


def check_archive(options: ReadOptions) -> None:
    """Check that the archive exists and that no option is given that archives do not support."""
    for name in _LOG_ONLY:
        if name in options.given:
            raise InvalidArgument(f"option {name!r} does not apply to an archive ({options.path!r}); remove it")
    archive = Archive.at(options.path)
    if "://" in options.path and not archive.numbers():
        raise ArchiveError(
            f"{options.path!r} is not an archive: it has no {DIRECTORY}/commit-* file. Data directories and segment "
            "files can only be read from local paths: copy them"
        )
    archive.open()


@dataclass
class ArchivedLife:
    """One life of a partition, and its files in log order."""

    #: ``name@group``.
    partition: str
    subject: str
    life: PartitionLife
    files: list[ArchivedFile] = field(default_factory=list)

    def records(self) -> Records:
        """The files as consume-log records, as if each file were a frame, sorted by their ends: a clock that is set
        back at midnight makes files overlap."""
        files = sorted(self.files, key=lambda file: file.partitions[self.partition][1])
        records = np.empty(len(files), RECORD)
        for index, file in enumerate(files):
            counts = {partition: last - first + 1 for partition, (first, last) in file.partitions.items()}
            count = counts[self.partition]
            size = (file.raw_size or file.size) * count // sum(counts.values())
            records[index] = (file.partitions[self.partition][0], file.start, file.time_min, size, count, 0)
        return records

    def missing(self, start: int, end: int) -> list[tuple[int, int]]:
        """The ranges [first, end) between ``start`` and ``end`` that no file has."""
        return without([(start, end)], self.life.ranges)


class ArchiveInput:
    """An archive. Each manifest is read once, however often the input is called."""

    expires = False

    def __init__(self, options: ReadOptions, wanted: WantedRows) -> None:
        self._options = options
        self._wanted = wanted
        self._archive = Archive.at(options.path)
        self._manifest = ArchiveManifest()
        #: (partition, number) → life; None: not built for this manifest yet.
        self._lives: dict[tuple[str, int], ArchivedLife] | None = None

    def close(self) -> None:
        """Does nothing: there is no connection."""

    def _newest(self) -> ArchiveManifest:
        """The newest manifest; ``SubjectNotFound`` for a subject that was never archived."""
        if self._archive.numbers()[-1:] != [self._manifest.number]:
            manifest = self._archive.open()
            subjects = {file.subject for file in manifest.find(MESSAGES)}
            check_names(f"the archive {self._options.path}", self._wanted, subjects)
            self._manifest, self._lives = manifest, None
        return self._manifest

    def spans(self, times: Sequence[int] = ()) -> list[PartitionSpan]:
        """From the newest manifest, one span for each life."""
        manifest = self._newest()
        if self._lives is None:
            self._lives = self._by_partition(lives_of(manifest, self._wanted, self._options.path))
        store_times = _StoreTimes(self._archive)
        found = []
        for archived in self._lives.values():
            name, _, group = archived.partition.rpartition("@")
            life = archived.life
            at = [store_times.first_at(archived, time) for time in times]
            until = [store_times.end_before(archived, time) for time in times]
            found.append(
                PartitionSpan(name, archived.subject, life.number, life.start, life.end, life.epochs, at, until, group)
            )
        return found

    def _by_partition(self, lives: Mapping[tuple[str, str, int], ArchivedLife]) -> dict[tuple[str, int], ArchivedLife]:
        """Raises ``ArchiveError`` for partitions of one name in two data directories."""
        sources: dict[str, str] = {}
        for source, partition, _ in lives:
            if sources.setdefault(partition, source) != source:
                raise ArchiveError(
                    f"{partition} is the name of partitions of two data directories in the archive "
                    f"{self._options.path} ({sources[partition]} and {source}), each with its own sequences: read the "
                    "archive without offsets, and archive each directory to its own archive or with its own --group"
                )
        return {(partition, number): life for (_, partition, number), life in lives.items()}

    def _life(self, each: SpanRange) -> ArchivedLife:
        assert self._lives is not None
        return self._lives[str(each.place), each.number]

    def sizes(self, ranges: Sequence[SpanRange]) -> list[int]:
        """As of the last call of ``spans``."""
        return [int(arithmetic.sizes_in(self._life(each).records(), each.start, each.end).sum()) for each in ranges]

    def reach(self, ranges: Sequence[SpanRange], sizes: Sequence[int]) -> list[int]:
        """The end of a file, so that no file is read for two batches."""
        return [
            arithmetic.reach(self._life(each).records(), each.start, each.end, size)
            for each, size in zip(ranges, sizes, strict=True)
        ]

    def tasks(
        self, ranges: Sequence[SpanRange], spans: Sequence[PartitionSpan], tasks_min: int
    ) -> list[ArchiveReadTask]:
        """Tasks for the files with rows in the ranges. Sequences that are in no file were lost before they were
        archived."""
        files: dict[str, ArchivedFile] = {}
        bounds: dict[str, dict[str, tuple[int, int]]] = {}
        losses = []
        for each in ranges:
            life = self._life(each)
            losses += [
                f"sequences {first} to {end - 1} of {life.partition} are not in the archive: its log had removed them, "
                "or they were damaged"
                for first, end in life.missing(each.start, each.end)
            ]
            for file in life.files:
                first, last = file.partitions[life.partition]
                if first < each.end and each.start <= last:
                    files[file.path] = file
                    bounds.setdefault(file.path, {})[life.partition] = (each.start, each.end)
        report(losses, fail=self._options.fail_on_loss)
        return self._tasks_of([FilePart.of(file, bounds[path]) for path, file in files.items()], tasks_min)

    def all_tasks(self, tasks_min: int) -> list[ArchiveReadTask]:
        """Tasks for all messages, of all lives and data directories."""
        return self._tasks_of([FilePart(file) for file in self._newest().find(MESSAGES)], tasks_min)

    def _tasks_of(self, parts: Iterable[FilePart], tasks_min: int) -> list[ArchiveReadTask]:
        """Tasks of about equal size, in log order."""
        found = [part for part in parts if _may_hold(part.file, self._wanted)]
        found.sort(key=lambda part: (part.file.source, part.file.start, part.file.path))
        total = sum(part.file.raw_size or part.file.size for part in found)
        size = max(min(-(-total // tasks_min), CHUNK_SIZE), 1)
        tasks: list[ArchiveReadTask] = []
        taken: list[FilePart] = []
        done = 0
        for part in found:
            taken.append(part)
            done += part.file.raw_size or part.file.size
            if done >= size:
                tasks.append(ArchiveReadTask(tuple(taken)))
                taken, done = [], 0
        return [*tasks, ArchiveReadTask(tuple(taken))] if taken else tasks


def lives_of(manifest: ArchiveManifest, wanted: WantedRows, path: str) -> dict[tuple[str, str, int], ArchivedLife]:
    """(source, partition, number) → every life of the wanted partitions that has files, in order of its first file."""
    found: dict[tuple[str, str, int], ArchivedLife] = {}
    named = [file for file in manifest.find(MESSAGES) if wanted.names(file.subject)]
    for file in sorted(named, key=lambda file: file.start):
        for partition in file.partitions:
            if wanted.keeps(file.subject, partition.rpartition("@")[0]):
                lives = manifest.sources[file.source].lives.get(partition, [])
                life = next((life for life in reversed(lives) if life.offset <= file.start), None)
                if life is None:
                    raise ArchiveError(f"the manifest of {path} does not record which sequences of {partition} it has")
                known = found.setdefault(
                    (file.source, partition, life.number), ArchivedLife(partition, file.subject, life)
                )
                known.files.append(file)
    return found


class _StoreTimes:
    """Finds sequences by store time from the manifest; a file is opened, once, only if the time lies within it."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self._known: dict[tuple[str, int], tuple[Mapping[str, int], Mapping[str, int]]] = {}

    def first_at(self, archived: ArchivedLife, time: int) -> int:
        """The first sequence that was stored at or after a time; the end where there is none."""
        found, partition = archived.life.end, archived.partition
        for file in archived.files:
            first = file.partitions[partition][0]
            if first < found and file.time_max >= time:
                found = min(found, first if file.time_min >= time else self._read(file, time)[0].get(partition, found))
        return found

    def end_before(self, archived: ArchivedLife, time: int) -> int:
        """The sequence after the last one that was stored before a time; the start where there is none."""
        found, partition = archived.life.start, archived.partition
        for file in reversed(archived.files):
            end = file.partitions[partition][1] + 1
            if end > found and file.time_min < time:
                found = max(found, end if file.time_max < time else self._read(file, time)[1].get(partition, found))
        return found

    def _read(self, file: ArchivedFile, time: int) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Partition → the first sequence at or after a time, and partition → the sequence after the last before it."""
        if (file.path, time) not in self._known:
            rows = read_columns(self._archive, file.path, ["partition", "sequence", "store_time"])
            later = pc.greater_equal(rows["store_time"].cast(pa.int64()), time)
            after = rows.filter(later).group_by("partition").aggregate([("sequence", "min")])
            before = rows.filter(pc.invert(later)).group_by("partition").aggregate([("sequence", "max")])
            self._known[file.path, time] = (
                dict(zip(after["partition"].to_pylist(), after["sequence_min"].to_pylist(), strict=True)),
                dict(zip(before["partition"].to_pylist(), pc.add(before["sequence_max"], 1).to_pylist(), strict=True)),
            )
        return self._known[file.path, time]


def _may_hold(file: ArchivedFile, wanted: WantedRows) -> bool:
    named = wanted.names(file.subject) and (wanted.subjects_only is None or file.subject in wanted.subjects_only)
    if not named or file.time_min > wanted.time_max or file.time_max < wanted.time_min:
        return False
    only, keys, low, high = wanted.partitions_only, wanted.keys, file.key_min, file.key_max
    if keys is not None and (low is None or high is None or not any(low <= key <= high for key in keys)):
        return False
    return any(
        first <= wanted.sequence_max and last >= wanted.sequence_min
        for partition, (first, last) in file.partitions.items()
        if only is None or partition.rpartition("@")[0] in only
    )
