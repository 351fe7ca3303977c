"""Requests about undecided transactions: list and show them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from plait.broker.broker import Broker
from plait.broker.transactions.transaction_table import StoredTransaction
from plait.broker.transactions.transactions import name_of
from plait.errors import TransactionNotFound
from plait.frame.view import FrameView
from plait.limits import FRAME_SIZE_MAX, HALF_MESSAGES_SHOWN_MAX
from plait.model.transaction_row import TransactionRow
from plait.wire.admin.operation import Page
from plait.wire.admin.transactions import ListTransactions


def transaction_row(
    broker: Broker, transaction: StoredTransaction, frames: Sequence[tuple[str, FrameView]] = ()
) -> TransactionRow:
    """A transaction as the wire has it."""
    partitions = [broker.partitions.get(number) for number in transaction.parts]
    return TransactionRow(
        transaction.id,
        transaction.producer_group,
        transaction.state,
        transaction.begun,
        transaction.checks,
        transaction.rows,
        transaction.size,
        sorted({partition.row.subject for partition in partitions if partition is not None}),
        [(subject, bytes(frame.buffer)) for subject, frame in frames],
    )


def list_transactions(broker: Broker, request: ListTransactions) -> Page[TransactionRow]:
    """A page of transactions, by their ids."""
    found = heapq.nsmallest(
        request.limit + 1,
        (
            number
            for number, each in broker.transactions.table.live.items()
            if number > request.after
            and each.rows
            and request.state in (None, each.state)
            and request.producer_group in (None, each.producer_group)
        ),
    )
    live = broker.transactions.table.live
    rows = [transaction_row(broker, live[number]) for number in found[: request.limit]]
    return Page(rows, rows[-1].id if len(found) > request.limit else None)


def show_transaction(broker: Broker, number: int) -> TransactionRow:
    """A transaction with its first messages."""
    transaction = broker.transactions.table.live.get(number)
    if transaction is None:
        name = name_of(number)
        outcome = {True: "committed", False: "rolled back", None: "decided long ago, or no message of it is stored"}
        raise TransactionNotFound(
            f"transaction {name} does not wait for a decision: it was "
            f"{outcome[broker.transactions.table.decided.get(number)]}; "
            "list the undecided ones with `plait transactions list`",
            transaction=name,
        )
    frames = broker.half_publisher.frames_of(transaction, HALF_MESSAGES_SHOWN_MAX, FRAME_SIZE_MAX)
    return transaction_row(broker, transaction, frames)
