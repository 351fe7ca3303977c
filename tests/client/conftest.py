"""Fixtures: real brokers and their clients, on the loop of each test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import plait
from plait.testing import EmbeddedBroker, ManualClock
from tests.client.support import PATIENCE_SECONDS, PlayedMeta, config_of


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[EmbeddedBroker]:
    async with EmbeddedBroker(tmp_path / "data") as running:
        yield running


@pytest.fixture
async def timed_broker(tmp_path: Path) -> AsyncIterator[EmbeddedBroker]:
    """A broker whose clock moves only by ``advance``."""
    async with EmbeddedBroker(tmp_path / "data", clock=ManualClock()) as running:
        yield running


@pytest.fixture
async def client(broker: EmbeddedBroker) -> AsyncIterator[plait.Client]:
    async with broker.connect() as connected:
        yield connected


@pytest.fixture
async def brokers(tmp_path: Path) -> AsyncIterator[list[EmbeddedBroker]]:
    """Two broker groups."""
    async with (
        EmbeddedBroker(tmp_path / "1", config=config_of("g1"), metas=()) as first,
        EmbeddedBroker(tmp_path / "2", config=config_of("g2"), metas=()) as second,
    ):
        yield [first, second]


@pytest.fixture
async def meta(brokers: list[EmbeddedBroker], request: pytest.FixtureRequest) -> AsyncIterator[PlayedMeta]:
    """Routes subject "s" to one partition on each broker; the parameter is the order strategy."""
    played = PlayedMeta(brokers, order=getattr(request, "param", "best_tried"))
    await played.open(2)
    yield played
    await played.close()


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[list[EmbeddedBroker]]:
    """A node with a meta server and a broker, and a second broker that is registered with it."""
    async with (
        EmbeddedBroker(tmp_path / "1", config=config_of("g1")) as first,
        EmbeddedBroker(tmp_path / "2", config=config_of("g2"), metas=[first.address]) as second,
    ):
        async with first.connect() as client:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while len(await client.admin.brokers()) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0)
        yield [first, second]
