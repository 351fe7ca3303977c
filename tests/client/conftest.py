"""A real broker and a client of it, on the loop of each test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

import plait
from plait.testing import EmbeddedBroker, ManualClock

#: Longer than anything here takes; only a failing test waits for it.
PATIENCE_SECONDS = 20.0


async def until(condition: Callable[[], object]) -> None:
    """Give way to the loop until the condition holds."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():
            await asyncio.sleep(0)


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


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[EmbeddedBroker]:
    async with EmbeddedBroker(tmp_path / "data") as running:
        yield running


@pytest.fixture
async def timed_broker(tmp_path: Path) -> AsyncIterator[EmbeddedBroker]:
    """A broker whose time passes by ``advance`` alone."""
    async with EmbeddedBroker(tmp_path / "data", clock=ManualClock()) as running:
        yield running


@pytest.fixture
async def client(broker: EmbeddedBroker) -> AsyncIterator[plait.Client]:
    async with broker.connect() as connected:
        yield connected
