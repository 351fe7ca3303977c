"""`GET /health` reports to a process monitor whether the node serves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from plait.server import Server
from plait.server.health_endpoint import CONNECTIONS_MAX, HealthEndpoint
from plait.storage.disk import RealDisk


@pytest.fixture
async def health(tmp_path: Path) -> AsyncIterator[HealthEndpoint]:
    server = Server(RealDisk(tmp_path), port=0)
    await server.start()
    endpoint = HealthEndpoint(server.broker_host, server.host, 0)
    await endpoint.start()
    yield endpoint
    await endpoint.stop()
    await server.stop()


async def ask(port: int, request: bytes) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    if not answer:
        return 0, b""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


async def test_a_serving_node_reports_ready_with_its_facts(health: HealthEndpoint) -> None:
    status, body = await ask(health.port, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    facts = json.loads(body)
    assert status == 200
    assert facts["status"] == "ready"
    assert facts["flush"] == "async"


async def test_failed_storage_is_503(health: HealthEndpoint) -> None:
    health._host.broker.turn.storage_failed(OSError(5, "broken"))
    status, body = await ask(health.port, b"GET /health HTTP/1.1\r\n\r\n")
    assert status == 503
    assert "broken" in json.loads(body)["error"]


async def test_an_unreadable_data_directory_is_503(health: HealthEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> tuple[int, int]:
        raise FileNotFoundError(2, "No such file or directory", "data")

    monkeypatch.setattr(health._host.disk, "space", gone)
    status, body = await ask(health.port, b"GET /health HTTP/1.1\r\n\r\n")
    assert status == 503
    assert "No such file" in json.loads(body)["error"]


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        (b"GET /elsewhere HTTP/1.1\r\n\r\n", 404),
        (b"POST /health HTTP/1.1\r\n\r\n", 405),
        (b"HEAD /health HTTP/1.1\r\n\r\n", 200),
        (b"nonsense\r\n\r\n", 405),
    ],
)
async def test_other_requests_get_the_matching_status(health: HealthEndpoint, request_head: bytes, status: int) -> None:
    assert (await ask(health.port, request_head))[0] == status


async def test_an_endless_request_is_closed(health: HealthEndpoint) -> None:
    status, _ = await ask(health.port, b"x" * 20_000)
    assert status == 0


async def test_idle_connections_do_not_keep_a_monitor_out(health: HealthEndpoint) -> None:
    idle = [await asyncio.open_connection("127.0.0.1", health.port) for _ in range(CONNECTIONS_MAX + 10)]
    for _ in range(3):
        status, _ = await ask(health.port, b"GET /health HTTP/1.1\r\n\r\n")
        assert status == 200
    for _, writer in idle:
        writer.transport.abort()
    await asyncio.sleep(0)
