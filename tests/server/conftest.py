"""Runs every server test on asyncio's loop and on uvloop, because their transports differ."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import pytest
import uvloop

from plait.broker import BrokerConfig
from plait.clock import Clock
from plait.errors import StorageFailed
from plait.limits import MIB, ServerLimits
from plait.server import Server
from plait.storage.disk import Disk
from plait.testing.simulated_disk import SimulatedDisk

Serve = Callable[..., Awaitable[Server]]


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """``await serve(disk, clock=..., limits={...}, **config)`` starts a server, which is stopped after the test."""
    started: list[Server] = []

    async def start(
        disk: Disk | None = None,
        *,
        clock: Clock | None = None,
        limits: dict[str, Any] | None = None,
        host: str = "127.0.0.1",
        **config: Any,
    ) -> Server:
        # Long timeouts: a loaded machine must not fail a test.
        patient = {"log_busy_seconds": 60.0, "queue_head_seconds": 60.0}
        settings = {"message_segment_size": 4 * MIB, "action_segment_size": 1 * MIB, "disk_free_min": 0} | config
        server = Server(
            SimulatedDisk() if disk is None else disk,
            BrokerConfig(**settings, limits=ServerLimits(**(patient | (limits or {})))),
            host=host,
            port=0,
            clock=clock,
        )
        await server.start()
        started.append(server)
        return server

    yield start
    for server in started:
        # The test may have broken the disk.
        with suppress(OSError, StorageFailed):
            await server.stop()
