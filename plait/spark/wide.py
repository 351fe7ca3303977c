"""A selection of history read on Spark: for much of a large archive, where one process would take long.

Spark spreads the files and the parts of logs over its tasks; each task reads its own as a lookup would, with the same
code. So the same messages are found, whichever way. Data directories and the archive must be where the tasks run.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from plait.client.arguments import limit_of
from plait.limits import MIB
from plait.spark import bare
from plait.spark.history import History, Piece
from plait.spark.live import SCHEMA
from plait.spark.ordering import Ordering
from plait.spark.selection import Selection
from plait.spark.worker import prepare_worker

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

#: Rows that a task hands to Spark at a time.
BATCH_COUNT: Final = 8_192


#: Rows that a task reads before it forgets those that cannot be among the first.
CUT_COUNT: Final = 65_536
#: Rows travel to the driver in pieces of about this size.
PACKED_SIZE: Final = MIB

Read = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def dataframe(spark: SparkSession, history: History, selection: Selection) -> DataFrame:
    """The messages of a selection, in no order, with the columns of the Spark source."""
    from pyspark.sql.pandas.types import from_arrow_schema

    def read(rows: Iterator[pa.Table]) -> Iterator[pa.RecordBatch]:
        for table in rows:
            yield from table.to_batches(max_chunksize=BATCH_COUNT)

    return _read_by(spark, history, selection, read, from_arrow_schema(SCHEMA))


def tables(
    spark: SparkSession, history: History, selection: Selection, *, limit: int | None = None
) -> Iterator[pa.Table]:
    """The same in the order they were stored, in this process; the first ``limit`` of them.

    However many there are, the driver has one task's rows in memory, and what ``Ordering`` holds. They wait on the
    disks of Spark's workers meanwhile.
    """
    from pyspark import StorageLevel

    first = None if limit is None else limit_of(limit)

    def read(rows: Iterator[pa.Table]) -> Iterator[pa.RecordBatch]:
        for table in rows if first is None else first_of_each(rows, first):
            yield from _packed(table)

    with Ordering(limit=first) as ordering:
        packed = _read_by(spark, history, selection, read, "rows binary").persist(StorageLevel.DISK_ONLY)
        try:
            # All tasks at once; one after another they are fetched.
            packed.count()
            for row in packed.toLocalIterator():
                ordering.add(pa.ipc.open_stream(row.rows).read_all())
        finally:
            packed.unpersist()
        yield from ordering.tables()


def first_of_each(tables: Iterator[pa.Table], limit: int) -> Iterator[pa.Table]:
    """Of each partition the first rows by sequence: no others can be among the first of all."""
    held: list[pa.Table] = []
    count = 0
    for table in tables:
        held.append(table)
        count += table.num_rows
        if count >= max(2 * limit, CUT_COUNT):
            held = [_first_rows(held, limit)]
            # What is left counts anew: many partitions may leave many rows.
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
    """Rows as the bytes of Arrow streams, which Spark passes on as they are."""
    count = min(max(1, PACKED_SIZE * table.num_rows // max(table.nbytes, 1)), BATCH_COUNT)
    for batch in table.to_batches(max_chunksize=count):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        yield pa.RecordBatch.from_pydict({"rows": pa.array([sink.getvalue().to_pybytes()], pa.binary())})


def _read_by(
    spark: SparkSession,
    history: History,
    selection: Selection,
    read: Callable[[Iterator[pa.Table]], Iterator[pa.RecordBatch]],
    schema: StructType | str,
) -> DataFrame:
    """What ``read`` makes of each piece of a selection, in a task of its own."""
    pieces = history.plan(selection).pieces
    # Each task is told its number and finds its piece by it; the largest begin first.
    pieces.sort(key=lambda piece: -piece.size)
    count = len(pieces)
    numbers = spark.range(0, count, 1, max(count, 1))
    return numbers.mapInArrow(_reader([pickle.dumps(piece) for piece in pieces], selection, read), schema)


def _reader(
    pieces: list[bytes], selection: Selection, read: Callable[[Iterator[pa.Table]], Iterator[pa.RecordBatch]]
) -> Read:
    def read_pieces(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        prepare_worker()
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                piece: Piece = pickle.loads(pieces[number])
                yield from read(piece.read(selection))

    return read_pieces
