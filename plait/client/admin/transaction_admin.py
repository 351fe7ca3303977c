"""Management of transactions that wait for their outcome: listing, showing, committing and rolling them back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, Literal, TypeVar

from plait.client.net.admin_calls import Calls
from plait.client.net.node import Node
from plait.client.transactions.transaction_info import TransactionInfo, info_of
from plait.errors import InvalidArgument, TransactionNotFound
from plait.limits import TRANSACTIONS_PAGE_MAX
from plait.model.transaction_row import TransactionRow
from plait.wire.admin import transactions as t

_T = TypeVar("_T")

#: The digits of an id.
_ID_LENGTH: Final = 16


class TransactionAdmin(Calls):
    """The operations of ``plait transactions``."""

    async def transactions(
        self, *, state: Literal["open", "parked"] | None = None, producer_group: str | None = None
    ) -> list[TransactionInfo]:
        """The transactions that are not decided, the oldest first, without their messages."""
        if state not in (None, "open", "parked"):
            raise InvalidArgument(f"state {state!r} is not known; use 'open' or 'parked'")
        nodes = await self._router.all_nodes()
        pages = await asyncio.gather(*(self._listed(node, state, producer_group) for node in nodes))
        return sorted((each for page in pages for each in page), key=lambda each: (each.begun, each.id))

    async def _listed(self, node: Node, state: str | None, producer_group: str | None) -> list[TransactionInfo]:
        found: list[TransactionInfo] = []
        after: int | None = 0
        while after is not None:
            page = await self._run(
                t.LIST_TRANSACTIONS,
                at=node,
                state=state,
                producer_group=producer_group,
                after=after,
                limit=TRANSACTIONS_PAGE_MAX,
            )
            found += [info_of(row, node.group) for row in page.rows]
            after = page.next
        return found

    async def transaction(self, transaction: str) -> TransactionInfo:
        """A transaction that is not decided, by its id, with its first messages; else ``TransactionNotFound``."""
        number = _number_of(transaction)

        async def show(node: Node) -> TransactionInfo:
            row: TransactionRow = await self._run(t.SHOW_TRANSACTION, at=node, transaction=number)
            return info_of(row, node.group)

        return await self._anywhere(show)

    async def commit_transaction(self, transaction: str) -> None:
        """Commit a transaction, open or parked: its messages become visible, each once.

        Raises ``TransactionDecided`` if it was rolled back.
        """
        await self._decided(transaction, "commit")

    async def rollback_transaction(self, transaction: str) -> None:
        """Roll a transaction back, open or parked: none of its messages becomes visible.

        Raises ``TransactionDecided`` if it was committed.
        """
        await self._decided(transaction, "rollback")

    async def _decided(self, transaction: str, outcome: str) -> None:
        number = _number_of(transaction)
        await self._anywhere(lambda node: self._run(t.DECIDE_TRANSACTION, at=node, transaction=number, outcome=outcome))

    async def _anywhere(self, ask: Callable[[Node], Coroutine[Any, Any, _T]]) -> _T:
        """The answer of the broker that knows the transaction."""
        nodes = await self._router.all_nodes()
        answers = await asyncio.gather(*(ask(node) for node in nodes), return_exceptions=True)
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        for answer in answers:
            if not isinstance(answer, BaseException):
                return answer
        # A broker that could not be asked may have the transaction.
        raise next((each for each in failures if not isinstance(each, TransactionNotFound)), failures[0])


def _number_of(transaction: object) -> int:
    if isinstance(transaction, str) and len(transaction) == _ID_LENGTH:
        try:
            return int(transaction, 16)
        except ValueError:
            pass
    raise InvalidArgument(
        f"transaction {transaction!r} is not valid; use its id of {_ID_LENGTH} hexadecimal digits, as "
        "'plait transactions list' shows it"
    )
