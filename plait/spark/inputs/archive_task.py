"""Reading some files of an archive as record batches: all their rows, or some sequences of each partition.

Files are sorted by key, so that the rows of a range of sequences are anywhere in them: they are found by their
sequences, whole columns at a time. Compaction may replace a file between planning and reading; the merged file has the
same rows, and they are read from there.
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

#: ``name@group`` → the sequences [start, end) that are asked for.
Bounds = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class FilePart:
    """A file, and what of it is asked for."""

    file: ArchivedFile
    #: None: all of it.
    bounds: Bounds | None = None

    @classmethod
    def of(cls, file: ArchivedFile, bounds: Bounds) -> FilePart:
        """Without bounds where they leave nothing out, so that nobody has to look at sequences."""
        whole = all(
            name in bounds and bounds[name][0] <= first and last < bounds[name][1]
            for name, (first, last) in file.partitions.items()
        )
        return cls(file, None if whole else bounds)

    def within(self, merged: ArchivedFile) -> FilePart:
        """The same rows of a file that this one was merged into: no other one of that day has their sequences."""
        own = {name: (first, last + 1) for name, (first, last) in self.file.partitions.items()}
        if self.bounds is not None:
            both = {name: (own[name], self.bounds[name]) for name in own.keys() & self.bounds.keys()}
            own = {name: (max(a[0], b[0]), min(a[1], b[1])) for name, (a, b) in both.items()}
        return FilePart.of(merged, own)

    def mask(self, partitions: pa.Array, sequences: pa.Array) -> pa.Array:
        """Which rows are asked for."""
        bounds = self.bounds or {}
        names = partitions.dictionary_encode()
        limits = np.array([bounds.get(name, (0, 0)) for name in names.dictionary.to_pylist()], np.int64)
        start, end = limits[names.indices.to_numpy()].T
        found = sequences.to_numpy()
        return pa.array((found >= start) & (found < end))


@dataclass(frozen=True)
class ArchiveReadTask:
    """Some files."""

    parts: tuple[FilePart, ...]

    def batches(self, options: ReadOptions, wanted: WantedRows, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Their rows, but for row groups and keys that filters exclude."""
        archive = Archive.at(options.path)
        for planned in self.parts:
            part = _there(archive, planned)
            with reading(archive, part.file), archive.files.open_input_file(archive.path(part.file.path)) as stream:
                yield from _read(stream, part, wanted, schema)


def _there(archive: Archive, part: FilePart) -> FilePart:
    """Where the rows of a file are now; ``ArchiveError`` where nobody knows."""
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
            and all(_holds(file.partitions.get(name), ends) for name, ends in gone.partitions.items())
        ):
            return part.within(file)
    raise ArchiveError(
        f"{archive.place}/{gone.path} is gone, and no other file has its {gone.count} messages. Restore the file from "
        "a copy"
    )


def _holds(outer: tuple[int, int] | None, inner: tuple[int, int]) -> bool:
    return outer is not None and outer[0] <= inner[0] and inner[1] <= outer[1]


@contextmanager
def reading(archive: Archive, file: ArchivedFile) -> Iterator[None]:
    """``ArchiveError`` names the file that does not read back."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise ArchiveError(f"{archive.place}/{file.path} does not read back: {error}") from error


def _read(stream: Any, part: FilePart, wanted: WantedRows, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    columns = [name for name in schema.names if name != "subject"]
    looked_at = ["key"] if wanted.keys is not None else []
    looked_at += ["partition", "sequence"] if part.bounds is not None else []
    # A query of no column but the subject still has to know how many rows there are.
    asked = list(dict.fromkeys([*columns, *looked_at])) or ["sequence"]
    keys = None if wanted.keys is None else pa.array(sorted(wanted.keys), pa.string())
    with pq.ParquetFile(stream) as parquet:
        for batch in parquet.iter_batches(_BATCH_COUNT, _groups(parquet.metadata, wanted, part.bounds), columns=asked):
            if part.bounds is not None:
                batch = batch.filter(part.mask(batch.column("partition"), batch.column("sequence")))
            if keys is not None:
                batch = batch.filter(pc.is_in(batch.column("key"), keys))
            if batch.num_rows:
                subject = pa.repeat(pa.scalar(part.file.subject, pa.string()), batch.num_rows)
                arrays = [subject if name == "subject" else batch.column(name) for name in schema.names]
                typed = [array.cast(field.type) for array, field in zip(arrays, schema, strict=True)]
                yield pa.RecordBatch.from_arrays(typed, schema=schema)


def _groups(metadata: Any, wanted: WantedRows, asked: Bounds | None) -> list[int]:
    """The row groups that may hold wanted rows, by their statistics."""
    places = {metadata.schema.column(index).path: index for index in range(metadata.num_columns)}
    low = min((start for start, _ in asked.values()), default=0) if asked is not None else 0
    high = max((end for _, end in asked.values()), default=0) - 1 if asked is not None else SEQUENCE_MAX
    bounds: dict[str, tuple[Any, Any]] = {
        "sequence": (max(wanted.sequence_min, low), min(wanted.sequence_max, high)),
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
