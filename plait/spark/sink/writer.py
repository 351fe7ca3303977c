"""``df.write.format("plait")`` and ``writeStream``: each batch becomes visible once, as a whole (R23).

Tasks stage their rows at the brokers, where nobody sees them; what they return names their stages. The driver's commit
decides at the meta server that these stages are the batch, and has them published. Nothing is kept here between two
batches, and nothing in Spark's checkpoint: whoever runs the batch again is told what was decided.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.pandas.types import to_arrow_schema

from plait import chance
from plait.client.blocking.loop_thread import shared_loop
from plait.client.client import Client, connect
from plait.client.staged import batch_commit as committing
from plait.client.staged.stage_writer import Staged, StagedRows, StageWriter
from plait.errors import InvalidArgument, PlaitError
from plait.model import names
from plait.spark.runtime.worker import prepare_worker
from plait.spark.sink.frame_columns import check_columns, encode

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

log = logging.getLogger("plait.spark")

_OPTIONS = ("server", "subject", "compression", "checkpointLocation", "path")
#: Where Spark tells a task which batch of which query it works for.
_QUERY = "sql.streaming.queryId"
_BATCH = "streaming.sql.batchId"
#: Which batches of a stream look after what other drivers have left undone (a save always does), and for how long in
#: all: time for a few that cannot be finished.
OTHERS_EVERY = 50
OTHERS_SECONDS = 15.0


@dataclass(frozen=True)
class WriteOptions:
    """What a user asked for, checked."""

    server: str
    subject: str | None
    compression: str | None

    @classmethod
    def parse(cls, given: Mapping[str, str], schema: pa.Schema, *, overwrite: bool) -> WriteOptions:
        """Spark's options, whose names know no case; ``InvalidArgument`` says what is wrong with them."""
        known = {name.lower(): name for name in _OPTIONS}
        for name in given:
            if name.lower() not in known:
                raise InvalidArgument(f"option {name!r} is not known; there are server, subject, compression")
        options = {known[name.lower()]: value.strip() for name, value in given.items()}
        if overwrite:
            raise InvalidArgument('messages are only ever added; say mode("append")')
        if "path" in options:
            raise InvalidArgument("messages are written to a server, not to a path; say option('server', ...)")
        if not options.get("server"):
            raise InvalidArgument("option 'server' is missing: an address, as in plait://127.0.0.1:7450")
        check_columns(schema)
        subject = options.get("subject")
        if subject is None and "subject" not in schema.names:
            raise InvalidArgument("option 'subject' is missing, and there is no column of that name")
        compression = options.get("compression")
        if compression not in (None, "zstd", "lz4"):
            raise InvalidArgument(f"compression {compression!r} is not known; use zstd or lz4")
        subject = None if subject is None else names.check("subject", subject)
        return cls(options["server"], subject, compression)

    def connect(self) -> Client:
        """A client of the server."""
        return connect(self.server, compression=self.compression)  # type: ignore[arg-type]


@dataclass
class TaskDone(WriterCommitMessage):
    """What one task wrote, as its driver hears of it."""

    query: str
    stages: list[Staged]


class _Task:
    """One attempt of a task: its rows on their way to the stages."""

    def __init__(self, options: WriteOptions, query: str, batch: int) -> None:
        self._client = options.connect()
        self._query = query
        self._batch = batch
        self._writers: dict[str, StageWriter] = {}

    async def open(self) -> None:
        await self._client.open()

    def now(self) -> int:
        return self._client._producer.next_now()

    async def write(self, subject: str, rows: StagedRows) -> None:
        writer = self._writers.get(subject)
        if writer is None:
            writer = self._writers[subject] = StageWriter(self._client, subject, self._query, self._batch)
        await writer.write(rows)

    async def complete(self) -> list[Staged]:
        found = await asyncio.gather(*(writer.complete() for writer in self._writers.values()))
        return [staged for stages in found for staged in stages]

    async def drop(self) -> None:
        """Nobody will hear of this attempt."""
        for writer in self._writers.values():
            await writer.drop()

    async def close(self) -> None:
        await self._client.close()


def write_rows(options: WriteOptions, query: str, batch: int, batches: Iterator[pa.RecordBatch]) -> TaskDone:
    """The work of a task: stage the rows, in order. What is wrong with them fails the task, and nothing is seen."""
    loop = shared_loop()
    task = _Task(options, query, batch)
    loop.run(task.open())
    try:
        for each in batches:
            for subject, rows in encode(each, options.subject, task.now()):
                loop.run(task.write(subject, rows))
        return TaskDone(query, loop.run(task.complete()))
    except BaseException:
        with contextlib.suppress(PlaitError):
            loop.run(task.drop())
        raise
    finally:
        loop.run(task.close())


class _SinkWriter:
    """What both kinds of writer share; pickled to the tasks and to the driver's commit."""

    def __init__(self, options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> None:
        prepare_worker()
        self.options = WriteOptions.parse(options, to_arrow_schema(schema, timezone="UTC"), overwrite=overwrite)

    def _commit(self, query: str, batch: int, done: Sequence[TaskDone]) -> None:
        async def commit(client: Client) -> None:
            if not await committing.commit(client, query, batch, _stages(done)):
                log.info("batch %d of query %s was committed before", batch, query)
            if batch % OTHERS_EVERY == 0:
                await _finish_others(client, query)

        self._run(commit)

    def _abort(self, query: str, batch: int, done: Sequence[TaskDone]) -> None:
        try:
            self._run(lambda client: committing.abort(client, query, batch, _stages(done)))
        except PlaitError as error:
            # What failed first says more. Stages that stay go with the next commit, or expire.
            log.warning("batch %d of query %s could not be called off: %s", batch, query, error)

    def _run(self, call: Callable[[Client], Awaitable[None]]) -> None:
        prepare_worker()

        async def run() -> None:
            async with self.options.connect() as client:
                await call(client)

        shared_loop().run(run())


class PlaitWriter(_SinkWriter, DataSourceArrowWriter):
    """One ``save()``: a query of its own, with one batch."""

    def __init__(self, options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite=overwrite)
        self.query = f"save-{chance.token(16)}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        prepare_worker()
        return write_rows(self.options, self.query, 0, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """All tasks are done: their rows become visible."""
        self._commit(self.query, 0, _done(messages))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Some task failed for good: nobody sees what the others wrote."""
        self._abort(self.query, 0, _done(messages))


class PlaitStreamWriter(_SinkWriter, DataSourceStreamArrowWriter):
    """One batch after another of a streaming query."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        prepare_worker()
        context = TaskContext.get()
        assert context is not None
        query, batch = context.getLocalProperty(_QUERY), context.getLocalProperty(_BATCH)
        if query is None or batch is None:
            raise InvalidArgument("Spark does not tell which batch of which query this is; use its own writeStream")
        return write_rows(self.options, query, int(batch), iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """All tasks of a batch are done: its rows become visible, unless the batch was committed before."""
        if done := _done(messages):
            self._commit(done[0].query, batchId, done)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Some task of a batch failed for good: nobody sees what the others wrote."""
        if done := _done(messages):
            self._abort(done[0].query, batchId, done)


async def _finish_others(client: Client, query: str) -> None:
    """What other drivers have left undone is done, unless it takes long: their broker may be away."""
    try:
        async with asyncio.timeout(OTHERS_SECONDS):
            await committing.finish_others(client, query)
    except TimeoutError:
        log.warning("what other drivers have left undone stays so: it takes longer than %g s", OTHERS_SECONDS)
    except PlaitError as error:
        log.warning("what other drivers have left undone stays so: %s", error)


def _done(messages: Sequence[WriterCommitMessage | None]) -> list[TaskDone]:
    return [message for message in messages if isinstance(message, TaskDone)]


def _stages(done: Sequence[TaskDone]) -> list[Staged]:
    return [staged for task in done for staged in task.stages]
