"""Defects of transactions: those that the model found, and designs that would break a promise."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from plait.broker.transactions.check_backs import CheckBacks
from plait.broker.transactions.transactions import Transactions
from plait.client.transactions.half_sender import PASSING, HalfSender
from plait.client.transactions.transaction import Transaction
from plait.errors import PlaitError

Patch = pytest.MonkeyPatch


def publish_half_messages_again(patch: Patch) -> None:
    """A start publishes a committed transaction from its first message on, whatever was published before."""
    patch.setattr(Transactions, "replay_copy", lambda self, schedule, frame: None)


def keep_half_messages_of_deleted_subjects(patch: Patch) -> None:
    """A subject that is deleted during a checkpoint leaves half messages that cannot be published."""
    recovered = Transactions.recovered

    def naive(self: Transactions, *, uncertain: bool) -> None:
        drop = self.table.drop_partition
        self.table.drop_partition = lambda partition: None  # type: ignore[method-assign]
        recovered(self, uncertain=uncertain)
        self.table.drop_partition = drop  # type: ignore[method-assign]

    patch.setattr(Transactions, "recovered", naive)


def check_transactions_that_got_another_message(patch: Patch) -> None:
    """A transaction that waited for a producer is checked at once after another message."""
    expect = CheckBacks.expect

    def naive(self: CheckBacks, transaction: Any) -> None:
        waits = transaction.id in self._waiting.get(transaction.producer_group, {})
        before = transaction.check_at
        expect(self, transaction)
        if waits:
            transaction.check_at = before

    patch.setattr(CheckBacks, "expect", naive)


def roll_back_after_a_commit_without_answer(patch: Patch) -> None:
    """A block whose commit got no answer rolls back, although the local transaction is committed."""

    async def naive(self: Transaction, request: str, outcome: Any) -> None:
        try:
            await self._sender.decide(request)
        except PASSING:
            self.state = "open"
            raise
        except PlaitError:
            self.state = "rolled back"
            raise
        self.state = outcome

    patch.setattr(Transaction, "_decide", naive)


def give_the_place_of_a_cancelled_message_to_another(patch: Patch) -> None:
    """After a cancelled send, the next message has the number of the cancelled one, which may be stored."""
    store = HalfSender.store

    async def naive(self: HalfSender, *arguments: Any) -> Any:
        try:
            return await store(self, *arguments)
        except asyncio.CancelledError:
            self.in_doubt = False
            raise

    patch.setattr(HalfSender, "store", naive)
