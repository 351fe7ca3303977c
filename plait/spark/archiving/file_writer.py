"""Writing the files of an archive, and proving that they hold what the log does.

A file has the rows of one subject and one day, of one stretch of the log, sorted by key, so that a lookup reads one
row group of it. It is written under a name that nobody else has, made durable, read back and compared; nobody knows
of it until a manifest names it. Nothing here needs Spark: tasks run it, and so may any process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date, timedelta
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from plait import chance
from plait.errors import ArchiveError
from plait.limits import MIB
from plait.spark.archiving.array_views import raw_size, viewed_batch
from plait.spark.archiving.digest import Digest, bounds
from plait.spark.archiving.manifest import Archive, ArchivedFile, DayKind, day_directory, subject_directory
from plait.spark.archiving.row_order import arranged, lookup_order
from plait.spark.source.spark_columns import STORED_COLUMNS

#: Level 3 takes a third longer than level 1 and saves a few hundredths of the size (docs/archive.md has figures).
COMPRESSION: Final = "zstd"
COMPRESSION_LEVEL: Final = 1
#: A point lookup reads one row group of a file, all columns of it: with twice as many rows it takes twice as long. Each
#: row group costs about 1.5 KB of statistics, which is little beside so many rows, or so many bytes of them.
ROW_GROUP_COUNT: Final = 8_192
ROW_GROUP_SIZE: Final = 2 * MIB
DAY_MICROS: Final = 86_400_000_000

#: What the path says is not a column.
MESSAGE_SCHEMA: Final = pa.schema(
    [pa.field(name, column.type, column.nullable) for name, column in STORED_COLUMNS.items() if name != "subject"]
)
_EPOCH_DAY: Final = date(1970, 1, 1)
#: Few different values: a dictionary costs nothing there, and much elsewhere.
_DICTIONARIES: Final = ["partition"]
_DAY_DICTIONARIES: Final = [
    *("action", "subject", "partition", "consumer_group", "consumer"),
    *("type", "text", "handler"),
]


def day_of(micros: int) -> str:
    """The UTC date of a time, as paths have it."""
    return (_EPOCH_DAY + timedelta(days=micros // DAY_MICROS)).isoformat()


def row_group_count(count: int, size: int) -> int:
    """Rows of a row group in a file of so many rows and bytes."""
    return max(1, min(ROW_GROUP_COUNT, ROW_GROUP_SIZE * count // max(size, 1)))


class FileWriter:
    """Writes files of one source that the manifest of one number will name."""

    def __init__(self, archive: Archive, number: int, source: str) -> None:
        self.archive = archive
        self._source = source
        # Who wrote it, and for which manifest: what no manifest up to that one names can go.
        self._prefix = f"{number:020d}-{chance.token(8)}"
        self._made = 0

    def messages(
        self,
        subject: str,
        day: str,
        rows: pa.RecordBatch,
        offsets: tuple[int, int],
        partitions: dict[str, tuple[int, int]],
    ) -> ArchivedFile:
        """A file of messages: ``rows`` has those of each partition in log order, ``partitions`` their first and last
        sequences."""
        path = self._path(subject_directory(subject, day))
        rows = arranged(rows, lookup_order(rows))
        keys = rows.column("key")
        # They are sorted, those without one last.
        key_min, key_max = (keys[place].as_py() for place in (0, max(len(keys) - keys.null_count - 1, 0)))
        time_min, time_max = _times(rows.column("store_time"))
        count, size_before = rows.num_rows, raw_size(rows)
        size = self._write(path, rows, size_before, _DICTIONARIES)
        checksum = self._compare(path, rows)
        return ArchivedFile(
            path=path,
            kind="messages",
            subject=subject,
            date=day,
            count=count,
            size=size,
            raw_size=size_before,
            checksum=checksum,
            source=self._source,
            start=offsets[0],
            end=offsets[1],
            partitions=partitions,
            key_min=key_min,
            key_max=key_max,
            time_min=time_min,
            time_max=time_max,
        )

    def of_day(self, kind: DayKind, day: str, rows: pa.RecordBatch, offsets: tuple[int, int]) -> ArchivedFile:
        """A file of events or deaths, in log order."""
        path = self._path(day_directory(kind, day))
        count, size_before = rows.num_rows, raw_size(rows)
        size = self._write(path, rows, size_before, [name for name in _DAY_DICTIONARIES if name in rows.schema.names])
        checksum = self._compare(path, rows)
        time_min, time_max = _times(rows.column("time"))
        return ArchivedFile(
            path=path,
            kind=kind,
            date=day,
            count=count,
            size=size,
            raw_size=size_before,
            checksum=checksum,
            source=self._source,
            start=offsets[0],
            end=offsets[1],
            time_min=time_min,
            time_max=time_max,
        )

    def aside(self, relative: str) -> str:
        """Another name for a file that is not whole yet."""
        directory, _, name = relative.rpartition("/")
        self._made += 1
        return f"{directory}/{self._prefix}-{self._made:05d}.{name}"

    def _path(self, directory: str) -> str:
        self._made += 1
        return f"{directory}/{self._prefix}-{self._made:05d}.parquet"

    def _write(self, relative: str, rows: pa.RecordBatch, raw_size: int, dictionaries: list[str]) -> int:
        archive = self.archive
        path = archive.path(relative)
        archive.make_directory(os.path.dirname(relative))
        pq.write_table(
            pa.Table.from_batches([rows]),
            path,
            filesystem=archive.files,
            row_group_size=row_group_count(rows.num_rows, raw_size),
            compression=COMPRESSION,
            compression_level=COMPRESSION_LEVEL,
            use_dictionary=dictionaries,
            write_statistics=True,
            write_page_index=True,
            # Who reads a few rows looks at a few pages, and must know that they are whole.
            write_page_checksum=True,
            # That texts were views is nobody's business.
            store_schema=False,
        )
        size: int = archive.files.get_file_info(path).size
        return size

    def _compare(self, path: str, rows: pa.RecordBatch) -> int:
        """Read a file back, compare it with its rows, and make it durable meanwhile; its checksum."""
        with ThreadPoolExecutor(1) as thread:
            durable = thread.submit(self.archive.make_durable, path)
            digest = Digest()
            is_same = True
            for batch in read_batches(self.archive, path):
                is_same = is_same and viewed_batch(batch).equals(rows.slice(digest.count, batch.num_rows))
                digest.feed(batch)
            durable.result()
        count, checksum = digest.value
        if not is_same or count != rows.num_rows:
            raise ArchiveError(
                f"{self.archive.place}/{path} does not read back as it was written; nothing was committed. Check "
                "memory and disks of this machine, then run again"
            )
        return checksum


def read_batches(archive: Archive, relative: str) -> Iterator[pa.RecordBatch]:
    """A file's rows, a row group at a time. ``ArchiveError`` says what cannot be read."""
    try:
        # Not as a data set: what stands in the path is no column of the file.
        with archive.files.open_input_file(archive.path(relative)) as source:
            file = pq.ParquetFile(source)
            # Batches that reach over row groups are copied once more.
            count = file.metadata.row_group(0).num_rows if file.num_row_groups else ROW_GROUP_COUNT
            yield from file.iter_batches(count, use_threads=False)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise ArchiveError(f"{archive.place}/{relative} cannot be read: {reason}") from error


def read_file(archive: Archive, relative: str) -> pa.Table:
    """All of a file's rows."""
    batches = list(read_batches(archive, relative))
    return pa.Table.from_batches(batches, batches[0].schema if batches else MESSAGE_SCHEMA)


def check_file(archive: Archive, file: ArchivedFile) -> None:
    """Read a file and compare it with what the manifest says; ``ArchiveError`` where they differ."""
    digest = Digest()
    for batch in read_batches(archive, file.path):
        digest.feed(batch)
    count, found = digest.value
    if (count, found) != (file.count, file.checksum):
        raise ArchiveError(
            f"{archive.place}/{file.path} is damaged: {count} rows with checksum {found:08x}, the manifest says "
            f"{file.count} with {file.checksum:08x}. Restore the file from a copy"
        )


def _times(column: pa.Array) -> tuple[int, int]:
    low, high = bounds(column.cast(pa.int64()))
    return low, high
