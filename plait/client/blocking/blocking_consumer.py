"""The consumer for blocking code, the results of its fetches, and the reader."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self, overload

import pyarrow as pa

from plait.client.arguments import Duration, seconds_of
from plait.client.blocking.loop_thread import Blocking, RunInLoop, blocking, signed_as
from plait.client.consume.consumer import ArrowBatch, Batch, Consumer
from plait.client.consume.delivered import Piece
from plait.client.consume.prefetch import ITERATION_COUNT
from plait.client.read import reader
from plait.client.read.reader import Reader
from plait.client.types import Message
from plait.errors import Closed, ForkedClient

#: The longest single wait of an iteration, which then waits again.
ITERATION_SECONDS = 3600.0


class SyncBatch(Blocking[Batch], Sequence[Message]):
    """A list-like batch of messages held by a consumer. It is empty when no message arrived in time."""

    ack = blocking(Batch.ack)
    nack = blocking(Batch.nack)
    reject = blocking(Batch.reject)

    def __len__(self) -> int:
        return len(self._inner)

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> list[Message]: ...
    def __getitem__(self, index: int | slice) -> Message | list[Message]:
        return self._inner[index]

    def __iter__(self) -> Iterator[Message]:
        return iter(self._inner)


class SyncArrowBatch(Blocking[ArrowBatch]):
    """Messages as an Arrow table, over the memory they were received in."""

    ack = blocking(ArrowBatch.ack)
    nack = blocking(ArrowBatch.nack)
    reject = blocking(ArrowBatch.reject)

    def __len__(self) -> int:
        return len(self._inner)

    @property
    def table(self) -> pa.Table:
        """The columns of the asynchronous ``ArrowBatch.table``."""
        return self._inner.table


class SyncConsumer(Blocking[Consumer]):
    """A member of a group. Use it with ``with``; leaving the block returns messages that are not acked.

    Threads may share it: one thread gets each message, and any thread may ack it.
    """

    def __init__(self, inner: Consumer, run: RunInLoop) -> None:
        super().__init__(inner, run)
        self.subject = inner.subject
        self.group = inner.group
        self.client_id = inner.client_id
        #: Rows that the loop handed over and no caller has taken: an interrupted call loses none.
        self._handed_over = inner._fetcher.handed_over

    def __enter__(self) -> Self:
        self._run(self._inner.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Send the pending acks, return all other messages, and leave the group.

        Control-C ends the wait. Closing continues in the background.
        """
        # If the client is closed or belongs to the parent process, there is nothing to close.
        with contextlib.suppress(Closed, ForkedClient):
            self._run(self._inner.close(), cancel=False)

    flush = blocking(Consumer.flush)

    @signed_as(Consumer.fetch)
    def fetch(self, count: int = 500, wait: Duration = 1.0) -> SyncBatch:
        """Up to ``count`` messages: those available now, or else the first that arrive within ``wait`` seconds."""
        return SyncBatch(Batch(self._fetch(count, wait)), self._run)

    @signed_as(Consumer.fetch_arrow)
    def fetch_arrow(self, count: int = 50_000, wait: Duration = 1.0) -> SyncArrowBatch:
        """Like ``fetch``, as an Arrow table over the received memory, without a copy."""
        return SyncArrowBatch(ArrowBatch(self._fetch(count, wait)), self._run)

    def _fetch(self, count: int, wait: Duration) -> list[Piece]:
        deadline = time.monotonic() + seconds_of(wait)
        pieces = self._handed_over.take(count)
        while not pieces:
            remaining = max(deadline - time.monotonic(), 0.0)
            self._run(self._hand_over(count, remaining))
            pieces = self._handed_over.take(count)
            if remaining <= 0 or self._inner._fetcher.stopping:
                break
        return pieces

    async def _hand_over(self, count: int, wait: float, *, apart: bool = False) -> None:
        """Fetch rows and hand them over. Runs on the loop."""
        self._inner._fetcher.put_back_handed_over()
        self._handed_over.add(await self._inner._fetch(count, wait, apart=apart))
        # Other callers may wait for these rows.
        self._inner._fetcher.wake()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Message:
        """Wait for the next message, without a timeout."""
        while True:
            message = self._handed_over.next()
            if message is not None:
                return message
            if self._inner._fetcher.stopping:
                raise StopIteration
            self._run(self._hand_over(ITERATION_COUNT, ITERATION_SECONDS, apart=True))


class SyncReader(Blocking[Reader]):
    """Reads a subject from a position. A restart of the server only delays it."""

    def __init__(self, inner: Reader, run: RunInLoop) -> None:
        super().__init__(inner, run)
        self.subject = inner.subject
        #: Messages that the loop handed over and no caller has taken: an interrupted call loses none.
        self._ready: deque[Message] = deque()
        self._lock = threading.Lock()

    @property
    def position(self) -> Any:
        """The position of the next read."""
        return self._inner.position

    def __enter__(self) -> Self:
        self._run(self._inner.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading."""
        self._inner._closed = True
        if self._inner._router.meta.closed is None:
            self._run(self._inner.close())

    def fetch(self, count: int = 500, wait: Duration = 1.0) -> list[Message]:
        """Up to ``count`` messages: those available now, or else the first that arrive within ``wait`` seconds."""
        if not self._ready or count < 1:
            self._run(self._hand_over(count, wait))
        with self._lock:
            return [self._ready.popleft() for _ in range(min(count, len(self._ready)))]

    async def _hand_over(self, count: int, wait: Duration) -> None:
        """Fetch messages and hand them over. Runs on the loop."""
        self._ready.extend(await self._inner.fetch(count, wait))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Message:
        """Wait for the next message, without a timeout."""
        while True:
            with self._lock:
                if self._ready:
                    return self._ready.popleft()
            if self._inner._closed:
                raise StopIteration
            self._run(self._hand_over(reader.ITERATION_COUNT, ITERATION_SECONDS))
