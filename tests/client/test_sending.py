"""``send``: receipts, bodies, refusals, and servers that are lost or silent."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import pydantic
import pytest

import plait
from plait.broker.appender import SendCallback
from plait.broker.partitions.partition import Partition
from plait.frame.builder import build_frame
from plait.frame.view import FrameView
from plait.limits import BODY_SIZE_MAX
from plait.testing import EmbeddedBroker
from tests.client.support import EAGER, PATIENCE_SECONDS, fetch_all, impatient, until


async def bodies_of(client: plait.Client, subject: str) -> list[bytes]:
    async with client.reader(subject, start="earliest") as reader:
        return [message.body for message in await reader.fetch(10_000, wait=0)]


async def test_a_receipt_names_message_partition_and_sequence(client: plait.Client) -> None:
    first = await client.send("order.book", b"created")
    second = await client.send("order.book", b"paid")
    assert (first.sequence, second.sequence) == (0, 1)
    assert str(first.partition) == "order.book@g1"
    assert first.message_id.producer == second.message_id.producer
    assert second.message_id.sequence == first.message_id.sequence + 1
    assert str(first.message_id) == f"{first.message_id.producer:016x}-{first.message_id.sequence}"


async def test_a_message_has_its_sent_fields_and_its_position(client: plait.Client) -> None:
    receipt = await client.send("order.book", b"created", key="order-1")
    async with client.consumer("order.book", group="billing") as consumer:
        [message] = await fetch_all(consumer, 1)
    assert (message.subject, message.body, message.key) == ("order.book", b"created", "order-1")
    assert (message.message_id, message.sequence, message.partition) == (
        receipt.message_id,
        receipt.sequence,
        receipt.partition,
    )
    assert message.send_time is not None
    assert message.send_time <= message.store_time
    assert (message.attempt, message.tags, message.headers) == (1, [], {})


async def test_concurrent_sends_are_sent_together_in_order(broker: EmbeddedBroker, client: plait.Client) -> None:
    await client.send("order.book", b"first")
    receipts = await asyncio.gather(*(client.send("order.book", b"%d" % n) for n in range(200)))
    assert [receipt.sequence for receipt in receipts] == list(range(1, 201))
    assert (await bodies_of(client, "order.book"))[1:] == [b"%d" % n for n in range(200)]
    assert len(broker.server.broker.subjects["order.book"].consume_log) == 2


async def test_one_send_or_half_of_many_leave_at_once_when_no_frame_is_in_flight(
    broker: EmbeddedBroker, client: plait.Client
) -> None:
    await client.send("order.book", b"first")
    counts: list[int] = []
    submit = broker.server.broker.submit

    def counting(partition: Partition, frame: FrameView, reply: SendCallback | None) -> None:
        counts.append(frame.count)
        submit(partition, frame, reply)

    broker.server.broker.submit = counting  # type: ignore[method-assign]
    await client.send("order.book", b"0")
    receipts = await asyncio.gather(*(client.send("order.book", b"%d" % n) for n in range(64)))
    assert [receipt.sequence for receipt in receipts] == list(range(2, 66))
    for count in (64, 31):
        await asyncio.gather(*(client.send("order.book", b"%d" % n) for n in range(count)))
    assert counts == [1, 1, 63, 32, 32, 31]
    sent = [0, *range(64), *range(64), *range(31)]
    assert (await bodies_of(client, "order.book"))[1:] == [b"%d" % n for n in sent]


@dataclass
class Paid:
    amount: int


class Placed(msgspec.Struct):
    amount: int


class Shipped(pydantic.BaseModel):
    amount: int


@pytest.mark.parametrize(
    ("body", "stored"),
    [
        (b"\0\xff", b"\0\xff"),
        (bytearray(b"ab"), b"ab"),
        (memoryview(b"ab"), b"ab"),
        ("grün", "grün".encode()),
        ({"a": [1, None]}, b'{"a":[1,null]}'),
        (Paid(5), b'{"amount":5}'),
        (Placed(5), b'{"amount":5}'),
        (Shipped(amount=5), b'{"amount":5}'),
        (b"", b""),
    ],
)
async def test_bodies_are_encoded_by_type(client: plait.Client, body: Any, stored: bytes) -> None:
    await client.send("order.book", body)
    await client.send_many("order.book", [body, body])
    assert await bodies_of(client, "order.book") == [stored] * 3


@pytest.mark.parametrize("body", [object(), "\ud800", {1j: 2}])
async def test_a_body_without_a_codec_is_refused(client: plait.Client, body: Any) -> None:
    with pytest.raises(plait.CodecError, match="cannot be encoded"):
        await client.send("order.book", body)
    with pytest.raises(plait.CodecError, match="cannot be encoded"):
        client.post("order.book", body)
    assert (await client.send("order.book", b"fine")).sequence == 0


async def test_a_body_over_the_limit_is_refused_and_one_at_the_limit_is_not(client: plait.Client) -> None:
    with pytest.raises(plait.TooLarge, match=str(BODY_SIZE_MAX)):
        await client.send("large", bytes(BODY_SIZE_MAX + 1))
    with pytest.raises(plait.TooLarge, match=str(BODY_SIZE_MAX)):
        await client.send_many("large", [b"small", bytes(BODY_SIZE_MAX + 1)])
    receipt = await client.send("large", bytes(BODY_SIZE_MAX))
    async with client.reader("large", start=receipt.sequence or 0) as reader:
        [message] = await reader.fetch(1)
    assert len(message.body) == BODY_SIZE_MAX


async def test_a_oneway_send_has_no_sequence_and_is_stored(client: plait.Client) -> None:
    async with client.consumer("order.book", group="billing") as consumer:
        receipt = await client.send("order.book", b"maybe", key="k", oneway=True)
        [message] = await fetch_all(consumer, 1)
    assert receipt.sequence is None
    assert (message.body, message.key, message.message_id) == (b"maybe", "k", receipt.message_id)


async def test_concurrent_oneway_sends_keep_their_ids(client: plait.Client) -> None:
    async with client.consumer("order.book", group="billing") as consumer:
        receipts = [await client.send("order.book", b"%d" % n, oneway=True) for n in range(50)]
        messages = await fetch_all(consumer, 50)
    assert [m.body for m in messages] == [b"%d" % n for n in range(50)]
    assert [m.message_id for m in messages] == [r.message_id for r in receipts]


@pytest.mark.parametrize("subject", ["", ".hidden", "-x", "a b", "ä", "x" * 201, "a/b", None, 5])
async def test_an_invalid_subject_name_is_refused(client: plait.Client, subject: Any) -> None:
    with pytest.raises(plait.InvalidName, match="subject name"):
        await client.send(subject, b"")
    with pytest.raises(plait.InvalidName, match="subject name"):
        client.post(subject, b"")
    with pytest.raises(plait.InvalidName, match="subject name"):
        client.consumer(subject, group="g")
    with pytest.raises(plait.InvalidName, match="subject name"):
        client.reader(subject)


async def test_every_allowed_character_is_accepted_in_a_name(client: plait.Client) -> None:
    assert str((await client.send("A_z%9.b:c-d" + "x" * 189, b"")).partition).startswith("A_z%9.b:c-d")


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
async def test_compressed_bodies_are_smaller_and_read_back_unchanged(
    broker: EmbeddedBroker, compression: Literal["zstd", "lz4"]
) -> None:
    bodies = [b"the same words again and again %d" % (n % 7) for n in range(2_000)]
    async with broker.connect() as plain, plait.connect(broker.address, compression=compression) as packed:
        await plain.send_many("plain", bodies)
        await packed.send_many("packed", bodies)
        for body in bodies[:10]:
            packed.post("packed", body)
        await packed.flush()
        sizes = {info.subject: info.size for info in await plain.admin.subjects()}
        assert sizes["packed"] < sizes["plain"] / 4
        async with plain.consumer("packed", group="g") as consumer:
            assert [m.body for m in await fetch_all(consumer, 2_010)] == bodies + bodies[:10]


async def test_an_unknown_compression_is_refused() -> None:
    with pytest.raises(plait.InvalidArgument, match="'zip' is not known"):
        plait.connect(compression="zip")  # type: ignore[arg-type]


# --- refusals ---------------------------------------------------------------------------------------------------------


async def test_a_refusal_reaches_the_caller_at_once_and_the_next_send_succeeds(
    broker: EmbeddedBroker, client: plait.Client
) -> None:
    await client.admin.create_subject("order.book")
    broker.server.broker.turn.read_only = True
    with pytest.raises(plait.ReadOnly):
        await client.send("order.book", b"refused")
    with pytest.raises(plait.ReadOnly):
        await client.send("new.subject", b"refused")
    broker.server.broker.turn.read_only = False
    assert (await client.send("order.book", b"stored")).sequence == 0
    assert (await client.send("new.subject", b"stored")).sequence == 0


async def test_frames_behind_a_refused_one_are_stored_in_order_and_once(
    broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R7: a frame names its predecessor; when the predecessor is refused, the later frames name another one."""
    submit = broker.server.broker.submit

    def refuse_some(partition: Partition, frame: FrameView, reply: SendCallback | None) -> None:
        if frame.first in refused:
            refused.remove(frame.first)
            raise plait.FlowControl("too busy")
        submit(partition, frame, reply)

    monkeypatch.setattr(broker.server.broker, "submit", refuse_some)
    async with broker.connect(limits=plait.ClientLimits(frame_count=1)) as client:
        for refused in ({1}, {13}, {23, 24, 30}):
            results = await asyncio.gather(
                *(client.send("order.book", b"%d" % n) for n in range(10)), return_exceptions=True
            )
            failed = [n for n, result in enumerate(results) if isinstance(result, plait.FlowControl)]
            assert not refused
            stored = [b"%d" % n for n in range(10) if n not in failed]
            assert (await bodies_of(client, "order.book"))[-len(stored) :] == stored
            sequences = [r.sequence for r in results if isinstance(r, plait.Receipt)]
            assert sequences == list(range(sequences[0] or 0, (sequences[0] or 0) + len(stored)))
        assert len(await bodies_of(client, "order.book")) == 25


async def test_frames_in_flight_when_the_producer_is_forgotten_are_stored_once_and_in_order(
    broker: EmbeddedBroker,
) -> None:
    async with broker.connect(limits=plait.ClientLimits(frame_count=2, in_flight_frames=4)) as client:
        await client.send("order.book", b"known")
        broker.server.broker.producers._windows.clear()
        bodies = [b"%d" % number for number in range(40)]
        receipts = await asyncio.gather(*(client.send("order.book", body) for body in bodies))
        assert await bodies_of(client, "order.book") == [b"known", *bodies]
        assert [receipt.sequence for receipt in receipts] == list(range(1, 41))
        assert len({receipt.message_id for receipt in receipts}) == 40


async def test_send_many_keeps_its_place_while_frames_wait_for_their_replies(broker: EmbeddedBroker) -> None:
    async with broker.connect(limits=plait.ClientLimits(in_flight_frames=1)) as client:
        await client.send("order.book", b"0", key="k")
        waiting = asyncio.ensure_future(client.send("order.book", b"1", key="k"))
        await asyncio.sleep(0)
        many = asyncio.ensure_future(client.send_many("order.book", [b"2", b"3"], keys=["k", "k"]))
        await asyncio.sleep(0)
        await asyncio.gather(waiting, many, client.send("order.book", b"4", key="k"))
        assert await bodies_of(client, "order.book") == [b"0", b"1", b"2", b"3", b"4"]


async def test_only_a_send_in_doubt_fails_when_the_producer_is_forgotten(broker: EmbeddedBroker) -> None:
    async with broker.connect(limits=EAGER) as client:
        await client.send("order.book", b"known")
        link = client._node.link
        assert link is not None
        answer = link.buffer_updated
        # The row is stored, but the link breaks before the reply arrives.
        link.buffer_updated = lambda size: None  # type: ignore[method-assign]
        doubtful = asyncio.ensure_future(client.send("order.book", b"in doubt"))
        await until(lambda: broker.server.broker.subjects["order.book"].next == 2)
        broker.server.broker.producers._windows.clear()
        behind = asyncio.ensure_future(client.send("order.book", b"behind it"))
        link.buffer_updated = answer  # type: ignore[method-assign]
        link.abort()
        with pytest.raises(plait.UnknownProducer, match="may or may not be stored"):
            await doubtful
        await asyncio.wait_for(behind, PATIENCE_SECONDS)
        assert await bodies_of(client, "order.book") == [b"known", b"in doubt", b"behind it"]


@pytest.mark.parametrize("frame_count", [1, 100])
async def test_rows_that_another_process_stored_under_the_same_producer_sequences_are_refused(
    broker: EmbeddedBroker, frame_count: int
) -> None:
    """A producer id is visible in every message id, so every reader of a message can send under it."""
    async with broker.connect(limits=plait.ClientLimits(frame_count=frame_count)) as client:
        real = await client.send("order.book", b"real 1")
        first = real.message_id.sequence + 1
        partition = broker.server.broker.subjects["order.book"]
        frames = [
            build_frame([b"forged"], producer=real.message_id.producer, first=first + n, previous=first + n - 1)
            for n in range(5)
        ]
        for frame in frames:
            broker.server.broker.submit(partition, FrameView(frame.tobytes()), None)
        results = await asyncio.gather(
            *(client.send("order.book", b"real %d" % n) for n in range(2, 12)), return_exceptions=True
        )
        refused = [result for result in results if isinstance(result, plait.ProducerConflict)]
        receipts = [result for result in results if isinstance(result, plait.Receipt)]
        assert len(refused) + len(receipts) == 10
        assert refused
        assert "'order.book' with other contents: another process uses this producer id" in str(refused[0])
        after = await client.send("order.book", b"after")
        assert after.message_id.producer != real.message_id.producer
        stored = await bodies_of(client, "order.book")
        assert len(stored) == len(receipts) + 7
        for receipt in receipts:
            assert stored[receipt.sequence or 0].startswith(b"real"), receipt


# --- an unreachable server --------------------------------------------------------------------------------------------


async def test_a_send_without_a_reply_times_out_with_the_reason(broker: EmbeddedBroker, client: plait.Client) -> None:
    await client.send("order.book", b"first")
    await broker.kill()
    with impatient(client), pytest.raises(plait.Timeout, match=r"'order.book' within 0.05 s"):
        await client.send("order.book", b"lost")
    await broker.start()
    assert (await client.send("order.book", b"last")).sequence == 1


async def test_a_first_frame_that_timed_out_does_not_fail_later_frames(
    broker: EmbeddedBroker, client: plait.Client
) -> None:
    await client.admin.create_subject("order.book")
    await broker.kill()
    with impatient(client), pytest.raises(plait.Timeout):
        await client.send("order.book", b"lost")
    await broker.start()
    assert (await client.send("order.book", b"stored")).sequence == 0


async def test_a_refused_connection_is_reported_soon_with_its_address_and_a_hint(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Much longer than the test may take: a refused connection does not wait for request_seconds.
    limits = plait.ClientLimits(request_seconds=600.0, refused_seconds=0.05)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"plait://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(plait.Unavailable, match=f"{address}.*is 'plait serve' running there?") as raised:
            async with asyncio.timeout(PATIENCE_SECONDS), plait.connect(address, limits=limits):
                pass
    assert raised.value.details["refused"]
    # Logged once, at the first attempt.
    assert [record.levelname for record in caplog.records if address in record.message] == ["WARNING"]


async def test_an_open_waits_for_a_starting_server(broker: EmbeddedBroker) -> None:
    await broker.kill()
    opening = asyncio.ensure_future(plait.connect(broker.address, limits=EAGER).open())
    await asyncio.sleep(0)
    await broker.start()
    client = await asyncio.wait_for(opening, PATIENCE_SECONDS)
    await client.close()


@pytest.mark.parametrize(
    "address",
    [
        "",
        "plait://",
        "plait://:7450",
        "host:port",
        "plait://h:0",
        "http://localhost:7450",
        "a b:1",
        "a..b",
        "h:65536",
        [],
    ],
)
async def test_an_invalid_address_is_refused(address: Any) -> None:
    with pytest.raises(plait.InvalidArgument, match="plait://host:port"):
        plait.connect(address)


async def test_the_first_address_that_answers_is_used(broker: EmbeddedBroker) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        addresses = [f"plait://127.0.0.1:{free.getsockname()[1]}", broker.address]
        async with plait.connect(addresses) as client:
            assert (await client.send("s", b"")).sequence == 0
        async with plait.connect(", ".join(addresses)) as client:
            assert (await client.send("s", b"")).sequence == 1


async def test_a_client_that_is_not_open_refuses_calls(broker: EmbeddedBroker) -> None:
    client = broker.connect()
    uses: list[Callable[[], Any]] = [
        lambda: client.send("s", b""),
        lambda: client.send_many("s", [b""]),
        lambda: client.flush(),
        lambda: client.admin.subjects(),
    ]
    for state in ("not connected", "is closed"):
        for use in uses:
            with pytest.raises(plait.Closed, match=state):
                await use()
        with pytest.raises(plait.Closed, match=state):
            client.post("s", b"")
        with pytest.raises(plait.Closed, match=state):
            client.consumer("s", group="g")
        with pytest.raises(plait.Closed, match=state):
            client.reader("s")
        if state == "not connected":
            async with client:
                await client.send("s", b"")


async def test_a_cancelled_send_does_not_disturb_other_sends(client: plait.Client) -> None:
    await client.send("order.book", b"0")
    sends = [asyncio.ensure_future(client.send("order.book", b"%d" % n)) for n in range(1, 4)]
    await asyncio.sleep(0)
    sends[1].cancel()
    assert [(await sends[0]).sequence, (await sends[2]).sequence] == [1, 3]
    await until(lambda: client._producer.buffered == 0)
