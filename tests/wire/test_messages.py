"""Packet heads: they round-trip, fields of newer versions are ignored, and other bytes are refused."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress
from typing import Any, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait import errors
from plait.errors import PlaitError, ProtocolError
from plait.limits import LOGICAL_PARTITIONS, REQUEST_RANGES_MAX, STAGES_PAGE_MAX
from plait.model.filter_terms import FilterTerms, TagFilter
from plait.model.reason import Reason
from plait.model.retry_policy import Retry
from plait.model.transaction_row import TransactionRow
from plait.wire import codec
from plait.wire import messages as m
from plait.wire import query_messages as q

KINDS: dict[str, type[m.PacketHead]] = {kind.__name__: kind for kind in m.PacketHead.__subclasses__()}

#: One message of each kind and its bytes in version 1. Later versions must read and write the same bytes.
GOLDEN: list[tuple[m.PacketHead, str]] = [
    (m.Hello(1, 3, "shop-1", ["zstd"]), "940103a673686f702d3191a47a737464"),
    (m.Welcome(1, "0.1.0", "g1", 7, 5.0, 64, []), "9701a5302e312e30a2673107cb40140000000000004090"),
    (m.ErrorReply("disk_full", "no room", {"last": 5}), "93a96469736b5f66756c6ca76e6f20726f6f6d81a46c61737405"),
    (m.DoneReply(), "90"),
    (m.NackReply(3), "9103"),
    (m.HeartbeatRequest(), "90"),
    (m.PartitionNumberRequest("order.book", delayed=True), "93aa6f726465722e626f6f6bc3c2"),
    (m.PartitionNumberReply(5, "order.book"), "9205aa6f726465722e626f6f6b"),
    (m.SendRequest(5, oneway=True), "9205c3"),
    (m.SendReply(300), "91cd012c"),
    (
        m.AttachRequest("s", "g", "c", ("sequence", 9), "at_least_once", [(1, 4, 2)]),
        "dc0010a173a167a16392a873657175656e636509ad61745f6c656173745f6f6e6365919301040200c0c2c20000c0c200c0",
    ),
    (m.AttachReply(1, 2, "s", "g", 16), "9b0102a173a16710cb0000000000000000c200c000c2"),
    (m.PullRequest(1, 500, 1_048_576, 20.0), "9401cd01f4ce00100000cb4034000000000000"),
    (m.PullReply([(0, 10, 1)], more=True), "959193000a01c3009000"),
    (m.AckRequest(1, [(0, 10, 1)]), "93019193000a0190"),
    (m.NackRequest(1, [(0, 10, 1)]), "9a019193000a01c0c0c2c390909090"),
    (
        m.NackRequest(1, [(0, 10, 1)], None, Reason("E", "t", "h"), True, False),
        "9a019193000a01c093a145a174a168c3c290909090",
    ),
    (
        m.NackRequest(1, [], 0.0, counted=False, lps=[(0, 512)], lp_ranges=[(0, 10, 1)], lp_tags=[3]),
        "9a0190cb0000000000000000c0c2c290919200cd02009193000a019103",
    ),
    (m.DetachRequest(1), "9101"),
    (m.ReadRequest("s", "latest", 10, 1000, 0.5), "96a173a66c61746573740acd03e8cb3fe0000000000000c0"),
    (m.ReadReply(1, "s", 10), "9501a1730ac290"),
    (m.AdminRequest("subject.list", {}), "92ac7375626a6563742e6c69737480"),
    (m.AdminReply(msgspec.Raw(b"\x90")), "9190"),
    (m.LeaseRequest(1, [(0, 512, 7, 9)], [5], [6], 8), "9501919400cd020007099105910608"),
    (
        m.LeaseReply(10.0, 3, [(0, 512, 7)], [(512, 513)], [(0, 1)], [(9, 10, 8)], [5]),
        "99cb402400000000000003919300cd0200079192cd0200cd0201919200019193090a0891059090",
    ),
    (m.RenewRequest([(1, 99)]), "9191920163"),
    (m.RouteRequest("order.book", create=False), "92aa6f726465722e626f6f6bc2"),
    (
        m.RouteReply(
            "s",
            2,
            "strict",
            [("s", "g1"), ("s#1", "g2")],
            [(0, 512, [(0, 7), (1, None)]), (512, 1024, [(0, None)])],
            {"g1": (["plait://a:1"], "RW")},
        ),
        "98a17302a67374726963749292a173a2673192a3732331a26732929300cd0200929200079201c093cd0200cd0400919200c081a267319291ab706c6169743a2f2f613a31a252579080",
    ),
    (
        m.MemberHeartbeatRequest("c", [("s", "g", True)], 5, 10.0, False, [("s", "g")]),
        "97a1639193a173a167c305cb4024000000000000c29192a173a16700",
    ),
    (
        q.QueryRequest("p", "k", (1, 2), None, 3, 4, (5, 6), 7, 8),
        "99a170a16b920102c003049205060708",
    ),
    (q.QueryReply(2, "p", 5, 9, 4, 1000), "9602a170050904cd03e8"),
    (
        m.MemberHeartbeatReply(
            6,
            [("s", "g", "exclusive", [(0, 512, 7)])],
            ["plait://a:1"],
            {"s": 2},
            [("t", "g", "subject_not_found", "no")],
        ),
        "95069194a173a167a96578636c7573697665919300cd02000791ab706c6169743a2f2f613a3181a173029194a174a167b17375626a6563745f6e6f745f666f756e64a26e6f",
    ),
    (m.TransactionChecksRequest("shop", 20.0), "92a473686f70cb4034000000000000"),
    (
        m.TransactionChecksReply([TransactionRow(7, "shop", "open", 9, 1, 2, 300, ["s"], [("s", b"f")])]),
        "91919907a473686f70a46f70656e090102cd012c91a1739192a173c40166",
    ),
]

numbers = st.integers(-(2**63), 2**64 - 1)
texts = st.text(max_size=20)
triples = st.lists(st.tuples(numbers, numbers, numbers), max_size=5)
plain = st.recursive(
    st.none() | st.booleans() | numbers | st.floats(allow_nan=False) | texts | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
VALUES: dict[Any, st.SearchStrategy[Any]] = {
    int: numbers,
    float: st.floats(allow_nan=False),
    str: texts,
    bool: st.booleans(),
    list[str]: st.lists(texts, max_size=4),
    int | None: st.none() | numbers,
    str | None: st.none() | texts,
    tuple[int, int] | None: st.none() | st.tuples(numbers, numbers),
    float | None: st.none() | st.floats(allow_nan=False),
    Reason | None: st.none() | st.builds(Reason, texts, texts, texts),
    FilterTerms | None: st.none() | st.builds(FilterTerms, st.builds(TagFilter, any=st.tuples(texts)), texts),
    Retry | None: st.none() | st.builds(Retry, first=st.floats(0, 1e6), steps=st.tuples(st.floats(0, 1e6))),
    list[tuple[int, int, int]]: triples,
    list[TransactionRow]: st.lists(
        st.builds(
            TransactionRow,
            *[numbers, texts, texts, numbers, numbers, numbers, numbers, st.lists(texts, max_size=2)],
            frames=st.lists(st.tuples(texts, st.binary(max_size=9)), max_size=2),
        ),
        max_size=3,
    ),
    list[int]: st.lists(numbers, max_size=4),
    list[m.LpWant]: st.lists(st.tuples(numbers, numbers, numbers, numbers), max_size=4),
    list[tuple[int, int]]: st.lists(st.tuples(numbers, numbers), max_size=4),
    list[tuple[str, str]]: st.lists(st.tuples(texts, texts), max_size=4),
    list[tuple[str, str, str, str]]: st.lists(st.tuples(texts, texts, texts, texts), max_size=4),
    list[m.LpHistory]: st.lists(
        st.tuples(numbers, numbers, st.lists(st.tuples(numbers, st.none() | numbers), max_size=3)), max_size=3
    ),
    dict[str, tuple[list[str], str]]: st.dictionaries(texts, st.tuples(st.lists(texts), texts), max_size=3),
    dict[str, int]: st.dictionaries(texts, numbers, max_size=3),
    dict[str, list[tuple[int, int, int, int]]]: st.dictionaries(
        texts, st.lists(st.tuples(numbers, numbers, numbers, numbers), max_size=3), max_size=3
    ),
    list[tuple[str, str, bool]]: st.lists(st.tuples(texts, texts, st.booleans()), max_size=3),
    list[tuple[str, str, str, list[m.LpGrant]]]: st.lists(st.tuples(texts, texts, texts, triples), max_size=3),
    m.Start: st.none() | texts | st.tuples(texts, numbers),
    dict[str, Any]: st.dictionaries(texts, plain, max_size=4),
    msgspec.Raw: plain.map(lambda value: msgspec.Raw(msgspec.msgpack.encode(value))),
}


def message_of(kind: type[m.PacketHead]) -> st.SearchStrategy[m.PacketHead]:
    hints = get_type_hints(kind)
    return st.builds(kind, **{field: VALUES[hints[field]] for field in kind.__struct_fields__})


messages = st.one_of([message_of(kind) for kind in KINDS.values()])


def decode(kind: int, head: bytes) -> m.PacketHead:
    return codec.decode(kind, memoryview(head))


@settings(deadline=None)
@given(messages)
def test_every_message_round_trips(message: m.PacketHead):
    assert decode(message.KIND, codec.encode(message)) == message


@settings(deadline=None)
@given(messages, st.lists(plain, min_size=1, max_size=3))
def test_fields_of_a_later_version_are_ignored(message: m.PacketHead, later: list[Any]):
    fields = [getattr(message, name) for name in message.__struct_fields__]
    assert decode(message.KIND, msgspec.msgpack.encode([*fields, *later])) == message


@pytest.mark.parametrize(("message", "frozen"), GOLDEN, ids=[type(message).__name__ for message, _ in GOLDEN])
def test_bytes_are_frozen(message: m.PacketHead, frozen: str):
    assert codec.encode(message).hex() == frozen
    assert decode(message.KIND, bytes.fromhex(frozen)) == message


def test_every_kind_has_a_unique_number_and_frozen_bytes():
    assert {kind.KIND for kind in KINDS.values()} == {
        1, 2, 3, 4, 5, 10, 11, 12, 13, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 40, 41, 50, 51, 52, 53,
        60, 61,
        70, 71,
    }  # fmt: skip
    assert len({kind.KIND for kind in KINDS.values()}) == len(KINDS)
    assert {type(message) for message, _ in GOLDEN} == set(KINDS.values())


def test_fields_of_an_older_version_get_their_defaults():
    assert decode(m.Hello.KIND, msgspec.msgpack.encode([1, 1, "c"])) == m.Hello(1, 1, "c", [])
    assert decode(m.AttachRequest.KIND, msgspec.msgpack.encode(["s", None, "c"])) == m.AttachRequest("s", None, "c")


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([*KINDS.values()]), st.binary(max_size=60) | plain.map(msgspec.msgpack.encode))
def test_arbitrary_heads_give_a_message_or_a_protocol_error(kind: type[m.PacketHead], head: bytes):
    with suppress(ProtocolError):
        assert type(decode(kind.KIND, head)) is kind


@settings(max_examples=200, deadline=None)
@given(messages, st.integers(0, 7), plain)
def test_a_value_of_any_type_in_any_field_gives_a_message_or_a_protocol_error(
    message: m.PacketHead, field: int, value: Any
):
    fields = [getattr(message, name) for name in message.__struct_fields__]
    fields[field : field + 1] = [value]
    with suppress(ProtocolError):
        assert type(decode(message.KIND, msgspec.msgpack.encode(fields))) is type(message)


@given(st.integers(0, 0xFFFF).filter(lambda number: number not in {kind.KIND for kind in KINDS.values()}))
def test_an_unknown_kind_is_named(kind: int):
    with pytest.raises(ProtocolError, match=f"packet kind {kind} is not known"):
        decode(kind, b"\x90")


@pytest.mark.parametrize("kind", [m.AttachRequest, m.ReadRequest, m.AdminRequest, m.ErrorReply])
def test_a_deeply_nested_head_is_refused(kind: type[m.PacketHead]):
    fields: dict[type[m.PacketHead], bytes] = {
        m.AttachRequest: b"\x94\xa1s\xa1g\xa1c",
        m.ReadRequest: b"\x95\xa1s",
        m.AdminRequest: b"\x92\xa1s\x81\xa1k",
        m.ErrorReply: b"\x93\xa1s\xa1t\x81\xa1k",
    }
    with pytest.raises(ProtocolError):
        decode(kind.KIND, fields[kind] + b"\x91" * 60_000)


@pytest.mark.parametrize(
    ("kind", "before"),
    [(m.AttachRequest, b"\x94\xa1s\xa1g\xa1c"), (m.AdminRequest, b"\x92\xa1s\x81\xa1k"), (m.Hello, b"")],
)
def test_a_head_of_many_tiny_objects_uses_a_few_times_its_size_in_memory(kind: type[m.PacketHead], before: bytes):
    count = (codec.RANGES_HEAD_SIZE_MAX if kind is m.AttachRequest else codec.HEAD_SIZE_MAX) - 100
    head = before + b"\xdd" + count.to_bytes(4, "big") + b"\x90" * count
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            decode(kind.KIND, head)
        assert tracemalloc.get_traced_memory()[1] < 2 * codec.HEAD_SIZE_MAX
    finally:
        tracemalloc.stop()


def test_a_head_over_its_limit_is_refused_before_decoding():
    with pytest.raises(ProtocolError, match=f"over the limit of {codec.HEAD_SIZE_MAX}"):
        decode(m.PullReply.KIND, bytes(codec.HEAD_SIZE_MAX + 1))
    for kind in (m.AttachRequest, m.AckRequest, m.NackRequest):
        with pytest.raises(ProtocolError, match=f"over the limit of {codec.RANGES_HEAD_SIZE_MAX}"):
            decode(kind.KIND, bytes(codec.RANGES_HEAD_SIZE_MAX + 1))
    with pytest.raises(ProtocolError, match=f"over the limit of {codec.OPEN_HEAD_SIZE_MAX}"):
        decode(m.AdminRequest.KIND, bytes(codec.OPEN_HEAD_SIZE_MAX + 1))


def test_a_pull_reply_may_have_many_ranges_and_a_request_as_many_as_the_limit():
    pulled = m.PullReply([(2 * n + 2**32, 2 * n + 2**32 + 1, 3) for n in range(1 << 18)])
    assert decode(m.PullReply.KIND, codec.encode(pulled)) == pulled
    ranges = [(2**62 + 2 * n, 2**62 + 2 * n + 1, 2**62) for n in range(REQUEST_RANGES_MAX)]
    tags = [2**62] * REQUEST_RANGES_MAX
    lps = [(lp, lp + 1) for lp in range(LOGICAL_PARTITIONS)]
    nack = m.NackRequest(1, ranges, 1.0, Reason("t" * 200, "\N{GRINNING FACE}" * 1000), tags=tags, lps=lps)
    assert decode(m.NackRequest.KIND, codec.encode(nack)) == nack


def test_a_listing_may_fill_a_packet():
    listing = msgspec.Raw(msgspec.msgpack.encode(["x" * 100] * 100_000))
    assert decode(m.AdminReply.KIND, codec.encode(m.AdminReply(listing))) == m.AdminReply(listing)


@pytest.mark.parametrize("code", errors.BY_CODE)
def test_every_error_round_trips_with_its_class(code: str):
    error = errors.BY_CODE[code]("what happened", last=5, subject="orders")
    failure = decode(m.ErrorReply.KIND, codec.encode(codec.failure_of(error)))
    assert isinstance(failure, m.ErrorReply)
    arrived = codec.error_of(failure)
    assert type(arrived) is type(error)
    assert (arrived.message, arrived.details, str(arrived)) == (error.message, error.details, str(error))


def test_an_error_may_name_as_many_stages_as_a_request():
    producers = [(1 << 63) - 1 - n for n in range(STAGES_PAGE_MAX)]
    error = errors.StaleRoute("elsewhere", producer=producers[0], producers=producers, odd=[b"x"], pair=(1, 2))
    failure = decode(m.ErrorReply.KIND, codec.encode(codec.failure_of(error)))
    assert isinstance(failure, m.ErrorReply)
    assert codec.error_of(failure).details == {"producer": producers[0], "producers": producers}


def test_an_error_code_of_a_later_version_becomes_a_plait_error():
    arrived = codec.error_of(m.ErrorReply("from_the_future", "what", {}))
    assert type(arrived) is PlaitError


def test_invalid_details_do_not_prevent_decoding_the_error():
    arrived = codec.error_of(m.ErrorReply("disk_full", "no room", {"message": 1, "self": 2, "": 3}))
    assert arrived.message == "no room"
    assert arrived.details == {"message": 1, "self": 2, "": 3}


def test_an_error_with_a_long_value_fits_into_its_packet():
    failure = codec.failure_of(errors.InvalidArgument("x" * 1_000_000))
    assert failure.message.endswith("...")
    assert decode(m.ErrorReply.KIND, codec.encode(failure)) == failure
