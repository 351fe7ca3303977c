"""Reading an archive: the Parquet files that its newest manifest names, as the same columns.

The manifest says of each file which subject, day, partitions, sequences, times and keys it has, so what filters exclude
is not opened; within a file the statistics of its row groups do the same. Files of a deleted or expired subject are as
good as any: an archive outlives both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from plait.client.arguments import to_datetime
from plait.client.spans import SHOWN_MAX
from plait.errors import ArchiveError, InvalidArgument, SubjectNotFound
from plait.spark.manifest import DIRECTORY, MESSAGES, Archive, ArchivedFile
from plait.spark.options import ReadOptions
from plait.storage.chunks import CHUNK_SIZE, Wanted
from plait.storage.disk import RealDisk

#: Options that say something of logs alone.
_NOT_HERE: Final = ("startingOffsets", "endingOffsets", "group", "failOnDamage", "failOnDataLoss")
_BATCH_COUNT: Final = 32_768


def is_archive(path: str) -> bool:
    """There is a manifest, or it is a place that no server keeps its logs at."""
    return "://" in path or RealDisk(path, read_only=True).exists(DIRECTORY)


def check_archive(options: ReadOptions) -> None:
    """There is one; what it cannot be asked for is refused."""
    for name in _NOT_HERE:
        if name in options.given:
            raise InvalidArgument(f"option {name!r} has no meaning for the archive {options.path!r}; use where(...)")
    Archive.at(options.path).open()


@dataclass(frozen=True)
class ArchiveTask:
    """Some files."""

    files: tuple[ArchivedFile, ...]

    def batches(self, options: ReadOptions, wanted: Wanted, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Their rows, but for row groups and keys that filters exclude."""
        archive = Archive.at(options.path)
        for file in self.files:
            try:
                yield from self._read(archive, file, wanted, schema)
            except FileNotFoundError:
                raise ArchiveError(
                    f"{options.path}/{file.path} is gone: compaction has replaced it since the query was planned, or "
                    "somebody removed it; run the query again"
                ) from None
            except (pa.ArrowException, OSError) as error:
                raise ArchiveError(f"{options.path}/{file.path} does not read back: {error}") from error

    @staticmethod
    def _read(archive: Archive, file: ArchivedFile, wanted: Wanted, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        columns = [name for name in schema.names if name != "subject"]
        asked = columns if wanted.keys is None or "key" in columns else [*columns, "key"]
        with archive.files.open_input_file(archive.path(file.path)) as stream, pq.ParquetFile(stream) as parquet:
            groups = _groups(parquet.metadata, wanted)
            # A query of no column but the subject still has to know how many rows there are.
            for batch in parquet.iter_batches(_BATCH_COUNT, groups, columns=asked or ["sequence"]):
                if wanted.keys is not None:
                    batch = batch.filter(pc.is_in(batch.column("key"), pa.array(sorted(wanted.keys), pa.string())))
                if batch.num_rows:
                    subject = pa.repeat(pa.scalar(file.subject, pa.string()), batch.num_rows)
                    arrays = [subject if name == "subject" else batch.column(name) for name in schema.names]
                    typed = [array.cast(field.type) for array, field in zip(arrays, schema, strict=True)]
                    yield pa.RecordBatch.from_arrays(typed, schema=schema)


def _groups(metadata: Any, wanted: Wanted) -> list[int]:
    """The row groups that may hold wanted rows, by their statistics."""
    places = {metadata.schema.column(index).path: index for index in range(metadata.num_columns)}
    bounds: dict[str, tuple[Any, Any]] = {
        "sequence": (wanted.sequence_min, wanted.sequence_max),
        "store_time": (to_datetime(wanted.time_min), to_datetime(wanted.time_max)),
    }
    if wanted.keys:
        bounds["key"] = (min(wanted.keys), max(wanted.keys))
    found = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        if all(_overlaps(group.column(places[name]).statistics, *ends) for name, ends in bounds.items()):
            found.append(number)
    return found


def _overlaps(statistics: Any, low: Any, high: Any) -> bool:
    if statistics is None or not statistics.has_min_max:
        # Where all keys are null there is no range, and nothing that has a key.
        return statistics is None or not isinstance(low, str)
    first, last = statistics.min, statistics.max
    if isinstance(first, datetime) and first.tzinfo is None:
        first, last = first.replace(tzinfo=low.tzinfo), last.replace(tzinfo=low.tzinfo)
    return bool(first <= high and last >= low)


def archive_tasks(options: ReadOptions, wanted: Wanted, tasks_min: int) -> list[ArchiveTask]:
    """The files that may hold wanted rows, shared out by size; ``SubjectNotFound`` for one that was never archived."""
    archive = Archive.at(options.path)
    manifest = archive.open()
    everything = manifest.find(MESSAGES)
    _check_subjects(options.path, wanted, sorted({file.subject for file in everything}))
    files = [file for file in everything if _may_hold(file, wanted)]
    if not files:
        return []
    total = sum(file.raw_size or file.size for file in files)
    size = max(min(-(-total // tasks_min), CHUNK_SIZE), 1)
    tasks: list[ArchiveTask] = []
    taken: list[ArchivedFile] = []
    done = 0
    for file in files:
        taken.append(file)
        done += file.raw_size or file.size
        if done >= size:
            tasks.append(ArchiveTask(tuple(taken)))
            taken, done = [], 0
    return [*tasks, ArchiveTask(tuple(taken))] if taken else tasks


def _may_hold(file: ArchivedFile, wanted: Wanted) -> bool:
    keys = wanted.keys
    return (
        wanted.names(file.subject)
        and (wanted.subjects_only is None or file.subject in wanted.subjects_only)
        and file.time_min <= wanted.time_max
        and file.time_max >= wanted.time_min
        and _has_sequences(file.partitions, wanted)
        and (keys is None or _between(keys, file.key_min, file.key_max))
    )


def _has_sequences(partitions: Mapping[str, tuple[int, int]], wanted: Wanted) -> bool:
    only = wanted.partitions_only
    return any(
        first <= wanted.sequence_max and last >= wanted.sequence_min
        for place, (first, last) in partitions.items()
        if only is None or place.rpartition("@")[0] in only
    )


def _between(keys: frozenset[str], first: str | None, last: str | None) -> bool:
    return first is not None and last is not None and any(first <= key <= last for key in keys)


def _check_subjects(path: str, wanted: Wanted, known: Sequence[str]) -> None:
    missing = sorted(wanted.subjects.difference(known))
    missing += [f"{prefix}*" for prefix in wanted.prefixes if not any(name.startswith(prefix) for name in known)]
    if missing:
        more = "" if len(known) <= SHOWN_MAX else f" and {len(known) - SHOWN_MAX} more"
        there = f"there are {', '.join(known[:SHOWN_MAX])}{more}" if known else "there are no subjects"
        raise SubjectNotFound(f"subject {', '.join(map(repr, missing))} is not in the archive {path}; {there}")
