"""A consumer of a subject with several partitions, on several brokers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

import plait
from plait.testing import EmbeddedBroker
from plait.wire import messages as m
from tests.client.cluster import EAGER, Cluster, by_partition, cluster_of
from tests.client.support import fetch_all, numbers, until


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster_of(tmp_path) as running:
        yield running


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[plait.Client]:
    async with cluster.connect() as connected:
        yield connected


async def test_rows_of_all_partitions_are_delivered_and_name_their_partition(
    cluster: Cluster, client: plait.Client
) -> None:
    await cluster.send("g1", 3)
    await cluster.send("g2", 4, first=10)
    async with client.consumer("s", group="g") as consumer:
        found = await fetch_all(consumer, 7)
        assert by_partition(found) == {"s@g1": [0, 1, 2], "s@g2": [10, 11, 12, 13]}
        for message in found:
            message.ack()
        await consumer.flush()
    assert [await cluster.lag("g1"), await cluster.lag("g2")] == [0, 0]


async def test_a_batch_is_acked_and_nacked_on_each_of_its_brokers(cluster: Cluster, client: plait.Client) -> None:
    async with client.consumer("s", group="g") as consumer:
        await cluster.send("g1", 5)
        await cluster.send("g2", 5)
        await until(lambda: consumer._buffer.count == 10)
        batch = await consumer.fetch_arrow(10)
        await batch.nack([0, 9], delay=60)
        await batch.ack()
        assert [await cluster.lag("g1"), await cluster.lag("g2")] == [1, 1]


async def test_an_unreachable_broker_does_not_stop_the_others(cluster: Cluster, client: plait.Client) -> None:
    async with client.consumer("s", group="g") as consumer:
        await cluster.send("g1", 2)
        await cluster.send("g2", 2, first=10)
        held = await fetch_all(consumer, 4)
        await cluster.brokers["g2"].kill()
        await until(lambda: not all(pulling.session for pulling in consumer._fetcher.clients))
        for message in held:
            message.ack()
        await cluster.send("g1", 3, first=2)
        batch = await consumer.fetch(3, wait=20)
        assert numbers(batch) == [2, 3, 4]
        # The ack waits only for its own broker.
        await batch.ack()
        await cluster.brokers["g2"].start()
        await consumer.flush()
        await cluster.send("g2", 1, first=12)
        assert numbers(await fetch_all(consumer, 1)) == [12]
        assert [await cluster.lag("g1"), await cluster.lag("g2")] == [0, 1]


async def test_a_consumer_opens_while_one_broker_is_unreachable(cluster: Cluster, client: plait.Client) -> None:
    await cluster.send("g1", 1)
    await cluster.send("g2", 1, first=1)
    await cluster.brokers["g2"].kill()
    async with client.consumer("s", group="g") as consumer:
        assert numbers(await fetch_all(consumer, 1)) == [0]
        await cluster.brokers["g2"].start()
        assert numbers(await fetch_all(consumer, 1)) == [1]


async def test_a_consumer_does_not_open_while_all_brokers_are_unreachable(cluster: Cluster) -> None:
    limits = msgspec.structs.replace(EAGER, request_seconds=0.1)
    async with cluster.connect(limits=limits) as client:
        await client._router.route("s")
        for broker in cluster.brokers.values():
            await broker.kill()
        await until(lambda: client._node.link is None)
        with pytest.raises(plait.Unavailable):
            await client.consumer("s", group="g").__aenter__()


async def test_the_refusal_of_one_broker_is_raised_by_the_open(cluster: Cluster, client: plait.Client) -> None:
    async with (
        cluster.brokers["g2"].connect() as direct,
        direct.consumer("s", group="g", delivery="at_most_once"),
    ):
        with pytest.raises(plait.GroupMismatch):
            await client.consumer("s", group="g").__aenter__()


async def test_new_partitions_are_consumed_from_their_first_message(cluster: Cluster, client: plait.Client) -> None:
    cluster.partitions = [("s", "g1")]
    async with client.consumer("s", group="g", start="latest") as consumer:
        await cluster.send("g2", 2, subject="s.1")
        await cluster.change(client, ("s", "g1"), ("s.1", "g2"))
        found = await fetch_all(consumer, 2)
        assert by_partition(found) == {"s.1@g2": [0, 1]}


async def test_a_consumer_leaves_a_removed_partition_when_it_holds_no_row_of_it(
    cluster: Cluster, client: plait.Client
) -> None:
    async with client.consumer("s", group="g") as consumer:
        await cluster.send("g2", 2)
        held = await fetch_all(consumer, 2)
        await cluster.change(client, ("s", "g1"))
        assert len(consumer._fetcher.clients) == 2
        for message in held:
            message.ack()
        await until(lambda: len(consumer._fetcher.clients) == 1 and not consumer._fetcher.leaving)
        async with cluster.brokers["g2"].connect() as direct:
            info = await direct.admin.group("s", "g")
            assert (info.lag, [c for c in info.consumers if c.online]) == (0, [])


async def test_a_removed_partition_that_returns_to_the_route_stays_attached(
    cluster: Cluster, client: plait.Client
) -> None:
    async with client.consumer("s", group="g") as consumer:
        await cluster.send("g2", 1)
        [message] = await fetch_all(consumer, 1)
        await cluster.change(client, ("s", "g1"))
        await cluster.change(client, ("s", "g1"), ("s", "g2"))
        message.ack()
        await consumer.flush()
        await cluster.send("g2", 1, first=1)
        assert numbers(await fetch_all(consumer, 1)) == [1]
        assert len(consumer._fetcher.clients) == 2


async def test_acks_of_each_partition_are_spooled(cluster: Cluster, tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    impatient = msgspec.structs.replace(EAGER, request_seconds=0.1)
    async with cluster.connect(client_id="worker", spool=spool, limits=impatient) as client:
        await cluster.send("g1", 2)
        await cluster.send("g2", 3)
        async with client.consumer("s", group="g") as consumer:
            held = await fetch_all(consumer, 5)
            for broker in cluster.brokers.values():
                await broker.kill()
            await until(lambda: not any(pulling.session for pulling in consumer._fetcher.clients))
            for message in held:
                message.ack()
            await until(lambda: len(list(spool.glob("*.outcomes"))) == 2)
    for broker in cluster.brokers.values():
        await broker.start()
    async with cluster.connect(client_id="worker", spool=spool) as client, client.consumer("s", group="g") as consumer:
        await consumer.flush()
        assert [await cluster.lag("g1"), await cluster.lag("g2")] == [0, 0]
        assert not list(spool.iterdir())


async def test_a_suspension_applies_to_all_partitions(cluster: Cluster, client: plait.Client) -> None:
    await cluster.send("g1", 3)
    await cluster.send("g2", 3)
    async with client.consumer("s", group="g") as consumer:
        await until(lambda: consumer._buffer.count == 6)
        consumer._fetcher.suspend()
        await consumer.flush()
        assert consumer._buffer.count == 0
        async with cluster.connect() as other, other.consumer("s", group="g") as second:
            assert len(await fetch_all(second, 6)) == 6
        consumer._fetcher.resume()
        assert len(await fetch_all(consumer, 6)) == 6


async def test_a_broker_of_a_cluster_creates_no_subject_with_the_name_of_a_partition(
    plait_async_broker: EmbeddedBroker,
) -> None:
    """A consumer that attaches before the broker order must not create a subject with the partition's name."""
    async with plait_async_broker.connect() as client:
        await client.admin.create_subject("s")
        link = client._node.link
        assert link is not None
        with pytest.raises(plait.StaleRoute):
            await link.request(m.AttachRequest("s#1", "g", "early", "earliest", "at_least_once", [], 0))
    assert list(plait_async_broker.server.broker.subjects) == ["s"]
