"""Queries: messages of a partition by key, by id, by a filter and by time. One request examines a bounded part."""

from __future__ import annotations

from functools import partial

from xxhash import xxh3_64_intdigest

from plait.broker.broker import Broker
from plait.broker.partitions.partition import Partition
from plait.broker.query.search import QueryBatch, QueryTerms, Search, span
from plait.errors import InvalidArgument, PlaitError
from plait.filter.message_filter import compile_filter
from plait.frame.header import SEQUENCE_MAX, TIME_MAX
from plait.limits import KEY_SIZE_MAX, QUERY_COUNT_MAX
from plait.model import names
from plait.server.connection import Connection
from plait.wire.query_messages import QueryReply, QueryRequest

_U64 = 1 << 64


class Queries:
    """The queries of a broker's clients. They share the budget of filters; what does not fit waits for a later turn."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._scans = broker.turn.scans
        #: Connections with a query that waits.
        self._waiting: set[Connection] = set()

    def serve(self, connection: Connection, correlation: int, request: QueryRequest, _: memoryview) -> None:
        if self._scans.budget.has_room() or connection in self._waiting:
            # Further queries of a connection are answered without an examination, so that few wait.
            self._answer(connection, correlation, request)
            return
        self._waiting.add(connection)
        self._scans.later(object(), partial(self._serve_later, connection, correlation, request))

    def _serve_later(self, connection: Connection, correlation: int, request: QueryRequest) -> None:
        self._waiting.discard(connection)
        try:
            self._answer(connection, correlation, request)
        except PlaitError as error:
            connection.fail(correlation, error)

    def _answer(self, connection: Connection, correlation: int, request: QueryRequest) -> None:
        # A client that does not read its replies gets none; it asks again.
        paused = connection.writing_paused or not self._scans.budget.has_room()
        batch, partition = query(self._broker, request, paused=paused)
        head = QueryReply(partition.id, partition.row.name, batch.next, batch.end, batch.rows, batch.bytes)
        connection.answer(correlation, head, batch.parts, batch.size)


def query(broker: Broker, request: QueryRequest, *, paused: bool = False) -> tuple[QueryBatch, Partition]:
    """Examine the next part of a partition for a query; nothing if ``paused``."""
    names.check_partition(request.name)
    terms = _terms(request)
    # A query creates no subject. In a cluster the missing partition makes the client refresh its route.
    partition = broker.partition_of(request.name, create=broker.catalog.routed)
    if request.span is None:
        start, end = span(partition, terms.since, terms.until)
    else:
        start, end = request.span
        if not 0 <= start < SEQUENCE_MAX or not 0 <= end < SEQUENCE_MAX:
            raise InvalidArgument(f"({start}, {end}) is not a range of sequences")
    count = 0 if paused else max(1, min(request.count, QUERY_COUNT_MAX))
    size = max(1, min(request.size, broker.limits.pull_bytes))
    search = Search(partition, broker.message_log, broker.message_index, terms, broker.turn.scans.budget)
    return search.run(start, end, count, size), partition


def _terms(request: QueryRequest) -> QueryTerms:
    key = None
    if request.key is not None:
        text = request.key.encode()
        if not 0 < len(text) <= KEY_SIZE_MAX:
            raise InvalidArgument(f"a key of {len(text)} bytes is not possible; use 1 to {KEY_SIZE_MAX}")
        key = (text, xxh3_64_intdigest(text))
    if request.message_id is not None and not all(0 <= number < _U64 for number in request.message_id):
        raise InvalidArgument(f"{request.message_id} is not a message id")
    return QueryTerms(
        key,
        request.message_id,
        None if request.filter is None else compile_filter(request.filter),
        0 if request.since is None else max(request.since, 0),
        TIME_MAX + 1 if request.until is None else min(request.until, TIME_MAX + 1),
    )
