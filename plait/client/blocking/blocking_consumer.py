"""Consuming from blocking code: ``Consumer`` and what its fetches return."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self, overload

import pyarrow as pa

from plait.client.arguments import Duration, seconds_of
from plait.client.blocking.loop_thread import RunInLoop
from plait.client.consume.ack_collector import Piece
from plait.client.consume.batch import ArrowBatch as LoopArrowBatch
from plait.client.consume.batch import Batch as LoopBatch
from plait.client.consume.batch import Rows
from plait.client.consume.buffer import ITERATION_COUNT
from plait.client.consume.consumer import Consumer as LoopConsumer
from plait.client.types import Message, Why
from plait.errors import Closed, ForkedClient

#: How long one wait of an iteration is; the next one follows at once.
ITERATION_SECONDS = 3600.0


class Batch(Sequence[Message]):
    """Messages in a consumer's hands, list-like. An empty batch means that nothing came in time."""

    def __init__(self, inner: LoopBatch, run: RunInLoop) -> None:
        self._inner = inner
        self._run = run

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

    def ack(self) -> None:
        """All that were not nacked are done; returns when the broker has it."""
        self._run(self._inner.ack())

    def nack(self, delay: Duration | None = None, reason: Why | None = None) -> None:
        """All that were not acked failed: the group gets them again after ``delay``, or as it retries."""
        self._run(self._inner.nack(delay, reason))

    def reject(self, reason: Why | None = None) -> None:
        """All that were not acked or nacked go to the group's dead letters at once."""
        self._run(self._inner.reject(reason))

    def __repr__(self) -> str:
        return repr(self._inner)


class ArrowBatch:
    """Messages as an Arrow table over the memory they were received in."""

    def __init__(self, inner: LoopArrowBatch, run: RunInLoop) -> None:
        self._inner = inner
        self._run = run

    def __len__(self) -> int:
        return len(self._inner)

    @property
    def table(self) -> pa.Table:
        """The columns of the asynchronous ``ArrowBatch.table``."""
        return self._inner.table

    def ack(self) -> None:
        """All rows that were not nacked are done; returns when the broker has it."""
        self._run(self._inner.ack())

    def nack(self, rows: Rows | None = None, delay: Duration | None = None, reason: Why | None = None) -> None:
        """These rows (all: None) failed: the group gets them again after ``delay``, or as it retries.

        ``rows`` are their numbers in the table, or a mask of all its rows; also of NumPy or Arrow.
        """
        self._run(self._inner.nack(rows, delay, reason))

    def reject(self, rows: Rows | None = None, reason: Why | None = None) -> None:
        """These rows (all: None) go to the group's dead letters at once; ``rows`` as for ``nack``."""
        self._run(self._inner.reject(rows, reason))

    def __repr__(self) -> str:
        return repr(self._inner)


class Consumer:
    """A member of a group. Use it with ``with``; leaving gives back what is not acked.

    Threads may share it: each message goes to one of them, and may be acked by any.
    """

    def __init__(self, inner: LoopConsumer, run: RunInLoop) -> None:
        self._inner = inner
        self._run = run
        self.subject = inner.subject
        self.group = inner.group
        self.client_id = inner.client_id
        #: What the loop handed over and nobody has taken: an interrupted call loses nothing.
        self._handed_over = inner._handed_over

    def __enter__(self) -> Self:
        self._run(self._inner.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Send the acks that are left, give back the rest, and leave the group.

        Control-C ends the waiting, not the closing: that continues in the background.
        """
        # Closed with its client, or its parent's: nothing is left to do.
        with contextlib.suppress(Closed, ForkedClient):
            self._run(self._inner.close(), cancel=False)

    def flush(self) -> None:
        """Until the broker has every ack and nack so far."""
        self._run(self._inner.flush())

    def fetch(self, count: int = 500, wait: Duration = 1.0) -> Batch:
        """Up to ``count`` messages: all that are there, or the first that come within ``wait`` seconds."""
        return Batch(LoopBatch(self._fetch(count, wait)), self._run)

    def fetch_arrow(self, count: int = 50_000, wait: Duration = 1.0) -> ArrowBatch:
        """Like ``fetch``, as an Arrow table that is not copied."""
        return ArrowBatch(LoopArrowBatch(self._fetch(count, wait)), self._run)

    def _fetch(self, count: int, wait: Duration) -> list[Piece]:
        deadline = time.monotonic() + seconds_of(wait)
        pieces = self._handed_over.take(count)
        while not pieces:
            remaining = max(deadline - time.monotonic(), 0.0)
            self._run(self._hand_over(count, remaining))
            pieces = self._handed_over.take(count)
            if remaining <= 0 or self._inner._stopping:
                break
        return pieces

    async def _hand_over(self, count: int, wait: float, *, apart: bool = False) -> None:
        """On the loop."""
        self._inner._unhand()
        self._handed_over.add(await self._inner._fetch(count, wait, apart=apart))
        # They may be for callers who wait for rows of their own.
        self._inner._wake()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Message:
        """The next message, however long it takes."""
        while True:
            message = self._handed_over.next()
            if message is not None:
                return message
            if self._inner._stopping:
                raise StopIteration
            self._run(self._hand_over(ITERATION_COUNT, ITERATION_SECONDS, apart=True))
