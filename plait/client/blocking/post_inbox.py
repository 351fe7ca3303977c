"""Messages that blocking code posts, from any thread.

``post`` appends to an inbox and wakes the loop once for all messages that are posted until the loop takes them. A
posted message needs no coroutine and no future, and its thread does not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from typing import Any

from plait.client.arguments import Duration, seconds_of
from plait.client.blocking.loop_thread import RunInLoop
from plait.client.send.encoding import encode_body, encode_group, encode_headers, encode_key, encode_tags
from plait.client.send.open_rows import ROW_SIZE, SHORT_BODY_MAX, SHORT_KEY_MAX, RowExtras
from plait.client.send.subject_sender import Senders
from plait.client.types import Receipt, Ticket
from plait.errors import BufferFull, Closed, InvalidArgument, PlaitError, Timeout
from plait.model import names

#: Rows that the loop takes in one turn; it serves the sockets between turns.
TURN_COUNT = 5_000


class SyncTicket:
    """A posted message; ``result`` waits for its receipt."""

    __slots__ = ("_error", "_inbox", "_ticket")

    def __init__(self, inbox: PostInbox) -> None:
        self._inbox = inbox
        #: The ticket of the asynchronous client, after the loop has taken the row...
        self._ticket: Ticket | None = None
        #: ...or the error if the client was closed before that.
        self._error: PlaitError | None = None

    @property
    def done(self) -> bool:
        """True if the receipt or the error is known."""
        return self._error is not None or (self._ticket is not None and self._ticket.done)

    def result(self, timeout: Duration | None = None) -> Receipt:
        """The receipt; raises the error of the send.

        Raises ``Timeout`` if neither is known within ``timeout``; the message may still be stored.
        """
        if not self.done:
            seconds = None if timeout is None else seconds_of(timeout)
            try:
                self._inbox.run(self._settled(), seconds)
            except TimeoutError:
                raise Timeout(
                    f"no receipt within {seconds:g} s; the message may still be stored, call result() again"
                ) from None
        if self._error is not None:
            raise self._error
        assert self._ticket is not None
        return self._ticket._batch.receipt(self._ticket._row)

    async def _settled(self) -> None:
        """Wait for the result. Runs on the loop."""
        if self._ticket is not None:
            await self._ticket._batch.wait()


#: Subject, body, key, extras, size and ticket.
_Row = tuple[str, bytes, str | None, RowExtras | None, int, SyncTicket]


class PostInbox:
    """Rows that were posted and not yet taken by the loop."""

    def __init__(self, senders: Senders, loop: asyncio.AbstractEventLoop, run: RunInLoop) -> None:
        self.run = run
        self._senders = senders
        self._producer = senders.producer
        self._loop = loop
        self._limit = self._producer.limits.buffer_bytes
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
        extras: RowExtras | None,
    ) -> SyncTicket:
        """Add a row, from any thread. An invalid row raises here."""
        if subject not in self._known:
            names.check("subject", subject)
            self._known.add(subject)
        if type(body) is not bytes or len(body) > SHORT_BODY_MAX:
            body = encode_body(body)
        if key is not None and (type(key) is not str or not 0 < len(key) < SHORT_KEY_MAX or not key.isascii()):
            key = encode_key(key)
        size = len(body) + ROW_SIZE
        if extras is not None:
            tags, headers = extras.tags, extras.headers
            if tags is not None:
                tags = [tags] if isinstance(tags, str) else list(tags)
                size += len(encode_tags(tags))
            if headers is not None:
                headers = dict(headers)
                size += len(encode_headers(headers))
            size += len(encode_group(extras.to_group))
            extras = extras._replace(tags=tags, headers=headers)
        ticket = SyncTicket(self)
        with self._lock:
            waiting = self._producer.buffered + self._size
            if waiting >= self._limit:
                raise BufferFull(
                    f"{waiting} bytes wait to be stored (limit {self._limit}); call client.flush() or use send()",
                    limit="buffer_bytes",
                    value=self._limit,
                )
            self._rows.append((subject, body, key, extras, size, ticket))
            self._size += size
            wake, self._scheduled = not self._scheduled, True
        if wake:
            try:
                self._loop.call_soon_threadsafe(self._turn)
            except RuntimeError:
                raise Closed("the interpreter is shutting down; post before the program ends") from None
        return ticket

    def take_soon(self) -> None:
        """Make the loop take all posted rows before it starts the caller's next coroutine. Call it from any thread."""
        if self._rows:
            # If the loop has ended, starting the coroutine fails.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self.take_all)

    def _turn(self) -> None:
        self._take(TURN_COUNT)
        with self._lock:
            self._scheduled = bool(self._rows)
            again = self._scheduled
        if again:
            self._loop.call_soon(self._turn)

    def take_all(self) -> None:
        """Give all posted rows to the producer. Runs on the loop."""
        self._take(len(self._rows))

    def _take(self, count: int) -> None:
        rows, senders, producer = self._rows, self._senders, self._producer
        taken = 0
        for _ in range(min(count, len(rows))):
            subject, body, key, extras, size, ticket = rows.popleft()
            taken += size
            if producer.closed is not None:
                ticket._error = producer.closed
                continue
            delayed = extras is not None and extras.due is not None
            known = senders.delayed if delayed else senders.plain
            sender = known.get(subject) or senders.sender(subject, delayed=delayed)
            try:
                if extras is not None and extras.priority:
                    sender.refuse_priorities()
                ticket._ticket = (sender.rows or sender.choose(key)).post(body, key, extras)
            except InvalidArgument as error:
                ticket._error = error
        with self._lock:
            self._size -= taken
