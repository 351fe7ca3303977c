"""A real broker and a client of it, on the loop of each test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import plait
from plait.testing import EmbeddedBroker, ManualClock


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
