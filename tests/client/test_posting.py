"""``post``, tickets, ``flush`` and the buffer's limit; ``send_many``."""

from __future__ import annotations

import asyncio

import pyarrow as pa
import pytest

import plait
from plait.testing import EmbeddedBroker
from tests.client.support import impatient, until


async def read(client: plait.Client, subject: str) -> list[plait.Message]:
    messages: list[plait.Message] = []
    async with client.reader(subject, start="earliest") as reader:
        while more := await reader.fetch(1_000_000, wait=0):
            messages += more
    return messages


async def test_a_ticket_returns_the_receipt_without_a_flush(client: plait.Client) -> None:
    tickets = [client.post("order.book", b"%d" % n, key=f"k{n}") for n in range(5)]
    assert not any(ticket.done for ticket in tickets)
    assert [(await ticket).sequence for ticket in tickets] == [0, 1, 2, 3, 4]
    assert all(ticket.done for ticket in tickets)
    assert [(m.key, m.body) for m in await read(client, "order.book")] == [(f"k{n}", b"%d" % n) for n in range(5)]


async def test_flush_waits_for_the_posts_of_all_subjects(client: plait.Client) -> None:
    tickets = [client.post(f"subject.{n % 3}", b"") for n in range(300)]
    await client.flush()
    assert all(ticket.done for ticket in tickets)


async def test_posts_and_sends_keep_their_order(client: plait.Client) -> None:
    client.post("order.book", b"1")
    client.post("order.book", b"2")
    await client.send("order.book", b"3")
    client.post("order.book", b"4")
    await client.send_many("order.book", [b"5", b"6"])
    assert [m.body for m in await read(client, "order.book")] == [b"1", b"2", b"3", b"4", b"5", b"6"]


async def test_a_full_buffer_refuses_posts_and_makes_sends_wait(broker: EmbeddedBroker) -> None:
    async with broker.connect(limits=plait.ClientLimits(buffer_bytes=10_000)) as client:
        posted = 0
        while client._producer.buffered < 10_000:
            client.post("order.book", bytes(100))
            posted += 1
        with pytest.raises(plait.BufferFull, match=r"limit 10000.*flush"):
            client.post("order.book", b"")
        assert 50 <= posted <= 100
        receipts = await asyncio.gather(*(client.send("order.book", bytes(5_000)) for _ in range(20)))
        assert [receipt.sequence for receipt in receipts] == list(range(posted, posted + 20))
        client.post("order.book", b"room again")
        await client.flush()
        assert client._producer.buffered == 0


async def test_no_send_overtakes_one_that_waits_for_room(broker: EmbeddedBroker) -> None:
    async with broker.connect(limits=plait.ClientLimits(buffer_bytes=2_000)) as client:
        await client.admin.create_subject("order.book", order="strict")
        sends: list[asyncio.Future[plait.Receipt]] = []
        posts: list[tuple[int, plait.Ticket]] = []
        refused = 0
        for number in range(600):
            sends.append(asyncio.ensure_future(client.send("order.book", bytes(100 + number % 7 * 100), key="k")))
            # Sends arrive while others wait for room, and while those are about to continue.
            for _ in range(1 if number % 10 == 1 else number % 3):
                await asyncio.sleep(0)
            if number % 10 == 1:
                # The last send has had a turn of the loop, so it has begun.
                sends[number // 2].cancel()
                try:
                    posts.append((number, client.post("order.book", b"", key="k")))
                except plait.BufferFull:
                    refused += 1
        done = await asyncio.gather(*sends, return_exceptions=True)
        stored = [(number + 0.0, each.sequence) for number, each in enumerate(done) if isinstance(each, plait.Receipt)]
        stored += [(number + 0.5, (await ticket).sequence) for number, ticket in posts]
    sequences = [sequence for _, sequence in sorted(stored)]
    assert refused
    assert len(sequences) > 500
    assert sequences == sorted(sequences)


async def test_send_many_does_not_overtake_sends_that_waited_for_room_before_it(broker: EmbeddedBroker) -> None:
    async with broker.connect(limits=plait.ClientLimits(buffer_bytes=2_000)) as client:
        await client.admin.create_subject("order.book", order="strict")
        client.post("order.book", bytes(3_000), key="k")
        sends = [asyncio.ensure_future(client.send("order.book", b"%d" % number, key="k")) for number in range(3)]
        await asyncio.sleep(0)
        many = asyncio.ensure_future(client.send_many("order.book", [b"3", b"4"], keys=["k", "k"]))
        receipts = [*await asyncio.gather(*sends), *await many]
    assert [receipt.sequence for receipt in receipts] == [1, 2, 3, 4, 5]


async def test_a_send_that_waits_too_long_for_room_times_out_and_the_next_one_succeeds(broker: EmbeddedBroker) -> None:
    async with broker.connect(limits=plait.ClientLimits(buffer_bytes=2_000)) as client:
        await client.send("order.book", b"")
        producer = client._producer
        # Rows that no broker ever answers.
        producer.buffered += 5_000
        with impatient(client), pytest.raises(plait.Timeout, match=r"buffer was full for 0.05 s"):
            await client.send("order.book", b"waits")
        producer.released(5_000)
        assert (await client.send("order.book", b"goes")).sequence == 1


async def test_a_cancelled_waiting_send_does_not_block_the_next(broker: EmbeddedBroker) -> None:
    async with broker.connect(limits=plait.ClientLimits(buffer_bytes=10_000)) as client:
        client.post("order.book", bytes(20_000))
        first, second = (asyncio.ensure_future(client.send("order.book", b"%d" % n)) for n in range(2))
        await asyncio.sleep(0)
        first.cancel()
        assert (await asyncio.wait_for(second, 5)).sequence == 1


async def test_flush_raises_the_error_of_a_post_once(broker: EmbeddedBroker, client: plait.Client) -> None:
    await client.send("order.book", b"stored")
    broker.server.broker.turn.read_only = True
    ticket = client.post("order.book", b"refused")
    with pytest.raises(plait.ReadOnly):
        await client.flush()
    await client.flush()
    with pytest.raises(plait.ReadOnly):
        await ticket


async def test_flush_does_not_repeat_the_error_of_a_send(broker: EmbeddedBroker, client: plait.Client) -> None:
    await client.send("order.book", b"stored")
    broker.server.broker.turn.read_only = True
    with pytest.raises(plait.ReadOnly):
        await client.send("order.book", b"refused")
    with pytest.raises(plait.ReadOnly):
        await client.send_many("order.book", [b"refused"])
    await client.flush()


# --- many -------------------------------------------------------------------------------------------------------------


async def test_send_many_stores_rows_in_order_over_several_frames(broker: EmbeddedBroker, client: plait.Client) -> None:
    bodies = [b"%100d" % n for n in range(50_000)]
    receipts = await client.send_many("order.book", bodies, keys=[n % 100 for n in range(50_000)])
    assert len(receipts) == 50_000
    assert [receipt.sequence for receipt in receipts] == list(range(50_000))
    assert receipts[-1].sequence == 49_999
    assert [r.sequence for r in receipts[10:13]] == [10, 11, 12]
    assert len(broker.server.broker.subjects["order.book"].consume_log) > 4
    messages = await read(client, "order.book")
    assert [m.body for m in messages] == bodies
    assert [m.key for m in messages[98:102]] == ["98", "99", "0", "1"]
    assert [m.message_id for m in messages[::9999]] == [r.message_id for r in list(receipts)[::9999]]
    with pytest.raises(IndexError):
        receipts[50_000]


@pytest.mark.parametrize(
    "bodies",
    [
        pa.array([b"a", b"bb", b""]),
        pa.array(["a", "bb", ""]),
        pa.chunked_array([[b"a"], [b"bb", b""]]),
        pa.array([b"x", b"a", b"bb", b"", b"y"]).slice(1, 3),
        pa.array([b"a", b"bb", b""], pa.large_binary()),
        [b"a", "bb", bytearray()],
        (b"a", b"bb", b""),
    ],
    ids=["array", "strings", "chunks", "slice", "large", "mixed", "tuple"],
)
async def test_send_many_takes_lists_and_arrow_arrays(client: plait.Client, bodies: pa.Array) -> None:
    await client.send_many("order.book", bodies)
    assert [m.body for m in await read(client, "order.book")] == [b"a", b"bb", b""]


async def test_send_many_makes_no_frame_over_the_limit(client: plait.Client) -> None:
    bodies = [bytes(n % 3 * 3_000_000 + 1) for n in range(9)]
    await client.send_many("order.book", bodies)
    async with client.reader("order.book", start="earliest") as reader:
        sizes: list[int] = []
        while len(sizes) < 9:
            sizes += [len(m.body) for m in await reader.fetch(9)]
    assert sizes == [len(body) for body in bodies]


async def test_send_many_without_bodies_returns_no_receipts(client: plait.Client) -> None:
    assert list(await client.send_many("order.book", [])) == []


@pytest.mark.parametrize(
    ("bodies", "keys", "reason"),
    [
        (b"one", None, "a list of bodies"),
        ("one", None, "a list of bodies"),
        ([b"a"], ["k", "l"], "2 keys for 1 bodies"),
        ([b"a"], [True], "bool"),
        ([b"a"], [""], "empty"),
        (pa.array([b"a", None]), None, "null"),
    ],
)
async def test_send_many_refuses_invalid_arguments(
    client: plait.Client, bodies: list[bytes], keys: list[str] | None, reason: str
) -> None:
    with pytest.raises(plait.InvalidArgument, match=reason):
        await client.send_many("order.book", bodies, keys=keys)
    assert (await client.send("order.book", b"")).sequence == 0


async def test_send_many_waits_for_room_in_the_buffer(broker: EmbeddedBroker) -> None:
    limits = plait.ClientLimits(buffer_bytes=50_000, frame_bytes=10_000, in_flight_frames=2)
    async with broker.connect(limits=limits) as client:
        await client.send_many("order.book", [bytes(1_000)] * 1_000)
        assert len(await read(client, "order.book")) == 1_000
        assert client._producer.buffered == 0


async def test_a_cancelled_flush_leaves_the_error_of_another_subject_to_the_next_flush(
    broker: EmbeddedBroker, client: plait.Client
) -> None:
    core = broker.server.broker.turn
    await client.send("first", b"")
    await client.send("second", b"")
    core.read_only = True
    refused = client.post("first", b"refused")
    await until(lambda: refused.done)
    core.read_only = False
    # The broker stores the next frame when ``commit`` is called below.
    commit, core.on_dirty = core.on_dirty, lambda: None
    client.post("second", b"slow")
    flushing = asyncio.ensure_future(client.flush())
    for _ in range(3):
        await asyncio.sleep(0)
    flushing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await flushing
    core.on_dirty = commit
    core.on_dirty()
    with pytest.raises(plait.ReadOnly):
        await client.flush()
    await client.flush()


async def test_closing_raises_the_errors_of_posted_messages(broker: EmbeddedBroker) -> None:
    client = await broker.connect().open()
    await client.send("s", b"")
    broker.server.broker.turn.low_space = "the disk is full"
    client.post("s", b"lost")
    with pytest.raises(plait.DiskFull):
        await client.close()

    async def leave(error: Exception | None) -> None:
        async with broker.connect() as another:
            another.post("s", b"lost")
            if error is not None:
                raise error

    with pytest.raises(plait.DiskFull):
        await leave(None)
    with pytest.raises(KeyError):
        await leave(KeyError())
