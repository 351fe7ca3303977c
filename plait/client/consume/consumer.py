"""The consumer, and the results of ``fetch`` and ``fetch_arrow``. ``Fetcher`` pulls the rows."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any, Self, TypeAlias, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from plait import tasks
from plait.client.arguments import Duration, seconds_of
from plait.client.closing import Closing, all_of
from plait.client.consume.delivered import Deliveries, Piece
from plait.client.consume.failure import FailureOutcome, failed_of, rejected_of
from plait.client.consume.fetcher import Fetcher
from plait.client.consume.prefetch import ITERATION_COUNT
from plait.client.consume.row_runs import row_mask
from plait.client.consume.several.several_fetcher import SeveralFetcher
from plait.client.types import Message, Why
from plait.errors import Closed, InvalidArgument
from plait.frame.arrow import MESSAGE_ID, SAME_TEXT, SCHEMA, arrays, attempts, message_ids, same_text

#: A bound on the prefetch that one ``fetch`` call can request.
FETCH_COUNT_MAX = 1 << 20

#: Rows of a table: row numbers, or a mask over all rows.
Rows: TypeAlias = Iterable[int] | Iterable[bool] | npt.NDArray[Any] | pa.Array | pa.ChunkedArray

TABLE_SCHEMA = pa.schema(
    [
        *SCHEMA,
        pa.field("attempt", pa.int32(), nullable=False),
        pa.field("message_id", MESSAGE_ID, nullable=False),
        pa.field("partition", SAME_TEXT, nullable=False),
    ]
)


class Consumer:
    """A member of a group. Use it with ``async with``; leaving the block returns messages that are not acked."""

    def __init__(self, fetcher: Fetcher | SeveralFetcher) -> None:
        self.subject = fetcher.terms.subject
        self.group = fetcher.terms.group
        self.client_id = fetcher.terms.client
        self._fetcher = fetcher
        self._buffer = fetcher.buffer
        self._limits = fetcher.limits
        self._closed = False
        #: Consumers with the same client id that are closing: this one attaches after they are closed.
        self._after: Sequence[Consumer] = ()
        self._opening: asyncio.Task[None] | None = None
        self._closing = Closing(self.subject, self._close)

    # --- opening and closing --------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._closing.begun or self._opening is not None:
            raise Closed(f"the consumer of {self.subject!r} was opened before; create another one with client.consumer")
        self._opening = tasks.child(self._open(), f"plait-open-{self.subject}")
        try:
            await self._opening
            if self._closing.begun:
                raise self._closed_while_opening()
        except BaseException as error:
            closed = self._closing.begun
            # Some partitions may be attached and hold rows.
            await self.close()
            task = asyncio.current_task()
            if closed and isinstance(error, asyncio.CancelledError) and not (task is not None and task.cancelling()):
                raise self._closed_while_opening() from None
            raise
        self._fetcher.start()
        return self

    def _closed_while_opening(self) -> Closed:
        return Closed(f"the consumer of {self.subject!r} was closed before it was open")

    async def _open(self) -> None:
        for consumer in self._after:
            await consumer._closing.wait()
        self._after = ()
        await self._fetcher.attach(asyncio.get_running_loop())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Send the pending acks, return all other messages, and leave the group.

        Closing is never interrupted: a caller that is cancelled still waits until the consumer is closed.
        """
        await self._closing()

    async def _close(self) -> None:
        self._fetcher.halt()
        if self._opening is not None and not self._opening.done():
            self._opening.cancel()
            await asyncio.wait([self._opening])
        await self._fetcher.send_outcomes()
        self._closed = True
        await self._fetcher.leave()
        self._fetcher.wake()

    def _stop(self) -> None:
        """Stop pulling and handing out; callers that wait for rows get none."""
        self._fetcher.halt()
        self._fetcher.wake()

    # --- handing out ----------------------------------------------------------------------------

    async def fetch(self, count: int = 500, wait: Duration = 1.0) -> Batch:
        """Up to ``count`` messages: those available now, or else the first that arrive within ``wait`` seconds."""
        return Batch(await self._fetch(count, wait))

    async def fetch_arrow(self, count: int = 50_000, wait: Duration = 1.0) -> ArrowBatch:
        """Like ``fetch``, as an Arrow table over the received memory, without a copy."""
        return ArrowBatch(await self._fetch(count, wait))

    async def flush(self) -> None:
        """Wait until the brokers have every ack and nack reported so far."""
        await flush_all(client.deliveries for client in self._fetcher.clients if client.collector.under_way)

    async def _fetch(self, count: int, wait: Duration, *, apart: bool = False) -> list[Piece]:
        """The rows for ``fetch``; ``apart``: no two rows of one key, so that each row may be handled by itself."""
        if count < 1:
            raise InvalidArgument(f"count must be 1 or more, not {count}")
        seconds = wait if type(wait) is float and 0 <= wait < math.inf else seconds_of(wait)
        loop, fetcher = self._opened(), self._fetcher
        if count > self._limits.prefetch_count:
            # Prefetch two such batches: the user handles one while the next one is pulled.
            fetcher.enlarge(2 * min(count, FETCH_COUNT_MAX))
        deadline = loop.time() + seconds
        try:
            while (available := self._buffer.available()) < count and not fetcher.stopping:
                self._opened()
                if available and not fetcher.more:
                    break
                remaining = deadline - loop.time()
                fetcher.demand = count
                fetcher.pull_on_demand()
                if available and not fetcher.more_comes():
                    # The limits allow no further pull until some rows are acked: return what is available.
                    break
                if available and fetcher.gather_seconds is not None:
                    remaining = min(remaining, fetcher.gather_seconds)
                if remaining <= 0 or fetcher.handed_over or not await fetcher.arrival(remaining):
                    break
        finally:
            fetcher.demand = 0
        return [] if fetcher.stopping else self._buffer.take(count, apart=apart)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        """Wait for the next message, without a timeout. Several tasks may iterate over one consumer."""
        fetcher = self._fetcher
        while not fetcher.stopping:
            message = self._buffer.next()
            if message is not None:
                return message
            self._opened()
            fetcher.demand = 1 if fetcher.tracks else min(ITERATION_COUNT, self._limits.prefetch_count)
            try:
                fetcher.pull_on_demand()
                await fetcher.arrival(None)
            finally:
                fetcher.demand = 0
        if self._closed:
            self._opened()
        raise StopAsyncIteration

    def _opened(self) -> asyncio.AbstractEventLoop:
        fetcher = self._fetcher
        if fetcher.error is not None:
            raise fetcher.error
        meta = fetcher.router.meta
        if meta.closed is not None:
            raise meta.closed
        if self._closed:
            raise Closed(f"the consumer of {self.subject!r} is closed; create another one with client.consumer")
        if fetcher.loop is None:
            how = "with" if meta.blocking else "async with"
            raise Closed(f"the consumer is not open; use '{how} client.consumer(...)'")
        return fetcher.loop


class Batch(Sequence[Message]):
    """A list-like batch of messages held by a consumer. It is empty when no message arrived in time."""

    def __init__(self, pieces: list[Piece]) -> None:
        self._pieces = pieces

    @cached_property
    def _messages(self) -> list[Message]:
        messages: list[Message] = []
        for delivered, start, stop in self._pieces:
            messages += delivered.messages(start, stop)
        return messages

    def __len__(self) -> int:
        return sum(stop - start for _, start, stop in self._pieces)

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> list[Message]: ...
    def __getitem__(self, index: int | slice) -> Message | list[Message]:
        return self._messages[index]

    def __iter__(self) -> Iterator[Message]:
        return iter(self._messages)

    async def ack(self) -> None:
        """Ack all messages that are not nacked; returns when the broker has stored the acks."""
        await report(self._pieces, None)

    async def nack(self, delay: Duration | None = None, reason: Why | None = None) -> None:
        """Nack all messages that are not acked: they are redelivered after ``delay``, or as the group's policy says."""
        await report(self._pieces, failed_of(delay, reason))

    async def reject(self, reason: Why | None = None) -> None:
        """Make all messages that are not acked or nacked dead letters of the group at once."""
        await report(self._pieces, rejected_of(reason))

    def _may_begin(self) -> bool:
        """True if the consumer still has the right to handle every message of the batch."""
        return all(delivered.may_begin(slice(start, stop)) for delivered, start, stop in self._pieces)

    def _report(self, failed: FailureOutcome | None) -> None:
        """Report how the messages without an outcome failed; None: they are acked."""
        for delivered, start, stop in self._pieces:
            delivered.report_rows(slice(start, stop), failed)

    def __repr__(self) -> str:
        return f"<Batch of {len(self)} messages>"


class ArrowBatch:
    """Messages as an Arrow table, over the memory they were received in."""

    def __init__(self, pieces: list[Piece]) -> None:
        self._pieces = pieces

    def __len__(self) -> int:
        return sum(stop - start for _, start, stop in self._pieces)

    @cached_property
    def table(self) -> pa.Table:
        """Columns sequence, key, body, tags, headers, send_time, store_time, producer, producer_sequence, attempt,
        message_id and partition; docs/consuming.md has their types.
        """
        batches = []
        for delivered, start, stop in self._pieces:
            columns = arrays(delivered.frame)
            columns += [
                attempts(delivered.attempt(0), delivered.count),
                message_ids(*columns[-2:]),
                same_text(str(delivered.partition), delivered.count),
            ]
            rows = pa.RecordBatch.from_arrays(columns, schema=TABLE_SCHEMA)
            batches.append(rows if stop - start == delivered.count else rows.slice(start, stop - start))
        return pa.Table.from_batches(batches, schema=TABLE_SCHEMA)

    async def ack(self) -> None:
        """Ack all rows that are not nacked; returns when the broker has stored the acks."""
        await report(self._pieces, None)

    async def nack(self, rows: Rows | None = None, delay: Duration | None = None, reason: Why | None = None) -> None:
        """Nack these rows (None: all): they are redelivered after ``delay``, or as the group's policy says.

        ``rows`` are row numbers of the table, or a mask over all its rows; a NumPy or Arrow array works too.
        """
        await self._fail(rows, failed_of(delay, reason))

    async def reject(self, rows: Rows | None = None, reason: Why | None = None) -> None:
        """Make these rows (None: all) dead letters of the group at once; ``rows`` as for ``nack``."""
        await self._fail(rows, rejected_of(reason))

    async def _fail(self, rows: Rows | None, failed: FailureOutcome) -> None:
        # All of ``rows`` is validated before any row is nacked.
        pieces = self._pieces if rows is None else self._pieces_of(row_mask(rows, len(self)))
        await report(pieces, failed)

    def _pieces_of(self, mask: npt.NDArray[np.bool_]) -> list[Piece]:
        """The marked rows as pieces; adjacent rows of a frame are one piece."""
        found: list[Piece] = []
        before = 0
        for delivered, start, stop in self._pieces:
            part = mask[before : before + stop - start]
            edges = np.flatnonzero(np.diff(part, prepend=False, append=False)) + start
            found += [(delivered, first, last) for first, last in edges.reshape(-1, 2).tolist()]
            before += stop - start
        return found

    def __repr__(self) -> str:
        return f"<ArrowBatch of {len(self)} messages>"


def report(pieces: list[Piece], failed: FailureOutcome | None) -> Awaitable[None]:
    """Report how the rows of the pieces that have no outcome failed; None: they are acked.

    Returns a wait until the brokers have every outcome reported so far.
    """
    for delivered, start, stop in pieces:
        delivered.report_rows(slice(start, stop), failed, soon=False)
    if len(pieces) == 1 and (only := pieces[0][0].deliveries) is not None:
        return only.flush()
    return flush_all(delivered.deliveries for delivered, _, _ in pieces)


def flush_all(partitions: Iterable[Deliveries | None]) -> Awaitable[None]:
    """Wait until the brokers have every outcome reported so far. An unreachable broker does not delay the others."""
    return all_of([each.flush() for each in dict.fromkeys(partitions) if each is not None])
