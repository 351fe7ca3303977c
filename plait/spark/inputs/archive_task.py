"""Reads files of an archive as record batches: all rows, or some sequences of each partition.

Files are sorted by key, so the rows of a range of sequences may be anywhere in them: a mask over whole columns selects
them. Compaction may replace a file between planning and reading; its rows are then read from the merged file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs

from plait.client.arguments import to_datetime
from plait.errors import ArchiveError
from plait.frame.header import SEQUENCE_MAX
from plait.spark.archiving.manifest import MESSAGES, Archive, ArchivedFile
from plait.spark.source.read_options import ReadOptions
from plait.storage.reading.log_chunks import WantedRows

_BATCH_COUNT: Final = 32_768

#: ``name@group`` → the wanted sequences [start, end).
Bounds = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class FilePart:
    """A file, and the wanted part of it."""

    file: ArchivedFile
    #: None: all rows.
    bounds: Bounds | None = None

    @classmethod
    def of(cls, file: ArchivedFile, bounds: Bounds) -> FilePart:
        """Without bounds where they include all rows, so that the task need not read sequences."""
        whole = all(
            name in bounds and bounds[name][0] <= first and last < bounds[name][1]
            for name, (first, last) in file.partitions.items()
        )
        return cls(file, None if whole else bounds)

    def within(self, merged: ArchivedFile) -> FilePart:
        """The same rows in the file that this one was merged into. No other file of that day has their sequences."""
        own = {name: (first, last + 1) for name, (first, last) in self.file.partitions.items()}
        if self.bounds is not None:
            both = {name: (own[name], self.bounds[name]) for name in own.keys() & self.bounds.keys()}
            own = {name: (max(a[0], b[0]), min(a[1], b[1])) for name, (a, b) in both.items()}
        return FilePart.of(merged, own)

    def mask(self, partitions: pa.Array, sequences: pa.Array) -> pa.Array:
        """True for each wanted row."""
        bounds = self.bounds or {}
        names = partitions.dictionary_encode()
        limits = np.array([bounds.get(name, (0, 0)) for name in names.dictionary.to_pylist()], np.int64)
        start, end = limits[names.indices.to_numpy()].T
        found = sequences.to_numpy()
        return pa.array((found >= start) & (found < end))


@dataclass(frozen=True)
class ArchiveReadTask:
    """Reads some files of an archive."""

    parts: tuple[FilePart, ...]

    def batches(self, options: ReadOptions, wanted: WantedRows, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """The rows of the files, without row groups and keys that filters exclude."""
        archive = Archive.at(options.path)
        for planned in self.parts:
            part = _current(archive, planned)
            with reading(archive, part.file), archive.files.open_input_file(archive.path(part.file.path)) as stream:
                yield from _read(stream, part, wanted, schema)


def _current(archive: Archive, part: FilePart) -> FilePart:
    """The file that has the rows now; ``ArchiveError`` where no file has them."""
    gone = part.file
    with reading(archive, gone):
        if archive.files.get_file_info(archive.path(gone.path)).type != fs.FileType.NotFound:
            return part
    for file in archive.open().find(MESSAGES, subjects=[gone.subject]):
        if (
            (file.source, file.date) == (gone.source, gone.date)
            and file.path != gone.path
            and file.start <= gone.start
            and gone.end <= file.end
            and all(_contains(file.partitions.get(name), ends) for name, ends in gone.partitions.items())
        ):
            return part.within(file)
    raise ArchiveError(
        f"{archive.location}/{gone.path} is gone, and no other file has its {gone.count} messages. Restore the file "
        "from a copy"
    )


def _contains(outer: tuple[int, int] | None, inner: tuple[int, int]) -> bool:
    return outer is not None and outer[0] <= inner[0] and inner[1] <= outer[1]


@contextmanager
def reading(archive: Archive, file: ArchivedFile) -> Iterator[None]:
    """Turn errors into an ``ArchiveError`` that names the file."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise ArchiveError(f"{archive.location}/{file.path} does not read back: {error}") from error


def _read(stream: Any, part: FilePart, wanted: WantedRows, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    columns = [name for name in schema.names if name != "subject"]
    filtered = ["key"] if wanted.keys is not None else []
    filtered += ["partition", "sequence"] if part.bounds is not None else []
    # A query for the subject alone still needs the number of rows.
    read = list(dict.fromkeys([*columns, *filtered])) or ["sequence"]
    keys = None if wanted.keys is None else pa.array(sorted(wanted.keys), pa.string())
    with pq.ParquetFile(stream) as parquet:
        for batch in parquet.iter_batches(_BATCH_COUNT, _groups(parquet.metadata, wanted, part.bounds), columns=read):
            if part.bounds is not None:
                batch = batch.filter(part.mask(batch.column("partition"), batch.column("sequence")))
            if keys is not None:
                batch = batch.filter(pc.is_in(batch.column("key"), keys))
            if batch.num_rows:
                subject = pa.repeat(pa.scalar(part.file.subject, pa.string()), batch.num_rows)
                arrays = [subject if name == "subject" else batch.column(name) for name in schema.names]
                typed = [array.cast(field.type) for array, field in zip(arrays, schema, strict=True)]
                yield pa.RecordBatch.from_arrays(typed, schema=schema)


def _groups(metadata: Any, wanted: WantedRows, bounds: Bounds | None) -> list[int]:
    """The row groups that may have wanted rows, by their statistics."""
    columns = {metadata.schema.column(index).path: index for index in range(metadata.num_columns)}
    low = min((start for start, _ in bounds.values()), default=0) if bounds is not None else 0
    high = max((end for _, end in bounds.values()), default=0) - 1 if bounds is not None else SEQUENCE_MAX
    limits: dict[str, tuple[Any, Any]] = {
        "sequence": (max(wanted.sequence_min, low), min(wanted.sequence_max, high)),
        "store_time": (to_datetime(wanted.time_min), to_datetime(wanted.time_max)),
    }
    if wanted.keys:
        limits["key"] = (min(wanted.keys), max(wanted.keys))
    found = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        if all(_overlaps(group.column(columns[name]).statistics, *ends) for name, ends in limits.items()):
            found.append(number)
    return found


def _overlaps(statistics: Any, low: Any, high: Any) -> bool:
    if statistics is None or not statistics.has_min_max:
        # Statistics without a range: all keys are null, so no row has a wanted key.
        return statistics is None or not isinstance(low, str)
    first, last = statistics.min, statistics.max
    if isinstance(first, datetime) and first.tzinfo is None:
        first, last = first.replace(tzinfo=low.tzinfo), last.replace(tzinfo=low.tzinfo)
    return bool(first <= high and last >= low)
