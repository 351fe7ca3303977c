"""Writing the files of an archive, and proving that they hold what the log does.

A file has the rows of one subject and one day, of one stretch of the log, sorted by key, so that a lookup reads one
row group of it. It is written under a name that nobody else has, made durable, read back and compared; nobody knows
of it until a manifest names it. Nothing here needs Spark: tasks run it, and so may any process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import date, timedelta
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from plait import chance
from plait.errors import ArchiveError
from plait.limits import MIB
from plait.spark.columns import STORED_COLUMNS
from plait.spark.digest import PARTITION, Digest, bounds, checksum_of, message_digests, taken
from plait.spark.manifest import Archive, ArchivedFile, DayKind, day_directory, subject_directory

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


def in_lookup_order(table: pa.Table) -> pa.Table:
    """Rows that stand in log order, by key (those without one last), partition and sequence."""
    keys = table.column("key").combine_chunks()
    partitions = table.column("partition").combine_chunks().dictionary_encode()
    count = len(partitions.dictionary)
    ranks = _ranks(partitions)
    if keys.null_count < len(keys):
        ranks = _ranks(keys.dictionary_encode()) * count + ranks
    if (ranks[1:] >= ranks[:-1]).all():
        return table
    # Stable: rows of one key and one partition stay in log order.
    order = np.argsort(ranks, kind="stable")
    return taken(table, order, PARTITION if count == 1 else frozenset())


def _ranks(encoded: pa.DictionaryArray) -> Any:
    """Each row's place among the different values in their order; nulls come last."""
    order = pc.array_sort_indices(encoded.dictionary).to_numpy()
    places = np.empty(len(order) + 1, np.int64)
    places[order] = np.arange(len(order))
    places[-1] = len(order)
    codes = encoded.indices.fill_null(len(order)) if encoded.indices.null_count else encoded.indices
    return places[codes.to_numpy()]


def row_group_count(table: pa.Table) -> int:
    """Rows of a row group in a file of these."""
    fitting: int = ROW_GROUP_SIZE * table.num_rows // max(table.nbytes, 1)
    return max(1, min(ROW_GROUP_COUNT, fitting))


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
        batches: list[pa.RecordBatch],
        offsets: tuple[int, int],
        digests: Mapping[str, Digest],
        partitions: dict[str, tuple[int, int]],
    ) -> ArchivedFile:
        """A file of messages. ``batches`` have each partition's rows in log order, and are used up: memory is dear.

        ``digests`` are what the rows of each partition have to be, ``partitions`` their first and last sequences.
        """
        table = pa.Table.from_batches(batches, MESSAGE_SCHEMA).combine_chunks()
        batches.clear()
        table = in_lookup_order(table)
        path = self._path(subject_directory(subject, day))
        found = message_digests(table)
        if {name: digest.value for name, digest in found.items()} != {n: digest.value for n, digest in digests.items()}:
            raise ArchiveError(
                f"{self.archive.place}/{path}: sorted rows are not those that were read; nothing was committed. "
                "Check the memory of this machine, then run again"
            )
        key_min, key_max = bounds(table.column("key"))
        time_min, time_max = _times(table.column("store_time"))
        count, raw_size = table.num_rows, table.nbytes
        checksum = checksum_of(table.to_batches())
        size = self._write(path, table, _DICTIONARIES)
        # What is read back may take its place.
        del table
        self._compare(path, checksum)
        return ArchivedFile(
            path=path,
            kind="messages",
            subject=subject,
            date=day,
            count=count,
            size=size,
            raw_size=raw_size,
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

    def of_day(self, kind: DayKind, day: str, table: pa.Table, offsets: tuple[int, int]) -> ArchivedFile:
        """A file of events or deaths, in log order."""
        path = self._path(day_directory(kind, day))
        size = self._write(path, table, [name for name in _DAY_DICTIONARIES if name in table.schema.names])
        checksum = checksum_of(table.to_batches())
        self._compare(path, checksum)
        time_min, time_max = _times(table.column("time"))
        return ArchivedFile(
            path=path,
            kind=kind,
            date=day,
            count=table.num_rows,
            size=size,
            raw_size=table.nbytes,
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

    def _write(self, relative: str, table: pa.Table, dictionaries: list[str]) -> int:
        archive = self.archive
        path = archive.path(relative)
        archive.make_directory(os.path.dirname(relative))
        pq.write_table(
            table,
            path,
            filesystem=archive.files,
            row_group_size=row_group_count(table),
            compression=COMPRESSION,
            compression_level=COMPRESSION_LEVEL,
            use_dictionary=dictionaries,
            write_statistics=True,
            write_page_index=True,
            # Who reads a few rows looks at a few pages, and must know that they are whole.
            write_page_checksum=True,
        )
        size: int = archive.files.get_file_info(path).size
        return size

    def _compare(self, path: str, expected: int) -> None:
        """Read a file back, and make it durable meanwhile."""
        with ThreadPoolExecutor(1) as thread:
            durable = thread.submit(self.archive.make_durable, path)
            found = checksum_of(read_batches(self.archive, path))
            durable.result()
        if expected != found:
            raise ArchiveError(
                f"{self.archive.place}/{path} does not read back as it was written (checksum {found:08x} instead of "
                f"{expected:08x}); nothing was committed. Check memory and disks of this machine, then run again"
            )


def read_batches(archive: Archive, relative: str) -> Iterator[pa.RecordBatch]:
    """A file's rows, a row group at a time. ``ArchiveError`` says what cannot be read."""
    try:
        # Not as a data set: what stands in the path is no column of the file.
        with archive.files.open_input_file(archive.path(relative)) as source:
            yield from pq.ParquetFile(source).iter_batches(ROW_GROUP_COUNT, use_threads=False)
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


def _times(column: pa.ChunkedArray) -> tuple[int, int]:
    low, high = bounds(column.cast(pa.int64()))
    return low, high
