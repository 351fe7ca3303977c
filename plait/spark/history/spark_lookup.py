"""A selection of history read on Spark: for much of a large archive, where one process would take long.

Spark spreads the files and the parts of logs over its tasks; each task reads its own as a lookup would, with the same
code. So the same messages are found, whichever way. Data directories and the archive must be where the tasks run.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from plait.client.arguments import limit_of
from plait.errors import Expired, PlaitError, from_code
from plait.limits import MIB
from plait.spark.history.archived_part import FileGone
from plait.spark.history.live_part import SCHEMA
from plait.spark.history.lookup import LOOKS_MAX, History, Piece
from plait.spark.history.selection import HistorySelection
from plait.spark.history.storage_order import Ordering
from plait.spark.runtime.job_runner import in_one_line
from plait.spark.runtime.worker import prepare_worker
from plait.spark.source import arrow_scalars as bare

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

#: Rows that a task hands to Spark at a time.
BATCH_COUNT: Final = 8_192
#: Rows that a task reads before it forgets those that cannot be among the first.
CUT_COUNT: Final = 65_536
#: Rows travel to the driver in pieces of about this size.
PACKED_SIZE: Final = MIB

#: What comes before an error in the words of another one.
_SEAL: Final = "plait-error-"

Read = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def dataframe(spark: SparkSession, history: History, selection: HistorySelection) -> DataFrame:
    """The messages of a selection, in no order, with the columns of the Spark source."""
    from pyspark.sql.pandas.types import from_arrow_schema

    def read(rows: Iterator[pa.Table]) -> Iterator[pa.RecordBatch]:
        for table in rows:
            yield from table.to_batches(max_chunksize=BATCH_COUNT)

    return _read_by(spark, history, selection, read, from_arrow_schema(SCHEMA))


def tables(
    spark: SparkSession, history: History, selection: HistorySelection, *, limit: int | None = None
) -> Iterator[pa.Table]:
    """The same in the order they were stored, in this process; the first ``limit`` of them.

    However many there are, the driver has one task's rows in memory, and what ``Ordering`` holds. They wait on the
    disks of Spark's workers meanwhile.
    """
    first = None if limit is None else limit_of(limit)
    for attempt in range(1, LOOKS_MAX + 1):
        with Ordering(limit=first) as ordering:
            try:
                _collect(spark, history, selection, first, ordering)
            except (Expired, FileGone):
                if not history.may_look_again(attempt):
                    raise
                continue
            yield from ordering.tables()
        return


def write(spark: SparkSession, history: History, selection: HistorySelection, path: str) -> int:
    """The same as Parquet files in a directory that is not there yet, in no order; how many they are."""
    for attempt in range(1, LOOKS_MAX + 1):
        frame = dataframe(spark, history, selection)
        try:
            with _told_here():
                # What a first look left is this call's own.
                frame.write.mode("error" if attempt == 1 else "overwrite").parquet(path)
                return spark.read.parquet(path).count()
        except (Expired, FileGone):
            if not history.may_look_again(attempt):
                raise
    raise AssertionError("the last look ends with what was found, or with an error")


def _collect(
    spark: SparkSession, history: History, selection: HistorySelection, first: int | None, ordering: Ordering
) -> None:
    """Read everything into an ordering."""
    from pyspark import StorageLevel

    def read(rows: Iterator[pa.Table]) -> Iterator[pa.RecordBatch]:
        for table in rows if first is None else first_of_each(rows, first):
            yield from _packed(table)

    with _told_here():
        packed = _read_by(spark, history, selection, read, "rows binary").persist(StorageLevel.DISK_ONLY)
        try:
            # All tasks at once; one after another they are fetched.
            packed.count()
            for row in packed.toLocalIterator():
                ordering.add(pa.ipc.open_stream(row.rows).read_all())
        finally:
            packed.unpersist()


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
    selection: HistorySelection,
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
                    raise RuntimeError(_sealed(error)) from None

    return read_pieces


# --- what goes wrong in a task ------------------------------------------------------------------


def _sealed(error: PlaitError) -> str:
    """An error as a word that Java passes on with all of its own."""
    packed = msgspec.msgpack.encode((error.code, error.message, isinstance(error, FileGone)))
    return f"{_SEAL}{packed.hex()};"


def _unsealed(text: str) -> PlaitError | None:
    match = re.search(rf"{_SEAL}([0-9a-f]+);", text)
    if match is None:
        return None
    code, message, is_gone = msgspec.msgpack.decode(bytes.fromhex(match[1]), type=tuple[str, str, bool])
    return FileGone(message) if is_gone else from_code(code, message)


@contextmanager
def _told_here() -> Iterator[None]:
    """What went wrong in a task is raised as it would be without Spark; what Spark has to say, in one line."""
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    with in_one_line("Spark did not read all of it; run again"):
        try:
            yield
        except (PySparkException, Py4JError) as error:
            found = _unsealed(f"{error} {getattr(error, '_stackTrace', '')}")
            if found is None:
                raise
            raise found from error
