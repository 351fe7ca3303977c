"""Writes the files of an archive and verifies that they have the rows of the log.

A file of messages has the rows of one subject and one day, from one range of the log, sorted by key, so that a lookup
reads one row group of it. A file of events or deaths has the rows of one day, in log order. Each file is written under
a unique name, made durable, read back and compared. No reader uses it until a manifest names it. Nothing here needs
Spark.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date, timedelta
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from crc32c import crc32c

from plait import chance
from plait.errors import ArchiveError
from plait.limits import MIB
from plait.spark.archiving.archive_files import first_line
from plait.spark.archiving.array_views import arranged, lookup_order, raw_size, viewed_batch
from plait.spark.archiving.manifest import MESSAGES, Archive, ArchivedFile, FileKind, RawSegment, directory_of
from plait.spark.source.spark_columns import STORED_COLUMNS

#: Level 3 takes a fifth to a third longer than level 1, and its files are not smaller (docs/archive.md has the
#: figures).
COMPRESSION: Final = "zstd"
COMPRESSION_LEVEL: Final = 1
#: A point lookup reads all columns of one row group: with twice as many rows it takes twice as long. Each row group
#: costs about 1.5 KB of statistics, which is little compared with this many rows or bytes.
ROW_GROUP_COUNT: Final = 8_192
ROW_GROUP_SIZE: Final = 2 * MIB
DAY_MICROS: Final = 86_400_000_000
#: Files are copied and read back in pieces of this size.
COPY_SIZE: Final = 8 * MIB

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


def day_of(days: int) -> str:
    """The date of a number of days since 1970, as in paths."""
    return (_EPOCH_DAY + timedelta(days=days)).isoformat()


def row_group_count(count: int, size: int) -> int:
    """The number of rows of a row group in a file with ``count`` rows and ``size`` bytes."""
    return max(1, min(ROW_GROUP_COUNT, ROW_GROUP_SIZE * count // max(size, 1)))


class FileWriter:
    """Writes the files of one source that the manifest with the number ``number`` is to name."""

    def __init__(self, archive: Archive, number: int, source: str) -> None:
        self.archive = archive
        self._source = source
        # Manifest number and a token of this writer. Once a manifest with this number or a higher one is committed,
        # files that neither it nor the one before names can be removed.
        self._prefix = f"{number:020d}-{chance.token(8)}"
        self._made = 0

    def name(self, suffix: str) -> str:
        """A name that no other file of the archive has."""
        self._made += 1
        return f"{self._prefix}-{self._made:05d}.{suffix}"

    def write(
        self,
        kind: FileKind,
        day: str,
        rows: pa.RecordBatch,
        offsets: tuple[int, int],
        *,
        subject: str = "",
        partitions: dict[str, tuple[int, int]] | None = None,
    ) -> ArchivedFile:
        """Write a file. ``rows`` are events or deaths in log order, or messages of a subject with those of each
        partition in log order; ``partitions`` has the first and last sequence of each partition."""
        key_min = key_max = None
        if kind == MESSAGES:
            rows = arranged(rows, lookup_order(rows))
            keys = rows.column("key")
            # Keys are sorted; rows without a key come last.
            key_min, key_max = (keys[index].as_py() for index in (0, max(len(keys) - keys.null_count - 1, 0)))
        directory = directory_of(kind, day, subject)
        relative = f"{directory}/{self.name('parquet')}"
        path = self.archive.path(relative)
        size_before = raw_size(rows)
        self.archive.make_directory(directory)
        pq.write_table(
            pa.Table.from_batches([rows]),
            path,
            filesystem=self.archive.files,
            row_group_size=row_group_count(rows.num_rows, size_before),
            compression=COMPRESSION,
            compression_level=COMPRESSION_LEVEL,
            use_dictionary=_DICTIONARIES[kind],
            write_statistics=True,
            write_page_index=True,
            # A reader of a few rows reads a few pages, and verifies these alone.
            write_page_checksum=True,
            # The file does not record that text columns were views.
            store_schema=False,
        )
        times = pc.min_max(rows.column("store_time" if kind == MESSAGES else "time").cast(pa.int64()))
        return ArchivedFile(
            path=relative,
            kind=kind,
            subject=subject,
            date=day,
            count=rows.num_rows,
            size=self.archive.files.get_file_info(path).size,
            raw_size=size_before,
            crc=self._read_back(relative, rows),
            source=self._source,
            start=offsets[0],
            end=offsets[1],
            partitions=partitions or {},
            key_min=key_min,
            key_max=key_max,
            time_min=times["min"].as_py(),
            time_max=times["max"].as_py(),
        )

    def _read_back(self, path: str, rows: pa.RecordBatch) -> int:
        """Compare a file with its rows while another thread makes it durable; return its checksum."""
        count, is_same = 0, True
        with ThreadPoolExecutor(1) as thread:
            durable = thread.submit(self.archive.make_durable, path)
            crc = file_crc(self.archive, path)
            for batch in read_batches(self.archive, path):
                is_same = is_same and viewed_batch(batch).equals(rows.slice(count, batch.num_rows))
                count += batch.num_rows
            durable.result()
        if not is_same or count != rows.num_rows:
            raise ArchiveError(
                f"{self.archive.location}/{path} does not read back as it was written; nothing was committed. Check "
                "the memory and disks of this machine, then run again"
            )
        return crc


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


def file_crc(archive: Archive, relative: str) -> int:
    """The CRC-32C of a file. Raises ``ArchiveError`` with the reason where it cannot be read."""
    crc = 0
    try:
        with archive.files.open_input_stream(archive.path(relative)) as stream:
            while piece := stream.read(COPY_SIZE):
                crc = crc32c(piece, crc)
    except OSError as error:
        raise ArchiveError(f"{archive.location}/{relative} cannot be read: {first_line(error)}") from error
    return crc


def check_file(archive: Archive, file: ArchivedFile | RawSegment) -> None:
    """Compare a file with its entry in the manifest; ``ArchiveError`` where they differ."""
    found = file_crc(archive, file.path)
    if found != file.crc:
        raise ArchiveError(
            f"{archive.location}/{file.path} is damaged: it has checksum {found:08x}, the manifest says "
            f"{file.crc:08x}. Restore the file from a copy"
        )
