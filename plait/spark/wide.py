"""A selection of history read on Spark: for much of a large archive, where one process would take long.

Spark spreads the files and the parts of logs over its tasks; each task reads its own as a lookup would, with the same
code. So the same messages are found, whichever way. Data directories and the archive must be where the tasks run.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from plait.client.arguments import limit_of
from plait.spark.history import History, Piece
from plait.spark.live import SCHEMA
from plait.spark.ordering import Ordering
from plait.spark.selection import Selection
from plait.spark.worker import prepare_worker

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: Rows that a task hands to Spark at a time.
BATCH_COUNT: Final = 8_192


def dataframe(spark: SparkSession, history: History, selection: Selection) -> DataFrame:
    """The messages of a selection, in no order, with the columns of the Spark source."""
    from pyspark.sql.pandas.types import from_arrow_schema

    pieces = history.plan(selection).pieces
    # Each task is told its number and finds its piece by it; the largest begin first.
    pieces.sort(key=lambda piece: -piece.size)
    count = len(pieces)
    numbers = spark.range(0, count, 1, max(count, 1))
    read = _reader([pickle.dumps(piece) for piece in pieces], selection)
    return numbers.mapInArrow(read, from_arrow_schema(SCHEMA))


def tables(
    spark: SparkSession, history: History, selection: Selection, *, limit: int | None = None
) -> Iterator[pa.Table]:
    """The same in the order they were stored, in this process; the first ``limit`` of them."""
    with Ordering(limit=None if limit is None else limit_of(limit)) as ordering:
        ordering.add(dataframe(spark, history, selection).toArrow().cast(SCHEMA))
        yield from ordering.tables()


def _reader(
    pieces: list[bytes], selection: Selection
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def read(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        prepare_worker()
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                piece: Piece = pickle.loads(pieces[number])
                for rows in piece.read(selection):
                    yield from rows.to_batches(max_chunksize=BATCH_COUNT)

    return read
