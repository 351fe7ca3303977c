"""``fetch``, ``fetch_arrow`` and iteration; acks and nacks; a closed consumer returns its messages."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import msgspec
import pyarrow as pa
import pytest

import plait
from plait.testing import EmbeddedBroker
from tests.client.support import PlayedMeta, fetch_all, numbers, send, until


async def test_fetch_returns_all_stored_rows_and_then_only_new_ones(client: plait.Client) -> None:
    await send(client, 30)
    async with client.consumer("s", group="g") as consumer:
        assert numbers(await consumer.fetch(20)) == list(range(20))
        assert numbers(await consumer.fetch(20)) == list(range(20, 30))
        assert list(await consumer.fetch(20, wait=0)) == []
        await send(client, 5, first=30)
        assert numbers(await fetch_all(consumer, 5)) == list(range(30, 35))


async def test_a_waiting_fetch_is_woken_by_the_first_message(client: plait.Client) -> None:
    async with client.consumer("s", group="g") as consumer:
        waiting = asyncio.ensure_future(consumer.fetch(100, wait=60))
        await until(lambda: consumer._fetcher.clients[0].pulls)
        await client.send("s", b"0")
        assert numbers(await asyncio.wait_for(waiting, 5)) == [0]


async def test_fetch_returns_an_empty_batch_after_its_wait(client: plait.Client) -> None:
    async with client.consumer("s", group="g") as consumer:
        for wait in (0.01, timedelta(milliseconds=10), "10ms"):
            batch = await consumer.fetch(10, wait=wait)
            assert (len(batch), list(batch)) == (0, [])
            await batch.ack()
        table = (await consumer.fetch_arrow(10, wait=0)).table
        assert (table.num_rows, table.schema.names[:3]) == (0, ["sequence", "key", "body"])


@pytest.mark.parametrize("wait", [-1, "soon", None, float("nan"), True])
async def test_an_invalid_wait_is_refused(client: plait.Client, wait: Any) -> None:
    async with client.consumer("s", group="g") as consumer:
        with pytest.raises(plait.InvalidArgument, match="duration"):
            await consumer.fetch(1, wait=wait)
        with pytest.raises(plait.InvalidArgument, match="count must be 1 or more"):
            await consumer.fetch(0)


async def test_a_batch_is_like_a_list(client: plait.Client) -> None:
    await send(client, 10)
    async with client.consumer("s", group="g") as consumer:
        batch = await consumer.fetch(10)
        assert len(batch) == 10
        assert batch[3].body == b"3"
        assert batch[-1].body == b"9"
        assert numbers(batch[2:5]) == [2, 3, 4]
        assert numbers(reversed(batch)) == list(range(9, -1, -1))
        assert batch[3] in batch
        assert repr(batch) == "<Batch of 10 messages>"
        assert repr(batch[0]) == "<Message s#0 key=None body=b'0'>"


async def test_fetch_crosses_frames_and_compressed_columns(broker: EmbeddedBroker) -> None:
    bodies = [b"%d" % n * 50 for n in range(5_000)]
    async with plait.connect(broker.address, compression="zstd") as client:
        await client.send_many("s", bodies)
        async with client.consumer("s", group="g") as consumer:
            received: list[bytes] = []
            for size in (1, 7, 1_000, 2_000, 5_000):
                messages = await fetch_all(consumer, min(size, 5_000 - len(received)))
                received += [m.body for m in messages]
                for message in messages:
                    message.ack()
                await consumer.flush()
            assert received == bodies


async def test_arrow_batches_have_one_row_per_message(client: plait.Client) -> None:
    receipts = await client.send_many("s", [b"a", b"b", b"c"], keys=["k", None, 3])
    await client.send("s", b"d", tags=["x", "y"], headers={"n": 1})
    async with client.consumer("s", group="g") as consumer:
        batch = await consumer.fetch_arrow(50_000)
        table = batch.table
        assert isinstance(table, pa.Table)
        assert len(batch) == table.num_rows == 4
        assert table["sequence"].to_pylist() == [0, 1, 2, 3]
        assert table["body"].to_pylist() == [b"a", b"b", b"c", b"d"]
        assert table["key"].to_pylist() == ["k", None, "3", None]
        assert table["attempt"].to_pylist() == [1] * 4
        assert table["producer_sequence"].to_pylist()[:3] == [r.message_id.sequence for r in receipts]
        ids = [plait.MessageId(**each) for each in table["message_id"].to_pylist()]
        assert ids[:3] == [receipt.message_id for receipt in receipts]
        assert table["partition"].to_pylist() == ["s@g1"] * 4
        assert msgspec.msgpack.decode(table["headers"][3].as_py()) == {"n": 1}
        assert table["headers"][0].as_py() is None
        await batch.ack()
    assert (await client.admin.group("s", "g")).lag == 0


async def test_iteration_has_no_end_and_a_break_loses_no_message(client: plait.Client) -> None:
    await send(client, 250)
    seen: list[int] = []
    async with client.consumer("s", group="g") as consumer:
        for stop in (10, 120, 249, 250):
            async for message in consumer:
                seen.append(int(message.body))
                await message.ack()
                if len(seen) == stop:
                    break
        seen += numbers(await consumer.fetch(10, wait=0))
        await send(client, 10, first=250)
        async for message in consumer:
            seen.append(int(message.body))
            if seen[-1] == 255:
                break
        seen += numbers(await fetch_all(consumer, 4))
    assert seen == list(range(260))


# --- acks and nacks ---------------------------------------------------------------------------------------------------


async def test_a_closed_consumer_returns_the_messages_that_are_not_acked(client: plait.Client) -> None:
    await send(client, 10)
    async with client.consumer("s", group="g") as consumer:
        batch = await consumer.fetch(10)
        for message in batch:
            if int(message.body) % 2:
                await message.ack()
    assert (await client.admin.group("s", "g")).lag == 5
    async with client.consumer("s", group="g") as consumer:
        again = await fetch_all(consumer, 5)
        assert numbers(again) == [0, 2, 4, 6, 8]
        assert [message.attempt for message in again] == [2] * 5
        assert list(await consumer.fetch(10, wait=0)) == []


async def test_batch_ack_waits_for_the_broker(client: plait.Client) -> None:
    await send(client, 1_000)
    async with client.consumer("s", group="g") as consumer:
        batch = await consumer.fetch(1_000)
        await batch.ack()
        info = await client.admin.group("s", "g")
        assert (info.lag, info.unacked, info.floor) == (0, 0, 1_000)
        await batch.ack()


async def test_a_message_nacked_without_delay_is_redelivered_at_once(client: plait.Client) -> None:
    await send(client, 3)
    async with client.consumer("s", group="g") as consumer:
        first, middle, last = await fetch_all(consumer, 3)
        first.ack()
        last.ack()
        for attempt in (2, 3, 4):
            middle.nack(delay=0)
            [middle] = await fetch_all(consumer, 1)
            assert (middle.body, middle.attempt) == (b"1", attempt)
        middle.ack()
    info = await client.admin.group("s", "g")
    assert (info.lag, info.redelivered) == (0, 3)


async def test_batch_nack_leaves_out_acked_messages(client: plait.Client) -> None:
    await send(client, 10)
    async with client.consumer("s", group="g") as consumer:
        batch = await consumer.fetch(10)
        batch[2].ack()
        batch[7].ack()
        await batch.nack(delay=0)
        assert numbers(await fetch_all(consumer, 8)) == [0, 1, 3, 4, 5, 6, 8, 9]


async def test_the_first_outcome_of_a_message_counts(client: plait.Client) -> None:
    await send(client, 4)
    async with client.consumer("s", group="g") as consumer:
        acked, nacked, flushed_ack, flushed_nack = await consumer.fetch(4)
        flushed_ack.ack()
        flushed_nack.nack()
        await consumer.flush()
        flushed_ack.nack()
        flushed_nack.ack()
        acked.ack()
        acked.nack()
        nacked.nack()
        nacked.ack()
        await consumer.flush()
        assert sorted(numbers(await fetch_all(consumer, 2))) == [1, 3]
        assert (await client.admin.group("s", "g")).unacked == 2


async def test_an_ack_after_the_close_is_refused(client: plait.Client) -> None:
    await send(client, 4)
    async with client.consumer("s", group="g") as consumer:
        batch = await consumer.fetch(2)
        arrow = await consumer.fetch_arrow(2)
    for _ in range(2):
        with pytest.raises(plait.Closed, match="returned to the group"):
            batch[0].ack()
        with pytest.raises(plait.Closed, match="returned to the group"):
            batch[1].nack()
        with pytest.raises(plait.Closed, match="returned to the group"):
            await batch.ack()
        with pytest.raises(plait.Closed, match="returned to the group"):
            await arrow.nack()


async def test_a_consumer_that_is_not_open_refuses_calls(client: plait.Client) -> None:
    consumer = client.consumer("s", group="g")
    with pytest.raises(plait.Closed, match="not open"):
        await consumer.fetch()
    async with consumer:
        with pytest.raises(plait.Closed, match="was opened before"):
            await consumer.__aenter__()
    for use in (consumer.fetch, consumer.fetch_arrow, consumer.__anext__, consumer.__aenter__):
        with pytest.raises(plait.Closed):
            await use()
    await consumer.close()


async def test_a_waiting_iteration_ends_when_the_consumer_is_closed(client: plait.Client) -> None:
    async with client.consumer("s", group="g") as consumer:
        waiting = asyncio.ensure_future(anext(consumer))
        await until(lambda: consumer._fetcher.waiting)
    with pytest.raises((plait.Closed, StopAsyncIteration)):
        await waiting


@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
async def test_a_message_that_is_damaged_under_a_running_broker_is_skipped(
    broker: EmbeddedBroker, client: plait.Client, delivery: Any
) -> None:
    for number in range(10):
        await client.send("s", b"%d" % number)
    record = broker.server.broker.subjects["s"].consume_log.record(4)
    (segment,) = (broker.data / "message").glob("*.log")
    with segment.open("r+b") as file:
        file.seek(record.offset + record.size - 1)
        file.write(b"!")
    async with client.consumer("s", group="g", delivery=delivery) as consumer:
        assert numbers(await fetch_all(consumer, 9)) == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert (await client.admin.group("s", "g")).lost == 1


# --- delivery modes -------------------------------------------------------------------------------------------------


async def test_at_most_once_never_redelivers_a_message(client: plait.Client) -> None:
    await send(client, 10)
    async with client.consumer("s", group="g", delivery="at_most_once") as consumer:
        assert numbers(await consumer.fetch(9)) == list(range(9))
        message = await anext(consumer)
        message.nack()
        await consumer.flush()
    async with client.consumer("s", group="g", delivery="at_most_once") as consumer:
        assert numbers(await consumer.fetch(10, wait=0.01)) == []
    assert (await client.admin.group("s", "g")).lag == 0


@pytest.mark.parametrize("broadcast", [False, True], ids=["group", "broadcast"])
async def test_at_most_once_returns_rows_that_were_not_handed_out(broker: EmbeddedBroker, broadcast: bool) -> None:
    async with broker.connect(client_id="c") as client:
        await send(client, 300)
        got: list[int] = []
        while len(got) < 300:
            async with client.consumer(
                "s", None if broadcast else "g", broadcast=broadcast, delivery="at_most_once", start="earliest"
            ) as consumer:
                async for message in consumer:
                    got.append(int(message.body))
                    if len(got) % 50 == 0:
                        break
        assert got == list(range(300))


async def test_at_most_once_returns_rows_of_all_partitions(meta: PlayedMeta) -> None:
    async with meta.client() as client:
        await send(client, 300)
        got: list[int] = []
        while len(got) < 300:
            async with client.consumer("s", "g", delivery="at_most_once") as consumer:
                async for message in consumer:
                    got.append(int(message.body))
                    if len(got) % 50 == 0:
                        break
        assert sorted(got) == list(range(300))


async def test_at_most_once_pulls_only_while_a_fetch_waits(client: plait.Client) -> None:
    await send(client, 10)
    async with client.consumer("s", group="g", delivery="at_most_once") as consumer:
        assert numbers(await consumer.fetch(4)) == [0, 1, 2, 3]
        assert not consumer._fetcher.clients[0].pulls
        assert (await client.admin.group("s", "g")).next == 4


async def test_every_broadcast_consumer_gets_every_message_from_now_on(
    broker: EmbeddedBroker, client: plait.Client
) -> None:
    await send(client, 5)
    async with (
        broker.connect() as second_client,
        client.consumer("s", broadcast=True) as first,
        client.consumer("s", group="ignored", broadcast=True) as same_client,
        second_client.consumer("s", broadcast=True) as second,
        client.consumer("s", group=None, start="earliest") as everything,
    ):
        await send(client, 5, first=5)
        for consumer in (first, same_client, second):
            assert numbers(await fetch_all(consumer, 5)) == [5, 6, 7, 8, 9]
        assert numbers(await fetch_all(everything, 10)) == list(range(10))
        assert len({c.client_id for c in (first, same_client, everything)}) == 3


async def test_the_prefetch_limit_counts_decompressed_bytes(broker: EmbeddedBroker) -> None:
    mib = 1 << 20
    limits = plait.ClientLimits(prefetch_bytes=4 * mib, pull_bytes=mib)
    async with plait.connect(broker.address, limits=limits, compression="zstd") as client:
        for _ in range(30):
            await client.send("s", bytes(mib))
        async with client.consumer("s", group="g") as consumer:
            seen = 0
            while seen < 30:
                batch = await consumer.fetch(1000, wait=5)
                assert 1 <= len(batch) <= 6
                seen += len(batch)
                await batch.ack()


@pytest.mark.parametrize("ordered", [False, True], ids=["shared", "ordered"])
async def test_a_stuck_row_limits_the_span_unless_keys_are_independent(broker: EmbeddedBroker, ordered: bool) -> None:
    limits = plait.ClientLimits(prefetch_count=10, prefetch_span=20)
    async with plait.connect(broker.address, limits=limits) as client:
        await send(client, 100)
        async with client.consumer("s", group="g", ordered=ordered) as consumer:
            stuck = await fetch_all(consumer, 1)
            seen = len(stuck)
            while batch := await consumer.fetch(10, wait=0.2):
                seen += len(batch)
                await batch.ack()
            assert seen == 100 if ordered else 20 <= seen <= 30
