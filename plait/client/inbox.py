"""What other threads post, on its way to the loop.

``post`` of a blocking client appends here and wakes the loop once for all that come before it looks: no coroutine, no
future and no waiting per message.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from plait import names
from plait.client.encoding import encode_body, encode_headers, encode_key, encode_tags
from plait.client.producer import Producer
from plait.client.rows import ROW_SIZE
from plait.client.types import Receipt
from plait.client.types import Ticket as LoopTicket
from plait.errors import BufferFull, Closed, PlaitError

#: Rows that one turn of the loop takes over; the socket is served in between.
TURN_COUNT = 5_000


class Fate:
    """What became of a posted row, first here and then at the broker."""

    __slots__ = ("error", "ticket")

    def __init__(self) -> None:
        self.ticket: LoopTicket | None = None
        self.error: PlaitError | None = None

    @property
    def known(self) -> bool:
        return self.error is not None or (self.ticket is not None and self.ticket.done)

    def receipt(self) -> Receipt:
        """What is known; raises what went wrong instead."""
        if self.error is not None:
            raise self.error
        assert self.ticket is not None
        return self.ticket._batch.receipt(self.ticket._row)

    async def wait(self) -> None:
        """On the loop, after the row was taken over: until it is known."""
        if self.ticket is not None:
            await self.ticket._batch.wait()


class _Row(NamedTuple):
    subject: str
    body: bytes
    key: str | None
    tags: list[str] | None
    headers: dict[str, Any] | None
    size: int
    fate: Fate


class Inbox:
    """See the module."""

    def __init__(self, producer: Producer, loop: asyncio.AbstractEventLoop) -> None:
        self._producer = producer
        self._loop = loop
        self._lock = threading.Lock()
        self._rows: deque[_Row] = deque()
        self._size = 0
        self._scheduled = False
        self._known: set[str] = set()

    def post(
        self,
        subject: str,
        body: Any,
        key: str | int | None,
        tags: Iterable[str] | None,
        headers: Mapping[str, Any] | None,
    ) -> Fate:
        """From any thread. What is wrong with the row is raised here."""
        if subject not in self._known:
            names.check("subject", subject)
            self._known.add(subject)
        if type(body) is not bytes or len(body) > 1_000_000:
            body = encode_body(body)
        text = None if key is None else encode_key(key)
        size = len(body) + ROW_SIZE
        if tags is not None:
            tags = [tags] if isinstance(tags, str) else list(tags)
            size += len(encode_tags(tags))
        if headers is not None:
            headers = dict(headers)
            size += len(encode_headers(headers))
        fate = Fate()
        row = _Row(subject, body, text, tags, headers, size, fate)
        limit = self._producer.limits.buffer_bytes
        with self._lock:
            if self._producer.buffered + self._size >= limit:
                raise BufferFull(
                    f"{self._producer.buffered + self._size} bytes wait to be stored (limit {limit}); "
                    "call client.flush() or use send()"
                )
            self._rows.append(row)
            self._size += size
            wake, self._scheduled = not self._scheduled, True
        if wake:
            try:
                self._loop.call_soon_threadsafe(self._turn)
            except RuntimeError:
                raise Closed("the interpreter is ending; nothing can be sent any more") from None
        return fate

    def _turn(self) -> None:
        self._take(TURN_COUNT)
        with self._lock:
            self._scheduled = bool(self._rows)
            again = self._scheduled
        if again:
            self._loop.call_soon(self._turn)

    def take_all(self) -> None:
        """On the loop: everything posted so far is in the producer's hands."""
        self._take(len(self._rows))

    def _take(self, count: int) -> None:
        rows = self._rows
        producer = self._producer
        taken = 0
        for _ in range(min(count, len(rows))):
            subject, body, key, tags, headers, size, fate = rows.popleft()
            taken += size
            if producer.closed is not None:
                fate.error = producer.closed
                continue
            fate.ticket = producer.queue(subject).post(body, key, tags, headers)
        with self._lock:
            self._size -= taken
