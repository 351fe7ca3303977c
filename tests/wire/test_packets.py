"""The receiver: it returns the same packets however the bytes are cut, and refuses invalid bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import ProtocolError
from plait.limits import PACKET_SIZE_MAX
from plait.wire import codec, link
from plait.wire import messages as m
from plait.wire.link import GROWTH_FIRST, HEADER, HEADER_SIZE, SHARED_SIZE, Receiver, pack
from tests.wire.test_messages import messages

#: Message, correlation and payload of a packet.
Content = tuple[m.PacketHead, int, bytes]


class Seen(NamedTuple):
    """The packets of a receiver and its error."""

    packets: list[Content]
    error: str | None


def feed(receiver: Receiver, data: bytes, cuts: Iterator[int]) -> Iterator[link.Packet]:
    """Feed bytes as a socket does: at most the size of the buffer and of the next cut at a time."""
    position = 0
    while position < len(data):
        buffer = receiver.get_buffer(-1)
        count = min(len(buffer), next(cuts), len(data) - position)
        buffer[:count] = data[position : position + count]
        position += count
        yield from receiver.received(count)
        if receiver.failure is not None:
            raise receiver.failure


def endless(cuts: list[int]) -> Iterator[int]:
    while True:
        yield from cuts


def see(data: bytes, cuts: list[int], shared_size: int = SHARED_SIZE) -> Seen:
    shared = memoryview(bytearray(shared_size))
    found: list[link.Packet] = []
    error = None
    try:
        found.extend(feed(Receiver(shared), data, endless(cuts)))
    except ProtocolError as failure:
        error = failure.message
    # Packets own their memory, because the receive buffer is reused.
    shared[:] = b"\xaa" * shared_size
    return Seen([(p.message, p.correlation, bytes(p.payload)) for p in found], error)


content = st.tuples(messages, st.integers(0, 0xFFFF_FFFF), st.binary(max_size=700))
cutting = st.lists(st.integers(1, 400), min_size=1, max_size=12)


def stream(contents: list[Content]) -> bytes:
    return b"".join(
        pack(message.KIND, number, codec.encode(message), len(payload)) + payload
        for message, number, payload in contents
    )


@settings(deadline=None)
@given(st.lists(content, max_size=8), cutting, st.integers(1, 600), st.integers(32, 300))
def test_packets_do_not_depend_on_how_the_stream_is_cut(
    contents: list[Content], cuts: list[int], shared_size: int, growth: int
):
    with patch.object(link, "GROWTH_FIRST", growth):
        assert see(stream(contents), cuts, shared_size) == Seen(contents, None)


@settings(deadline=None)
@given(
    st.lists(content, max_size=3), st.binary(max_size=300), cutting, cutting, st.integers(1, 600), st.integers(1, 600)
)
def test_arbitrary_bytes_give_packets_or_a_protocol_error_however_they_are_cut(
    contents: list[Content],
    tail: bytes,
    cuts: list[int],
    other_cuts: list[int],
    shared_size: int,
    other_shared_size: int,
):
    data = stream(contents) + tail
    seen = see(data, cuts, shared_size)
    assert seen == see(data, other_cuts, other_shared_size)
    assert seen.packets[: len(contents)] == contents


@settings(deadline=None)
@given(st.integers(HEADER_SIZE, PACKET_SIZE_MAX), st.lists(st.integers(1, 100_000), max_size=20))
def test_an_incomplete_packet_uses_memory_only_for_received_bytes(declared: int, arrivals: list[int]):
    receiver = Receiver(memoryview(bytearray(SHARED_SIZE)))
    data = HEADER.pack(declared, 1, 0, 1, 0) + bytes(sum(arrivals))
    room = 0
    fed = 0
    for count in [HEADER_SIZE, *arrivals]:
        piece = data[fed : fed + count]
        if fed + count >= declared:
            return
        assert not [*feed(receiver, piece, endless([SHARED_SIZE]))]
        fed += len(piece)
        room = max(room, len(receiver.get_buffer(-1)) + receiver.partial_size)
        assert receiver.partial_size == fed
    assert room <= max(GROWTH_FIRST, 2 * fed, SHARED_SIZE + HEADER_SIZE)


@pytest.mark.parametrize("size", [0, HEADER_SIZE - 1, PACKET_SIZE_MAX + 1, 0xFFFF_FFFF])
def test_an_impossible_size_is_refused_with_the_first_header(size: int):
    assert see(HEADER.pack(size, 1, 0, 1, 0), [100]).error == (
        f"packet size {size} is outside {HEADER_SIZE} to {PACKET_SIZE_MAX}"
    )


def test_packets_before_an_invalid_one_are_returned():
    good = pack(m.DoneReply.KIND, 9, b"\x90")
    seen = see(good + b"\xff" * 16, [1000])
    assert seen.packets == [(m.DoneReply(), 9, b"")]
    assert seen.error is not None


@pytest.mark.parametrize("head_size", [1, 7, 100, 0xFFFF_FFFF])
def test_a_head_that_passes_the_end_is_refused(head_size: int):
    assert see(HEADER.pack(HEADER_SIZE, 1, 0, 1, head_size), [100]).error == (
        f"packet head of {head_size} bytes passes the packet's end"
    )


def test_a_packet_of_the_largest_size_is_received_in_place():
    payload_size = PACKET_SIZE_MAX - HEADER_SIZE - 8
    data = pack(m.SendRequest.KIND, 1, b"\x91\x01", payload_size) + b"\x01" * payload_size
    ((message, _, payload),) = see(data, [100_000]).packets
    assert message == m.SendRequest(1)
    assert payload == b"\x01" * payload_size


def test_a_packet_that_is_too_large_is_not_packed():
    with pytest.raises(ProtocolError, match="over the limit"):
        pack(12, 1, b"", PACKET_SIZE_MAX)


def test_a_head_may_be_larger_than_64_kib():
    reply = m.PullReply([(n, n + 1, 1) for n in range(0, 40_000, 2)])
    assert see(pack(m.PullReply.KIND, 1, codec.encode(reply)), [5000]).packets == [(reply, 1, b"")]


@pytest.mark.parametrize(
    ("kind", "head", "error"),
    [
        (999, b"\x90", "packet kind 999 is not known"),
        (m.SendRequest.KIND, b"\xc1", "does not decode"),
        (m.AdminRequest.KIND, b"\xc6" + bytes(70_000), "over the limit of 65536"),
    ],
)
def test_a_head_that_is_no_message_is_refused_after_the_packets_before_it(kind: int, head: bytes, error: str):
    seen = see(pack(m.DoneReply.KIND, 9, b"\x90") + pack(kind, 1, head), [1000])
    assert seen.packets == [(m.DoneReply(), 9, b"")]
    assert error in str(seen.error)


def test_the_header_is_as_documented():
    assert pack(0x0102, 0x0A0B0C0D, b"\x90", 5).hex() == "1d000000" + "0201" + "0000" + "0d0c0b0a" + "01000000" + (
        "9000000000000000"
    )
