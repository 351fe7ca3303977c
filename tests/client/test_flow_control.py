"""The prefetch of a consumer: its limits by messages, bytes and span, and the messages it leaves to others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import plait
from plait.client.consume.prefetch import Prefetch
from plait.testing import EmbeddedBroker
from tests.client.support import fetch_all, numbers, send, until


async def held(client: plait.Client) -> int:
    return (await client.admin.group("s", "g")).unacked


async def test_a_consumer_prefetches_up_to_its_limit(client: plait.Client) -> None:
    await send(client, 5_000)
    async with client.consumer("s", group="g") as consumer:
        await until(lambda: consumer._buffer.count == 1_000)
        assert await held(client) == 1_000
        messages = await fetch_all(consumer, 1_000)
        assert await held(client) <= 2_000
        for message in messages:
            message.ack()
        await consumer.flush()
        await until(lambda: consumer._buffer.count == 1_000)
        assert await held(client) == 1_000


async def test_a_small_prefetch_leaves_the_rest_to_others(client: plait.Client) -> None:
    await send(client, 100)
    async with client.consumer("s", group="g", prefetch=10) as slow:
        await until(lambda: slow._buffer.count == 10)
        assert await held(client) == 10
        async with client.consumer("s", group="g") as quick:
            assert numbers(await fetch_all(quick, 90)) == list(range(10, 100))
        assert numbers(await fetch_all(slow, 10)) == list(range(10))


async def test_prefetch_of_one_hands_out_one_at_a_time(client: plait.Client) -> None:
    await send(client, 20)
    async with client.consumer("s", group="g", prefetch=1) as consumer:
        for number in range(20):
            message = await anext(consumer)
            assert int(message.body) == number
            assert await held(client) == 1
            message.ack()
            await consumer.flush()


async def test_large_messages_stop_the_prefetch_by_their_bytes(broker: EmbeddedBroker) -> None:
    limits = plait.ClientLimits(prefetch_bytes=1_000_000, pull_bytes=200_000)
    async with broker.connect(limits=limits) as client:
        for _ in range(40):
            await client.send("s", bytes(100_000))
        async with client.consumer("s", group="g") as consumer:
            await until(
                lambda: (
                    not consumer._fetcher.clients[0].pulls and consumer._fetcher.clients[0].deliveries.bytes >= 900_000
                )
            )
            assert 900_000 <= consumer._fetcher.clients[0].deliveries.bytes <= 1_400_000
            assert await held(client) <= 14
            count = 0
            while count < 40:
                batch = await consumer.fetch(40)
                count += len(batch)
                assert await held(client) <= 14
                await batch.ack()


async def test_a_consumer_that_never_acks_gets_only_the_prefetch_and_a_warning(
    client: plait.Client, caplog: pytest.LogCaptureFixture
) -> None:
    await send(client, 300)
    async with client.consumer("s", group="g", prefetch=10) as consumer:
        kept = [await anext(consumer) for _ in range(10)]
        waiting = asyncio.ensure_future(anext(consumer))
        await until(lambda: "10 messages are not acked" in caplog.text)
        assert await held(client) == 10
        kept[0].ack()
        assert (await waiting).sequence == 10
        assert list(await consumer.fetch(10, wait=0)) == []
        for message in kept:
            message.ack()
        await consumer.flush()
        assert len(await fetch_all(consumer, 9)) == 9


async def test_oneway_sends_wait_for_the_socket_without_blocking_the_loop(broker: EmbeddedBroker) -> None:
    turns = 0

    async def work() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with broker.connect() as client:
        other = asyncio.ensure_future(work())
        for _ in range(20_000):
            await client.send("s", bytes(1_000), oneway=True)
            link = client._node.link
            assert link is not None
            assert link._transport is not None
            assert link._transport.get_write_buffer_size() < 8 << 20
        other.cancel()
    assert turns > 20


async def test_a_fetch_may_ask_for_more_than_the_prefetch(client: plait.Client) -> None:
    await send(client, 30_000)
    async with client.consumer("s", group="g") as consumer:
        batch = await consumer.fetch_arrow(30_000, wait=20)
        assert len(batch) == 30_000
        await batch.ack()


async def test_the_cost_of_a_message_does_not_grow_with_the_partitions(
    client: plait.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    wanted = Prefetch.wanted

    def counted(self: Prefetch[Any], puller: Any, *, patient: bool = True) -> int:
        nonlocal calls
        calls += 1
        return wanted(self, puller, patient=patient)

    monkeypatch.setattr(Prefetch, "wanted", counted)
    await client.admin.create_subject("wide", partitions=32)
    await client.send_many("wide", [b"%d" % n for n in range(1_000)], keys=[f"k{n}" for n in range(1_000)])
    async with client.consumer("wide", "g") as consumer:
        seen = []
        async for message in consumer:
            await asyncio.sleep(0)
            message.ack()
            seen.append(int(message.body))
            if len(seen) == 1_000:
                break
        await consumer.flush()
    assert sorted(seen) == list(range(1_000))
    # One call for each pull and each ack, not one for each partition.
    assert calls < 5_000
