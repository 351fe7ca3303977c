"""Reads the Parquet files of an archive: whole columns, some sequences of each partition, or few row groups.

Files are sorted by key and have statistics for each row group, so that a key is in few row groups. The rows of a range
of sequences may be anywhere in a file: a mask over whole columns selects them. Compaction may replace a file between
planning and reading: the source then reads its rows from the merged file, a lookup plans again (``FileGone``).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs

from plait.errors import ArchiveError
from plait.filter.message_filter import compile_filter
from plait.frame.header import SEQUENCE_MAX
from plait.spark.archiving.manifest import MESSAGES, Archive, ArchivedFile
from plait.spark.inputs.archived_fields import HEADER_COLUMNS, ArchivedFields, columns_of
from plait.spark.source.read_options import ReadOptions
from plait.spark.source.spark_columns import COLUMNS, joined
from plait.spark.source.typed_headers import PREFIX
from plait.storage.reading.log_chunks import WantedRows

_BATCH_COUNT: Final = 32_768
#: The maximum of open files, with their footers; about 100 KiB each.
OPEN_MAX: Final = 256

#: ``name@group`` → the wanted sequences [start, end).
Bounds = Mapping[str, tuple[int, int]]
#: Column → the least and the greatest wanted value, as statistics have them: text as bytes, times in microseconds.
Limits = Mapping[str, tuple[Any, Any]]


class FileGone(ArchiveError):
    """A file that the manifest names does not exist: a later manifest has replaced it, or it is lost."""


@contextmanager
def reading(archive: Archive, path: str, count: int = 0) -> Iterator[None]:
    """Turn errors into an ``ArchiveError`` that names the file and, if it is gone, its ``count`` messages."""
    try:
        yield
    except FileNotFoundError as error:
        missing = f": {count} messages are missing" if count else ""
        raise FileGone(
            f"{archive.location}/{path} does not exist, and the archive's manifest names it{missing}. Restore the file "
            "from a copy"
        ) from error
    except (pa.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise ArchiveError(
            f"{archive.location}/{path} is damaged or cannot be read: {reason}. Restore the file from a copy; "
            f"'plait spark archive --to {archive.location} --verify' checks all files",
            file=f"{archive.location}/{path}",
        ) from error


def read_columns(archive: Archive, path: str, columns: list[str], filters: Any = None) -> pa.Table:
    """Some rows of a file."""
    with reading(archive, path):
        return pq.read_table(
            archive.path(path), columns=columns, filters=filters, filesystem=archive.files, partitioning=None
        )


# --- open files ---------------------------------------------------------------------------------


class OpenFile:
    """An open file and the statistics of its row groups. Its readers share its file position: they hold ``lock``."""

    def __init__(self, archive: Archive, file: ArchivedFile, *, verify: bool) -> None:
        path = archive.path(file.path)
        local = isinstance(archive.files, fs.LocalFileSystem)
        source = pa.memory_map(path) if local else archive.files.open_input_file(path)
        self.parquet = pq.ParquetFile(source, page_checksum_verification=verify)
        metadata = self.parquet.metadata
        if metadata.num_rows != file.count:
            raise pa.ArrowInvalid(f"it has {metadata.num_rows} rows, the manifest says {file.count}")
        self.names: list[str] = self.parquet.schema_arrow.names
        self.lock = threading.Lock()
        self._columns = {metadata.schema.column(index).path: index for index in range(metadata.num_columns)}
        #: Column → for each row group its least and greatest value; (): it has none; None: not known.
        self._bounds: dict[str, list[tuple[Any, ...] | None]] = {}

    def groups(self, limits: Limits) -> list[int]:
        """The row groups that may have a value within the limits, for each of the columns."""
        metadata = self.parquet.metadata
        found = list(range(metadata.num_row_groups))
        for column, (low, high) in limits.items():
            if column not in self._bounds:
                groups = map(metadata.row_group, range(metadata.num_row_groups))
                self._bounds[column] = [_bounds(group, self._columns[column]) for group in groups]
            bounds = self._bounds[column]
            found = [group for group in found if _overlaps(bounds[group], low, high)]
        return found


def _bounds(group: Any, column: int) -> tuple[Any, ...] | None:
    statistics = group.column(column).statistics
    if statistics is None:
        return None
    if statistics.has_min_max:
        # Raw values, text as bytes: converting them would import pandas.
        return statistics.min_raw, statistics.max_raw
    return () if statistics.has_null_count and statistics.null_count == group.num_rows else None


def _overlaps(bounds: tuple[Any, ...] | None, low: Any, high: Any) -> bool:
    return bounds is None or (bounds != () and bool(bounds[0] <= high and low <= bounds[1]))


class OpenFiles:
    """A cache of open files, since an archived file never changes; thread-safe."""

    def __init__(self, count_max: int = OPEN_MAX) -> None:
        self._count_max = count_max
        self._files: OrderedDict[str, OpenFile] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, archive: Archive, file: ArchivedFile) -> OpenFile:
        """The open file; opens it if it is not in the cache."""
        with self._lock:
            known = self._files.get(file.path)
            if known is not None:
                self._files.move_to_end(file.path)
                return known
        opened = OpenFile(archive, file, verify=True)
        with self._lock:
            self._files[file.path] = opened
            while len(self._files) > self._count_max:
                self._files.popitem(last=False)
        return opened


# --- tasks of the source ------------------------------------------------------------------------


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
            with reading(archive, part.file.path, part.file.count):
                yield from joined(_read(OpenFile(archive, part.file, verify=False), part, wanted, schema))


def _current(archive: Archive, part: FilePart) -> FilePart:
    """The file that has the rows now; ``ArchiveError`` where no file has them."""
    gone = part.file
    with reading(archive, gone.path):
        if archive.files.get_file_info(archive.path(gone.path)).type != fs.FileType.NotFound:
            return part
    for file in archive.open().find(MESSAGES, subjects=[gone.subject]):
        if (
            (file.source, file.date) == (gone.source, gone.date)
            and file.path != gone.path
            and file.start <= gone.start
            and gone.end <= file.end
            and gone.partitions.keys() <= file.partitions.keys()
            and all(
                file.partitions[name][0] <= first and last <= file.partitions[name][1]
                for name, (first, last) in gone.partitions.items()
            )
        ):
            return part.within(file)
    raise ArchiveError(
        f"{archive.location}/{gone.path} is gone, and no other file has its {gone.count} messages. Restore the file "
        "from a copy"
    )


def limits_of(wanted: WantedRows, bounds: Bounds | None = None) -> Limits:
    """The limits of wanted rows, and of the sequences of a part."""
    low = min((start for start, _ in bounds.values()), default=0) if bounds is not None else 0
    high = max((end for _, end in bounds.values()), default=0) - 1 if bounds is not None else SEQUENCE_MAX
    limits: dict[str, tuple[Any, Any]] = {
        "sequence": (max(wanted.sequence_min, low), min(wanted.sequence_max, high)),
        "store_time": (wanted.time_min, wanted.time_max),
    }
    if wanted.keys:
        limits["key"] = (min(wanted.keys).encode(), max(wanted.keys).encode())
    return limits


def _read(opened: OpenFile, part: FilePart, wanted: WantedRows, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    groups = opened.groups(limits_of(wanted, part.bounds))
    if wanted.filter is None:
        yield from _rows(opened, groups, part, wanted, schema, None)
        return
    condition = compile_filter(wanted.filter)
    for group in groups:
        # The other columns of a group without matching rows are not read.
        examined = opened.parquet.read_row_group(group, columns=columns_of(condition.used))
        mask = condition.mask(ArchivedFields(examined), examined.num_rows)
        if mask.any():
            yield from _rows(opened, [group], part, wanted, schema, mask)


def _rows(
    opened: OpenFile,
    groups: list[int],
    part: FilePart,
    wanted: WantedRows,
    schema: pa.Schema,
    mask: npt.NDArray[np.bool_] | None,
) -> Iterator[pa.RecordBatch]:
    """The wanted rows of some row groups; ``mask``: the rows that the filter leaves."""
    columns = [name for name in schema.names if name != "subject" and name in COLUMNS]
    own = [field for field in schema if field.name not in COLUMNS]
    filtered = ["key"] if wanted.keys is not None else []
    filtered += ["partition", "sequence"] if part.bounds is not None else []
    filtered += HEADER_COLUMNS if own else []
    # A query for the subject alone still needs the number of rows.
    read = list(dict.fromkeys([*columns, *filtered])) or ["sequence"]
    keys = None if wanted.keys is None else pa.array(sorted(wanted.keys), pa.string())
    done = 0
    for batch in opened.parquet.iter_batches(_BATCH_COUNT, groups, columns=read):
        done += batch.num_rows
        if mask is not None:
            batch = batch.filter(pa.array(mask[done - batch.num_rows : done]))
        if part.bounds is not None:
            batch = batch.filter(part.mask(batch.column("partition"), batch.column("sequence")))
        if keys is not None:
            batch = batch.filter(pc.is_in(batch.column("key"), keys))
        if batch.num_rows:
            headers = ArchivedFields(batch) if own else None
            built = {each.name: headers.typed(each.name.removeprefix(PREFIX), each.type) for each in own if headers}
            built["subject"] = pa.repeat(pa.scalar(part.file.subject, pa.string()), batch.num_rows)
            arrays = [built[name] if name in built else batch.column(name) for name in schema.names]
            typed = [array.cast(field.type) for array, field in zip(arrays, schema, strict=True)]
            yield pa.RecordBatch.from_arrays(typed, schema=schema)
