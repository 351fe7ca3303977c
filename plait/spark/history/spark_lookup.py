"""Reads a selection of history on Spark: for selections that would take one process long.

Spark distributes the files and the parts of logs over its tasks; each task reads its part with the code of a lookup, so
both find the same messages. Tasks must be able to read the data directories and the archive.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from plait.client.arguments import limit_of
from plait.errors import PlaitError
from plait.limits import MIB
from plait.spark.history.lookup import LOOKS_MAX, REMOVED, History
from plait.spark.history.pieces import SCHEMA, Piece
from plait.spark.history.selection import HistorySelection
from plait.spark.history.storage_order import Ordering
from plait.spark.runtime.job_runner import NoProgress, ProgressListener, encode_error, run_action, spark_errors
from plait.spark.runtime.worker import prepare_worker
from plait.spark.source import arrow_scalars as bare

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

#: Rows that a task passes to Spark at a time.
BATCH_COUNT: Final = 8_192
#: Rows that a task reads before it discards those that cannot be among the first.
CUT_COUNT: Final = 65_536
#: Rows are sent to the driver in pieces of about this size.
PACKED_SIZE: Final = MIB

_FAILED: Final = "Spark did not read all of it; run again"

Read = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def dataframe(spark: SparkSession, history: History, selection: HistorySelection) -> DataFrame:
    """The messages of a selection, in no order, with the columns of the Spark source."""
    from pyspark.sql.pandas.types import from_arrow_schema

    def read(rows: Iterator[pa.Table]) -> Iterator[pa.RecordBatch]:
        for table in rows:
            yield from table.to_batches(max_chunksize=BATCH_COUNT)

    return _read_by(spark, history, selection, read, from_arrow_schema(SCHEMA))


def tables(
    spark: SparkSession,
    history: History,
    selection: HistorySelection,
    *,
    limit: int | None = None,
    progress: ProgressListener | None = None,
) -> Iterator[pa.Table]:
    """The first ``limit`` messages of a selection, in the order in which they were stored, in this process.

    The driver has the rows of one task and those of ``Ordering`` in memory; the others are on the disks of Spark's
    workers.
    """
    first = None if limit is None else limit_of(limit)
    return history.ordered(lambda ordering: _collect(spark, history, selection, first, ordering, progress), limit)


def write(
    spark: SparkSession,
    history: History,
    selection: HistorySelection,
    path: str,
    progress: ProgressListener | None = None,
) -> int:
    """Write the messages of a selection as Parquet files, in no order, to a new directory; returns their number."""
    for attempt in range(1, LOOKS_MAX + 1):
        frame = dataframe(spark, history, selection)
        try:
            with spark_errors(_FAILED):
                # A second attempt overwrites the files of the first.
                writer = frame.write.mode("error" if attempt == 1 else "overwrite")
                _run(spark, partial(writer.parquet, path), progress)
                return spark.read.parquet(path).count()
        except REMOVED:
            if not history.may_look_again(attempt):
                raise
    raise AssertionError("unreachable: the last attempt returns or raises")


def _collect(
    spark: SparkSession,
    history: History,
    selection: HistorySelection,
    first: int | None,
    ordering: Ordering,
    progress: ProgressListener | None,
) -> None:
    """Read all rows of a selection into an ordering."""
    from pyspark import StorageLevel

    def read(rows: Iterator[pa.Table]) -> Iterator[pa.RecordBatch]:
        for table in rows if first is None else first_of_each(rows, first):
            yield from _packed(table)

    with spark_errors(_FAILED):
        packed = _read_by(spark, history, selection, read, "rows binary").persist(StorageLevel.DISK_ONLY)
        try:
            # Run all tasks in parallel first; then fetch their results one by one.
            _run(spark, packed.count, progress)
            for row in packed.toLocalIterator():
                ordering.add(pa.ipc.open_stream(row.rows).read_all())
        finally:
            packed.unpersist()


def _run(spark: SparkSession, action: Callable[[], object], progress: ProgressListener | None) -> None:
    progress = progress or NoProgress()
    progress.step("reading on Spark", unit="parts")
    run_action(spark, action, progress.update)


def first_of_each(tables: Iterator[pa.Table], limit: int) -> Iterator[pa.Table]:
    """The first rows of each partition by sequence: no others can be among the first of all."""
    held: list[pa.Table] = []
    count = 0
    for table in tables:
        held.append(table)
        count += table.num_rows
        if count >= max(2 * limit, CUT_COUNT):
            held = [_first_rows(held, limit)]
            # Do not count the remaining rows: with many partitions they may already exceed the limit.
            count = 0
    if held:
        yield _first_rows(held, limit)


def _first_rows(tables: list[pa.Table], limit: int) -> pa.Table:
    rows = pa.concat_tables(tables).combine_chunks()
    rows = rows.take(pc.sort_indices(rows, [("partition", "ascending"), ("sequence", "ascending")]))
    numbers = bare.values(rows["partition"].combine_chunks().dictionary_encode().indices, np.int32)
    places = np.arange(len(numbers))
    starts = np.maximum.accumulate(np.where(np.diff(numbers, prepend=-1) != 0, places, 0))
    return rows.take(bare.integers(np.flatnonzero(places - starts < limit)))


def _packed(table: pa.Table) -> Iterator[pa.RecordBatch]:
    """Rows as the bytes of Arrow streams, which Spark passes on unchanged."""
    count = min(max(1, PACKED_SIZE * table.num_rows // max(table.nbytes, 1)), BATCH_COUNT)
    for batch in table.to_batches(max_chunksize=count):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        yield pa.RecordBatch.from_pydict({"rows": pa.array([sink.getvalue().to_pybytes()], pa.binary())})


def _read_by(
    spark: SparkSession,
    history: History,
    selection: HistorySelection,
    read: Callable[[Iterator[pa.Table]], Iterator[pa.RecordBatch]],
    schema: StructType | str,
) -> DataFrame:
    """The result of ``read`` for each piece of a selection, one task per piece."""
    # A task gets a number and finds its piece by it; the largest pieces start first.
    pieces = sorted(history.plan(selection), key=lambda piece: -piece.size)
    count = len(pieces)
    numbers = spark.range(0, count, 1, max(count, 1))
    return numbers.mapInArrow(_reader([pickle.dumps(piece) for piece in pieces], selection, read), schema)


def _reader(
    pieces: list[bytes], selection: HistorySelection, read: Callable[[Iterator[pa.Table]], Iterator[pa.RecordBatch]]
) -> Read:
    def read_pieces(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        prepare_worker()
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                piece: Piece = pickle.loads(pieces[number])
                try:
                    yield from read(piece.read(selection))
                except PlaitError as error:
                    raise RuntimeError(encode_error(error)) from None

    return read_pieces
