"""The client for blocking code: the same names without ``await``, for use from any thread.

One loop in a background thread serves all blocking clients of a process. Each call runs there and the caller waits; an
interrupt, such as control-C, cancels the call and leaves the client usable. A forked child starts its own loop; clients
that the parent opened raise ``ForkedClient`` in the child.
"""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from datetime import datetime
from types import EllipsisType, TracebackType
from typing import Any, Literal, Self, TypeVar

import pyarrow as pa

from plait.client.admin.schedule_admin import ScheduledMessage
from plait.client.arguments import Duration, Start
from plait.client.blocking.blocking_admin import Admin
from plait.client.blocking.blocking_consumer import Consumer
from plait.client.blocking.blocking_reader import Reader
from plait.client.blocking.loop_thread import LoopThread, shared_loop
from plait.client.client import DEFAULT_ADDRESS
from plait.client.client import Client as LoopClient
from plait.client.send.due_time import Delay, Delays, DeliverAts, due_of
from plait.client.send.post_inbox import PostInbox, Ticket
from plait.client.send.send_many import Headers, Tags
from plait.client.types import Receipt, Receipts
from plait.errors import PlaitError
from plait.limits import ClientLimits
from plait.model.retry_policy import Retry

T = TypeVar("T")

log = logging.getLogger("plait.client")

#: How long the exit of the program waits for each client that is not closed.
EXIT_SECONDS = 2.0

_open: weakref.WeakSet[Client] = weakref.WeakSet()


@atexit.register
def _close_forgotten() -> None:
    for client in list(_open):
        client._close_at_exit()


def connect(
    address: str | Sequence[str] = DEFAULT_ADDRESS,
    *,
    client_id: str | None = None,
    compression: Literal["zstd", "lz4"] | None = None,
    limits: ClientLimits | None = None,
    spool: str | os.PathLike[str] | None = None,
) -> Client:
    """A client for ``with``. The arguments are those of ``plait.connect``."""
    return Client(address, client_id=client_id, compression=compression, limits=limits, spool=spool)


class Client:
    """Sends, consumes and administers; safe to share between threads."""

    def __init__(
        self,
        address: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        client_id: str | None = None,
        compression: Literal["zstd", "lz4"] | None = None,
        limits: ClientLimits | None = None,
        spool: str | os.PathLike[str] | None = None,
    ) -> None:
        self._client = LoopClient(address, client_id=client_id, compression=compression, limits=limits, spool=spool)
        self._client._node.blocking = True
        self.client_id = self._client.client_id
        self.limits = self._client.limits
        self._thread: LoopThread | None = None
        self._inbox: PostInbox | None = None
        #: Management of subjects and groups.
        self.admin = Admin(self._client.admin, self._run)

    def open(self) -> Self:
        """Connect; ``with`` does it for you. After a failure it may be called again."""
        self._client._check_not_closed()
        if self._inbox is None:
            self._thread = shared_loop()
            self._thread.run(self._client.open())
            self._inbox = PostInbox(self._client._senders, self._thread.loop, self._run)
            _open.add(self)
        return self

    def close(self) -> None:
        """Send the posted messages and disconnect; raises the first error of posted messages since the last flush.

        Control-C ends the wait. Closing continues in the background, and the exit of the program waits briefly for it.
        """
        if self._thread is not None and self._thread.running:
            self._thread.run(self._close(), cancel=False)
            _open.discard(self)

    async def _close(self) -> None:
        if not self._client._closing.begun:
            self._take_posted()
        await self._client.close()

    def _close_at_exit(self) -> None:
        """Send posted messages for up to ``EXIT_SECONDS`` if the program exits without closing the client."""
        if self._thread is None or not self._thread.running:
            return
        try:
            self._thread.run(self._close(), EXIT_SECONDS)
        except (TimeoutError, PlaitError):
            self._thread.run(self._client._node.close(), EXIT_SECONDS)

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except PlaitError as failure:
            if error is None:
                raise
            log.error("posted messages failed: %s", failure)

    # --- running --------------------------------------------------------------------------------

    def _run(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None, *, cancel: bool = True) -> T:
        """Run a coroutine on the loop and wait for its result."""
        if self._thread is None or self._client._producer.closed is not None:
            coroutine.close()
            self._client._check_open()
        assert self._thread is not None
        return self._thread.run(coroutine, timeout, cancel=cancel)

    def _take_posted(self) -> None:
        """Send the messages that were posted before this call. Runs on the loop."""
        if self._inbox is not None:
            self._inbox.take_all()

    # --- sending --------------------------------------------------------------------------------

    def send(
        self,
        subject: str,
        body: Any,
        *,
        key: str | int | None = None,
        tags: Iterable[str] | None = None,
        headers: Mapping[str, str | int | float | bool] | None = None,
        delay: Delay | None = None,
        deliver_at: datetime | None = None,
        oneway: bool = False,
    ) -> Receipt:
        """Store a message and wait for its receipt. ``oneway`` sends once and waits for nothing.

        ``delay`` (10 ms to 2 years) or ``deliver_at`` makes it a delayed message.
        """
        return self._run(self._send(subject, body, key, tags, headers, delay, deliver_at, oneway))

    async def _send(
        self,
        subject: str,
        body: Any,
        key: str | int | None,
        tags: Iterable[str] | None,
        headers: Mapping[str, str | int | float | bool] | None,
        delay: Delay | None,
        deliver_at: datetime | None,
        oneway: bool,
    ) -> Receipt:
        self._take_posted()
        return await self._client.send(
            subject, body, key=key, tags=tags, headers=headers, delay=delay, deliver_at=deliver_at, oneway=oneway
        )

    def post(
        self,
        subject: str,
        body: Any,
        *,
        key: str | int | None = None,
        tags: Iterable[str] | None = None,
        headers: Mapping[str, str | int | float | bool] | None = None,
        delay: Delay | None = None,
        deliver_at: datetime | None = None,
    ) -> Ticket:
        """Buffer a message and return at once. ``ticket.result()`` gives the receipt. Raises ``BufferFull``."""
        inbox = self._inbox
        if inbox is None or self._client._producer.closed is not None:
            self._client._check_open()
        assert inbox is not None
        due = None
        if delay is not None or deliver_at is not None:
            due = due_of(delay, deliver_at, self._client._producer.next_now())
        return inbox.post(subject, body, key, tags, headers, due)

    def send_many(
        self,
        subject: str,
        bodies: Sequence[Any] | pa.Array | pa.ChunkedArray,
        *,
        keys: Sequence[str | int | None] | None = None,
        tags: Tags | None = None,
        headers: Headers | None = None,
        delay: Delays | None = None,
        deliver_at: DeliverAts | None = None,
    ) -> Receipts:
        """Store many messages, in order, and wait for all receipts. Bodies may be an Arrow array.

        ``tags`` and ``headers`` apply to every message, or are lists with one entry per message. ``delay`` and
        ``deliver_at`` are one value for all messages, or one per message.
        """
        return self._run(self._send_many(subject, bodies, keys, tags, headers, delay, deliver_at))

    async def _send_many(
        self, subject: str, bodies: Any, keys: Any, tags: Any, headers: Any, delay: Any, deliver_at: Any
    ) -> Receipts:
        self._take_posted()
        return await self._client.send_many(
            subject, bodies, keys=keys, tags=tags, headers=headers, delay=delay, deliver_at=deliver_at
        )

    def cancel(self, scheduled: Receipt | ScheduledMessage) -> bool:
        """Cancel a delayed message. True: it is never delivered; False: it was delivered or cancelled before."""
        return self._run(self._client.cancel(scheduled))

    def reschedule(
        self,
        scheduled: Receipt | ScheduledMessage,
        *,
        delay: Delay | None = None,
        deliver_at: datetime | None = None,
    ) -> Receipt:
        """Change the due time of a delayed message; returns its new receipt.

        ``NotScheduled``: it was delivered or cancelled.
        """
        return self._run(self._client.reschedule(scheduled, delay=delay, deliver_at=deliver_at))

    def flush(self) -> None:
        """Wait until everything posted is stored; raises the first error since the last flush."""
        self._run(self._flush())

    async def _flush(self) -> None:
        self._take_posted()
        await self._client.flush()

    # --- consuming ------------------------------------------------------------------------------

    def consumer(
        self,
        subject: str,
        group: str | EllipsisType | None = ...,
        *,
        broadcast: bool = False,
        delivery: Literal["at_least_once", "at_most_once"] = "at_least_once",
        start: Start | None = None,
        prefetch: int | None = None,
        retry: Retry | None = None,
        ordered: bool = False,
        affinity: Literal["key"] | None = None,
        handling: Duration | None = None,
    ) -> Consumer:
        """A member of a group, for ``with``; the arguments are those of the asynchronous client."""

        async def make() -> Consumer:
            inner = self._client._consumer(
                subject,
                group,
                broadcast,
                delivery,
                start,
                prefetch,
                retry,
                ordered,
                affinity,
                handling,
                any_thread=True,
            )
            return Consumer(inner, self._run)

        return self._run(make())

    def reader(self, subject: str, *, start: Start = "latest") -> Reader:
        """Read without a group, for ``with``: from "earliest", "latest", a sequence, a time, or "-5m"."""

        async def make() -> Reader:
            return Reader(self._client.reader(subject, start=start), self._run)

        return self._run(make())
