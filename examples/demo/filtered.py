"""A group with a filter: it gets the messages that match, and the broker counts the others as consumed."""

from __future__ import annotations

import asyncio

import msgspec

import plait
from examples.demo.processes import DemoFailed

SUBJECT = "order.shipped"
GROUP = "large-to-shanghai"
WHERE = "city = 'SHA' AND amount >= 450"
COUNT = 1_000
AMOUNT_MAX = 500
PATIENCE_SECONDS = 30.0


class Filtered(msgspec.Struct, frozen=True):
    """The result."""

    #: The number of each message that should arrive, and of each that did.
    expected: list[int]
    received: list[int]
    #: What the node reports: messages that the filter left out, and messages that wait.
    left_out: int
    lag: int

    def check(self) -> None:
        """Check that exactly the matching messages arrived, and that the others do not wait."""
        if self.received != self.expected or (self.left_out, self.lag) != (COUNT - len(self.expected), 0):
            raise DemoFailed(f"filter: {len(self.expected)} of {COUNT} messages should have arrived: {self}")


async def show_filter(address: str) -> Filtered:
    """Send messages with headers, and consume those that match a condition on two of them."""
    headers = [{"city": ("BJS", "SHA")[number % 2], "amount": number % AMOUNT_MAX} for number in range(COUNT)]
    expected = [number for number, each in enumerate(headers) if each["city"] == "SHA" and number % AMOUNT_MAX >= 450]
    received: list[int] = []
    async with plait.connect(address) as client:
        await client.send_many(SUBJECT, [b"%d" % number for number in range(COUNT)], headers=headers)
        async with client.consumer(SUBJECT, GROUP, where=WHERE) as consumer:
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    while len(received) < len(expected):
                        batch = await consumer.fetch(COUNT, wait=PATIENCE_SECONDS)
                        received += [int(message.body) for message in batch]
                        await batch.ack()
            except TimeoutError:
                raise DemoFailed(f"filter: {len(received)} of {len(expected)} messages arrived") from None
        group = await client.admin.group(SUBJECT, GROUP)
    return Filtered(expected, sorted(received), group.filtered, group.lag)
