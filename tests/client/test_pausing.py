"""Pausing and resuming groups through the client, over several brokers, route changes and the command line's words."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

import plait
from plait.testing import EmbeddedBroker
from tests.client.support import EAGER, PATIENCE_SECONDS, fetch_all, until
from tests.client.test_app import running
from tests.client.test_expanding import settled

KEYS = [f"k{n}" for n in range(30)]


async def nothing(consumer: plait.Consumer) -> bool:
    return not await consumer.fetch(10, wait=0.2)


@pytest.mark.parametrize("settings", [{}, {"ordered": True}, {"delivery": "at_most_once"}], ids=str)
async def test_a_paused_group_gets_nothing_in_old_and_new_partitions(
    nodes: list[EmbeddedBroker], settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with nodes[0].connect(limits=EAGER) as client, nodes[0].connect(limits=EAGER) as later:
        admin = client.admin
        await admin.create_subject("s", partitions=2)
        with pytest.raises(plait.GroupNotFound):
            await admin.pause_group("s", "g")
        async with client.consumer("s", group="g", **settings) as consumer:
            await client.send_many("s", [b"before"] * 30, keys=KEYS)
            for message in await fetch_all(consumer, 30):
                await message.ack()
            since = await admin.pause_group("s", "g")
            assert await admin.pause_group("s", "g") == since
            await client.send_many("s", [b"1"] * 30, keys=KEYS)
            await admin.expand_subject("s", 4)
            await settled(client, "s")
            await client.send_many("s", [b"2"] * 30, keys=KEYS)
            async with later.consumer("s", group="g", **settings) as second:
                assert [await nothing(consumer), await nothing(second)] == [True, True]
                shown = await admin.group("s", "g")
                assert (shown.lag, shown.paused) == (60, round(since.timestamp() * 1_000_000))
                assert (await admin.group("s", "g", partition="s@g1")).online == 2
            assert await admin.resume_group("s", "g") == since
            assert await admin.resume_group("s", "g") is None
            messages: list[plait.Message] = []
            async with asyncio.timeout(PATIENCE_SECONDS):
                while len(messages) < 60:
                    for message in await consumer.fetch(60, wait=1.0):
                        messages.append(message)
                        await message.ack()
            by_key = {key: [message.body for message in messages if message.key == key] for key in KEYS}
            assert all(sorted(bodies) == [b"1", b"2"] for bodies in by_key.values())
            if "ordered" in settings:
                assert all(bodies == [b"1", b"2"] for bodies in by_key.values())
            await consumer.flush()
        assert (await admin.group("s", "g")).paused is None
    said = [record for record in caplog.records if "is paused since" in record.getMessage()]
    # Each consumer says it once, however many partitions tell it.
    assert len(said) == 2
    assert all(record.levelno == logging.WARNING for record in said)


async def test_an_app_continues_when_its_paused_group_is_resumed(nodes: list[EmbeddedBroker]) -> None:
    app, handled = plait.App(nodes[0].address, group="g"), []

    @app.subscriber("s")
    async def on_message(body: bytes) -> None:
        handled.append(body)

    async with nodes[0].connect() as client:
        await client.admin.create_subject("s", partitions=2)
        async with running(app):
            await client.send("s", b"1")
            await until(lambda: handled)
            await client.admin.pause_group("s", "g")
            await client.send("s", b"2")
            async with asyncio.timeout(PATIENCE_SECONDS):
                while (await client.admin.group("s", "g")).lag != 1:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            assert handled == [b"1"]
            await client.admin.resume_group("s", "g")
            await until(lambda: len(handled) == 2)


async def test_a_deleted_group_that_begins_again_is_not_paused(nodes: list[EmbeddedBroker]) -> None:
    async with nodes[0].connect(limits=EAGER) as client:
        await client.send("s", b"1")
        async with client.consumer("s", group="g"):
            await client.admin.pause_group("s", "g")
        await client.admin.delete_group("s", "g")
        async with client.consumer("s", group="g") as consumer:
            [message] = await fetch_all(consumer, 1)
            await message.ack()
