"""Limits of sends and groups through the client: sends wait in order and nothing is lost, over several brokers."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

import plait
from plait.client.send.row_columns import RowColumns
from plait.client.staged.stage_writer import StageWriter
from plait.testing import EmbeddedBroker
from tests.client.support import EAGER, PATIENCE_SECONDS, fetch_all
from tests.client.test_expanding import by_key, settled
from tests.client.test_posting import read

KEYS = [f"k{n}" for n in range(10)]


async def elapsed(work: Any) -> float:
    loop = asyncio.get_running_loop()
    begun = loop.time()
    await work
    return loop.time() - begun


@pytest.mark.parametrize("order", ["strict", "best_tried"])
async def test_sends_beyond_the_rate_wait_in_order(
    broker: EmbeddedBroker, order: Any, caplog: pytest.LogCaptureFixture
) -> None:
    limits = msgspec.structs.replace(EAGER, frame_count=5)
    async with broker.connect(limits=limits) as client:
        await client.admin.create_subject("s", order=order)
        assert await client.admin.set_send_rate("s", messages_per_second=100) == plait.Rate(100)
        tickets = [client.post("s", b"%d" % n, key=f"k{n % 3}") for n in range(60)]
        assert await elapsed(client.flush()) > 0.4
        assert [(await ticket).sequence for ticket in tickets] == list(range(60))
        receipts = await asyncio.gather(*(client.send("s", b"%d" % n) for n in range(60, 80)))
        await client.send_many("s", [b"%d" % n for n in range(80, 100)])
        assert sorted(receipt.sequence or 0 for receipt in receipts) == list(range(60, 80))
        assert [int(message.body) for message in await read(client, "s")] == list(range(100))
    [said] = [record for record in caplog.records if "wait: subject 's' is at its limit" in record.getMessage()]
    assert said.levelname == "WARNING"


async def test_posts_beyond_the_rate_fill_the_buffer(broker: EmbeddedBroker) -> None:
    limits = msgspec.structs.replace(EAGER, buffer_bytes=5_000)
    async with broker.connect(limits=limits) as client:
        await client.admin.create_subject("s")
        await client.admin.set_send_rate("s", messages_per_second=50)
        posted = 0
        while client._producer.buffered < 5_000:
            client.post("s", bytes(100))
            posted += 1
        with pytest.raises(plait.BufferFull):
            client.post("s", bytes(100))
        assert 20 < posted < 100
        # A send waits for room. Without a limit everything is stored soon.
        waiting = asyncio.ensure_future(client.send("s", b"last"))
        await client.admin.set_send_rate("s")
        receipt = await asyncio.wait_for(waiting, PATIENCE_SECONDS)
        await client.flush()
        assert receipt.sequence == posted
        assert (await client.admin.subject("s")).subject.send_rate is None


async def test_delayed_half_and_staged_messages_count_when_they_are_sent(broker: EmbeddedBroker) -> None:
    async with broker.connect(limits=EAGER) as client:
        await client.admin.create_subject("s")
        await client.admin.set_send_rate("s", messages_per_second=50)

        async def delayed() -> None:
            for _ in range(12):
                await client.send("s", b"d", delay=timedelta(milliseconds=20))

        assert await elapsed(delayed()) > 0.1

        async def transaction() -> None:
            async with client.transaction(producer_group="p", check=lambda _: None) as half:
                for _ in range(12):
                    await half.send("s", b"h")

        assert await elapsed(transaction()) > 0.1

        async def stage() -> None:
            writer = StageWriter(client, "s", "q", 1)
            for _ in range(12):
                await writer.write(RowColumns(pa.array([b"x"], pa.binary())))
            [staged] = await writer.complete()
            assert staged.rows == 12

        assert await elapsed(stage()) > 0.1
        # Neither becoming due nor the commit counts again.
        assert len(await read_until(client, 24)) == 24


async def read_until(client: plait.Client, count: int) -> list[plait.Message]:
    messages: list[plait.Message] = []
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(messages) < count:
            messages = await read(client, "s")
    return messages


async def test_sends_keep_their_order_while_a_limited_subject_is_expanded(nodes: list[EmbeddedBroker]) -> None:
    async with nodes[0].connect() as admin, nodes[0].connect(limits=EAGER) as client:
        await admin.admin.create_subject("s", partitions=2, order="strict")
        await admin.admin.set_send_rate("s", messages_per_second=300)
        posted: dict[str, list[bytes]] = {key: [] for key in KEYS}
        for number in range(300):
            key = KEYS[number % len(KEYS)]
            posted[key].append(b"%d" % number)
            client.post("s", b"%d" % number, key=key)
            if number in (100, 200):
                await admin.admin.expand_subject("s", 4 if number == 100 else 3)
        await settled(admin, "s")
        await client.flush()
        assert await by_key(admin, "s") == posted
        assert (await admin.admin.subject("s")).subject.send_rate == plait.Rate(300)


@pytest.mark.parametrize("settings", [{}, {"ordered": True}, {"delivery": "at_most_once"}], ids=str)
async def test_a_limited_group_gets_everything_at_its_rate(
    nodes: list[EmbeddedBroker], settings: dict[str, Any]
) -> None:
    async with nodes[0].connect(limits=EAGER) as client:
        admin = client.admin
        await admin.create_subject("s", partitions=2)
        with pytest.raises(plait.GroupNotFound):
            await admin.set_group_rate("s", "g", messages_per_second=5)
        async with client.consumer("s", group="g", **settings) as consumer:
            await client.send("s", b"first", key="k0")
            for message in await fetch_all(consumer, 1):
                await message.ack()
            await admin.set_group_rate("s", "g", messages_per_second=40, bytes_per_second=1_000_000)
            assert (await admin.group("s", "g")).rate == plait.Rate(40, 1_000_000)
            begun = asyncio.get_running_loop().time()
            await client.send_many("s", [b"%d" % n for n in range(60)], keys=[KEYS[n % 10] for n in range(60)])
            await admin.expand_subject("s", 4)
            await settled(client, "s")
            found: list[plait.Message] = []
            async with asyncio.timeout(PATIENCE_SECONDS):
                while len(found) < 60:
                    for message in await consumer.fetch(60, wait=1.0):
                        found.append(message)
                        await message.ack()
            # The limits may have saved the messages of one second.
            assert asyncio.get_running_loop().time() - begun > 0.3
            for key in KEYS if "ordered" in settings else []:
                mine = [int(message.body) for message in found if message.key == key]
                assert mine == sorted(mine)
            await consumer.flush()
        assert (await admin.group("s", "g")).lag == 0
        await admin.delete_group("s", "g")
        async with client.consumer("s", group="g"):
            assert (await admin.group("s", "g")).rate is None


async def test_limits_outlast_a_restart_of_meta_server_and_broker(tmp_path: Path) -> None:
    async with EmbeddedBroker(tmp_path) as node, node.connect(limits=EAGER) as client:
        await client.send("s", b"1")
        async with client.consumer("s", group="g"):
            await client.admin.set_group_rate("s", "g", messages_per_second=7)
        await client.admin.set_send_rate("s", bytes_per_second=5_000)
    async with EmbeddedBroker(tmp_path) as node, node.connect(limits=EAGER) as client:
        details = await client.admin.subject("s")
        assert details.subject.send_rate == plait.Rate(None, 5_000)
        assert [group.rate for group in details.groups] == [plait.Rate(7)]
