"""A stop of the server loses no reply, waits for no client, and leaves no connection open."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

import plait
from plait.errors import Unavailable
from plait.frame.builder import build_frame
from plait.frame.view import FrameView
from plait.limits import KIB, MIB
from plait.testing import EmbeddedBroker
from plait.testing.simulated_disk import SimulatedDisk
from plait.wire import messages as m
from tests.server.conftest import Serve
from tests.server.raw import Raw, until


@pytest.fixture
async def broker() -> AsyncIterator[EmbeddedBroker]:
    async with EmbeddedBroker() as broker:
        yield broker


async def test_a_stop_answers_the_accepted_requests(serve: Serve):
    server = await serve(flush="sync", message_segment_size=64 * MIB)
    async with Raw(server, "raw") as raw:
        partition = await raw.route("orders")
        session = await raw.attach("orders")
        sends = []
        for first in range(1, 51):
            frame = build_frame([bytes(1000)], producer=7, first=first, previous=first - 1)
            sends.append(raw.request(m.SendRequest(partition), frame.tobytes()))
        waiting = raw.request(m.PullRequest(session, 1000, 16 * MIB, 60.0))
        beating = raw.request(m.HeartbeatRequest())
        answers = [await raw.next()]
        while answers[-1].correlation != beating:
            answers.append(await raw.next())
        stopping = asyncio.create_task(server.stop())
        try:
            while True:
                answers.append(await raw.next())
        except (asyncio.IncompleteReadError, ConnectionError):
            await stopping
    by_number = {answer.correlation: answer.message for answer in answers}
    assert [by_number[number] for number in sends] == [m.SendReply(number) for number in range(50)]
    assert isinstance(by_number[waiting], m.PullReply)


async def test_a_stop_does_not_wait_for_a_client_that_does_not_read(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("plait.server.listener.HANG_UP_SECONDS", 0.2)
    server = await serve(message_segment_size=64 * MIB)
    async with plait.connect(server.address) as client:
        await client.send_many("large", [bytes(1 * MIB - 1000)] * 30)
    async with Raw(server, "raw") as raw:
        raw.request(m.ReadRequest("large", "earliest", 1000, 16 * MIB, 0.0))
        await raw.reader.readexactly(1000)
        began = asyncio.get_running_loop().time()
        await server.stop()
        assert asyncio.get_running_loop().time() - began < 10.0
    assert not server.connections


async def test_requests_delayed_by_a_slow_reader_are_not_served_after_a_stop(
    serve: Serve, caplog: pytest.LogCaptureFixture
):
    disk = SimulatedDisk()
    config = {"limits": {"outgoing_bytes_per_connection": 32 * KIB}, "message_segment_size": 64 * MIB}
    server = await serve(disk, **config)
    async with Raw(server, "raw") as raw:
        for first in range(1, 17):
            await raw.store("large", bytes(1 * MIB), first=first, previous=first - 1)
        partition = await raw.route("orders")
        (connection,) = server.connections
        raw.request(m.ReadRequest("large", "earliest", 1000, 16 * MIB, 0.0))
        await until(lambda: connection.writing_paused)
        delayed = [
            raw.request(m.SendRequest(partition), build_frame([b"late"], producer=8, first=1, previous=0).tobytes()),
            raw.request(m.PartitionNumberRequest("late")),
        ]
        await until(lambda: len(connection._delayed) == len(delayed))
        stopping = asyncio.create_task(server.stop())
        await until(lambda: server.broker_host.stopped)
        answers: list[int] = []
        try:
            while True:
                answers.append((await raw.next()).correlation)
        except (asyncio.IncompleteReadError, ConnectionError):
            await stopping
    assert not set(answers) & set(delayed)
    assert disk.list("message") == ["00000000000000000000.log"]
    assert [record.message for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")] == []
    server = await serve(disk, **config)
    assert server.report is not None
    assert server.report.clean
    assert set(server.broker.subjects) == {"large", "orders"}
    assert server.broker.subjects["orders"].visible == 0


async def test_after_a_stop_nothing_is_committed(serve: Serve):
    disk = SimulatedDisk()
    server = await serve(disk)
    async with Raw(server, "raw") as raw:
        await raw.store("orders", b"x")
    await server.stop()
    operations, answers = disk.operations, []
    server.broker.turn.answer_after_commit(lambda: answers.append(True))
    frame = build_frame([b"late"], producer=8, first=1, previous=0)
    server.broker.submit(server.broker.subjects["orders"], FrameView(frame.tobytes()), lambda *a: answers.append(a))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (disk.operations, answers) == (operations, [])
    assert server.failed is not None
    assert not server.failed.done()


@pytest.mark.parametrize("turns", range(4))
async def test_a_connection_accepted_while_the_server_stops_is_closed(serve: Serve, turns: int):
    """A connection that asyncio accepted and had not started when the server stopped must not stay open."""
    server = await serve()
    with socket.create_connection((server.host, server.port)) as late:
        for _ in range(turns):
            await asyncio.sleep(0)
        stopping = asyncio.ensure_future(server.stop())
        late.settimeout(60)
        with suppress(ConnectionResetError):
            assert await asyncio.get_running_loop().run_in_executor(None, late.recv, 1) == b""
        await stopping
    # A transport that asyncio has forgotten warns when it is collected.
    gc.collect()


async def test_requests_to_the_meta_server_of_a_stopping_node_are_unavailable(broker: EmbeddedBroker):
    """The meta server stops before the last connection closes. The node must not answer like a broker without one."""
    server = broker.server
    async with Raw(server, "raw") as raw:
        await server.cluster.stop()
        for request in (m.MemberHeartbeatRequest("c", [("orders", "g", True)], 0, 0.0), m.RouteRequest("orders", True)):
            with pytest.raises(Unavailable, match="this meta server is stopping"):
                await raw.ask(request)
    assert not server.broker.subjects
