"""Transactions: begin and decide them, list and show those that are not decided."""

from __future__ import annotations

from typing import Literal

from plait.limits import Int64
from plait.model.transaction_row import TransactionRow
from plait.wire.admin.operation import Operation, Page, Request


class BeginTransaction(Request):
    """Begin a transaction. Its id is a random number of the client."""

    transaction: Int64
    producer_group: str


class DecideTransaction(Request):
    """Commit or roll back a transaction. With ``rows``, it is committed only if it has this number of messages."""

    transaction: Int64
    outcome: Literal["commit", "rollback"]
    rows: int | None = None


class ListTransactions(Request):
    """List undecided transactions with ids above ``after``; only those in ``state``, and of ``producer_group``."""

    state: Literal["open", "parked"] | None = None
    producer_group: str | None = None
    after: int = 0
    limit: int = 100


class ShowTransaction(Request):
    """Show an undecided transaction with its first messages."""

    transaction: Int64


BEGIN_TRANSACTION = Operation[None]("transaction.begin", BeginTransaction)
DECIDE_TRANSACTION = Operation[None]("transaction.decide", DecideTransaction)
LIST_TRANSACTIONS = Operation("transaction.list", ListTransactions, Page[TransactionRow])
SHOW_TRANSACTION = Operation("transaction.show", ShowTransaction, TransactionRow)
