"""The archived part of a subject's history: rows of the Parquet files that the manifest names.

Files are sorted by key and have statistics for each row group, so that a key is in few row groups: the manifest selects
files, statistics select row groups, and the columns of the conditions are read before all others. Open files are
cached, since an archived file never changes.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from plait.errors import ArchiveError
from plait.spark.archiving.manifest import MESSAGES, Archive, ArchivedFile, ArchiveManifest
from plait.spark.history.live_part import ENCODED, SCHEMA
from plait.spark.history.selection import HistorySelection
from plait.spark.source import arrow_scalars as bare
from plait.spark.source import header_columns

#: The maximum of open files, with their footers; about 100 KiB each.
OPEN_MAX: Final = 256
#: Columns whose statistics select row groups.
_CHOOSING: Final = ("key", "message_id", "store_time")


class FileGone(ArchiveError):
    """A file that the manifest names does not exist: a later manifest has replaced it, or it is lost."""


@dataclass(frozen=True)
class ArchivedPiece:
    """One file that may have matching rows; pickled to the task that reads it."""

    #: The address of the archive.
    archive: str
    file: ArchivedFile

    @property
    def size(self) -> int:
        return self.file.size

    def read(
        self, selection: HistorySelection, *, encoded: bool = False, files: OpenFiles | None = None
    ) -> Iterator[pa.Table]:
        """The matching rows. ``encoded`` adds a column with the headers as they were sent, null where all values are
        text. ``files`` caches open files.
        """
        try:
            opened = (files or OpenFiles()).get(self.archive, self.file)
            yield from opened.read(selection, encoded=encoded)
        except FileNotFoundError as error:
            raise FileGone(
                f"{self.archive}/{self.file.path} does not exist, and the archive's manifest names it: "
                f"{self.file.count} messages are missing. Restore the file from a copy"
            ) from error
        except (pa.ArrowException, OSError) as error:
            reason = str(error).partition("\n")[0]
            raise ArchiveError(
                f"{self.archive}/{self.file.path} is damaged or cannot be read: {reason}. Restore the file from a copy",
                file=f"{self.archive}/{self.file.path}",
            ) from error


def plan_archived(archive: Archive, manifest: ArchiveManifest, selection: HistorySelection) -> list[ArchivedPiece]:
    """The files that may have matching rows, by the manifest."""
    found = manifest.find(
        MESSAGES, subjects=[selection.subject], time_min=selection.time_min, time_max=selection.time_max
    )
    return [ArchivedPiece(archive.address, file) for file in found if _may_hold(file, selection.key)]


def _may_hold(file: ArchivedFile, key: str | None) -> bool:
    """Whether the file may have rows of the key; True if no key is given."""
    if key is None:
        return True
    return file.key_min is not None and file.key_max is not None and file.key_min <= key <= file.key_max


class OpenFiles:
    """A cache of open files; thread-safe."""

    def __init__(self, count_max: int = OPEN_MAX) -> None:
        self._count_max = count_max
        self._files: OrderedDict[str, _File] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, archive: str, file: ArchivedFile) -> _File:
        """The open file; opens it if it is not in the cache."""
        with self._lock:
            known = self._files.get(file.path)
            if known is not None:
                self._files.move_to_end(file.path)
                return known
        opened = _File(archive, file.path, file.count)
        with self._lock:
            self._files[file.path] = opened
            while len(self._files) > self._count_max:
                self._files.popitem(last=False)
        return opened


# --- one file -----------------------------------------------------------------------------------


@dataclass
class _Bounds:
    """The least and the greatest value of a column in each row group; None: unknown, or no value."""

    low: list[Any] = field(default_factory=list)
    high: list[Any] = field(default_factory=list)
    #: The row group has no value at all.
    empty: list[bool] = field(default_factory=list)


class _File:
    """An open file and its row groups."""

    def __init__(self, archive: str, path: str, count: int) -> None:
        self._parquet = pq.ParquetFile(_open(Archive.at(archive), path), page_checksum_verification=True)
        metadata = self._parquet.metadata
        if metadata.num_rows != count:
            raise pa.ArrowInvalid(f"it has {metadata.num_rows} rows, the manifest says {count}")
        names = [metadata.schema.column(number).path for number in range(metadata.num_columns)]
        missing = [name for name in SCHEMA.names if name != "subject" and name not in self._parquet.schema_arrow.names]
        if missing:
            raise pa.ArrowInvalid(f"it has no column {', '.join(missing)}")
        self._columns = [name for name in self._parquet.schema_arrow.names if name in SCHEMA.names]
        self._typed = header_columns.TYPES in self._parquet.schema_arrow.names
        self._bounds = {name: self._bounds_of(names.index(name)) for name in _CHOOSING}
        # Readers of one file share its file position, so they take turns.
        self._lock = threading.Lock()

    def _bounds_of(self, column: int) -> _Bounds:
        bounds = _Bounds()
        metadata = self._parquet.metadata
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            statistics = group.column(column).statistics
            known = statistics is not None and statistics.has_min_max
            # Raw values, text as bytes: converting them would import pandas.
            bounds.low.append(statistics.min_raw if known else None)
            bounds.high.append(statistics.max_raw if known else None)
            counted = statistics is not None and statistics.has_null_count
            bounds.empty.append(counted and statistics.null_count == group.num_rows)
        return bounds

    def groups(self, selection: HistorySelection) -> list[int]:
        """The row groups that may have matching rows."""
        found = range(self._parquet.metadata.num_row_groups)
        if selection.key is not None:
            key = selection.key.encode()
            found = self._from(found, key)
            groups = _within(found, self._bounds["key"], key, key)
        else:
            groups = list(found)
        if selection.message_id is not None:
            message_id = selection.message_id.encode()
            groups = _within(groups, self._bounds["message_id"], message_id, message_id)
        return _within(groups, self._bounds["store_time"], selection.time_min, selection.time_max)

    def _from(self, groups: range, key: bytes) -> range:
        """Without the row groups before the key, found by binary search if all bounds are known."""
        high = self._bounds["key"].high
        return groups if None in high else range(bisect_left(high, key), groups.stop)

    def read(self, selection: HistorySelection, *, encoded: bool) -> Iterator[pa.Table]:
        columns = [*self._columns, header_columns.TYPES] if encoded and self._typed else self._columns
        for group in self.groups(selection):
            with self._lock:
                rows = self._matching(group, selection, columns)
            if rows is not None and rows.num_rows:
                yield _finished(rows, selection.subject, encoded)

    def _matching(self, group: int, selection: HistorySelection, columns: list[str]) -> pa.Table | None:
        parquet = self._parquet
        condition_columns = selection.columns
        # A lookup of few rows already reads several files in threads.
        threads = not selection.few
        if not condition_columns:
            return parquet.read_row_group(group, columns=columns, use_threads=threads)
        # Read the columns of the conditions first: most of these row groups have no matching row.
        index = "__row"
        rows = parquet.read_row_group(group, columns=condition_columns, use_threads=threads)
        rows = rows.append_column(index, bare.integers(np.arange(rows.num_rows)))
        found = selection.matching(rows)
        if not found.num_rows:
            return None
        rest = parquet.read_row_group(group, columns=columns, use_threads=threads)
        return rest if found.num_rows == rest.num_rows else rest.take(found[index])


def _finished(rows: pa.Table, subject: str, encoded: bool) -> pa.Table:
    subjects = bare.repeated(subject, rows.num_rows)
    finished = rows.append_column("subject", subjects).select(SCHEMA.names).cast(SCHEMA)
    if not encoded:
        return finished
    types = rows[header_columns.TYPES] if header_columns.TYPES in rows.column_names else None
    original = (
        pa.nulls(rows.num_rows, pa.binary()) if types is None else header_columns.encoded_of(rows["headers"], types)
    )
    return finished.append_column(ENCODED, original)


def _within(groups: Iterable[int], bounds: _Bounds, low: Any, high: Any) -> list[int]:
    least, greatest, empty = bounds.low, bounds.high, bounds.empty
    return [
        group
        for group in groups
        if not empty[group] and (least[group] is None or (least[group] <= high and low <= greatest[group]))
    ]


def _open(archive: Archive, path: str) -> Any:
    if isinstance(archive.files, fs.LocalFileSystem):
        return pa.memory_map(archive.path(path))
    return archive.files.open_input_file(archive.path(path))
