"""The consumer: hands the rows of its partitions to the user. ``Fetcher`` pulls them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from plait import tasks
from plait.client.arguments import Duration, seconds_of
from plait.client.closing import Closing
from plait.client.consume.batch import ITERATION_COUNT, ArrowBatch, Batch, flush_all
from plait.client.consume.delivered import Piece
from plait.client.consume.fetcher import Fetcher
from plait.client.types import Message
from plait.errors import Closed, InvalidArgument

#: A bound on the prefetch that one ``fetch`` call can request.
FETCH_COUNT_MAX = 1 << 20


class Consumer:
    """A member of a group. Use it with ``async with``; leaving the block returns messages that are not acked."""

    def __init__(self, fetcher: Fetcher) -> None:
        self.subject = fetcher.terms.subject
        self.group = fetcher.terms.group
        self.client_id = fetcher.terms.client
        self._fetcher = fetcher
        self._clients = fetcher.clients
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
        await flush_all([client.deliveries for client in self._clients if not client.collector.quiet])

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
