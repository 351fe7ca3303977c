"""The client for blocking code: the same names without ``await``, for use from any thread.

One loop in a background thread serves all blocking clients of a process. Each call runs there and the caller waits; an
interrupt, such as control-C, cancels the call and leaves the client usable. A forked child starts its own loop; clients
that the parent opened raise ``ForkedClient`` in the child.

``post`` appends to an inbox and wakes the loop once for all messages that are posted until the loop takes them. A
posted message needs no coroutine and no future, and its thread does not wait.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import threading
import weakref
from collections import deque
from collections.abc import Coroutine, Iterable, Mapping
from datetime import datetime
from types import TracebackType
from typing import Any, Self, TypeVar

from plait.client.admin.admin import Admin
from plait.client.arguments import Duration, seconds_of
from plait.client.blocking.blocking_consumer import SyncConsumer, SyncReader
from plait.client.blocking.blocking_transaction import SyncTransaction
from plait.client.blocking.loop_thread import Blocking, LoopThread, RunInLoop, blocking, shared_loop, signed_as
from plait.client.client import Client
from plait.client.send.encoding import Delay, due_of, encode_body, encode_group, encode_headers, encode_key, encode_tags
from plait.client.send.open_rows import ROW_SIZE, SHORT_BODY_MAX, SHORT_KEY_MAX
from plait.client.send.subject_sender import Senders
from plait.client.types import Receipt, Ticket
from plait.errors import BufferFull, Closed, PlaitError, Timeout
from plait.model import names


class SyncAdmin(Blocking[Admin]):
    """The operations of ``plait subject``, ``group``, ``dlq``, ``schedule``, ``cron``, ``transactions``, ``cluster``.

    The client's thread calls the ``progress`` of ``resend_dead`` and ``purge_dead``.
    """

    subjects = blocking(Admin.subjects)
    subject = blocking(Admin.subject)
    create_subject = blocking(Admin.create_subject)
    set_subject = blocking(Admin.set_subject)
    delete_subject = blocking(Admin.delete_subject)
    groups = blocking(Admin.groups)
    group = blocking(Admin.group)
    rewind_group = blocking(Admin.rewind_group)
    pause_group = blocking(Admin.pause_group)
    resume_group = blocking(Admin.resume_group)
    set_send_rate = blocking(Admin.set_send_rate)
    set_group_rate = blocking(Admin.set_group_rate)
    set_group = blocking(Admin.set_group)
    set_group_filter = blocking(Admin.set_group_filter)
    delete_group = blocking(Admin.delete_group)
    server = blocking(Admin.server)

    route = blocking(Admin.route)
    expand_subject = blocking(Admin.expand_subject)
    brokers = blocking(Admin.brokers)
    set_broker_state = blocking(Admin.set_broker_state)
    forget_broker = blocking(Admin.forget_broker)
    allocation = blocking(Admin.allocation)

    create_recurrence = blocking(Admin.create_recurrence)
    set_recurrence = blocking(Admin.set_recurrence)
    recurrences = blocking(Admin.recurrences)
    recurrence = blocking(Admin.recurrence)
    pause_recurrence = blocking(Admin.pause_recurrence)
    resume_recurrence = blocking(Admin.resume_recurrence)
    remove_recurrence = blocking(Admin.remove_recurrence)
    firing_times = blocking(Admin.firing_times)

    parked = blocking(Admin.parked)
    resume_key = blocking(Admin.resume_key)
    skip_key = blocking(Admin.skip_key)
    resume_all = blocking(Admin.resume_all)
    skip_all = blocking(Admin.skip_all)

    dead_queues = blocking(Admin.dead_queues)
    dead_letters = blocking(Admin.dead_letters)
    dead_letter = blocking(Admin.dead_letter)
    dead_reasons = blocking(Admin.dead_reasons)
    resend_dead = blocking(Admin.resend_dead)
    purge_dead = blocking(Admin.purge_dead)

    scheduled = blocking(Admin.scheduled)
    schedule_counts = blocking(Admin.schedule_counts)
    cancel_scheduled = blocking(Admin.cancel_scheduled)
    reschedule = blocking(Admin.reschedule)

    transactions = blocking(Admin.transactions)
    transaction = blocking(Admin.transaction)
    commit_transaction = blocking(Admin.commit_transaction)
    rollback_transaction = blocking(Admin.rollback_transaction)


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


#: Subject, body, key, tags, headers, due time (None: not delayed), group that it is addressed to, size and ticket.
_Row = tuple[str, bytes, str | None, list[str] | None, dict[str, Any] | None, int | None, str | None, int, SyncTicket]


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
        tags: Iterable[str] | None,
        headers: Mapping[str, Any] | None,
        due: int | None = None,
        to_group: str | None = None,
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
        if tags is not None:
            tags = [tags] if isinstance(tags, str) else list(tags)
            size += len(encode_tags(tags))
        if headers is not None:
            headers = dict(headers)
            size += len(encode_headers(headers))
        size += len(encode_group(to_group))
        ticket = SyncTicket(self)
        with self._lock:
            waiting = self._producer.buffered + self._size
            if waiting >= self._limit:
                raise BufferFull(
                    f"{waiting} bytes wait to be stored (limit {self._limit}); call client.flush() or use send()",
                    limit="buffer_bytes",
                    value=self._limit,
                )
            self._rows.append((subject, body, key, tags, headers, due, to_group, size, ticket))
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
        rows = self._rows
        senders, producer = self._senders, self._producer
        taken = 0
        for _ in range(min(count, len(rows))):
            subject, body, key, tags, headers, due, to_group, size, ticket = rows.popleft()
            taken += size
            if producer.closed is not None:
                ticket._error = producer.closed
                continue
            known = senders.plain if due is None else senders.delayed
            sender = known.get(subject) or senders.sender(subject, delayed=due is not None)
            ticket._ticket = (sender.rows or sender.choose(key)).post(body, key, tags, headers, due, to_group)
        with self._lock:
            self._size -= taken


T = TypeVar("T")

log = logging.getLogger("plait.client")

#: How long the exit of the program waits for each client that is not closed.
EXIT_SECONDS = 2.0

_open: weakref.WeakSet[SyncClient] = weakref.WeakSet()


@atexit.register
def _close_forgotten() -> None:
    """Send posted messages for up to ``EXIT_SECONDS`` if the program exits without closing its clients."""
    for client in list(_open):
        thread = client._thread
        if thread is None or not thread.running:
            continue
        try:
            thread.run(client._close(), EXIT_SECONDS)
        except (TimeoutError, PlaitError):
            thread.run(client._inner._node.close(), EXIT_SECONDS)


class SyncClient:
    """Sends, consumes and administers; safe to share between threads."""

    @signed_as(Client.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._inner = Client(*args, **kwargs)
        self._inner._node.blocking = True
        self.client_id = self._inner.client_id
        self.limits = self._inner.limits
        self._thread: LoopThread | None = None
        self._inbox: PostInbox | None = None
        #: Management of subjects and groups.
        self.admin = SyncAdmin(self._inner.admin, self._run)

    def open(self) -> Self:
        """Connect; ``with`` does it for you. After a failure it may be called again."""
        self._inner._check_not_closed()
        if self._inbox is None:
            self._thread = shared_loop()
            self._thread.run(self._inner.open())
            self._inbox = PostInbox(self._inner._senders, self._thread.loop, self._run)
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
        if self._inbox is not None and not self._inner._closing.begun:
            self._inbox.take_all()
        await self._inner.close()

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
        """Run a coroutine on the loop and wait for its result. It sees all messages that were posted before."""
        if self._thread is None or self._inner._producer.closed is not None:
            coroutine.close()
            self._inner._check_open()
        assert self._thread is not None
        if self._inbox is not None:
            self._inbox.take_soon()
        return self._thread.run(coroutine, timeout, cancel=cancel)

    # --- sending --------------------------------------------------------------------------------

    send = blocking(Client.send)
    send_many = blocking(Client.send_many)
    flush = blocking(Client.flush)
    request = blocking(Client.request)
    reply = blocking(Client.reply)
    dropped_replies = property(lambda self: self._inner.dropped_replies, doc=Client.dropped_replies.__doc__)
    cancel = blocking(Client.cancel)
    reschedule = blocking(Client.reschedule)

    @signed_as(Client.post)
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
        to_group: str | None = None,
    ) -> SyncTicket:
        """Buffer a message and return at once. ``ticket.result()`` gives the receipt. Raises ``BufferFull``."""
        inbox = self._inbox
        if inbox is None or self._inner._producer.closed is not None:
            self._inner._check_open()
        assert inbox is not None
        due = None
        if delay is not None or deliver_at is not None:
            due = due_of(delay, deliver_at, self._inner._producer.next_now())
        return inbox.post(subject, body, key, tags, headers, due, to_group)

    @signed_as(Client.transaction)
    def transaction(self, *args: Any, **kwargs: Any) -> SyncTransaction:
        """Messages that become visible together, or never, for ``with``; ``check`` runs in a thread."""
        return SyncTransaction(self._inner.transaction(*args, **kwargs), self._run)

    @signed_as(Client.transaction_checks)
    def transaction_checks(self, *args: Any, **kwargs: Any) -> None:
        async def add() -> None:
            self._inner.transaction_checks(*args, **kwargs)

        self._run(add())

    # --- consuming ------------------------------------------------------------------------------

    query = blocking(Client.query)
    why = blocking(Client.why)

    @signed_as(Client.consumer)
    def consumer(self, *args: Any, **kwargs: Any) -> SyncConsumer:
        """A member of a group, for ``with``; the arguments are those of the asynchronous client."""

        async def make() -> SyncConsumer:
            return SyncConsumer(self._inner.consumer(*args, **kwargs), self._run)

        return self._run(make())

    @signed_as(Client.reader)
    def reader(self, *args: Any, **kwargs: Any) -> SyncReader:
        """Read without a group, for ``with``: from "earliest", "latest", a sequence, a time, or "-5m"."""

        async def make() -> SyncReader:
            return SyncReader(self._inner.reader(*args, **kwargs), self._run)

        return self._run(make())
