"""``Transaction``: messages that become visible together when it is committed, or never."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from types import TracebackType
from typing import Any, Final, Literal, Self

from plait import tasks
from plait.client.closing import end_of
from plait.client.net.router import Router
from plait.client.send.encoding import (
    Delay,
    due_of,
    encode_body,
    encode_group,
    encode_headers,
    encode_key,
    encode_tags,
    priority_of,
)
from plait.client.send.producer import Producer, new_producer_id
from plait.client.transactions.half_sender import PASSING, HalfRow, HalfSender
from plait.client.transactions.transaction_info import transaction_name
from plait.client.types import MessageId, Receipt
from plait.errors import PlaitError, Timeout, TransactionDecided, TransactionIncomplete
from plait.limits import ClientLimits
from plait.model import names

log = logging.getLogger("plait.client")

_OPEN: Final = "open"
#: The outcome was requested and is not known: neither this process nor the block decides again.
_IN_DOUBT: Final = "in doubt"

TransactionState = Literal["open", "committed", "rolled back", "in doubt"]


class Transaction:
    """Sends messages that consumers get only if the transaction is committed, for ``async with``.

    Leaving the block commits; an exception rolls back. If the process ends before that, a broker asks a producer of the
    producer group for the outcome (``Client.transaction_checks``). One task at a time uses a transaction.
    """

    def __init__(
        self,
        router: Router,
        producer: Producer,
        limits: ClientLimits,
        producer_group: str,
        check_open: Callable[[], None],
        begin: Callable[[], None],
    ) -> None:
        number = new_producer_id()
        #: Identifies the transaction, also for ``check`` and ``plait transactions``.
        self.id = transaction_name(number)
        self.producer_group = producer_group
        self.state: TransactionState = _OPEN
        self._number = number
        self._sender = HalfSender(router, limits, number, producer_group)
        self._producer = producer
        self._limits = limits
        self._check_open = check_open
        self._begin = begin
        self._lock = asyncio.Lock()
        #: The first failed send: the transaction cannot be committed after it.
        self._failed: PlaitError | None = None

    def __repr__(self) -> str:
        return f"<Transaction {self.id} of {self.producer_group}: {self.state}>"

    async def __aenter__(self) -> Self:
        self._check_open()
        self._begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.state != _OPEN:
            return
        # A cancelled caller waits for the outcome, which is bounded by ``send_seconds``.
        ending = tasks.child(self.commit() if error is None else self._leave(), f"plait-end-{self.id}")
        cancelled = await end_of(ending)
        if error is None:
            await ending
        if cancelled is not None:
            raise cancelled

    async def _leave(self) -> None:
        """Roll back after an exception in the block, which is raised whatever happens here."""
        try:
            await self.rollback()
        except PlaitError as error:
            log.warning("transaction %s is not rolled back; a check decides it: %s", self.id, error)

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
    ) -> Receipt:
        """Store a message that becomes visible with the commit. ``sequence`` of its receipt is None.

        With ``delay`` (from this call) or ``deliver_at``, a committed message is delivered when it is due. Raises
        ``TransactionSpansGroups`` if the subject has no partition on the broker group of the other messages, and
        ``TransactionIncomplete`` after a send that failed, or was cancelled, so that it is unknown whether its message
        is stored: the transaction can only be rolled back then.
        """
        names.check("subject", subject)
        due = 0
        if delay is not None or deliver_at is not None:
            due = due_of(delay, deliver_at, self._producer.next_now())
        row = HalfRow(
            subject,
            encode_body(body),
            None if key is None else encode_key(key),
            encode_tags(tags),
            encode_headers(headers),
            due,
            encode_group(to_group),
            priority_of(priority),
        )
        async with self._lock:
            self._check_open()
            self._check_undecided()
            if self._failed is not None:
                raise TransactionIncomplete(
                    f"transaction {self.id} can only be rolled back, because a send failed: {self._failed.message}",
                    transaction=self.id,
                )
            try:
                place, number = await self._sender.store(row, self._producer.now(), self._producer.compression)
            except PlaitError as error:
                if self._sender.in_doubt:
                    self._failed = error
                raise
            except asyncio.CancelledError:
                if self._sender.in_doubt:
                    self._failed = Timeout(f"a send to {subject!r} was cancelled")
                raise
        return Receipt(MessageId(self._number, number), place, None)

    async def commit(self) -> None:
        """Make all messages visible, each exactly once.

        If this raises ``Timeout`` or ``Unavailable``, the outcome is unknown: a check finds it out. Raises
        ``TransactionIncomplete`` if a send failed and it is unknown whether the message is stored; the transaction is
        rolled back then.
        """
        async with self._lock:
            self._check_undecided()
            if self._failed is not None:
                await self._decide("rollback", "rolled back")
                raise TransactionIncomplete(
                    f"transaction {self.id} was rolled back, because a send failed: {self._failed.message}",
                    transaction=self.id,
                )
            try:
                await self._decide("commit", "committed")
            except TransactionIncomplete:
                await self._decide("rollback", "rolled back")
                raise

    async def rollback(self) -> None:
        """Delete all messages: none becomes visible."""
        async with self._lock:
            self._check_undecided()
            await self._decide("rollback", "rolled back")

    async def _decide(self, request: str, outcome: TransactionState) -> None:
        self._check_open()
        # A commit may take effect although its reply is lost: a rollback must not follow it.
        self.state = _IN_DOUBT
        try:
            await self._sender.decide(request)
        except PASSING:
            raise
        except TransactionDecided as error:
            self.state = "committed" if error.details["outcome"] == "committed" else "rolled back"
            raise
        except PlaitError:
            # The broker refused the decision.
            self.state = _OPEN
            raise
        self.state = outcome

    def _check_undecided(self) -> None:
        if self.state != _OPEN:
            raise TransactionDecided(
                f"transaction {self.id} is {self.state}; begin another one", transaction=self.id, outcome=self.state
            )
