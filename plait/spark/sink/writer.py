"""``df.write.format("plait")`` and ``writeStream``: each batch becomes visible once, as a whole (R23).

Tasks stage their rows at the brokers, where consumers do not see them, and return the names of their stages. The
driver's commit records at the meta server that these stages are the batch, and publishes them. The writer keeps no
state between batches, here or in Spark's checkpoint: a process that runs the batch again gets the recorded decision
from the meta server.
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
from plait.client.staged.stage_writer import Staged, StageWriter
from plait.errors import InvalidArgument, PlaitError
from plait.model import names
from plait.spark.runtime.worker import prepare_worker
from plait.spark.sink.frame_columns import check_columns, encode

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

log = logging.getLogger("plait.spark")

_OPTIONS = ("server", "subject", "compression", "checkpointLocation", "path")
#: The local properties in which Spark gives a task the query and the batch that it works for.
_QUERY = "sql.streaming.queryId"
_BATCH = "streaming.sql.batchId"
#: After this many batches of a stream, and with every save, the writer finishes commits that other drivers left
#: unfinished. It spends at most this many seconds on them, enough for a few that cannot be finished.
OTHERS_EVERY = 50
OTHERS_SECONDS = 15.0


@dataclass(frozen=True)
class WriteOptions:
    """The checked options of a write."""

    server: str
    subject: str | None
    compression: str | None

    @classmethod
    def parse(cls, given: Mapping[str, str], schema: pa.Schema, *, overwrite: bool) -> WriteOptions:
        """Parse Spark's options, whose names are case-insensitive; raises ``InvalidArgument`` for a wrong option."""
        known = {name.lower(): name for name in _OPTIONS}
        for name in given:
            if name.lower() not in known:
                raise InvalidArgument(f"unknown option {name!r}; the options are server, subject, compression")
        options = {known[name.lower()]: value.strip() for name, value in given.items()}
        if overwrite:
            raise InvalidArgument('messages cannot be overwritten; use mode("append")')
        if "path" in options:
            raise InvalidArgument("messages are written to a server, not to a path; use option('server', ...)")
        if not options.get("server"):
            raise InvalidArgument("option 'server' is missing: an address, as in plait://127.0.0.1:7450")
        check_columns(schema)
        subject = options.get("subject")
        if subject is None and "subject" not in schema.names:
            raise InvalidArgument("option 'subject' is missing, and the DataFrame has no column 'subject'; give one")
        compression = options.get("compression")
        if compression not in (None, "zstd", "lz4"):
            raise InvalidArgument(f"unknown compression {compression!r}; use zstd or lz4")
        subject = None if subject is None else names.check("subject", subject)
        return cls(options["server"], subject, compression)

    def connect(self) -> Client:
        """A client of the server."""
        return connect(self.server, compression=self.compression)  # type: ignore[arg-type]


@dataclass
class TaskDone(WriterCommitMessage):
    """The stages that one task wrote, as reported to the driver."""

    query: str
    stages: list[Staged]


def write_rows(options: WriteOptions, query: str, batch: int, batches: Iterator[pa.RecordBatch]) -> TaskDone:
    """The work of a task: stage the rows in order. A row that cannot be sent fails the task, and no row is visible."""
    loop = shared_loop()
    client = options.connect()
    writers: dict[str, StageWriter] = {}

    async def complete() -> list[Staged]:
        found = await asyncio.gather(*(writer.complete() for writer in writers.values()))
        return [staged for stages in found for staged in stages]

    loop.run(client.open())
    try:
        for each in batches:
            for subject, rows in encode(each, options.subject, client._producer.next_now()):
                if subject not in writers:
                    writers[subject] = StageWriter(client, subject, query, batch)
                loop.run(writers[subject].write(rows))
        return TaskDone(query, loop.run(complete()))
    except BaseException:
        # The driver does not get the names of these stages.
        with contextlib.suppress(PlaitError):
            for writer in writers.values():
                loop.run(writer.drop())
        raise
    finally:
        loop.run(client.close())


class _SinkWriter:
    """The common part of both writers; pickled to the tasks and to the driver's commit."""

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
            # The first failure is the cause, so this one is only logged. The stages are removed with the next commit,
            # or they expire.
            log.warning("batch %d of query %s could not be aborted: %s", batch, query, error)

    def _run(self, call: Callable[[Client], Awaitable[None]]) -> None:
        prepare_worker()

        async def run() -> None:
            async with self.options.connect() as client:
                await call(client)

        shared_loop().run(run())


class PlaitWriter(_SinkWriter, DataSourceArrowWriter):
    """Writes one ``save()``: a separate query with one batch."""

    def __init__(self, options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite=overwrite)
        self.query = f"save-{chance.token(16)}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        prepare_worker()
        return write_rows(self.options, self.query, 0, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Make the rows of all tasks visible, when all are done."""
        self._commit(self.query, 0, _done(messages))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Drop the rows of all tasks, because a task failed permanently."""
        self._abort(self.query, 0, _done(messages))


class PlaitStreamWriter(_SinkWriter, DataSourceStreamArrowWriter):
    """Writes the batches of a streaming query."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        prepare_worker()
        context = TaskContext.get()
        assert context is not None
        query, batch = context.getLocalProperty(_QUERY), context.getLocalProperty(_BATCH)
        if query is None or batch is None:
            raise InvalidArgument("the task has no query id and batch id from Spark; write with writeStream")
        return write_rows(self.options, query, int(batch), iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Make the rows of a batch visible when all its tasks are done, unless the batch was committed before."""
        if done := _done(messages):
            self._commit(done[0].query, batchId, done)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Drop the rows of all tasks of a batch, because one of them failed permanently."""
        if done := _done(messages):
            self._abort(done[0].query, batchId, done)


async def _finish_others(client: Client, query: str) -> None:
    """Finish commits that other drivers left unfinished, with a time limit: a broker may be unreachable."""
    try:
        async with asyncio.timeout(OTHERS_SECONDS):
            await committing.finish_others(client, query)
    except TimeoutError:
        log.warning("unfinished commits of other drivers were left: finishing them took over %g s", OTHERS_SECONDS)
    except PlaitError as error:
        log.warning("unfinished commits of other drivers were left: %s", error)


def _done(messages: Sequence[WriterCommitMessage | None]) -> list[TaskDone]:
    return [message for message in messages if isinstance(message, TaskDone)]


def _stages(done: Sequence[TaskDone]) -> list[Staged]:
    return [staged for task in done for staged in task.stages]
