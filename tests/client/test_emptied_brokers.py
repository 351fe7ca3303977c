"""Broker groups that are emptied and switched off: the meta server knows what each group has finished there (R26), and
a lost broker group can be given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

import plait
from plait.broker.partitions.sealing import gone_below
from plait.errors import InvalidArgument
from plait.testing import EmbeddedBroker
from tests.client.support import EAGER, PATIENCE_SECONDS, config_of, fetch_all, until
from tests.client.test_expanding import settled, wait_for

KEYS = [f"k{n}" for n in range(20)]


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[list[EmbeddedBroker]]:
    """A node with a meta server and a broker, and a second broker that is registered with it."""
    async with EmbeddedBroker(tmp_path / "1", config=config_of("g1")) as first:
        second = EmbeddedBroker(tmp_path / "2", config=config_of("g2"), metas=[first.address])
        await second.start()
        try:
            async with first.connect() as client:
                await wait_for(client, lambda brokers: len(brokers) == 2)
            yield [first, second]
        finally:
            await second.stop()


async def handle(client: plait.Client, count: int, group: str = "g") -> list[bytes]:
    async with client.consumer("s", group=group, ordered=True) as consumer:
        messages = await fetch_all(consumer, count)
        for message in messages:
            await message.ack()
        await consumer.flush()
    return sorted(message.body for message in messages)


async def moved(client: plait.Client, places: list[str]) -> None:
    await client.admin.expand_subject("s", places)
    await settled(client, "s")


async def draining(client: plait.Client) -> int:
    return sum(share.draining for share in (await client.admin.route("s")).partitions)


async def drained(client: plait.Client) -> None:
    """Wait until no partition drains."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await draining(client):  # noqa: ASYNC110
            await asyncio.sleep(0)


async def lost(client: plait.Client, group: str) -> None:
    """Wait until the meta server considers a broker group lost."""
    await wait_for(client, lambda brokers: any(b.group == group and b.state == "NRW" for b in brokers))


@pytest.mark.parametrize("orderly", [True, False])
async def test_a_group_continues_without_a_broker_that_it_has_finished(
    nodes: list[EmbeddedBroker], orderly: bool
) -> None:
    first, second = nodes
    async with first.connect(limits=EAGER) as client:
        await client.admin.create_subject("s", partitions=1, groups=["g2"], order="strict")
        await client.send_many("s", [b"old"] * 20, keys=KEYS)
        await handle(client, 20)
        await moved(client, ["s@g1"])
        if orderly:
            await second.stop()
        else:
            # Reported with a heartbeat, soon after the last ack.
            await drained(client)
            await second.kill()
    # The broker and the client that knew the progress are gone.
    async with first.connect(limits=EAGER) as client:
        assert await draining(client) == 0
        await client.send_many("s", [b"new"] * 20, keys=KEYS)
        assert await handle(client, 20) == [b"new"] * 20


async def test_unfinished_keys_wait_until_the_lost_broker_is_given_up(
    nodes: list[EmbeddedBroker],
) -> None:
    first, second = nodes
    async with first.connect(limits=EAGER) as client:
        await client.admin.create_subject("s", partitions=1, groups=["g2"], order="strict")
        await client.send_many("s", [b"old"] * 20, keys=KEYS)
        await handle(client, 20, "quick")
        async with client.consumer("s", group="slow", ordered=True) as consumer:
            await (await fetch_all(consumer, 1))[0].ack()
            await consumer.flush()
        await moved(client, ["s@g1"])
        with pytest.raises(InvalidArgument, match="'g2' is alive; stop its broker first"):
            await client.admin.forget_broker("g2")
        await second.stop()
        await lost(client, "g2")
        assert await draining(client) > 0
        await client.send_many("s", [b"new"] * 20, keys=KEYS)
        assert await handle(client, 20, "quick") == [b"new"] * 20
        async with client.consumer("s", group="slow", ordered=True) as consumer:
            assert len(await consumer.fetch(1, wait=0.2)) == 0
            with pytest.raises(InvalidArgument, match=r"s@g2: group slow has not finished \d+ .*--lost"):
                await client.admin.forget_broker("g2")
            [gone] = await client.admin.forget_broker("g2", lost=True)
            assert (gone.subject, gone.partition, gone.takes, list(gone.groups)) == ("s", "s@g2", 0, ["slow"])
            assert sorted(m.body for m in await fetch_all(consumer, 20)) == [b"new"] * 20
        assert {str(share.partition) for share in (await client.admin.route("s")).partitions} == {"s@g1"}
        assert [broker.group for broker in await client.admin.brokers()] == ["g1"]
        with pytest.raises(InvalidArgument, match="there is no broker group 'g2'; there are g1"):
            await client.admin.forget_broker("g2")


async def test_sends_move_to_other_brokers_when_a_lost_broker_is_given_up(nodes: list[EmbeddedBroker]) -> None:
    first, second = nodes
    async with first.connect(limits=EAGER) as client:
        await client.admin.create_subject("s", partitions=1, groups=["g2"], order="strict")
        await client.admin.create_subject("both", partitions=2)
        await client.send("s", b"lost", key="k")
        await second.kill()
        await lost(client, "g2")
        with pytest.raises(InvalidArgument, match="s@g2: 1024 of 1024 logical partitions are sent there"):
            await client.admin.forget_broker("g2")
        gone = await client.admin.forget_broker("g2", lost=True)
        assert {each.partition: each.takes for each in gone} == {"s@g2": 1024, "both@g2": 512}
        await client.send_many("s", [b"new"] * 20, keys=KEYS)
        assert await handle(client, 20) == [b"new"] * 20
        assert sum(share.takes for share in (await client.admin.route("both")).partitions) == 1024


async def test_an_emptied_and_finished_broker_is_forgotten_without_loss(
    nodes: list[EmbeddedBroker],
) -> None:
    first, second = nodes
    async with first.connect(limits=EAGER) as client:
        await client.admin.create_subject("s", partitions=2)
        await client.send_many("s", [b"old"] * 20, keys=KEYS)
        await handle(client, 20)
        await moved(client, ["s@g1"])
        await drained(client)
        await second.stop()
        await lost(client, "g2")
        assert await client.admin.forget_broker("g2") == []
        await client.send_many("s", [b"new"] * 20, keys=KEYS)
        assert await handle(client, 20) == [b"new"] * 20


async def test_a_broadcast_that_returns_while_its_emptied_broker_is_off_misses_no_message(
    nodes: list[EmbeddedBroker],
) -> None:
    first, second = nodes
    async with first.connect(limits=EAGER, client_id="screen-1") as client:
        await client.admin.create_subject("s", partitions=1, groups=["g2"])
        async with client.consumer("s", broadcast=True) as screen:
            await client.send("s", b"old")
            await (await fetch_all(screen, 1))[0].ack()
        await moved(client, ["s@g1"])
        await drained(client)
        await second.stop()
        await client.send("s", b"new")
    async with (
        first.connect(limits=EAGER, client_id="screen-1") as client,
        client.consumer("s", broadcast=True) as screen,
    ):
        assert [message.body for message in await fetch_all(screen, 1)] == [b"new"]


async def partitions(client: plait.Client) -> list[str]:
    return sorted(str(share.partition) for share in (await client.admin.route("s")).partitions)


async def test_an_empty_partition_leaves_the_route_when_its_schedule_is_empty(
    nodes: list[EmbeddedBroker],
) -> None:
    first, second = nodes
    async with first.connect(limits=EAGER) as client:
        await client.admin.create_subject("s", partitions=1, groups=["g2"])
        receipt = await client.send("s", b"later", delay="1h")
        await moved(client, ["s@g1"])
        sealed = second.server.broker.subjects["s"]
        assert gone_below(second.server.broker, sealed) == -1
        assert await partitions(client) == ["s@g1", "s@g2"]
        assert await client.cancel(receipt)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while await partitions(client) != ["s@g1"]:  # noqa: ASYNC110
                await asyncio.sleep(0)


async def test_a_client_does_not_connect_to_a_given_up_broker_group_until_it_registers_again(
    nodes: list[EmbeddedBroker], tmp_path: Path
) -> None:
    first, second = nodes
    limits = msgspec.structs.replace(EAGER, unreached_seconds=0.02)
    async with first.connect(limits=limits) as client:
        await client.admin.create_subject("s", partitions=1, groups=["g2"])
        await client.send("s", b"lost")
        await second.kill()
        await lost(client, "g2")
        node = client._router._nodes["g2"]
        assert not node.resting
        await client.admin.forget_broker("g2", lost=True)
        await client.send("s", b"kept")
        await until(lambda: node.resting)
        assert "g2" not in client._router._watched
        with pytest.raises(InvalidArgument, match="broker group 'g2' does not exist; use one of g1"):
            await client._router.group_node("g2")
        async with EmbeddedBroker(tmp_path / "3", config=config_of("g2"), metas=[first.address]):
            await wait_for(client, lambda brokers: len(brokers) == 2)
            await moved(client, ["s#1@g2"])
            receipt = await client.send("s", b"new", key="k")
            assert receipt.partition.group == "g2"
            assert not node.resting
