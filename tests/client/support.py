"""What the client's tests share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import msgspec

import plait

#: Longer than anything here takes; only a failing test waits for it.
PATIENCE_SECONDS = 20.0


async def until(condition: Callable[[], object]) -> None:
    """Give way to the loop until the condition holds."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - the condition is of any kind
            await asyncio.sleep(0)


@contextmanager
def impatient(client: plait.Client) -> Iterator[None]:
    """Sends of this block wait for 50 ms only; those around it as long as the machine takes."""
    producer = client._producer
    patient, producer.limits = producer.limits, msgspec.structs.replace(producer.limits, send_seconds=0.05)
    for outlet in producer._outlets.values():
        for queue in outlet.queues():
            # Armed for the patience of an earlier send.
            if queue._timer is not None:
                queue._timer.cancel()
                queue._timer = None
    try:
        yield
    finally:
        producer.limits = patient


async def lose(client: plait.Client) -> None:
    """End a client as a crash of its process would: no goodbye, its connection breaks."""
    node = client._node
    assert node._task is not None
    node._task.cancel()
    await asyncio.gather(node._task, return_exceptions=True)
    link = node._link
    assert link is not None
    link.abort()
    await until(lambda: link.closed)


async def fetch_all(consumer: plait.Consumer, count: int) -> list[plait.Message]:
    """Exactly ``count`` messages, in the order they come."""
    messages: list[plait.Message] = []
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(messages) < count:
            messages += await consumer.fetch(count - len(messages), wait=PATIENCE_SECONDS)
    return messages


async def send(client: plait.Client, count: int, subject: str = "s", first: int = 0) -> None:
    """Messages whose bodies are numbers from ``first``."""
    await client.send_many(subject, [b"%d" % n for n in range(first, first + count)])


def numbers(messages: Iterable[plait.Message]) -> list[int]:
    """The numbers in the bodies of what ``send`` sent."""
    return [int(message.body) for message in messages]
