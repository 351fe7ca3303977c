"""Writes the files of an archive and verifies that they have the rows of the log.

A file has the rows of one subject and one day, from one range of the log, sorted by key, so that a lookup reads one
row group of it. It is written under a unique name, made durable, read back and compared. No reader uses it until a
manifest names it. Nothing here needs Spark.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date, timedelta
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from plait import chance
from plait.errors import ArchiveError
from plait.limits import MIB
from plait.spark.archiving.archive_files import first_line
from plait.spark.archiving.array_views import raw_size, viewed_batch
from plait.spark.archiving.digest import Digest
from plait.spark.archiving.manifest import Archive, ArchivedFile, DayKind, FileKind, day_directory, subject_directory
from plait.spark.archiving.row_order import arranged, lookup_order
from plait.spark.source.spark_columns import STORED_COLUMNS

#: Level 3 takes a third longer than level 1 and saves a few percent of the size (docs/archive.md has figures).
COMPRESSION: Final = "zstd"
COMPRESSION_LEVEL: Final = 1
#: A point lookup reads all columns of one row group: with twice as many rows it takes twice as long. Each row group
#: costs about 1.5 KB of statistics, which is little compared with this many rows or bytes.
ROW_GROUP_COUNT: Final = 8_192
ROW_GROUP_SIZE: Final = 2 * MIB
DAY_MICROS: Final = 86_400_000_000

#: Without the subject, which is in the path of the file.
MESSAGE_SCHEMA: Final = pa.schema(
    [pa.field(name, column.type, column.nullable) for name, column in STORED_COLUMNS.items() if name != "subject"]
)
_EPOCH_DAY: Final = date(1970, 1, 1)
#: Columns with few distinct values. A dictionary costs nothing for these, and much for others.
_DICTIONARIES: Final = {
    "messages": ["partition"],
    "actions": ["action", "subject", "partition", "consumer_group", "consumer"],
    "deaths": ["subject", "partition", "consumer_group", "type", "text", "handler"],
}


def day_of(micros: int) -> str:
    """The UTC date of a time, as in paths."""
    return (_EPOCH_DAY + timedelta(days=micros // DAY_MICROS)).isoformat()


def row_group_count(count: int, size: int) -> int:
    """The number of rows of a row group in a file with ``count`` rows and ``size`` bytes."""
    return max(1, min(ROW_GROUP_COUNT, ROW_GROUP_SIZE * count // max(size, 1)))


class FileWriter:
    """Writes files of one source for the manifest of one number."""

    def __init__(self, archive: Archive, number: int, source: str) -> None:
        self.archive = archive
        self._source = source
        # Manifest number and a token of this writer. A file that no manifest up to this number names can be removed.
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
        """Write a file of messages. ``rows`` has the rows of each partition in log order, ``partitions`` the first and
        last sequence of each partition."""
        rows = arranged(rows, lookup_order(rows))
        keys = rows.column("key")
        # Keys are sorted; rows without a key come last.
        key_min, key_max = (keys[index].as_py() for index in (0, max(len(keys) - keys.null_count - 1, 0)))
        file = self._file("messages", day, subject_directory(subject, day), rows, offsets)
        return msgspec.structs.replace(file, subject=subject, partitions=partitions, key_min=key_min, key_max=key_max)

    def of_day(self, kind: DayKind, day: str, rows: pa.RecordBatch, offsets: tuple[int, int]) -> ArchivedFile:
        """Write a file of events or deaths, in log order."""
        return self._file(kind, day, day_directory(kind, day), rows, offsets)

    def _file(
        self, kind: FileKind, day: str, directory: str, rows: pa.RecordBatch, offsets: tuple[int, int]
    ) -> ArchivedFile:
        path = self._path(directory)
        size_before = raw_size(rows)
        size = self._write(path, rows, size_before, _DICTIONARIES[kind])
        times = pc.min_max(rows.column("store_time" if kind == "messages" else "time").cast(pa.int64()))
        return ArchivedFile(
            path=path,
            kind=kind,
            date=day,
            count=rows.num_rows,
            size=size,
            raw_size=size_before,
            checksum=self._compare(path, rows),
            source=self._source,
            start=offsets[0],
            end=offsets[1],
            time_min=times["min"].as_py(),
            time_max=times["max"].as_py(),
        )

    def aside(self, relative: str) -> str:
        """The name of a file while it is being written."""
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
            # A reader of a few rows reads a few pages, and verifies these alone.
            write_page_checksum=True,
            # The file does not record that text columns were views.
            store_schema=False,
        )
        size: int = archive.files.get_file_info(path).size
        return size

    def _compare(self, path: str, rows: pa.RecordBatch) -> int:
        """Read a file back and compare it with its rows while another thread makes it durable; return its checksum."""
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
                f"{self.archive.location}/{path} does not read back as it was written; nothing was committed. Check "
                "the memory and disks of this machine, then run again"
            )
        return checksum


def read_batches(archive: Archive, relative: str) -> Iterator[pa.RecordBatch]:
    """The rows of a file, one row group at a time. Raises ``ArchiveError`` with the reason where it cannot be read."""
    try:
        # Not as a data set, which would add columns from the path.
        with archive.files.open_input_file(archive.path(relative)) as source:
            file = pq.ParquetFile(source)
            # Batches that span row groups would be copied again.
            count = file.metadata.row_group(0).num_rows if file.num_row_groups else ROW_GROUP_COUNT
            yield from file.iter_batches(count, use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise ArchiveError(f"{archive.location}/{relative} cannot be read: {first_line(error)}") from error


def read_file(archive: Archive, relative: str) -> pa.Table:
    """All rows of a file."""
    batches = list(read_batches(archive, relative))
    return pa.Table.from_batches(batches, batches[0].schema if batches else MESSAGE_SCHEMA)


def check_file(archive: Archive, file: ArchivedFile) -> None:
    """Read a file and compare it with its entry in the manifest; ``ArchiveError`` where they differ."""
    digest = Digest()
    for batch in read_batches(archive, file.path):
        digest.feed(batch)
    count, found = digest.value
    if (count, found) != (file.count, file.checksum):
        raise ArchiveError(
            f"{archive.location}/{file.path} is damaged: {count} rows with checksum {found:08x}, the manifest says "
            f"{file.count} with {file.checksum:08x}. Restore the file from a copy"
        )
