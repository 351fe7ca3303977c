"""Ordered consumers, end to end: each key stays in order while members, brokers, routes and messages fail or change."""

from __future__ import annotations

import asyncio
import functools
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest

import plait
from plait.client.consume.ordered.ordered_pull import OrderedPullClient
from plait.model.logical_partitions import lp_of_key
from plait.testing import ManualClock
from plait.wire import messages as m
from tests.client.cluster import Cluster, cluster_of
from tests.client.support import PATIENCE_SECONDS, fetch_all, numbers, until
from tests.support.progress import within_cpu_seconds

KEYS = [f"key-{n}" for n in range(7)]


def rows(count: int, first: int = 0, keys: list[str] = KEYS) -> list[tuple[str, int]]:
    """(key, number) of numbered messages, with the keys in turn."""
    return [(keys[n % len(keys)], n) for n in range(first, first + count)]


def by_key(messages: Iterable[plait.Message]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for message in messages:
        assert message.key is not None
        found[message.key].append(int(message.body))
    return dict(found)


async def handle(consumer: plait.Consumer, count: int) -> list[plait.Message]:
    """Fetch and ack ``count`` messages, in order of delivery."""
    seen: list[plait.Message] = []
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(seen) < count:
            batch = await consumer.fetch(count - len(seen), wait=PATIENCE_SECONDS)
            seen += batch
            await batch.ack()
    return seen


def key_below(lp: int) -> str:
    """A key whose logical partition is below ``lp``."""
    return next(key for n in range(10_000) if lp_of_key(key := f"k{n}") < lp)


def key_from(lp: int) -> str:
    return next(key for n in range(10_000) if lp_of_key(key := f"k{n}") >= lp)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster_of(tmp_path) as running:
        running.partitions = [("s", "g1")]
        yield running


@pytest.fixture
async def strict(cluster: Cluster) -> Cluster:
    cluster.order = "strict"
    await cluster.open("g1")
    return cluster


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[plait.Client]:
    async with cluster.connect(client_id="a") as connected:
        yield connected


async def test_a_batch_has_each_key_in_order_and_the_epoch_of_its_lock(cluster: Cluster, client: plait.Client) -> None:
    await cluster.send_keyed("g1", rows(100))
    cluster.meta.epoch = 40
    async with client.consumer("s", group="g", ordered=True) as consumer:
        batch = await consumer.fetch(100, wait=PATIENCE_SECONDS)
        assert numbers(batch) == list(range(100))
        assert {message.epoch for message in batch} == {cluster.meta.epoch}
        await batch.ack()
        assert await cluster.lag("g1") == 0


async def test_a_second_fetch_returns_only_rows_of_other_keys(cluster: Cluster, client: plait.Client) -> None:
    await cluster.send_keyed("g1", [("a", 0), ("a", 1), ("b", 2), ("b", 3)])
    async with client.consumer("s", group="g", ordered=True) as consumer:
        await until(lambda: consumer._buffer.count == 4)
        first = await consumer.fetch(1)
        assert numbers(first) == [0]
        assert numbers(await consumer.fetch(10)) == [2, 3]
        assert numbers(await consumer.fetch(10, wait=0)) == []
        await first.ack()
        assert numbers(await consumer.fetch(10)) == [1]


async def test_tasks_handle_different_keys_concurrently_and_each_key_in_order(
    cluster: Cluster, client: plait.Client
) -> None:
    await cluster.send_keyed("g1", rows(70))
    busy: set[str] = set()
    seen: list[plait.Message] = []
    most = 0

    async def work(consumer: plait.Consumer) -> None:
        nonlocal most
        async for message in consumer:
            assert message.key is not None
            assert message.key not in busy
            busy.add(message.key)
            most = max(most, len(busy))
            for _ in range(3):
                await asyncio.sleep(0)
            seen.append(message)
            busy.remove(message.key)
            message.ack()
            if len(seen) == 70:
                consumer._stop()

    async with client.consumer("s", group="g", ordered=True) as consumer:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await asyncio.gather(*(work(consumer) for _ in range(4)))
    assert by_key(seen) == by_key_of(rows(70))
    assert most == 4
    assert await cluster.lag("g1") == 0


def by_key_of(several: list[tuple[str, int]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for key, number in several:
        found[key].append(number)
    return dict(found)


async def test_members_share_the_keys_and_each_key_has_one_owner(cluster: Cluster, client: plait.Client) -> None:
    low, high = key_below(512), key_from(512)
    async with (
        cluster.connect(client_id="b") as other,
        client.consumer("s", group="g", ordered=True) as one,
        other.consumer("s", group="g", ordered=True) as two,
    ):
        await cluster.send_keyed("g1", rows(20, keys=[low, high]))
        assert by_key(await fetch_all(one, 10)) == {low: list(range(0, 20, 2))}
        assert by_key(await fetch_all(two, 10)) == {high: list(range(1, 20, 2))}


async def test_a_key_moves_when_its_owner_holds_no_more_rows_of_it(cluster: Cluster, client: plait.Client) -> None:
    key = key_from(512)
    await cluster.send_keyed("g1", rows(10, keys=[key]))
    async with client.consumer("s", group="g", ordered=True) as one:
        begun = (await fetch_all(one, 1))[0]
        await until(lambda: one._buffer.count == 9)
        async with cluster.connect(client_id="b") as other, other.consumer("s", group="g", ordered=True) as two:
            # Rows that were not handed out are returned.
            await until(lambda: one._buffer.count == 0)
            assert len(await two.fetch(10, wait=0.1)) == 0
            begun.ack()
            found = await fetch_all(two, 9)
            assert numbers(found) == list(range(1, 10))
            assert {message.attempt for message in found} == {1}
            assert min(message.epoch for message in found) > begun.epoch
            for message in found:
                message.ack()
            await two.flush()
            assert await cluster.lag("g1") == 0


async def test_a_leaving_member_returns_its_rows_and_releases_its_keys(cluster: Cluster, client: plait.Client) -> None:
    await cluster.send_keyed("g1", rows(30))
    async with cluster.connect(client_id="b") as other, other.consumer("s", group="g", ordered=True) as two:
        async with client.consumer("s", group="g", ordered=True) as one:
            await until(lambda: one._buffer.count and one._buffer.count + two._buffer.count == 30)
            begun = await one.fetch(1)
            assert len(begun) == 1
        assert cluster.meta.members == ["b"]
        found = await handle(two, 30)
        assert by_key(found) == by_key_of(rows(30))
        assert [message.attempt for message in found if message.sequence != begun[0].sequence] == [1] * 29


async def test_a_failed_message_of_a_strict_subject_holds_back_only_its_key(
    strict: Cluster, client: plait.Client
) -> None:
    await strict.send_keyed("g1", [("a", 0), ("a", 1), ("b", 2), ("a", 3), ("b", 4)])
    retry = plait.Retry(steps=(0,))
    async with client.consumer("s", group="g", ordered=True, retry=retry) as consumer:
        await until(lambda: consumer._buffer.count == 5)
        [failing] = await consumer.fetch(1)
        failing.nack(delay=0)
        seen = await handle(consumer, 5)
        assert by_key(seen) == {"a": [0, 1, 3], "b": [2, 4]}
        assert [message.attempt for message in seen if message.key == "a"] == [2, 1, 1]
        assert await strict.lag("g1") == 0


async def test_a_failed_key_with_large_messages_is_redelivered_in_several_pulls(
    strict: Cluster, client: plait.Client
) -> None:
    async with strict.brokers["g1"].connect() as direct:
        for number in range(8):
            await direct.send("s", (b"%d" % number).ljust(300_000), key="a")
    retry = plait.Retry(steps=(0,))
    # The broker runs on this loop: the limit ends a broker that retries a row that does not fit without end.
    with within_cpu_seconds(15):
        async with client.consumer("s", group="g", ordered=True, retry=retry) as consumer:
            await until(lambda: consumer._buffer.count == 8)
            [failing] = await consumer.fetch(1)
            failing.nack(delay=0)
            assert by_key(await handle(consumer, 8)) == {"a": list(range(8))}


async def test_rows_behind_a_failed_one_of_their_batch_are_redelivered_even_if_acked(
    strict: Cluster, client: plait.Client
) -> None:
    await strict.send_keyed("g1", [("a", 0), ("b", 1), ("a", 2), ("b", 3), ("a", 4)])
    async with client.consumer("s", group="g", ordered=True) as consumer:
        await until(lambda: consumer._buffer.count == 5)
        batch = await consumer.fetch(5)
        batch[2].nack(delay=0)
        await batch.ack()
        again = await handle(consumer, 2)
        assert by_key(again) == {"a": [2, 4]}
        assert [message.attempt for message in again] == [2, 1]
        assert await strict.lag("g1") == 0


async def test_best_tried_continues_after_a_failed_message(cluster: Cluster, client: plait.Client) -> None:
    await cluster.send_keyed("g1", [("a", 0), ("a", 1), ("a", 2)])
    async with client.consumer("s", group="g", ordered=True) as consumer:
        await until(lambda: consumer._buffer.count == 3)
        [failing] = await consumer.fetch(1)
        failing.nack(delay=60)
        found = await consumer.fetch(3, wait=PATIENCE_SECONDS)
        assert numbers(found) == [1, 2]
        await found.ack()
        assert await cluster.lag("g1") == 1


async def test_no_row_is_handed_out_after_the_lease_ends(cluster: Cluster) -> None:
    clock = ManualClock()
    async with cluster.connect(client_id="a") as client:
        client._consumers.clock = clock
        async with client.consumer("s", group="g", ordered=True) as consumer:
            await cluster.send_keyed("g1", rows(10))
            await until(lambda: consumer._buffer.count == 10)
            assert numbers(await consumer.fetch(1)) == [0]
            clock.advance(10.1)
            assert len(await consumer.fetch(10, wait=0)) == 0
            assert consumer._buffer.next() is None
            [pulling] = consumer._fetcher.clients
            pulling.ask()  # type: ignore[attr-defined]
            assert len(await consumer.fetch(10, wait=PATIENCE_SECONDS)) > 0


async def test_a_consumer_that_handles_for_too_long_is_no_member_until_it_acks(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    async with cluster.connect(client_id="a") as client:
        client._consumers.clock = clock
        async with client.consumer("s", group="g", ordered=True, handling=60) as consumer:
            await cluster.send_keyed("g1", rows(10))
            [message] = await consumer.fetch(1, wait=PATIENCE_SECONDS)
            clock.advance(61)
            cluster.meta.change()
            await until(lambda: not cluster.meta.members)
            assert "handled for more than 60 s" in caplog.text
            [holder] = consumer._fetcher.clients
            assert isinstance(holder, OrderedPullClient)
            assert holder.lease() is None
            message.ack()
            await until(lambda: cluster.meta.members == ["a"])
            assert holder.lease() is not None


async def test_rows_of_an_older_span_are_delivered_before_those_of_the_next(
    cluster: Cluster, client: plait.Client
) -> None:
    """The route changed from g1 to g2: for every key, the rows on g1 are delivered first."""
    await cluster.open("g1")
    await cluster.send_keyed("g1", rows(20))
    await cluster.seal("g1", version=2)
    await cluster.open("g2", version=2)
    await cluster.send_keyed("g2", rows(20, first=20))
    cluster.version = 2
    cluster.partitions = [("s", "g1"), ("s", "g2")]
    cluster.histories = [(0, 1024, [(0, 20), (1, None)])]
    async with client.consumer("s", group="g", ordered=True) as consumer:
        first = await consumer.fetch(20, wait=PATIENCE_SECONDS)
        assert numbers(first) == list(range(20))
        assert len(await consumer.fetch(20, wait=0.05)) == 0
        await first.ack()
        second = await fetch_all(consumer, 20)
        assert numbers(second) == list(range(20, 40))


async def test_a_route_change_while_consuming_keeps_the_order(cluster: Cluster, client: plait.Client) -> None:
    await cluster.open("g1")
    await cluster.send_keyed("g1", rows(20))
    async with client.consumer("s", group="g", ordered=True) as consumer:
        begun = await consumer.fetch(5, wait=PATIENCE_SECONDS)
        await cluster.seal("g1", lps=(0, 512), version=2)
        await cluster.open("g2", lps=(0, 512), version=2)
        low = [row for row in rows(20, first=20) if lp_of_key(row[0]) < 512]
        high = [row for row in rows(20, first=20) if lp_of_key(row[0]) >= 512]
        await cluster.send_keyed("g2", low)
        await cluster.send_keyed("g1", high)
        cluster.histories = [(0, 512, [(0, 20), (1, None)]), (512, 1024, [(0, None)])]
        await cluster.change(client, ("s", "g1"), ("s", "g2"))
        await begun.ack()
        seen = [*begun, *await handle(consumer, 35)]
        assert by_key(seen) == by_key_of(rows(40))
        assert {str(message.partition) for message in seen} == {"s@g1", "s@g2"}


async def test_a_shared_allocation_refuses_an_ordered_consumer(cluster: Cluster, client: plait.Client) -> None:
    cluster.meta.strategy = "shared"
    with pytest.raises(plait.GroupMismatch, match=r"group 'g' of 's' is not ordered.*ordered=True"):
        await client.consumer("s", group="g", ordered=True).__aenter__()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"ordered": True, "broadcast": True}, "a broadcast cannot be ordered"),
        ({"ordered": True, "group": None}, "a broadcast cannot be ordered"),
        ({"ordered": True, "delivery": "at_most_once"}, "at_most_once cannot be ordered"),
        ({"ordered": 1}, "ordered must be True or False, not 1"),
        ({"handling": 5}, "handling= applies to ordered=True"),
        ({"handling": 0, "ordered": True}, "handling must be more than 0, not 0"),
    ],
)
async def test_settings_that_exclude_order_are_refused(
    client: plait.Client, arguments: dict[str, object], reason: str
) -> None:
    with pytest.raises(plait.InvalidArgument, match=reason):
        client.consumer("s", **{"group": "g", **arguments})  # type: ignore[arg-type]


async def test_a_smaller_share_returns_the_rows_that_were_not_handed_out(
    cluster: Cluster, client: plait.Client
) -> None:
    low, high = key_below(512), key_from(512)
    cluster.meta.fixed = {"a": [(0, 1024, 1)]}
    await cluster.send_keyed("g1", rows(20, keys=[low, high]))
    async with client.consumer("s", group="g", ordered=True) as consumer:
        await until(lambda: consumer._buffer.count == 20)
        cluster.meta.fixed = {"a": [(0, 512, 1)]}
        cluster.meta.change()
        await until(lambda: consumer._buffer.count == 10)
        assert by_key(await consumer.fetch(20)) == {low: list(range(0, 20, 2))}


@pytest.mark.parametrize("order", ["strict", "best_tried"])
async def test_rows_of_an_earlier_pull_do_not_overtake_returned_rows_while_the_broker_is_slow(
    cluster: Cluster, client: plait.Client, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    cluster.order = order
    await cluster.open("g1")
    late: list[functools.partial[None]] = []
    pulled = OrderedPullClient._pulled
    slow = False

    def take(self: OrderedPullClient, *answer: Any) -> None:
        if slow:
            late.append(functools.partial(pulled, self, *answer))
        else:
            pulled(self, *answer)

    monkeypatch.setattr(OrderedPullClient, "_pulled", take)
    cluster.meta.fixed = {"a": [(0, 1024, 1)]}
    await cluster.send_keyed("g1", rows(4, keys=["k"]))
    async with client.consumer("s", group="g", ordered=True) as consumer:
        await until(lambda: consumer._buffer.count == 4)
        (partition,) = consumer._fetcher.clients
        assert isinstance(partition, OrderedPullClient)
        slow = True
        await cluster.send_keyed("g1", rows(1, first=4, keys=["k"]))
        await until(lambda: bool(late))
        first = await consumer.fetch(1)
        # The reply to the ack is held back; the client sends no other outcome until it arrives.
        answered = asyncio.Event()
        assert partition.session is not None
        request = partition.session.link.request

        async def ask(message: m.PacketHead, *more: Any) -> Any:
            answer = await request(message, *more)
            if isinstance(message, m.AckRequest):
                await answered.wait()
            return answer

        monkeypatch.setattr(partition.session.link, "request", ask)
        acking = asyncio.create_task(first.ack())
        await until(lambda: partition.collector.under_way and not partition.deliveries.unsent)
        consumer._fetcher.allocated("exclusive", [])  # type: ignore[attr-defined]
        await until(lambda: not partition._asking)
        consumer._fetcher.allocated("exclusive", [(0, 1024, 2)])  # type: ignore[attr-defined]
        await until(lambda: bool(partition.rights.open.all()))
        slow = False
        for answer in late:
            answer()
        assert numbers(await consumer.fetch(10, wait=0)) == []
        answered.set()
        await acking
        assert numbers(await handle(consumer, 4)) == [1, 2, 3, 4]


async def test_refused_locks_trigger_a_full_heartbeat(cluster: Cluster, client: plait.Client) -> None:
    cluster.meta.fixed = {"a": [(0, 1024, 5)], "b": [(0, 1024, 4)]}
    async with (
        client.consumer("s", group="g", ordered=True) as one,
        cluster.connect(client_id="b") as other,
        other.consumer("s", group="g", ordered=True),
    ):
        await until(lambda: one._fetcher.clients[0].rights.open.all())  # type: ignore[attr-defined]
        asked = [each for each in cluster.meta.heartbeats if each.client == "b" and each.seen == 0]
        await until(
            lambda: len([b for b in cluster.meta.heartbeats if b.client == "b" and b.seen == 0]) > max(len(asked), 1)
        )
