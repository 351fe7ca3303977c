"""Reading an archive: the Parquet files that its newest manifest names, as the same columns.

The manifest says of each file which subject, day, partitions, sequences, times and keys it has, so what filters exclude
is not opened; and of each partition which sequences are archived, in which epochs. So an archive is read from offset to
offset, and as a stream while it grows, by its manifest; a file is opened in the driver only to find a time within it.
Files of a deleted or expired subject are as good as any: an archive outlives both, and has a span for each life of a
partition.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from plait.client.read.surveyor import PartitionSpan, SpanRange
from plait.errors import ArchiveError, InvalidArgument
from plait.spark.archiving.manifest import DIRECTORY, MESSAGES, Archive, ArchivedFile, ArchiveManifest, PartitionLife
from plait.spark.inputs.archive_task import ArchiveReadTask, FilePart, reading
from plait.spark.source.offsets import report
from plait.spark.source.read_options import ReadOptions
from plait.storage.disk import RealDisk
from plait.storage.logs import record_spans as arithmetic
from plait.storage.logs.consume_log import RECORD, Records
from plait.storage.reading.log_chunks import CHUNK_SIZE, WantedRows, check_names

#: Options that say something of logs alone.
_NOT_HERE: Final = ("group", "failOnDamage")


def is_archive(path: str) -> bool:
    """There is a manifest, or it is a place that no server keeps its logs at."""
    return "://" in path or RealDisk(path, read_only=True).exists(DIRECTORY)


def check_archive(options: ReadOptions) -> None:
    """There is one; what it cannot be asked for is refused."""
    for name in _NOT_HERE:
        if name in options.given:
            raise InvalidArgument(f"option {name!r} has no meaning for the archive {options.path!r}")
    archive = Archive.at(options.path)
    if "://" in options.path and not archive.numbers():
        raise ArchiveError(
            f"{options.path!r} is not an archive: it has no {DIRECTORY}/commit-* file. Data directories and segment "
            "files are read from local paths alone: copy them"
        )
    archive.open()


@dataclass
class _Part:
    """One life of a partition, and its files."""

    place: str
    subject: str
    life: PartitionLife
    files: list[ArchivedFile] = field(default_factory=list)

    def records(self) -> Records:
        """Its files as if each were one frame, by where they end: a clock set back at midnight makes them overlap."""
        files = sorted(self.files, key=lambda file: file.partitions[self.place][1])
        records = np.empty(len(files), RECORD)
        for index, file in enumerate(files):
            counts = {place: last - first + 1 for place, (first, last) in file.partitions.items()}
            size = (file.raw_size or file.size) * counts[self.place] // sum(counts.values())
            records[index] = (file.partitions[self.place][0], file.start, file.time_min, size, counts[self.place])
        return records

    def missing(self, start: int, end: int) -> list[tuple[int, int]]:
        """Sequences [first, end) between two that no file has."""
        gaps = ((max(gap, start), min(first, end)) for (_, gap), (first, _) in pairwise(self.life.ranges))
        return [(first, last) for first, last in gaps if first < last]


class ArchiveInput:
    """An archive. It may be asked again and again: a manifest is read once."""

    expires = False

    def __init__(self, options: ReadOptions, wanted: WantedRows) -> None:
        self._options = options
        self._wanted = wanted
        self._archive = Archive.at(options.path)
        self._manifest = ArchiveManifest()
        #: By partition and its number; None: not looked at.
        self._parts: dict[tuple[str, int], _Part] | None = None

    def close(self) -> None:
        """There is nothing to hang up."""

    def _look(self) -> ArchiveManifest:
        """The newest manifest; ``SubjectNotFound`` for a subject that was never archived."""
        if self._archive.numbers()[-1:] != [self._manifest.number]:
            manifest = self._archive.open()
            there = {file.subject for file in manifest.find(MESSAGES)}
            check_names(f"the archive {self._options.path}", self._wanted, there)
            self._manifest, self._parts = manifest, None
        return self._manifest

    def spans(self, times: Sequence[int] = ()) -> list[PartitionSpan]:
        """As the newest manifest has them, one for each life."""
        manifest = self._look()
        if self._parts is None:
            self._parts = _parts_of(self._options.path, manifest, self._wanted)
        moments = _Moments(self._archive)
        found = []
        for part in self._parts.values():
            name, _, group = part.place.rpartition("@")
            life = part.life
            at = [moments.first_at(part, time) for time in times]
            until = [moments.end_before(part, time) for time in times]
            found.append(
                PartitionSpan(name, part.subject, life.number, life.start, life.end, life.epochs, at, until, group)
            )
        return found

    def _part(self, each: SpanRange) -> _Part:
        assert self._parts is not None
        return self._parts[str(each.place), each.number]

    def sizes(self, ranges: Sequence[SpanRange]) -> list[int]:
        """By the last look at the manifest."""
        return [int(arithmetic.sizes_in(self._part(each).records(), each.start, each.end).sum()) for each in ranges]

    def reach(self, ranges: Sequence[SpanRange], sizes: Sequence[int]) -> list[int]:
        """To the end of a file, so that none is read for two batches."""
        return [
            arithmetic.reach(self._part(each).records(), each.start, each.end, size)
            for each, size in zip(ranges, sizes, strict=True)
        ]

    def tasks(
        self, ranges: Sequence[SpanRange], spans: Sequence[PartitionSpan], tasks_min: int
    ) -> list[ArchiveReadTask]:
        """The files with rows in the ranges. What lies between and is in no file was lost before it was archived."""
        files: dict[str, ArchivedFile] = {}
        bounds: dict[str, dict[str, tuple[int, int]]] = {}
        losses = []
        for each in ranges:
            part = self._part(each)
            losses += [
                f"sequences {first} to {end - 1} of {part.place} are not in the archive: they were gone from its log, "
                "or damaged there"
                for first, end in part.missing(each.start, each.end)
            ]
            for file in part.files:
                first, last = file.partitions[part.place]
                if first < each.end and each.start <= last:
                    files[file.path] = file
                    bounds.setdefault(file.path, {})[part.place] = (each.start, each.end)
        report(losses, fail=self._options.fail_on_loss)
        return self._tasks_of([FilePart.of(file, bounds[path]) for path, file in files.items()], tasks_min)

    def all_tasks(self, tasks_min: int) -> list[ArchiveReadTask]:
        """Everything there is, of whatever life and data directory."""
        return self._tasks_of([FilePart(file) for file in self._look().find(MESSAGES)], tasks_min)

    def _tasks_of(self, parts: Iterable[FilePart], tasks_min: int) -> list[ArchiveReadTask]:
        """Shared out by size, in the order of the log."""
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


def _parts_of(path: str, manifest: ArchiveManifest, wanted: WantedRows) -> dict[tuple[str, int], _Part]:
    """Every life of the partitions that are asked for, the older ones first.

    ``ArchiveError`` where the manifest cannot tell lives apart.
    """
    parts: dict[tuple[str, int], _Part] = {}
    homes: dict[str, str] = {}
    for file in sorted(manifest.find(MESSAGES), key=lambda file: file.start):
        if not wanted.names(file.subject):
            continue
        for place in file.partitions:
            if not wanted.keeps(file.subject, place.rpartition("@")[0]):
                continue
            if homes.setdefault(place, file.source) != file.source:
                raise ArchiveError(
                    f"{place} is the name of partitions of two data directories in the archive {path} "
                    f"({homes[place]} and {file.source}), each with sequences of its own: read it without offsets, and "
                    "archive each directory to a place, or under a --group, of its own"
                )
            lives = [life for life in manifest.sources[file.source].lives.get(place, []) if life.offset <= file.start]
            if not lives:
                raise ArchiveError(
                    f"the archive {path} does not say which sequences of {place} it has: an earlier Plait began it. "
                    "Read it without offsets, or archive anew to another place"
                )
            parts.setdefault((place, lives[-1].number), _Part(place, file.subject, lives[-1])).files.append(file)
    return parts


class _Moments:
    """When messages were stored, by the manifest; files that a time lies within are looked into, each once."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self._known: dict[tuple[str, int], tuple[Mapping[str, int], Mapping[str, int]]] = {}

    def first_at(self, part: _Part, time: int) -> int:
        """The first sequence that was stored at or after a time; the end where there is none."""
        found = part.life.end
        for file in part.files:
            first = file.partitions[part.place][0]
            if first < found and file.time_max >= time:
                found = min(found, first if file.time_min >= time else self._look(file, time)[0].get(part.place, found))
        return found

    def end_before(self, part: _Part, time: int) -> int:
        """The sequence after the last one that was stored before a time; the start where there is none."""
        found = part.life.start
        for file in reversed(part.files):
            end = file.partitions[part.place][1] + 1
            if end > found and file.time_min < time:
                found = max(found, end if file.time_max < time else self._look(file, time)[1].get(part.place, found))
        return found

    def _look(self, file: ArchivedFile, time: int) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Partition → the first sequence at or after a time; and the one after the last before it."""
        if (file.path, time) not in self._known:
            archive = self._archive
            with reading(archive, file), archive.files.open_input_file(archive.path(file.path)) as stream:
                rows = pq.read_table(stream, columns=["partition", "sequence", "store_time"])
            later = pc.greater_equal(rows["store_time"].cast(pa.int64()), time)
            after = rows.filter(later).group_by("partition").aggregate([("sequence", "min")])
            before = rows.filter(pc.invert(later)).group_by("partition").aggregate([("sequence", "max")])
            self._known[file.path, time] = (
                dict(zip(after["partition"].to_pylist(), after["sequence_min"].to_pylist(), strict=True)),
                dict(zip(before["partition"].to_pylist(), pc.add(before["sequence_max"], 1).to_pylist(), strict=True)),
            )
        return self._known[file.path, time]


def _is_in(only: frozenset[str] | None, name: str) -> bool:
    return only is None or name in only


def _may_hold(file: ArchivedFile, wanted: WantedRows) -> bool:
    keys = wanted.keys
    return (
        wanted.names(file.subject)
        and _is_in(wanted.subjects_only, file.subject)
        and file.time_min <= wanted.time_max
        and file.time_max >= wanted.time_min
        and _has_sequences(file.partitions, wanted)
        and (keys is None or _between(keys, file.key_min, file.key_max))
    )


def _has_sequences(partitions: Mapping[str, tuple[int, int]], wanted: WantedRows) -> bool:
    return any(
        first <= wanted.sequence_max and last >= wanted.sequence_min
        for place, (first, last) in partitions.items()
        if _is_in(wanted.partitions_only, place.rpartition("@")[0])
    )


def _between(keys: frozenset[str], first: str | None, last: str | None) -> bool:
    return first is not None and last is not None and any(first <= key <= last for key in keys)
