"""Transactions: messages of two subjects become visible together by a commit, or never after a rollback."""

from __future__ import annotations

import asyncio

import msgspec

import plait
from examples.demo.processes import DemoFailed

SUBJECTS = ["order.placed", "stock.reserved"]
GROUP = "warehouse"
PRODUCER_GROUP = "shop"
#: How long the consumer waits for messages that must not arrive.
SILENCE_SECONDS = 0.3
PATIENCE_SECONDS = 30.0


class Transacted(msgspec.Struct, frozen=True):
    """The result: what the consumer got."""

    before: list[tuple[str, str]]
    committed: list[tuple[str, str]]
    after_rollback: list[tuple[str, str]]

    def check(self) -> None:
        """Check that only the committed messages arrived, and only after the commit."""
        expected = [(subject, "order-1") for subject in SUBJECTS]
        if (self.before, self.committed, self.after_rollback) != ([], expected, []):
            raise DemoFailed(f"transactions: {self}; expected {expected} after the commit, and nothing else")


async def show_transactions(address: str) -> Transacted:
    """Commit the messages of one order and roll back those of another."""
    async with plait.connect(address) as client:
        for subject in SUBJECTS:
            await client.admin.create_subject(subject)
        async with client.consumer(SUBJECTS, GROUP) as consumer:
            async with client.transaction(PRODUCER_GROUP) as transaction:
                for subject in SUBJECTS:
                    await transaction.send(subject, b"order-1", key="order-1")
                before = await _received(consumer, 0)
            committed = await _received(consumer, len(SUBJECTS))
            async with client.transaction(PRODUCER_GROUP) as transaction:
                for subject in SUBJECTS:
                    await transaction.send(subject, b"order-2", key="order-2")
                # As an exception in the block would.
                await transaction.rollback()
            return Transacted(before, committed, await _received(consumer, 0))


async def _received(consumer: plait.Consumer, count: int) -> list[tuple[str, str]]:
    """The subjects and bodies of the next ``count`` messages, and of those that follow soon, sorted."""
    found: list[tuple[str, str]] = []
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                batch = await consumer.fetch(10, wait=SILENCE_SECONDS)
                found += [(message.subject, message.body.decode()) for message in batch]
                await batch.ack()
                if len(found) >= count and not batch:
                    return sorted(found)
    except TimeoutError:
        raise DemoFailed(f"transactions: {len(found)} of {count} committed messages arrived: {found}") from None
