"""Invalid bytes and requests: the client gets a clear error or is disconnected, and other clients are served."""

from __future__ import annotations

import asyncio
import logging
import random
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import plait
from plait.errors import (
    FrameError,
    InternalError,
    InvalidArgument,
    InvalidName,
    PlaitError,
    ProducerConflict,
    ProtocolError,
    StaleRoute,
    StaleSession,
    VersionMismatch,
)
from plait.frame.builder import build_frame
from plait.frame.columns import Codec, Column
from plait.frame.view import frames_in
from plait.limits import COLUMN_SIZE_MAX, KIB, MIB, PACKET_SIZE_MAX
from plait.server import Server
from plait.storage.disk import RealDisk
from plait.wire import codec
from plait.wire import messages as m
from plait.wire.link import HEADER, HEADER_SIZE, pack
from tests.frame.samples import Draft, arrow_bytes, resign, with_column
from tests.server.conftest import Serve
from tests.server.raw import Raw

FRAME = Draft([b"one", b"two"], base=0).build()


@pytest.fixture
async def server(serve: Serve) -> Server:
    return await serve()


@pytest.fixture
async def witness(server: Server) -> AsyncIterator[plait.Client]:
    """Another client, which must not be affected."""
    async with plait.connect(server.address) as client:
        await client.send("calm", b"before")
        yield client
        receipt = await client.send("calm", b"after")
        assert receipt.sequence == 1
        async with client.consumer("calm", group="g") as consumer:
            batch = await consumer.fetch(2)
            assert [message.body for message in batch] == [b"before", b"after"]
    assert server.failed is not None
    assert not server.failed.done()


def packet(kind: int, head: bytes = b"\x90", payload: bytes = b"") -> bytes:
    return pack(kind, 5, head, len(payload)) + payload


def head_of(*fields: Any) -> bytes:
    return msgspec.msgpack.encode(list(fields))


# --- the server sends the reason and closes the connection ----------------------------------------


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "packet size", id="another protocol"),
        pytest.param(bytes(HEADER_SIZE), "packet size 0", id="zeros"),
        pytest.param(HEADER.pack(PACKET_SIZE_MAX + 1, 5, 0, 1, 0), "packet size", id="oversized"),
        pytest.param(HEADER.pack(0xFFFF_FFFF, 5, 0, 1, 0), "packet size 4294967295", id="largest size"),
        pytest.param(HEADER.pack(24, 5, 0, 1, 9) + bytes(8), "passes the packet's end", id="lying head size"),
        pytest.param(packet(999), "kind 999 is not known", id="unknown kind"),
        pytest.param(packet(m.DoneReply.KIND), "kind 4 is not a request", id="an answer as request"),
        pytest.param(packet(m.PartitionNumberRequest.KIND, b"\xc1"), "does not decode", id="no msgpack"),
        pytest.param(packet(m.PartitionNumberRequest.KIND, head_of(5)), "does not decode", id="wrong type"),
        pytest.param(packet(m.PartitionNumberRequest.KIND, head_of()), "does not decode", id="missing field"),
        pytest.param(packet(m.PartitionNumberRequest.KIND, b"\x91\xa1\xff"), "does not decode", id="no text"),
        pytest.param(packet(m.PullRequest.KIND, head_of(1, 2.5, 3, 4.0)), "does not decode", id="float for a count"),
        pytest.param(packet(m.AckRequest.KIND, head_of(1, [[1, 2]])), "does not decode", id="short range"),
        pytest.param(
            packet(m.ReadRequest.KIND, head_of("s", ["time", "x"], 1, 1, 0.0)), "does not decode", id="bad start"
        ),
        pytest.param(
            packet(m.AdminRequest.KIND, b"\x92\xa1s\x81\xa1k" + b"\x91" * 50_000), "does not decode", id="nesting"
        ),
        pytest.param(
            packet(m.SendRequest.KIND, head_of(1), FRAME.tobytes() + bytes(8)), "contains a frame of", id="lying frame"
        ),
    ],
)
async def test_a_protocol_error_closes_the_connection_with_the_reason(
    server: Server, witness: plait.Client, data: bytes, expected: str
):
    async with Raw(server, "raw") as raw:
        raw.write(data)
        error = await raw.ending()
    assert isinstance(error, ProtocolError)
    assert expected in error.message


async def test_requests_before_an_invalid_packet_are_served(server: Server, witness: plait.Client):
    async with Raw(server, "raw") as raw:
        frame = build_frame([b"x"], producer=9, first=1, previous=0).tobytes()
        partition = await raw.route("orders")
        raw.write(
            pack(m.SendRequest.KIND, 7, codec.encode(m.SendRequest(partition)), len(frame)) + frame + b"\xff" * 64
        )
        assert isinstance(await raw.ending(), ProtocolError)
    assert (await witness.send("orders", b"y")).sequence == 1


async def test_the_first_packet_must_be_a_hello(server: Server, witness: plait.Client):
    async with Raw(server) as raw:
        raw.request(m.PartitionNumberRequest("orders"))
        error = await raw.ending()
    assert isinstance(error, ProtocolError)
    assert "first packet must be a hello" in error.message
    assert "orders" not in server.broker.subjects


@pytest.mark.parametrize(("lowest", "highest"), [(2, 3), (0, 0), (3, 1)])
async def test_an_unsupported_version_is_refused_and_both_versions_are_named(
    server: Server, witness: plait.Client, lowest: int, highest: int
):
    async with Raw(server) as raw:
        raw.request(m.Hello(lowest, highest, "raw"))
        error = await raw.ending()
    assert isinstance(error, VersionMismatch)
    assert error.message == (
        f"this server supports protocol 1, the client {lowest} to {highest}; use matching versions of Plait"
    )


async def test_a_client_that_also_supports_later_versions_is_accepted(server: Server):
    async with Raw(server) as raw:
        welcome = await raw.ask(m.Hello(1, 9, "raw", ["teleport"]))
    assert welcome.version == 1


# --- the server refuses the request and keeps the connection --------------------------------------


def corrupted(frame: bytes, offset: int) -> bytes:
    changed = bytearray(frame)
    changed[offset] ^= 1
    return bytes(changed)


def repacked(raw_size: int, packed: bytes) -> bytes:
    """A frame whose body column declares a wrong size."""
    return with_column(FRAME, Column.BODY, Codec.ZSTD, struct.pack("<I", raw_size) + packed).tobytes()


def bomb(declared: int) -> bytes:
    """A frame with 64 MiB of zeros compressed to a few KiB, and a wrong declared size."""
    honest = build_frame([bytes(16 * MIB - 8)] * 4, producer=1, first=1, previous=0, compression="zstd").tobytes()
    view = plait.frame.FrameView(honest)
    packed = bytes(view.stored(Column.BODY)[4:])
    return with_column(
        Draft([b"x"] * 4).build(), Column.BODY, Codec.ZSTD, struct.pack("<I", declared) + packed
    ).tobytes()


WHOLE = FRAME.tobytes()
RUN_TABLE = struct.pack("<4Q", 7, 1, 2, 0)
SELECTION = struct.pack("<2I", 2, 0)


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        pytest.param(lambda: b"", "too few for a frame header", id="nothing"),
        pytest.param(lambda: WHOLE[:60], "too few for a frame header", id="half a header"),
        pytest.param(lambda: WHOLE[:-8], "cut off", id="cut off"),
        pytest.param(lambda: b"XX" + WHOLE[2:], "magic", id="magic"),
        pytest.param(lambda: resign(WHOLE[:2] + b"\x02" + WHOLE[3:]), "version 2", id="newer version"),
        pytest.param(lambda: corrupted(WHOLE, len(WHOLE) - 9), "frame checksum", id="body bit"),
        pytest.param(lambda: corrupted(WHOLE, 17), "frame checksum", id="producer bit"),
        pytest.param(lambda: corrupted(WHOLE, 50), "stamp checksum", id="stamp bit"),
        pytest.param(lambda: resign(WHOLE[:8] + b"\xff\xff\xff\x7f" + WHOLE[12:]), "count", id="lying count"),
        pytest.param(lambda: resign(WHOLE[:8] + b"\x09\0\0\0" + WHOLE[12:]), "offsets", id="too many rows declared"),
        pytest.param(lambda: resign(WHOLE[:13] + b"\x80" + WHOLE[14:]), "not known", id="unknown mandatory column"),
        pytest.param(
            lambda: with_column(FRAME, Column.RUNS, Codec.RAW, RUN_TABLE).tobytes(), "only brokers add them", id="runs"
        ),
        pytest.param(
            lambda: with_column(FRAME, Column.SELECTION, Codec.RAW, SELECTION).tobytes(),
            "only brokers add them",
            id="selection",
        ),
        pytest.param(lambda: repacked(COLUMN_SIZE_MAX + 1, b"x"), "the limit is", id="declares too much"),
        pytest.param(lambda: repacked(COLUMN_SIZE_MAX, b"no zstd at all"), "does not inflate", id="no zstd"),
        pytest.param(lambda: bomb(1000), "does not inflate to the 1000 bytes", id="bomb"),
        pytest.param(lambda: bomb(0), "does not inflate to the 0 bytes", id="bomb that declares nothing"),
    ],
)
async def test_an_invalid_frame_is_refused_and_the_connection_stays_open(
    server: Server, witness: plait.Client, frame: Callable[[], bytes], expected: str
):
    data = frame()
    before = arrow_bytes()
    async with Raw(server, "raw") as raw:
        partition = await raw.route("orders")
        with pytest.raises(FrameError, match=expected):
            await raw.ask(m.SendRequest(partition), data)
        assert arrow_bytes() - before < MIB
        # A oneway send is dropped without a reply.
        raw.request(m.SendRequest(partition, oneway=True), data)
        assert await raw.store("orders", b"good") == 0
    assert server.broker.subjects["orders"].visible == 1


async def test_different_rows_under_stored_producer_sequences_are_refused_and_a_resend_is_accepted(server: Server):
    async with Raw(server, "raw") as raw:
        assert await raw.store("orders", b"forged", producer=9) == 0
        with pytest.raises(ProducerConflict, match=r"rows 1 to 1 of producer 0000000000000009.* stored in 'orders'"):
            await raw.store("orders", b"real", producer=9)
        assert await raw.store("orders", b"x", producer=9, first=2, previous=1) == 1
        with pytest.raises(ProducerConflict, match="rows 1 to 2"):
            await raw.store("orders", b"forged", b"x", producer=9)
        assert await raw.store("orders", b"forged", producer=9) == 0
    assert server.broker.subjects["orders"].visible == 2


async def test_a_frame_that_inflates_to_the_limit_uses_only_its_compressed_size_after_validation(
    serve: Serve, tmp_path: Path
):
    server = await serve(RealDisk(tmp_path), message_segment_size=64 * MIB)
    frame = build_frame([bytes(16 * MIB - 8)] * 4, producer=1, first=1, previous=0, compression="zstd").tobytes()
    assert len(frame) < 64 * KIB
    before = arrow_bytes()
    async with Raw(server, "raw") as raw:
        partition = await raw.route("orders")
        assert await raw.ask(m.SendRequest(partition), frame) == m.SendReply(0)
        assert arrow_bytes() - before < MIB
        answer = await raw.answer(raw.request(m.ReadRequest("orders", "earliest", 2, 1, 0.0)))
        # The body column is sent compressed, not inflated and cut.
        assert len(answer.payload) < 64 * KIB
        assert arrow_bytes() - before < MIB


def small_bomb(first: int, rows: int = 4) -> bytes:
    """A frame with 1 MiB of zeros compressed to some hundred bytes."""
    bodies = [bytes(MIB // rows)] * rows
    return build_frame(bodies, producer=1, first=first, previous=first - 1, compression="zstd").tobytes()


@pytest.mark.parametrize("ordered", [False, True])
async def test_the_inflated_size_of_frames_counts_towards_the_size_of_a_pull(server: Server, ordered: bool):
    async with Raw(server, "raw") as raw:
        partition = await raw.route("orders")
        for n in range(20):
            await raw.ask(m.SendRequest(partition), small_bomb(4 * n + 1))
        session = await raw.attach("orders", ordered=ordered)
        if ordered:
            await raw.ask(m.LeaseRequest(session, [(0, 1024, 1, 0)]))
        for expected in (4, 12):
            pulled = await raw.ask(m.PullRequest(session, 1000, expected // 4 * (MIB + 64 * KIB), 0.0))
            assert sum(end - start for start, end, _ in pulled.ranges) == expected
        read = await raw.ask(m.ReadRequest("orders", "earliest", 1000, 5 * (MIB + 64 * KIB), 0.0))
        assert read.next == 20


async def test_dead_letters_of_a_compressed_frame_are_retained_compressed(server: Server):
    async with Raw(server) as raw:
        await raw.hello()
        partition = await raw.route("orders")
        await raw.ask(m.SendRequest(partition), small_bomb(1, 64))
        session = await raw.attach("orders")
        await raw.ask(m.PullRequest(session, 64, 2 * MIB, 0.0))
        before = server.broker.retained_log.end
        for row in range(64):
            await raw.ask(m.NackRequest(session, [(row, row + 1, 1)], reject=True))
        assert server.broker.retained_log.end - before < 64 * KIB
        await raw.ask(m.AdminRequest("dlq.resend", {"subject": "orders", "group": "g"}))
        pulled = await raw.answer(raw.request(m.PullRequest(session, 64, 2 * MIB, 0.0)))
        rows = sum(end - start for start, end, _ in pulled.message.ranges)
        frames = list(frames_in(pulled.payload))
        assert rows == sum(frame.count for frame in frames) >= 1
        assert set(frames[0].binary(Column.BODY).to_pylist()) == {bytes(MIB // 64)}


@pytest.mark.parametrize(
    ("request_", "kind", "expected"),
    [
        pytest.param(m.PartitionNumberRequest("no name"), InvalidName, "partition name 'no name'", id="subject"),
        pytest.param(m.PartitionNumberRequest(""), InvalidName, "partition name ''", id="empty subject"),
        pytest.param(m.PartitionNumberRequest("x" * 221), InvalidName, "200", id="long subject"),
        pytest.param(m.PartitionNumberRequest("../../etc"), InvalidName, "etc", id="path"),
        pytest.param(m.Hello(1, 1, "a/b"), InvalidName, "client name", id="client"),
        pytest.param(m.AttachRequest("s", "a b", "c"), InvalidName, "group name", id="group"),
        pytest.param(
            m.AttachRequest("s", "%broadcast%c", "c"), InvalidName, "begin with % are reserved", id="reserved group"
        ),
        pytest.param(m.AttachRequest("s", "%broadcast%" + "x" * 200, "c"), InvalidName, "group name", id="long group"),
        pytest.param(m.AttachRequest("s", "g", "c", "yesterday"), InvalidArgument, "start 'yesterday'", id="start"),
        pytest.param(m.AttachRequest("s", "g", "c", ("sequence", -1)), InvalidArgument, "start", id="negative start"),
        pytest.param(
            m.AttachRequest("s", "g", "c", None, "exactly_once"), InvalidArgument, "exactly_once", id="delivery"
        ),
        pytest.param(m.AttachRequest("s", "g", "c", holds=[(5, 4, 1)]), InvalidArgument, "range", id="holds"),
        pytest.param(m.AttachRequest("s", "g", "c", began=-1), InvalidArgument, "not a version of a route", id="began"),
        pytest.param(m.SendRequest(99), StaleRoute, "partition 99", id="partition"),
        pytest.param(m.SendRequest(-1), StaleRoute, "partition -1", id="negative partition"),
        pytest.param(m.PullRequest(99, 1, 1, 0.0), StaleSession, "attach again", id="session"),
        pytest.param(m.AckRequest(99, []), StaleSession, "attach again", id="ack without session"),
        pytest.param(
            m.NackRequest(99, [], -1.0), StaleSession, "attach again", id="nack with a past delay, without session"
        ),
        pytest.param(m.NackRequest(99, []), StaleSession, "attach again", id="nack without session"),
        pytest.param(m.ReadRequest("s", None, 1, 1, 0.0), InvalidArgument, "start None", id="read without start"),
        pytest.param(m.ReadRequest("s", "latest", 1, 1, float("nan")), InvalidArgument, "wait of nan", id="wait"),
        pytest.param(m.AdminRequest("subject.explode"), InvalidArgument, "is not known", id="operation"),
        pytest.param(m.AdminRequest("subject.create"), InvalidArgument, "subject", id="no argument"),
        pytest.param(
            m.AdminRequest("subject.create", {"subject": 5}), InvalidArgument, "subject.create", id="argument type"
        ),
        pytest.param(
            m.AdminRequest("subject.create", {"subject": "s", "x": 1}), InvalidArgument, "x", id="extra argument"
        ),
        pytest.param(
            m.AdminRequest("subject.create", {"subject": "s", "retention_seconds": -1}),
            InvalidArgument,
            "a number above 0",
            id="age",
        ),
    ],
)
async def test_an_invalid_request_is_answered_with_the_reason(
    server: Server, witness: plait.Client, request_: m.PacketHead, kind: type[PlaitError], expected: str
):
    async with Raw(server, "raw") as raw:
        await raw.route("s")
        with pytest.raises(kind, match=expected):
            await raw.ask(request_)
        assert await raw.ask(m.HeartbeatRequest()) == m.DoneReply()


@pytest.mark.parametrize(
    "ranges",
    [
        [(-1, 5, 1)],
        [(5, 4, 1)],
        [(0, 1, -1)],
        [(0, 2**62, 1)],
        [(-(2**63), 2**63 - 1, 1)],
        [(0, 2**64 - 1, 2**64 - 1)],
    ],
)
async def test_impossible_ranges_are_refused_and_change_nothing(
    server: Server, witness: plait.Client, ranges: list[tuple[int, int, int]]
):
    async with Raw(server, "raw") as raw:
        await raw.store("orders", b"a", b"b")
        session = await raw.attach("orders")
        for request in (m.AckRequest(session, ranges), m.NackRequest(session, ranges)):
            with pytest.raises(InvalidArgument, match="is not a range"):
                await raw.ask(request)
        pulled = await raw.ask(m.PullRequest(session, 10, 1000, 0.0))
        assert pulled.ranges == [(0, 2, 1)]


@pytest.mark.parametrize("group", ["g", None])
async def test_acks_and_holds_of_undelivered_rows_skip_nothing(server: Server, group: str | None):
    async with Raw(server, "raw") as raw:
        await raw.store("orders", *[b"x"] * 10)
        session = await raw.attach("orders", group, start="earliest")
        await raw.ask(m.AckRequest(session, [(0, 10, 1)]))
        await raw.ask(m.DetachRequest(session))
        session = await raw.attach("orders", group, holds=[(0, 10, 1)])
        await raw.ask(m.AckRequest(session, [(0, 10, 1)]))
        pulled = await raw.ask(m.PullRequest(session, 4, 10_000, 0.0))
        assert pulled.ranges == [(0, 4, 1)]
        await raw.ask(m.AckRequest(session, [(0, 10, 1)]))
        pulled = await raw.ask(m.PullRequest(session, 10, 10_000, 0.0))
        assert pulled.ranges == [(4, 10, 1)]


async def test_overlapping_ranges_count_once(server: Server):
    async with Raw(server, "raw") as raw:
        await raw.store("orders", *[b"x"] * 10)
        session = await raw.attach("orders")
        await raw.ask(m.PullRequest(session, 10, 10_000, 0.0))
        await raw.ask(m.AckRequest(session, [(4, 6, 1), (0, 5, 1), (0, 5, 1), (5, 5, 1), (2, 3, 7)]))
        await raw.ask(m.NackRequest(session, [(6, 8, 1), (7, 8, 1)], 0.0))
        pulled = await raw.ask(m.PullRequest(session, 10, 10_000, 0.0))
        assert pulled.ranges == [(6, 8, 2)]
        group = server.membership.group("orders", "g")
    assert (group.cursor.floor, group.cursor.held_count) == (6, 4)


async def test_a_range_named_a_thousand_times_costs_no_more_than_once(server: Server):
    async with Raw(server, "raw") as raw:
        await raw.store("orders", *[b"x"] * 100)
        session = await raw.attach("orders")
        await raw.ask(m.PullRequest(session, 100, 100_000, 0.0))
        # The consumer holds every other row: fifty ranges, each of which overlaps every claim.
        await raw.ask(m.AckRequest(session, [(n, n + 1, 1) for n in range(0, 100, 2)]))
        await raw.ask(m.DetachRequest(session))
        written = server.broker.action_log.end
        await raw.attach("orders", holds=[(0, 100, 1)] * 1000)
        await raw.ask(m.AdminRequest("group.list"))
        await raw.ask(m.PartitionNumberRequest("another"))
    assert server.broker.action_log.end - written < 10_000


@pytest.mark.parametrize("count", [-5, 0, 1, 2**63 - 1])
@pytest.mark.parametrize("size", [-5, 0, 1, 2**63 - 1])
async def test_any_count_and_size_of_a_pull_or_read_is_accepted(server: Server, count: int, size: int):
    async with Raw(server, "raw") as raw:
        await raw.store("orders", b"a")
        await raw.store("orders", b"b", first=2, previous=1)
        session = await raw.attach("orders")
        pulled = await raw.ask(m.PullRequest(session, count, size, 0.0))
        assert pulled.ranges[0][0] == 0
        read = await raw.ask(m.ReadRequest("orders", "earliest", count, size, 0.0))
        assert 0 <= read.next <= 2


async def test_a_defect_closes_one_connection_with_an_internal_error(
    server: Server, witness: plait.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def broken(*_: object, **__: object) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(server.membership, "attach", broken)
    async with Raw(server, "raw") as raw:
        with caplog.at_level(logging.CRITICAL, "plait.server"):
            raw.request(m.AttachRequest("orders", "g", "raw"))
            error = await raw.ending()
    assert isinstance(error, InternalError)
    assert "KeyError" in error.message
    monkeypatch.undo()


async def test_a_defect_in_a_commit_stops_the_server_before_anything_is_acknowledged(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def broken(*_: object, **__: object) -> None:
        raise KeyError("a defect")

    async with Raw(server, "raw") as raw:
        partition = await raw.route("orders")
        monkeypatch.setattr(server.broker.turn, "_answer", broken)
        with caplog.at_level(logging.CRITICAL + 1, "plait.server"):
            raw.request(m.SendRequest(partition), WHOLE)
            assert await raw.ending() is None
            assert server.failed is not None
            failure = await asyncio.wait_for(server.failed, 60)
    assert "defect" in failure.message


async def test_a_packet_that_never_ends_affects_no_other_client(server: Server, witness: plait.Client):
    async with Raw(server, "raw") as raw:
        raw.write(HEADER.pack(PACKET_SIZE_MAX, m.SendRequest.KIND, 0, 1, 8) + bytes(100))
        await witness.send("other", b"x")
    async with Raw(server, "raw"):
        pass
    assert server.connections.partial_bytes == 0


async def test_random_bytes_affect_only_their_connection(server: Server, witness: plait.Client, seed: int):
    rng = random.Random(seed)
    heads = [
        codec.encode(message)
        for message in (m.PartitionNumberRequest("s"), m.AttachRequest("s", "g", "c"), m.PullRequest(1, 1, 1, 0.0))
    ]
    for _ in range(60):
        async with Raw(server, "raw") as raw:
            for _ in range(rng.randrange(1, 4)):
                kind = rng.choice([1, 5, 10, 12, 20, 22, 24, 25, 26, 30, 40, rng.randrange(65536)])
                head = bytearray(rng.choice(heads))
                for _ in range(rng.randrange(3)):
                    head[rng.randrange(len(head))] = rng.randrange(256)
                payload = rng.randbytes(rng.randrange(3) * 8)
                raw.write(pack(kind, rng.randrange(3), bytes(head), len(payload)) + payload)
            raw.writer.write_eof()
            error = await raw.ending()
            assert not isinstance(error, InternalError), error
