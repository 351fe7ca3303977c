"""Management of transactions: begin, decide, list and show them."""

from __future__ import annotations

from plait.broker.transactions import transaction_requests
from plait.errors import InvalidArgument
from plait.limits import TRANSACTIONS_PAGE_MAX
from plait.model.transaction_row import TransactionRow
from plait.server.broker_host import BrokerHost
from plait.wire.admin.operation import Page
from plait.wire.admin.transactions import (
    BeginTransaction,
    DecideTransaction,
    ListTransactions,
    ShowTransaction,
)


def begin(host: BrokerHost, request: BeginTransaction) -> None:
    host.broker.transactions.begin(_checked(request.transaction), request.producer_group)
    host.arm_timer()


def decide(host: BrokerHost, request: DecideTransaction) -> None:
    number = _checked(request.transaction)
    host.broker.transactions.decide(number, commit=request.outcome == "commit", rows=request.rows)


def list_(host: BrokerHost, request: ListTransactions) -> Page[TransactionRow]:
    if not 1 <= request.limit <= TRANSACTIONS_PAGE_MAX:
        raise InvalidArgument(f"a limit of {request.limit} transactions is invalid; use 1 to {TRANSACTIONS_PAGE_MAX}")
    return transaction_requests.list_transactions(host.broker, request)


def show(host: BrokerHost, request: ShowTransaction) -> TransactionRow:
    return transaction_requests.show_transaction(host.broker, _checked(request.transaction))


def _checked(number: int) -> int:
    if number <= 0:
        raise InvalidArgument(f"transaction {number} is invalid; use the id that the client or a listing shows")
    return number
