"""Delayed messages: each arrives at its due time, none is early, and cancelled ones never arrive."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import msgspec
import numpy as np

import plait
from examples.demo.processes import DemoFailed

SUBJECT = "order.reminder"
GROUP = "reminders"
COUNT = 1_000
CANCELLED = 50
#: The range of the delays, in seconds.
SECONDS = (0.3, 1.0)
PATIENCE_SECONDS = 30.0


class Delayed(msgspec.Struct, frozen=True):
    """The result. Lateness is from the due time to the handler, in milliseconds."""

    messages: int
    #: Cancelled in time. On a slow machine some messages may arrive before their cancellation.
    cancelled: int
    early: int
    #: Messages that arrived although they were cancelled.
    called_off: int
    p50: float
    p99: float

    def check(self) -> None:
        """Check that all messages arrived, none early and none after its cancellation."""
        if (self.messages, self.early, self.called_off) != (COUNT - self.cancelled, 0, 0):
            raise DemoFailed(f"delays: {self}; expected {COUNT - self.cancelled} messages, none early or cancelled")


async def show_delays(address: str) -> Delayed:
    """Send delayed messages, cancel some, and measure when the others arrive."""
    lateness: list[float] = []
    async with plait.connect(address) as client:
        delays = np.random.default_rng(1).uniform(*SECONDS, COUNT)
        receipts = await client.send_many(SUBJECT, [b"%d" % number for number in range(COUNT)], delay=delays)
        called_off = [receipts[-number] for number in range(1, CANCELLED + 1)]
        done = await asyncio.gather(*(client.cancel(receipt) for receipt in called_off))
        called_off_ids = {receipt.message_id for receipt, cancelled in zip(called_off, done, strict=True) if cancelled}
        came: set[plait.MessageId] = set()
        async with client.consumer(SUBJECT, GROUP) as consumer:
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    while len(came) < COUNT - len(called_off_ids):
                        batch = await consumer.fetch(COUNT, wait=PATIENCE_SECONDS)
                        now = datetime.now(UTC)
                        for message in batch:
                            assert message.deliver_at is not None
                            came.add(message.message_id)
                            lateness.append((now - message.deliver_at).total_seconds() * 1000)
                        await batch.ack()
            except TimeoutError:
                raise DemoFailed(f"delays: {len(came)} of {COUNT} messages arrived") from None
    late = np.array(lateness)
    return Delayed(
        len(came),
        len(called_off_ids),
        int((late < 0).sum()),
        len(came & called_off_ids),
        float(np.percentile(late, 50)),
        float(np.percentile(late, 99)),
    )
