"""``Transaction`` for blocking code."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from plait.client.blocking.loop_thread import Blocking, blocking
from plait.client.transactions.transaction import Transaction, TransactionState


class SyncTransaction(Blocking[Transaction]):
    """Sends messages that consumers get only if the transaction is committed, for ``with``.

    Leaving the block commits; an exception rolls back. If the process ends before that, a broker asks a producer of the
    producer group for the outcome (``Client.transaction_checks``).
    """

    send = blocking(Transaction.send)
    commit = blocking(Transaction.commit)
    rollback = blocking(Transaction.rollback)

    @property
    def id(self) -> str:
        """Identifies the transaction, also for ``check`` and ``plait transactions``."""
        return self._inner.id

    @property
    def producer_group(self) -> str:
        return self._inner.producer_group

    @property
    def state(self) -> TransactionState:
        return self._inner.state

    def __enter__(self) -> Self:
        self._run(self._inner.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run(self._inner.__aexit__(kind, error, trace))
