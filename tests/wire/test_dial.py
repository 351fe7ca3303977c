"""The client side of a connection, against correct and faulty servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from plait.errors import DiskFull, PlaitError, ProtocolError, Unavailable, VersionMismatch
from plait.wire import codec
from plait.wire import messages as m
from plait.wire.link import HEADER, HEADER_SIZE, Link, dial, pack, parse_address

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
WELCOME = m.Welcome(1, "0.1.0", "g1", 1, 5.0, 64)


@asynccontextmanager
async def listening(script: Script) -> AsyncIterator[str]:
    """A server that runs the script for each connection and then closes it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await script(reader, writer)
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"plait://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


async def next_request(reader: asyncio.StreamReader) -> tuple[int, int]:
    """(kind, correlation) of the next packet."""
    size, kind, _, correlation, _ = HEADER.unpack(await reader.readexactly(HEADER_SIZE))
    await reader.readexactly(size - HEADER_SIZE)
    return kind, correlation


def packet(correlation: int, message: m.PacketHead, payload: bytes = b"") -> bytes:
    return pack(message.KIND, correlation, codec.encode(message), len(payload)) + payload


async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    _, correlation = await next_request(reader)
    writer.write(packet(correlation, WELCOME))


@asynccontextmanager
async def linked(script: Script) -> AsyncIterator[Link]:
    """A link to a server that replies with a welcome and then runs the script."""

    async def whole(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await welcome(reader, writer)
        await script(reader, writer)

    async with listening(whole) as address:
        link = await dial(address, "c", 5.0)
        try:
            yield link
        finally:
            link.abort()
            await until_lost(link)


async def until_lost(link: Link) -> None:
    """Wait until the link is lost."""
    lost = asyncio.get_running_loop().create_future()
    before = link.on_lost

    def on_lost() -> None:
        before()
        lost.set_result(None)

    link.on_lost = on_lost
    if not link.closed:
        await lost


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("plait://127.0.0.1:7000", ("127.0.0.1", 7000)),
        ("plait://broker", ("broker", 7450)),
        ("broker:80", ("broker", 80)),
        (" plait://broker:1/ ", ("broker", 1)),
        ("plait://[::1]:9", ("::1", 9)),
        ("plait://[::1]", ("::1", 7450)),
    ],
)
def test_addresses_are_parsed(address: str, expected: tuple[str, int]):
    assert parse_address(address) == expected


async def test_replies_in_any_order_reach_their_requests():
    async def reversed_answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        numbers = [(await next_request(reader))[1] for _ in range(3)]
        for place, number in reversed(list(enumerate(numbers))):
            writer.write(packet(number, m.SendReply(place), b"p" * place))

    async with linked(reversed_answers) as link:
        answers = await asyncio.gather(*(link.request_payload(m.SendRequest(1)) for _ in range(3)))
    assert [(answer.sequence, bytes(payload)) for answer, payload in answers] == [(0, b""), (1, b"p"), (2, b"pp")]


async def test_a_request_that_cannot_be_packed_leaves_no_state():
    async with linked(answer_all) as link:
        answers: list[object] = []
        with pytest.raises(OverflowError):
            link.call(m.AdminRequest("x", {"number": 1 << 70}), lambda *answer: answers.append(answer))
        with pytest.raises(ProtocolError, match="over the limit"):
            link.call(m.HeartbeatRequest(), lambda *answer: answers.append(answer), size=1 << 31)
        assert await link.request(m.SendRequest(1)) == m.SendReply(0)
    assert answers == []


async def answer_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        try:
            _, number = await next_request(reader)
        except asyncio.IncompleteReadError:
            return
        writer.write(packet(number, m.SendReply(0)))


async def test_an_error_reply_fails_only_its_request():
    async def one_failure(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, second = (await next_request(reader))[1], (await next_request(reader))[1]
        writer.write(packet(first, codec.failure_of(DiskFull("no room", last=4))) + packet(second, m.DoneReply()))

    async with linked(one_failure) as link:
        failed, done = await asyncio.gather(
            link.request(m.HeartbeatRequest()), link.request(m.HeartbeatRequest()), return_exceptions=True
        )
    assert isinstance(failed, DiskFull)
    assert failed.details == {"last": 4}
    assert done == m.DoneReply()


async def test_a_lost_connection_fails_open_and_later_requests():
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await next_request(reader)

    async with linked(hang_up) as link:
        with pytest.raises(Unavailable, match="lost"):
            await link.request(m.HeartbeatRequest())
        with pytest.raises(Unavailable):
            await link.request(m.HeartbeatRequest())


async def test_an_error_of_the_connection_fails_every_request_as_unavailable():
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await next_request(reader)
        writer.write(packet(0, codec.failure_of(DiskFull("no room"))))

    async with linked(refuse) as link:
        with pytest.raises(Unavailable, match="no room"):
            await link.request(m.HeartbeatRequest())
        assert isinstance(link.error, DiskFull)


@pytest.mark.parametrize(
    "garbage",
    [
        pytest.param(b"\xff" * 64, id="size"),
        pytest.param(pack(9999, 2, b"\x90"), id="kind"),
        pytest.param(pack(m.SendReply.KIND, 2, b"\xc1"), id="head"),
        pytest.param(HEADER.pack(HEADER_SIZE, m.SendReply.KIND, 0, 2, 50), id="head size"),
    ],
)
async def test_a_protocol_error_of_the_server_closes_the_connection(garbage: bytes):
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await next_request(reader)
        writer.write(garbage)
        await reader.read()

    async with linked(babble) as link:
        with pytest.raises(Unavailable, match="closed the connection"):
            await link.request(m.HeartbeatRequest())
        assert isinstance(link.error, ProtocolError)


async def test_replies_without_a_waiting_request_are_ignored():
    async def talkative(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, number = await next_request(reader)
        writer.write(
            packet(77, m.DoneReply()) + packet(78, codec.failure_of(DiskFull("x"))) + packet(number, m.DoneReply())
        )

    async with linked(talkative) as link:
        assert await link.request(m.HeartbeatRequest()) == m.DoneReply()


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        pytest.param(m.DoneReply(), ProtocolError, "answered with packet kind 4 instead of 2", id="another reply"),
        pytest.param(m.Welcome(2, "9", "g1", 1, 5.0, 64), VersionMismatch, "chose protocol 2", id="version"),
        pytest.param(codec.failure_of(VersionMismatch("we speak 2")), VersionMismatch, "we speak 2", id="refusal"),
    ],
)
async def test_a_refused_hello_raises_the_reason(answer: m.PacketHead, kind: type[PlaitError], text: str):
    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, correlation = await next_request(reader)
        writer.write(packet(correlation, answer))

    async with listening(other) as address:
        with pytest.raises(kind, match=text):
            await dial(address, "c", 5.0)


async def test_a_server_of_another_protocol_is_detected_at_once():
    async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        await reader.read()

    async with listening(http) as address:
        with pytest.raises(ProtocolError):
            await dial(address, "c", 5.0)


async def test_a_silent_server_is_unavailable_after_the_timeout():
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with listening(silent) as address:
        with pytest.raises(Unavailable, match=r"no answer from .* within 0.05 s"):
            await dial(address, "c", 0.05)


async def test_without_a_server_the_error_names_the_command_to_start_one():
    async with listening(welcome) as address:
        pass
    with pytest.raises(Unavailable, match="is 'plait serve' running there"):
        await dial(address, "c", 5.0)


def test_every_request_has_one_kind_of_reply():
    answers = set(codec.ANSWERS.values()) | {m.ErrorReply.KIND}
    assert {kind.KIND for kind in m.PacketHead.__subclasses__()} == answers | set(codec.ANSWERS)
