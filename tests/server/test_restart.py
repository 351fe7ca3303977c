"""A restart only delays clients; retention runs on the server's clock and overtaken groups show what they lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

import plait
from plait.clock import ManualClock
from plait.testing import EmbeddedBroker
from plait.testing.embedded_broker import TEST_CONFIG

LIMITS = plait.ClientLimits(reconnect_max_seconds=0.05)


@pytest.fixture
async def broker() -> AsyncIterator[EmbeddedBroker]:
    async with EmbeddedBroker() as broker:
        yield broker


async def restart(broker: EmbeddedBroker, how: str) -> None:
    """Restart after a clean stop or a crash."""
    if how == "killed":
        await broker.kill()
    await broker.restart()


HOW = pytest.mark.parametrize("how", ["stopped", "killed"])


@HOW
async def test_acks_before_a_restart_hold_after_it(broker: EmbeddedBroker, how: str):
    async with broker.connect(limits=LIMITS) as client, client.consumer("orders", group="g") as consumer:
        await client.send_many("orders", [b"%d" % number for number in range(10)])
        batch = await consumer.fetch(10)
        for message in batch[:4]:
            message.ack()
        await consumer.flush()
        await restart(broker, how)
        for message in batch[4:7]:
            message.ack()
        await consumer.flush()
        await client.send("orders", b"new")
        assert [message.body for message in await consumer.fetch(10, wait=20)] == [b"new"]
        group = await client.admin.group("orders", "g")
        assert (group.unacked, group.floor, group.redelivered) == (4, 7, 0)


@HOW
async def test_a_waiting_fetch_and_a_waiting_reader_survive_a_restart(broker: EmbeddedBroker, how: str):
    async with (
        broker.connect(limits=LIMITS) as client,
        client.consumer("orders", group="g") as consumer,
        client.reader("orders") as reader,
    ):
        fetching = asyncio.create_task(consumer.fetch(1, wait=30))
        reading = asyncio.create_task(reader.fetch(1, wait=30))
        await restart(broker, how)
        await client.send("orders", b"x")
        assert [message.body for message in await fetching] == [b"x"]
        assert [message.body for message in await reading] == [b"x"]


@HOW
async def test_sends_in_progress_are_stored_once(broker: EmbeddedBroker, how: str):
    async with broker.connect(limits=LIMITS) as client:
        await client.send("orders", b"first")
        sends = [asyncio.create_task(client.send("orders", b"%d" % number)) for number in range(200)]
        posted = [client.post("orders", b"p%d" % number) for number in range(200)]
        await asyncio.sleep(0)
        await restart(broker, how)
        receipts = await asyncio.gather(*sends)
        await client.flush()
        assert all(ticket.done for ticket in posted)
        async with client.reader("orders", start="earliest") as reader:
            stored = await reader.fetch(1000, wait=0)
    assert len(stored) == 401
    assert len({message.body for message in stored}) == 401
    at = {message.body: message.sequence for message in stored}
    for number, receipt in enumerate(receipts):
        assert receipt.sequence in (None, at[b"%d" % number])


async def test_retention_runs_periodically_on_the_servers_clock():
    async with EmbeddedBroker(clock=ManualClock()) as broker, broker.connect() as client:
        await client.admin.create_subject("short", retention=60)
        for subject in ("short", "long"):
            await client.send(subject, b"old")
        await broker.advance(50)
        for subject in ("short", "long"):
            await client.send(subject, b"young")
        assert (await client.admin.subject("short")).subject.start == 0
        await broker.advance(20)
        subject = (await client.admin.subject("short")).subject
        assert (subject.start, subject.end, subject.count) == (1, 2, 1)
        assert (await client.admin.subject("long")).subject.start == 0
        async with client.reader("short", start="earliest") as reader:
            assert [message.body for message in await reader.fetch(10, wait=0)] == [b"young"]


async def test_a_group_overtaken_by_retention_continues_and_shows_its_loss():
    async with EmbeddedBroker(clock=ManualClock()) as broker, broker.connect() as client:
        await client.admin.create_subject("short", retention=60)
        async with client.consumer("short", group="g") as consumer:
            await client.send("short", b"seen")
            await (await consumer.fetch(1)).ack()
        await client.send_many("short", [b"missed"] * 5)
        await broker.advance(61)
        await client.send("short", b"young")
        await broker.advance(1)
        async with client.consumer("short", group="g") as consumer:
            assert [message.body for message in await consumer.fetch(10)] == [b"young"]
        group = await client.admin.group("short", "g")
        assert (group.lost, group.next) == (5, 7)


async def test_the_default_retention_is_the_brokers():
    config = msgspec.structs.replace(TEST_CONFIG, retention_seconds=10.0)
    async with EmbeddedBroker(config=config, clock=ManualClock()) as broker, broker.connect() as client:
        await client.send("orders", b"old")
        await broker.advance(11)
        assert (await client.admin.subject("orders")).subject.start == 1
