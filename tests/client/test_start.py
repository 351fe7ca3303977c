"""``start=`` applies only to a group that no partition of the subject knows: a stopped group gets all messages of the
partitions that were added meanwhile."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

import plait
from plait.broker.groups import group_settings
from plait.testing import EmbeddedBroker
from tests.client.support import EAGER, fetch_all
from tests.client.test_expanding import settled

KEYS = [f"k{n}" for n in range(40)]
FUTURE = datetime(2100, 1, 1, tzinfo=UTC)


async def expand(client: plait.Client, partitions: list[str]) -> None:
    await client.admin.expand_subject("s", partitions)
    await settled(client, "s")


async def send(client: plait.Client, body: bytes) -> None:
    await client.send_many("s", [body] * 40, keys=KEYS)


async def handled(consumer: plait.Consumer, count: int) -> list[bytes]:
    messages = await fetch_all(consumer, count)
    for message in messages:
        await message.ack()
    await consumer.flush()
    assert len(await consumer.fetch(1, wait=0)) == 0
    return sorted({message.body for message in messages})


@pytest.mark.parametrize(
    "settings",
    [
        {"group": "g", "start": "latest"},
        {"group": "g", "start": FUTURE},
        {"group": "g", "start": "latest", "ordered": True},
        {"broadcast": True},
    ],
    ids=["latest", "time", "ordered", "broadcast"],
)
async def test_a_stopped_group_gets_the_messages_of_new_partitions(
    nodes: list[EmbeddedBroker], settings: dict[str, Any]
) -> None:
    async with nodes[0].connect(limits=EAGER, client_id="fixed") as client:
        await client.admin.create_subject("s", partitions=1, groups=["g1"])
        await send(client, b"before it began")
        async with client.consumer("s", **settings) as consumer:
            await send(client, b"seen")
            assert await handled(consumer, 40) == [b"seen"]
        await expand(client, ["s@g1", "s#1@g1", "s@g2"])
        await send(client, b"meanwhile")
        async with client.consumer("s", **settings) as consumer:
            assert await handled(consumer, 40) == [b"meanwhile"]


async def test_a_new_group_has_the_same_start_on_all_partitions_for_all_its_consumers(
    nodes: list[EmbeddedBroker],
) -> None:
    async with nodes[0].connect(limits=EAGER) as client, nodes[0].connect(limits=EAGER) as other:
        await client.admin.create_subject("s", partitions=2)
        await send(client, b"old")
        async with (
            client.consumer("s", group="g", start="latest") as first,
            # The second consumer finds a group that began with the same route.
            other.consumer("s", group="g", start="latest") as second,
        ):
            await send(client, b"new")
            bodies: list[bytes] = []
            while len(bodies) < 40:
                for consumer in (first, second):
                    batch = await consumer.fetch(40, wait=0.05)
                    bodies += [message.body for message in batch]
                    await batch.ack()
            assert set(bodies) == {b"new"}


async def test_a_group_that_one_broker_knows_is_not_new_while_another_broker_is_down(
    nodes: list[EmbeddedBroker],
) -> None:
    first, second = nodes
    settings = {"group": "g", "start": "latest"}
    limits = msgspec.structs.replace(EAGER, attach_seconds=0.05)
    async with first.connect(limits=limits) as client:
        await client.admin.create_subject("s", partitions=1, groups=["g1"])
        async with client.consumer("s", **settings) as consumer:
            await send(client, b"seen")
            await handled(consumer, 40)
        await expand(client, ["s@g1", "s#1@g1", "s@g2"])
        await send(client, b"meanwhile")
        await second.stop()
        async with client.consumer("s", **settings) as consumer:
            bodies = [message.body for message in await fetch_all(consumer, 1)]
            await second.start()
            bodies += [message.body for message in await fetch_all(consumer, 39)]
        assert bodies == [b"meanwhile"] * 40


async def test_a_busy_broker_is_asked_again_whether_it_knows_the_group(
    nodes: list[EmbeddedBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    began, calls = group_settings.began, []

    def busy_at_first(*args: Any) -> int | None:
        version = began(*args)
        if version is not None:
            calls.append(version)
            if len(calls) == 1:
                raise plait.FlowControl("later")
        return version

    settings = {"group": "g", "start": "latest"}
    async with nodes[0].connect(limits=EAGER) as client:
        await client.admin.create_subject("s", partitions=1, groups=["g1"])
        async with client.consumer("s", **settings):
            pass
        await expand(client, ["s@g1", "s@g2"])
        await send(client, b"meanwhile")
        monkeypatch.setattr(group_settings, "began", busy_at_first)
        async with client.consumer("s", **settings) as consumer:
            assert await handled(consumer, 40) == [b"meanwhile"]
        assert len(calls) == 2


async def test_a_warning_names_an_unreachable_broker_that_may_know_the_group(
    nodes: list[EmbeddedBroker], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = nodes
    async with first.connect(limits=msgspec.structs.replace(EAGER, request_seconds=0.5)) as client:
        await client.admin.create_subject("s", partitions=2)
        await second.stop()
        async with client.consumer("s", group="g", start="latest"):
            pass
        assert "broker group g2 did not answer whether group g has consumed s before: it counts as" in caplog.text
        await second.start()
