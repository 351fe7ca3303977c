"""Memory stays bounded and other clients are served whatever a client does with its connection."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

import plait
from plait.clock import ManualClock
from plait.errors import InvalidArgument, LimitExceeded, StaleSession
from plait.frame.builder import build_frame
from plait.limits import KIB, MIB, PACKET_SIZE_MAX
from plait.server import Server
from plait.server.connection import Connection
from plait.storage.disk import RealDisk
from plait.testing.simulated_disk import Operation, SimulatedDisk
from plait.wire import codec
from plait.wire import messages as m
from plait.wire.link import HEADER, pack
from tests.server.conftest import Serve
from tests.server.raw import PATIENCE_SECONDS, Raw, until
from tests.support.require import require


def resident() -> int:
    """Private memory of the process in bytes, without mapped log files."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * KIB


def has_ipv6() -> bool:
    return socket.has_ipv6 and Path("/proc/net/if_inet6").exists()


def connection_of(server: Server, client: str) -> Connection:
    return next(connection for connection in server.connections if connection.client == client)


# --- time ----------------------------------------------------------------------------------------


async def test_a_connection_without_a_hello_is_closed_even_if_it_sends_bytes(serve: Serve):
    clock = ManualClock()
    server = await serve(clock=clock, limits={"hello_seconds": 10.0, "idle_seconds": 30.0})
    async with Raw(server) as silent, Raw(server) as dripping:
        await until(lambda: len(server.connections) == 2)
        for _ in range(10):
            dripping.write(b"\x28")
            await until(lambda: not dripping.writer.transport.get_write_buffer_size())
            clock.advance(1.0)
            server.broker_host.tick()
        assert len(server.connections) == 2
        clock.advance(0.1)
        server.broker_host.tick()
        assert await silent.ending() is None
        assert await dripping.ending() is None
    assert not server.connections


async def test_a_half_open_connection_is_closed_and_its_consumer_lost(serve: Serve):
    clock = ManualClock()
    server = await serve(clock=clock, limits={"idle_seconds": 30.0, "consumer_lost_seconds": 5.0})
    async with Raw(server, "gone") as half_open, Raw(server, "alive") as alive:
        await alive.store("orders", b"a")
        session = await half_open.attach("orders", client="gone")
        await half_open.ask(m.PullRequest(session, 10, 1000, 0.0))
        other = await alive.attach("orders", client="alive")
        waiting = alive.request(m.PullRequest(other, 10, 1000, 60.0))
        for _ in range(31):
            clock.advance(1.0)
            alive.request(m.HeartbeatRequest())
            await alive.next()
            server.broker_host.tick()
            if clock.monotonic() < 1005.5:
                assert len(server.connections) == 2
        # The rows of the lost consumer were delivered at once; one of the packets read above was the pull's reply.
        assert await half_open.ending() is None
        assert waiting
        assert [connection.client for connection in server.connections] == ["alive"]
        group = server.membership.group("orders", "g")
        assert group.redelivered_count == 1


async def test_a_lost_consumer_with_an_open_connection_gets_stale_session(serve: Serve):
    clock = ManualClock()
    server = await serve(clock=clock, limits={"consumer_lost_seconds": 5.0})
    async with Raw(server, "raw") as stopped:
        session = await stopped.attach("orders")
        waiting = stopped.request(m.PullRequest(session, 10, 1000, 60.0))
        await stopped.ask(m.HeartbeatRequest())
        clock.advance(6.0)
        server.broker_host.tick()
        with pytest.raises(StaleSession, match="attach again"):
            await stopped.answer(waiting)
        with pytest.raises(StaleSession):
            await stopped.ask(m.AckRequest(session, []))
        assert await stopped.attach("orders") != session


# --- sessions ------------------------------------------------------------------------------------


async def test_a_session_belongs_to_its_connection(serve: Serve):
    server = await serve()
    async with Raw(server, "owner") as owner, Raw(server, "thief") as thief:
        await owner.store("orders", b"a")
        session = await owner.attach("orders", client="owner")
        for request in (
            m.PullRequest(session, 1, 1, 0.0),
            m.AckRequest(session, [(0, 1, 1)]),
            m.NackRequest(session, [(0, 1, 1)]),
        ):
            with pytest.raises(StaleSession):
                await thief.ask(request)
        assert await thief.ask(m.DetachRequest(session)) == m.DoneReply()
        assert (await owner.ask(m.PullRequest(session, 1, 1, 0.0))).ranges == [(0, 1, 1)]


async def test_heartbeats_of_an_old_connection_do_not_keep_a_moved_consumer_alive(serve: Serve):
    clock = ManualClock()
    server = await serve(clock=clock, limits={"consumer_lost_seconds": 5.0})
    async with Raw(server, "c") as old, Raw(server, "c") as new:
        await old.store("orders", b"a")
        session = await old.attach("orders", client="c")
        waiting = old.request(m.PullRequest(session, 1, 1, 60.0))
        assert (await old.answer(waiting)).message.ranges == [(0, 1, 1)]
        waiting = old.request(m.PullRequest(session, 1, 1, 60.0))
        await old.ask(m.HeartbeatRequest())
        clock.advance(5.1)
        moved = await new.attach("orders", client="c")
        with pytest.raises(StaleSession):
            await old.answer(waiting)
        assert (await new.ask(m.PullRequest(moved, 1, 1, 0.0))).ranges == [(0, 1, 2)]
        for _ in range(6):
            clock.advance(1.0)
            await old.ask(m.HeartbeatRequest())
            server.broker_host.tick()
        assert not server.broker.sessions
        assert server.membership.group("orders", "g").cursor.returned.count == 1


async def test_a_detached_consumer_gets_its_open_poll_answered(serve: Serve):
    server = await serve()
    async with Raw(server, "raw") as raw:
        session = await raw.attach("orders")
        waiting = raw.request(m.PullRequest(session, 1, 1, 60.0))
        detached = raw.request(m.DetachRequest(session))
        with pytest.raises(StaleSession):
            await raw.answer(waiting)
        assert (await raw.answer(detached)).message == m.DoneReply()


async def test_long_polls_of_one_connection_are_limited_and_released(serve: Serve):
    server = await serve(limits={"polls_per_connection": 3})
    async with Raw(server, "raw") as raw:
        session = await raw.attach("orders")
        pulls = [raw.request(m.PullRequest(session, 1, 1, 60.0)) for _ in range(2)]
        read = raw.request(m.ReadRequest("orders", "latest", 1, 1, 60.0))
        with pytest.raises(LimitExceeded, match="limit of long polls reached \\(3 per"):
            await raw.ask(m.ReadRequest("orders", "latest", 1, 1, 60.0))
        with pytest.raises(LimitExceeded):
            await raw.ask(m.PullRequest(session, 1, 1, 60.0))
        async with Raw(server, "other") as other:
            await other.store("orders", b"a", b"b")
        assert {(await raw.next()).correlation for _ in range(3)} == {*pulls, read}
        for _ in range(10):
            assert (await raw.ask(m.ReadRequest("orders", "earliest", 1, 1, 60.0))).next == 1


# --- connections ---------------------------------------------------------------------------------


async def test_connections_beyond_the_limit_are_refused_and_the_limit_is_named(serve: Serve):
    server = await serve(limits={"connections": 2})
    async with Raw(server, "a") as first, Raw(server, "b"):
        async with Raw(server) as third:
            error = await third.ending()
        assert isinstance(error, LimitExceeded)
        assert error.message == "connection limit reached (2 per server); close idle connections"
        await first.ask(m.HeartbeatRequest())
    await until(lambda: not server.connections)
    async with Raw(server, "raw"):
        pass


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.com", ""])
async def test_a_host_that_is_not_loopback_is_refused(host: str):
    with pytest.raises(InvalidArgument, match="is not loopback"):
        Server(SimulatedDisk(), host=host, port=0)


async def test_ipv6_loopback_is_served(serve: Serve):
    require(has_ipv6(), "this machine has no IPv6")
    server = await serve(host="::1")
    assert server.address == f"plait://[::1]:{server.port}"
    async with plait.connect(server.address) as client:
        await client.send("orders", b"a")


# --- unread replies ------------------------------------------------------------------------------


@asynccontextmanager
async def unread_socket(server: Server, client: str) -> AsyncIterator[Callable[[bytes], None]]:
    """A connection that never reads, with the smallest receive buffer that the kernel allows."""
    loop = asyncio.get_running_loop()
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.setblocking(False)
    try:
        await loop.sock_connect(raw, (server.host, server.port))
        await loop.sock_sendall(raw, packet(m.Hello(1, 1, client)))
        await until(lambda: any(connection.client == client for connection in server.connections))

        def write(data: bytes) -> None:
            try:
                raw.send(data)
            except BlockingIOError:
                # Expected: the server has stopped reading.
                pass

        yield write
    finally:
        raw.close()


def packet(message: m.PacketHead, correlation: int = 1, payload: bytes = b"") -> bytes:
    return pack(message.KIND, correlation, codec.encode(message), len(payload)) + payload


async def test_a_client_that_never_reads_uses_bounded_memory_and_delays_no_other_client(serve: Serve, tmp_path: Path):
    server = await serve(
        RealDisk(tmp_path), limits={"outgoing_bytes_per_connection": 1 * MIB}, message_segment_size=64 * MIB
    )
    async with plait.connect(server.address) as client:
        await client.send_many("large", [bytes(100 * KIB)] * 300)
        before = resident()
        async with unread_socket(server, "slow") as write:
            write(packet(m.ReadRequest("large", "earliest", 1000, 16 * MIB, 0.0)) * 2000)
            connection = connection_of(server, "slow")
            await until(lambda: connection.writing_paused)
            # One reply is being sent, the other requests wait, and the server reads no more of them.
            for _ in range(200):
                write(packet(m.HeartbeatRequest()) * 1000)
                await asyncio.sleep(0)
            assert connection._outgoing_size() < 20 * MIB
            # 30 MiB of the mapped log have been read. Without the limit it would be gigabytes.
            assert resident() - before < 64 * MIB
            began = time.perf_counter()
            assert (await client.send("calm", b"x")).sequence == 0
            async with client.consumer("calm", group="g") as consumer:
                assert len(await consumer.fetch(1)) == 1
            # Milliseconds on an idle machine. A server that waits for the slow reader would never reply.
            assert time.perf_counter() - began < 20.0


async def test_unread_replies_have_a_total_limit_and_the_connections_with_the_most_are_closed(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.ERROR, "plait.server")
    limits = {"outgoing_bytes_per_connection": 1 * MIB, "outgoing_bytes_total": 12 * MIB}
    server = await serve(RealDisk(tmp_path), limits=limits, message_segment_size=64 * MIB)
    async with plait.connect(server.address) as client, AsyncExitStack() as stack:
        await client.send_many("large", [bytes(100 * KIB)] * 80)
        highest = 0
        for number in range(20):
            write = await stack.enter_async_context(unread_socket(server, f"slow-{number}"))
            write(packet(m.ReadRequest("large", "earliest", 1000, 4 * MIB, 0.0)))
            await until(lambda number=number: server.connections.outgoing_bytes or number == 0)
            await client.send("calm", b"x")
            highest = max(highest, sum(connection._outgoing_size() for connection in server.connections))
            assert server.connections.outgoing_bytes <= limits["outgoing_bytes_total"]
        assert highest <= limits["outgoing_bytes_total"] + 20 * 64 * KIB
        left = [connection for connection in server.connections if connection.client.startswith("slow")]
        assert 2 <= len(left) < 20
        assert (await client.send("calm", b"x")).sequence == 20
    await until(lambda: not server.connections)
    assert server.connections.outgoing_bytes == 0


async def test_slow_readers_stay_connected_while_they_send_heartbeats_or_read(serve: Serve):
    clock = ManualClock()
    server = await serve(
        clock=clock,
        limits={"outgoing_bytes_per_connection": 64 * KIB, "idle_seconds": 8.0, "consumer_lost_seconds": 4.0},
        message_segment_size=64 * MIB,
    )
    async with Raw(server) as sender, Raw(server) as heartbeating, Raw(server) as taking:
        for raw, client in ((sender, "sender"), (heartbeating, "heartbeating"), (taking, "taking")):
            await raw.hello(client)
        for first in range(1, 31):
            await sender.store("large", bytes(1 * MIB), first=first, previous=first - 1)
        heartbeating.request(
            m.PullRequest(await heartbeating.attach("large", "a", "heartbeating"), 1000, 16 * MIB, 0.0)
        )
        session = await taking.attach("large", "b", "taking")
        for _ in range(2):
            taking.request(m.PullRequest(session, 1000, 16 * MIB, 0.0))
            taking.write(packet(m.HeartbeatRequest()) * 2000)
        async with unread_socket(server, "stuck") as write:
            write(packet(m.ReadRequest("large", "earliest", 1000, 16 * MIB, 0.0)))
            for client in ("stuck", "heartbeating", "taking"):
                await until(lambda client=client: connection_of(server, client).writing_paused)
            await until(lambda: connection_of(server, "taking")._reading_paused)
            for _ in range(4):
                # The server does not read its heartbeats, but the client reads some of its replies.
                size = connection_of(server, "taking")._outgoing_size()
                async with asyncio.timeout(PATIENCE_SECONDS):
                    while connection_of(server, "taking")._outgoing_size() >= size:
                        await taking.reader.readexactly(64 * KIB)
                for _ in range(3):
                    clock.advance(1.0)
                    await sender.ask(m.HeartbeatRequest())
                    heartbeating.request(m.HeartbeatRequest())
                    await until(lambda: not heartbeating.writer.transport.get_write_buffer_size())
                    await sender.ask(m.HeartbeatRequest())
                    server.broker_host.tick()
            await until(lambda: len(server.connections) == 3)
            assert {connection.client for connection in server.connections} == {"sender", "heartbeating", "taking"}
            assert len(server.broker.sessions) == 2


async def test_requests_delayed_by_a_slow_reader_are_all_served_in_order(serve: Serve):
    server = await serve(limits={"outgoing_bytes_per_connection": 32 * KIB}, message_segment_size=64 * MIB)
    async with Raw(server, "raw") as raw:
        for first in range(1, 6):
            await raw.store("large", bytes(1 * MIB), first=first, previous=first - 1)
        wanted = []
        for sequence in range(5):
            wanted.append(raw.request(m.ReadRequest("large", ("sequence", sequence), 1, 1, 0.0)))
            wanted.append(raw.request(m.HeartbeatRequest()))
        connection = connection_of(server, "raw")
        await until(lambda: connection.writing_paused)
        answers = [await raw.next() for _ in wanted]
        assert [answer.correlation for answer in answers] == wanted
        assert [answer.message.next for answer in answers[::2]] == [1, 2, 3, 4, 5]
        assert not connection.writing_paused
        assert await raw.ask(m.HeartbeatRequest()) == m.DoneReply()


async def test_an_invalid_request_delayed_by_a_slow_reader_still_closes_the_connection(serve: Serve):
    server = await serve(limits={"outgoing_bytes_per_connection": 32 * KIB}, message_segment_size=64 * MIB)
    async with Raw(server, "raw") as raw:
        for first in range(1, 9):
            await raw.store("large", bytes(1 * MIB), first=first, previous=first - 1)
        raw.request(m.ReadRequest("large", "earliest", 100, 16 * MIB, 0.0))
        raw.write(pack(m.PartitionNumberRequest.KIND, 3, b"\xc1"))
        connection = connection_of(server, "raw")
        await until(lambda: connection.writing_paused)
        error = await raw.ending()
    assert error is not None
    assert "does not decode" in error.message


async def test_a_reply_too_large_for_a_packet_becomes_an_error(serve: Serve):
    server = await serve(message_segment_size=64 * MIB)
    async with Raw(server, "raw") as raw:
        await raw.route("orders")
        connection_of(server, "raw").answer(77, m.DoneReply(), [], PACKET_SIZE_MAX)
        answer = await raw.next()
        assert (answer.correlation, answer.message.code) == (77, "too_large")
        assert await raw.ask(m.HeartbeatRequest()) == m.DoneReply()


async def test_listings_of_thousands_of_subjects_fit(serve: Serve):
    server = await serve(message_segment_size=64 * MIB)
    async with plait.connect(server.address) as client, Raw(server) as raw:
        await raw.hello()
        for number in range(2000):
            raw.request(m.PartitionNumberRequest(f"subject.{number:04}"))
        for _ in range(2000):
            await raw.next()
        subjects = await client.admin.subjects()
    assert [subject.subject for subject in subjects] == [f"subject.{number:04}" for number in range(2000)]


# --- incomplete packets ----------------------------------------------------------------------------


async def test_a_thousand_connections_with_incomplete_packets_use_little_memory_and_delay_no_other_client(
    serve: Serve, tmp_path: Path
):
    server = await serve(RealDisk(tmp_path))
    loop = asyncio.get_running_loop()
    began = HEADER.pack(PACKET_SIZE_MAX, m.SendRequest.KIND, 0, 2, 8) + codec.encode(m.SendRequest(1))
    sockets = [socket.socket() for _ in range(1000)]
    before = resident()
    try:
        for number, dripping in enumerate(sockets):
            dripping.setblocking(False)
            await loop.sock_connect(dripping, (server.host, server.port))
            await loop.sock_sendall(dripping, packet(m.Hello(1, 1, f"drip-{number}")) + began)
        await until(lambda: sum(connection.partial > 0 for connection in server.connections) == 1000)
        async with plait.connect(server.address) as client:
            for _ in range(5):
                for dripping in sockets:
                    dripping.send(b"\0")
                started = time.perf_counter()
                await client.send("calm", b"x")
                assert time.perf_counter() - started < 20.0
            await until(lambda: all(c.partial > len(began) for c in server.connections if c.client[:4] == "drip"))
            async with client.consumer("calm", group="g") as consumer:
                assert len(await consumer.fetch(5)) == 5
            # Another client can still send a large packet.
            await client.send_many("calm", [bytes(100 * KIB)] * 20)
        assert len(server.connections) >= 1000
        assert server.connections.partial_bytes < 1 * MIB
        assert resident() - before < 64 * MIB
    finally:
        for dripping in sockets:
            dripping.close()
    await until(lambda: not server.connections)
    assert server.connections.partial_bytes == 0


async def test_above_the_limit_of_incomplete_packets_the_oldest_one_is_closed(serve: Serve):
    clock = ManualClock()
    server = await serve(clock=clock, limits={"partial_bytes_total": 4 * MIB})
    began = HEADER.pack(PACKET_SIZE_MAX, m.SendRequest.KIND, 0, 2, 8)
    async with Raw(server) as old, Raw(server) as young, Raw(server) as whole:
        for raw, client in ((old, "old"), (young, "young"), (whole, "whole")):
            await raw.hello(client)
        partition = await whole.route("orders")
        frame = build_frame([bytes(2 * MIB)], producer=7, first=1, previous=0).tobytes()
        sent = packet(m.SendRequest(partition), 9, frame)
        whole.write(sent[:100])
        await until(lambda: connection_of(server, "whole").partial == 100)
        clock.advance(1.0)
        server.broker_host.tick()
        # This connection always has an incomplete packet, but never an old one.
        whole.write(sent[100:] + sent[:100])
        assert (await whole.answer(9)).message == m.SendReply(0)
        old.write(began + bytes(MIB))
        await until(lambda: connection_of(server, "old").partial > MIB)
        clock.advance(1.0)
        server.broker_host.tick()
        whole.write(sent[100:] + sent[:100])
        assert (await whole.answer(9)).message == m.SendReply(0)
        young.write(began + bytes(MIB))
        await until(lambda: connection_of(server, "young").partial > MIB)
        whole.write(sent[100 : 2 * MIB])
        error = await old.ending()
        assert isinstance(error, LimitExceeded)
        assert "incomplete packets" in error.message
        whole.write(sent[2 * MIB :])
        assert (await whole.answer(9)).message == m.SendReply(0)
        await until(lambda: len(server.connections) == 2)
        assert server.connections.partial_bytes == connection_of(server, "young").partial


# --- unanswered frames -----------------------------------------------------------------------------


async def test_reading_stops_while_too_many_bytes_are_unanswered(serve: Serve):
    """A sync hangs, so written frames cannot be acknowledged. The frames are too large for a sync on the loop."""
    disk = SimulatedDisk()
    hanging = False
    let_go = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_operation(operation: Operation, path: str, size: int) -> None:
        if hanging and operation == "sync" and path.startswith("message/"):
            asyncio.run_coroutine_threadsafe(let_go.wait(), loop).result(PATIENCE_SECONDS)

    disk.on_operation = on_operation
    clock = ManualClock()
    server = await serve(
        disk,
        clock=clock,
        flush="sync",
        limits={"in_flight_bytes_per_connection": 1 * MIB, "idle_seconds": 30.0},
        message_segment_size=64 * MIB,
    )
    async with Raw(server) as raw, Raw(server) as other:
        await raw.hello()
        await other.hello("other")
        partition = await raw.route("orders")
        hanging = True
        for first in range(1, 101):
            frame = build_frame([bytes(300 * KIB)], producer=7, first=first, previous=first - 1)
            raw.request(m.SendRequest(partition), frame.tobytes())
        connection = connection_of(server, "raw")
        await until(lambda: connection._reading_paused)
        size = connection.in_flight
        # At most one read beyond the limit, and the other client is served.
        assert 1 * MIB < size < 2 * MIB
        await other.ask(m.HeartbeatRequest())
        assert connection.in_flight == size
        # The server does not read from the connection, so it must not count it as idle.
        for _ in range(40):
            clock.advance(1.0)
            await other.ask(m.HeartbeatRequest())
            server.broker_host.tick()
        assert len(server.connections) == 2
        hanging = False
        let_go.set()
        sequences = [(await raw.next()).message for _ in range(100)]
        answered = [message.sequence for message in sequences if isinstance(message, m.SendReply)]
        assert answered == list(range(len(answered)))
        assert connection.in_flight == 0
        assert not connection._reading_paused
