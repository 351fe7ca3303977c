"""Management of transactions: begin, decide, list and show them."""

from __future__ import annotations

from plait.broker.transactions import transaction_requests
from plait.errors import InvalidArgument, TransactionDecided
from plait.limits import TRANSACTIONS_PAGE_MAX
from plait.model.transaction_row import TransactionRow
from plait.server.broker_host import BrokerHost
from plait.server.operations.partitions import Answer
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


def decide(host: BrokerHost, request: DecideTransaction, answer: Answer) -> None:
    """Answered after the commit, also if it was decided before: a crash may lose a decision that is not committed."""
    number, refusal = _checked(request.transaction), None
    try:
        host.broker.transactions.decide(number, commit=request.outcome == "commit", rows=request.rows)
    except TransactionDecided as error:
        refusal = error
    host.broker.turn.answer_after_commit(lambda: answer(None, refusal))


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
