"""The client for blocking code: the same names without ``await``, for use from any thread.

One loop in a background thread serves all blocking clients of a process. Each call runs there and the caller waits; an
interrupt, such as control-C, cancels the call and leaves the client usable. A forked child starts its own loop; clients
that the parent opened raise ``ForkedClient`` in the child.
"""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import Coroutine, Iterable, Mapping
from datetime import datetime
from types import TracebackType
from typing import Any, Self, TypeVar

from plait.client.admin.admin import Admin
from plait.client.blocking.blocking_consumer import SyncConsumer, SyncReader
from plait.client.blocking.blocking_transaction import SyncTransaction
from plait.client.blocking.loop_thread import Blocking, LoopThread, blocking, shared_loop, signed_as
from plait.client.blocking.post_inbox import PostInbox, SyncTicket
from plait.client.client import Client
from plait.client.send.encoding import (
    Delay,
    due_of,
    priority_of,
)
from plait.client.send.open_rows import RowExtras
from plait.errors import PlaitError


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
        priority: int = 0,
    ) -> SyncTicket:
        """Buffer a message and return at once. ``ticket.result()`` gives the receipt. Raises ``BufferFull``."""
        inbox = self._inbox
        if inbox is None or self._inner._producer.closed is not None:
            self._inner._check_open()
        assert inbox is not None
        due, extras = None, None
        if delay is not None or deliver_at is not None:
            due = due_of(delay, deliver_at, self._inner._producer.next_now())
        if tags is not None or headers is not None or due is not None or to_group is not None or priority:
            extras = RowExtras(tags, headers, due, to_group, priority and priority_of(priority))
        return inbox.post(subject, body, key, extras)

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
