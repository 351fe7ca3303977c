"""The methods of a client that are about transactions."""

from __future__ import annotations

from collections.abc import Callable

from plait.client.net.router import Router
from plait.client.send.producer import Producer
from plait.client.transactions.check_answers import Check, CheckAnswers
from plait.client.transactions.transaction import Transaction
from plait.limits import ClientLimits
from plait.model import names


class Transactional:
    """Base of the client: begins transactions and answers the checks of brokers."""

    limits: ClientLimits
    _router: Router
    _producer: Producer
    _checks: CheckAnswers
    _check_open: Callable[[], None]

    def transaction(self, producer_group: str, *, check: Check | None = None) -> Transaction:
        """Messages that become visible together, or never, for ``async with``.

        ``producer_group`` names the producers that know the outcome. ``check`` is passed to ``transaction_checks`` when
        the transaction begins; leave it out where another call has done that.
        """
        names.check_group(producer_group)

        def begin() -> None:
            if check is not None:
                self.transaction_checks(producer_group, check)

        return Transaction(self._router, self._producer, self.limits, producer_group, self._check_open, begin)

    def transaction_checks(self, producer_group: str, check: Check) -> None:
        """Answer the checks of a producer group until the client is closed.

        A broker asks for the outcome of a transaction that is not decided 6 seconds after its last message, then every
        30 seconds. ``check`` gets a ``TransactionInfo`` and returns "commit", "rollback", or "unknown" to be asked
        again. It may be a coroutine function; any other function runs in a thread. The last ``check`` that was given
        for a producer group applies.
        """
        self._check_open()
        self._checks.add(names.check_group(producer_group), check)
