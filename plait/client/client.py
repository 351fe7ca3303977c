"""``connect`` and ``Client``: the connection of one process to a server or a cluster."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import datetime
from types import EllipsisType, TracebackType
from typing import Any, Literal, Self

import pyarrow as pa

from plait import chance
from plait.client.admin.admin import Admin
from plait.client.arguments import Duration, Start, start_of
from plait.client.closing import Closing
from plait.client.consume.ack_spool import spool_directory
from plait.client.consume.consumer import Consumer
from plait.client.consume.consumers import Consumers
from plait.client.consume.terms import ConsumerArguments
from plait.client.net.node import Node
from plait.client.net.router import Router
from plait.client.read.message_search import MessageSearch
from plait.client.read.reader import Reader
from plait.client.requests.requesting import DEFAULT_REPLY_SUBJECT, Requesting
from plait.client.send.encoding import Delay, Delays, DeliverAts, due_of, dues_of
from plait.client.send.open_rows import RowExtras
from plait.client.send.producer import Producer
from plait.client.send.rescheduling import Rescheduling
from plait.client.send.send_many import Headers, Tags, send_many
from plait.client.send.subject_sender import Senders
from plait.client.transactions.check_answers import CheckAnswers
from plait.client.transactions.transactional import Transactional
from plait.client.types import Receipt, Receipts, Ticket
from plait.clock import Clock, virtual_clock
from plait.errors import Closed, ForkedClient, InvalidArgument, PlaitError
from plait.limits import ClientLimits
from plait.model import names
from plait.model.filter_terms import TagFilter, filter_terms
from plait.model.retry_policy import Retry

log = logging.getLogger("plait.client")

DEFAULT_ADDRESS = "plait://127.0.0.1:7450"

_clients: weakref.WeakSet[Client] = weakref.WeakSet()


def _after_fork() -> None:
    """A forked child shares the parent's sockets and producer id: it must not use them (R9)."""
    for client in list(_clients):
        client._abandon_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def new_client_id() -> str:
    """An id that no other client has, on this host or another."""
    return f"client-{chance.process_number()}-{chance.token(6)}"


def connect(
    address: str | Sequence[str] = DEFAULT_ADDRESS,
    *,
    client_id: str | None = None,
    compression: Literal["zstd", "lz4"] | None = None,
    limits: ClientLimits | None = None,
    spool: str | os.PathLike[str] | None = None,
    reply_subject: str = DEFAULT_REPLY_SUBJECT,
) -> Client:
    """A client for ``async with``.

    Name a ``client_id`` to keep it over restarts: a consumer that returns with the same id gets back the messages that
    it held. Without one, each client gets a new id. ``spool`` is a directory for acks and nacks that cannot be sent
    because the broker is down: the next process with the same client id sends them.
    Replies to the requests of this client are sent to ``reply_subject``, which is created when it is first needed.
    """
    return Client(
        address,
        client_id=client_id,
        compression=compression,
        limits=limits,
        spool=spool,
        reply_subject=reply_subject,
    )


class Client(MessageSearch, Transactional, Rescheduling, Requesting):
    """Sends, consumes and administers. Reconnects whenever a connection is lost."""

    def __init__(
        self,
        address: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        client_id: str | None = None,
        compression: Literal["zstd", "lz4"] | None = None,
        limits: ClientLimits | None = None,
        spool: str | os.PathLike[str] | None = None,
        reply_subject: str = DEFAULT_REPLY_SUBJECT,
    ) -> None:
        addresses = address.split(",") if isinstance(address, str) else list(address)
        if not addresses:
            raise InvalidArgument("the list of addresses is empty; give at least one, as in plait://host:port")
        if compression not in (None, "zstd", "lz4"):
            raise InvalidArgument(f"compression {compression!r} is not known; use 'zstd' or 'lz4'")
        self.client_id = names.check("client", client_id) if client_id is not None else new_client_id()
        directory = None if spool is None else spool_directory(spool, client_id)
        self.limits = limits or ClientLimits()
        self._node = Node(addresses, self.client_id, self.limits)
        self._router = Router(self._node, self.client_id, self.limits)
        self._producer = Producer(self.limits, compression)
        self._senders = Senders(self._router, self._producer)
        self._consumers = Consumers(self._router, self.client_id, self.limits, directory)
        self._checks = CheckAnswers(self._router, self.limits)
        self._requester = self._new_requester(reply_subject)
        self._consumers.reply = self.reply
        self._opened = False
        #: Several tasks may open a client: the second one waits for the first.
        self._open_lock = asyncio.Lock()
        self._closing = Closing(self.client_id, self._close_all)
        #: The first error of posted messages, if ``close`` found one.
        self._failure: PlaitError | None = None
        #: The current time in microseconds since 1970; "-5m" counts from it.
        self._now = self._producer.now
        #: Management of subjects and groups.
        self.admin = Admin(self._router, lambda: self._now())
        clock = virtual_clock(addresses)
        if clock is not None:
            self._use_clock(clock)
        _clients.add(self)

    async def open(self) -> Self:
        """Connect; ``async with`` does it for you. After a failure it may be called again."""
        async with self._open_lock:
            self._check_not_closed()
            if not self._opened:
                self._producer.open()
                await self._node.open()
                self._opened = True
        return self

    async def close(self) -> None:
        """Send the buffered messages and disconnect; raises the first error of posted messages since the last flush.

        A caller that is cancelled still waits until the client is closed: closing is never interrupted.
        """
        error = await self._close()
        if error is not None:
            raise error

    async def _close(self) -> PlaitError | None:
        """Close. Returns the first error of posted messages, to the first caller only."""
        if isinstance(self._producer.closed, ForkedClient):
            return None
        try:
            await self._closing()
        except asyncio.CancelledError:
            if self._failure is not None:
                log.error("posted messages failed: %s", self._failure)
            raise
        failure, self._failure = self._failure, None
        return failure

    async def _close_all(self) -> None:
        async with AsyncExitStack() as stack:
            # Runs in reverse order. An error in one step does not prevent the others.
            for close in (
                self._node.close,
                self._router.close,
                self._end_sending,
                self._checks.close,
                self._requester.close,
            ):
                stack.push_async_callback(close)
            await self._consumers.close()

    async def _end_sending(self) -> None:
        if self._producer.closed is None:
            self._failure = await self._senders.close()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failure = await self._close()
        if failure is not None:
            if error is None:
                raise failure
            log.error("posted messages failed: %s", failure)

    def _abandon_after_fork(self) -> None:
        """Called in a forked child: refuses every call, and touches nothing that the parent still uses."""
        error = ForkedClient("this client was opened before a fork; connect again in the child")
        self._node.closed = self._producer.closed = error
        self._router.abandon(error)
        self._consumers.abandon()

    def _use_clock(self, clock: Clock) -> None:
        """Use this clock instead of the machine's for send times, due times, start positions and leases."""
        self._now = self._producer.now = self._producer.next_now = clock.now
        self._consumers.clock = clock

    def _check_not_closed(self) -> None:
        if self._producer.closed is not None:
            raise self._producer.closed
        if self._closing.begun:
            raise Closed("the client is closed; connect again")

    def _check_open(self) -> None:
        if self._producer.closed is not None:
            raise self._producer.closed
        if not self._opened:
            raise self._node.not_open()

    # --- sending --------------------------------------------------------------------------------

    async def send(
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
        oneway: bool = False,
    ) -> Receipt:
        """Store a message and wait for its receipt. ``oneway`` sends once and waits for nothing.

        With ``delay`` (10 ms to 2 years) or ``deliver_at`` the message is delivered when it is due, never earlier.
        Until then its receipt can cancel it. With ``to_group`` only that group gets the message. Messages with a higher
        ``priority`` (0 to 9) are delivered first; a strict subject refuses it.
        """
        producer = self._producer
        if producer.closed is not None or not self._opened:
            self._check_open()
        due: int | None = None
        if delay is not None or deliver_at is not None:
            if oneway:
                raise InvalidArgument(
                    "a delayed message cannot be sent oneway: it would have no receipt; leave oneway out"
                )
            # The delay counts from the call, not from the moment at which the buffer has room.
            due = due_of(delay, deliver_at, producer.next_now())
        if producer.buffered >= producer.buffer_bytes and not oneway:
            names.check("subject", subject)
            await producer.room()
        senders = self._senders
        known = senders.plain if due is None else senders.delayed
        sender = known.get(subject) or senders.sender(subject, delayed=due is not None)
        extras: RowExtras | None = None
        if tags is not None or headers is not None or due is not None or to_group is not None or priority:
            extras = RowExtras(tags, headers, due, to_group, priority and sender.allowed(priority))
        if oneway:
            return await sender.send_oneway(body, key, extras)
        batch, row = (sender.rows or sender.choose(key)).send(body, key, extras)
        if not batch.settled:
            future = producer.loop.create_future()
            batch.waiters.append(future)
            await future
        return batch.receipt(row)

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
    ) -> Ticket:
        """Buffer a message and return at once. ``await ticket`` gives the receipt. Raises ``BufferFull``."""
        producer = self._producer
        if producer.buffered >= producer.buffer_bytes or producer.closed is not None or not self._opened:
            self._check_open()
            producer.refuse_when_full()
        senders, due = self._senders, None
        if delay is None and deliver_at is None:
            sender = senders.plain.get(subject) or senders.sender(subject)
            if tags is None and headers is None and to_group is None and not priority:
                return (sender.rows or sender.choose(key)).post(body, key)
        else:
            due = due_of(delay, deliver_at, producer.next_now())
            sender = senders.delayed.get(subject) or senders.sender(subject, delayed=True)
        extras = RowExtras(tags, headers, due, to_group, priority and sender.allowed(priority))
        return (sender.rows or sender.choose(key)).post(body, key, extras)

    async def send_many(
        self,
        subject: str,
        bodies: Sequence[Any] | pa.Array | pa.ChunkedArray,
        *,
        keys: Sequence[str | int | None] | None = None,
        tags: Tags | None = None,
        headers: Headers | None = None,
        delay: Delays | None = None,
        deliver_at: DeliverAts | None = None,
        to_group: str | Sequence[str | None] | None = None,
        priority: int | Sequence[int] = 0,
    ) -> Receipts:
        """Store many messages, in order, and wait for all receipts. Bodies may be an Arrow array.

        Messages that fill several frames are sent frame by frame, so a concurrent send may be stored between them.
        ``tags`` and ``headers`` apply to every message, or are lists with one entry for each message. ``delay``,
        ``deliver_at``, ``to_group`` and ``priority`` are one value for all messages, or one for each.
        """
        self._check_open()
        when = None
        if delay is not None or deliver_at is not None:
            when = functools.partial(dues_of, delay, deliver_at, self._producer.next_now())
        return await send_many(self._senders, subject, bodies, keys, when, tags, headers, to_group, priority)

    async def flush(self) -> None:
        """Wait until everything posted is stored; raises the first error since the last flush."""
        self._check_open()
        await self._senders.flush()

    # --- consuming ------------------------------------------------------------------------------

    def consumer(
        self,
        subject: str | Iterable[str],
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
        tags: TagFilter | str | Iterable[str] | None = None,
        where: str | None = None,
        fair_by: str | None = None,
    ) -> Consumer:
        """A member of a group, for ``async with``. With ``broadcast=True`` or ``group=None`` it gets every message.

        ``subject`` is a name, a prefix such as "order.*", or a list of both; new subjects that a prefix covers join by
        themselves. A named subject that does not exist is created. A new group starts at the earliest message, a
        broadcast at the latest, unless ``start`` is given: "earliest", "latest", a sequence, a datetime, or "-5m"
        before now. ``retry`` sets how long failed messages wait, for the whole group.
        ``ordered``: messages with the same key are delivered one after another, to one member at a time.
        ``affinity="key"``: they are delivered to the same member while no member joins or leaves, and a failed message
        never holds back others. With either, a member that handles a message for longer than ``handling`` loses the
        messages that it holds to other members.
        ``tags`` and ``where`` are the filter of the group, as for ``reader``: messages that it leaves out count as
        consumed. A member without ``retry`` or a filter uses those of the group.
        ``fair_by``, "key" or the name of a header, says what identifies a tenant: every tenant that has messages gets
        the same share of the deliveries. It is the same for all members.
        """
        basics = (subject, group, broadcast, delivery, start, prefetch, retry, ordered, affinity, handling)
        return self._consumer(ConsumerArguments(*basics, filter_terms(where, tags), fair_by))

    def _consumer(self, arguments: ConsumerArguments, *, any_thread: bool = False) -> Consumer:
        """``consumer``, whose messages may be acked from ``any_thread``."""
        self._check_open()
        self._check_not_closed()
        return self._consumers.new(arguments, self._now(), any_thread=any_thread or self._node.blocking)

    def reader(
        self,
        subject: str,
        *,
        start: Start = "latest",
        where: str | None = None,
        tags: TagFilter | Iterable[str] | None = None,
    ) -> Reader:
        """Read without a group, for ``async with``: from "earliest", "latest", a sequence, a time, or "-5m".

        ``where`` is an SQL condition on headers, key and times, as in "city = 'BJS' AND amount > 5". ``tags``: messages
        with one of these tags, or a ``TagFilter``. The broker sends only messages that match both. Reading does not
        create the subject: raises ``SubjectNotFound``, or ``InvalidFilter`` with the place of a mistake.
        """
        self._check_open()
        self._check_not_closed()
        names.check("subject", subject)
        return Reader(self._router, self.limits, subject, start_of(start, self._now()), filter_terms(where, tags))
