"""A delayed message whose logical partition moves while it waits is stored once, in the partition that has its LP when
it becomes due, and ordered groups get it.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest

import plait
from plait.broker.partitions.partition import Partition
from plait.broker.schedule.forwards import WaitingForward
from plait.errors import SubjectNotFound
from plait.server.cluster import forwarder
from plait.testing import EmbeddedBroker
from plait.wire import messages as m
from tests.client.support import EAGER, fetch_all, until
from tests.client.test_expanding import settled

KEYS = [f"k{n}" for n in range(16)]
PAST = datetime(2020, 1, 1, tzinfo=UTC)


async def make_due(client: plait.Client, receipts: list[plait.Receipt]) -> None:
    """Reschedule the messages to a past time."""
    for receipt in receipts:
        await client.reschedule(receipt, deliver_at=PAST)


async def expand(client: plait.Client, partitions: int | list[str]) -> None:
    await client.admin.expand_subject("s", partitions)
    await settled(client, "s")


@pytest.mark.parametrize(
    "after",
    [["s@g1", "s#1@g1", "s@g2"], ["s@g2"], ["s#1@g1"]],
    ids=["1 to 3", "to another broker", "to another partition of the broker"],
)
async def test_keyed_messages_enter_the_partition_of_their_key_when_they_are_due(
    nodes: list[EmbeddedBroker], after: list[str]
) -> None:
    async with nodes[0].connect(limits=EAGER) as client:
        await client.admin.create_subject("s", partitions=1, groups=["g1"], order="strict")
        async with client.consumer("s", group="g", ordered=True) as consumer:
            receipts = [await client.send("s", key.encode(), key=key, delay="1h") for key in KEYS]
            await expand(client, after)
            await make_due(client, receipts)
            messages = await fetch_all(consumer, len(KEYS))
            assert {(each.message_id, each.key, each.body) for each in messages} == {
                (receipt.message_id, key, key.encode()) for receipt, key in zip(receipts, KEYS, strict=True)
            }
            assert {str(each.partition) for each in messages} == set(after)
            assert {each.deliver_at for each in messages} == {PAST}
            for message in messages:
                await message.ack()
            assert len(await consumer.fetch(10, wait=0)) == 0
        # Forwarded messages are removed from the schedule they waited in.
        assert await client.admin.schedule_counts("s") == []
        assert not await client.cancel(receipts[0])
        await until(lambda: not nodes[0].server.broker.forwards.waiting())


async def test_messages_without_keys_leave_a_sealed_partition(
    nodes: list[EmbeddedBroker],
) -> None:
    async with nodes[0].connect(limits=EAGER) as client:
        await client.admin.create_subject("s", partitions=2)
        async with client.consumer("s", group="g", ordered=True) as consumer:
            receipts = [await client.send("s", b"%d" % n, delay="1h") for n in range(20)]
            assert {receipt.partition.group for receipt in receipts} == {"g1", "g2"}
            await expand(client, ["s@g2"])
            await make_due(client, receipts)
            messages = await fetch_all(consumer, 20)
            assert {each.message_id for each in messages} == {receipt.message_id for receipt in receipts}
            assert {str(each.partition) for each in messages} == {"s@g2"}


async def test_a_delayed_send_with_an_old_route_is_scheduled_by_the_new_route(nodes: list[EmbeddedBroker]) -> None:
    async with nodes[0].connect(limits=EAGER) as client, nodes[0].connect(limits=EAGER) as admin:
        await admin.admin.create_subject("s", partitions=1, groups=["g1"], order="strict")
        assert (await client.send("s", b"0", key="k", delay="1h")).partition.group == "g1"
        await expand(admin, ["s@g2"])
        assert (await client.send("s", b"1", key="k", delay="1h")).partition.group == "g2"
        assert (await client.send("s", b"2", delay="1h")).partition.group == "g2"


async def test_forwards_wait_for_an_unreachable_broker_and_are_stored_once(nodes: list[EmbeddedBroker]) -> None:
    first, second = nodes
    async with first.connect(limits=EAGER) as client:
        await client.admin.create_subject("s", partitions=1, groups=["g1"])
        receipts = [await client.send("s", key.encode(), key=key, delay="1h") for key in KEYS]
        await expand(client, ["s@g2"])
        await second.stop()
        await make_due(client, receipts)
        forwards = first.server.broker.forwards
        await until(lambda: sum(each.next - each.start for each in forwards.waiting()) == len(KEYS))
        await first.restart()
        await second.start()
        async with client.consumer("s", group="g", ordered=True) as consumer:
            messages = await fetch_all(consumer, len(KEYS))
            assert {each.message_id for each in messages} == {receipt.message_id for receipt in receipts}
            assert len(await consumer.fetch(10, wait=0)) == 0


async def test_an_unreachable_broker_and_its_return_are_each_logged_once(
    nodes: list[EmbeddedBroker], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = nodes
    monkeypatch.setattr(forwarder, "PAUSE_SECONDS", 0.01)
    attempts: list[int] = []
    sent = forwarder.Forwarder._sent

    async def counted(self: forwarder.Forwarder, partition: Partition, waiting: WaitingForward) -> bool:
        attempts.append(partition.id)
        return await sent(self, partition, waiting)

    monkeypatch.setattr(forwarder.Forwarder, "_sent", counted)
    async with first.connect(limits=EAGER) as client:
        await client.admin.create_subject("s", partitions=1, groups=["g1"])
        receipts = [await client.send("s", b"", key="k", delay="1h")]
        await expand(client, ["s@g2"])
        await second.stop()
        await make_due(client, receipts)
        await until(lambda: len(attempts) > 5)
        await second.start()
        await until(lambda: not first.server.broker.forwards.waiting())
    logged = [text for text in caplog.messages if "delayed messages of partition s" in text]
    assert [text.partition(":")[0] for text in logged] == [
        "delayed messages of partition s cannot be forwarded yet",
        "delayed messages of partition s are forwarded again",
    ]


async def test_a_route_that_is_not_found_is_requested_again(
    nodes: list[EmbeddedBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a lost meta database is rebuilt from the brokers' catalogs, its subjects are not found."""
    cluster = nodes[0].server.cluster
    known = cluster.route
    asked: list[str] = []

    async def route(subject: str) -> m.RouteReply:
        asked.append(subject)
        if len(asked) < 3:
            raise SubjectNotFound(f"there is no subject {subject!r}", subject=subject)
        return await known(subject)

    async with nodes[0].connect(limits=EAGER) as client:
        await client.admin.create_subject("s", partitions=1, groups=["g1"])
        receipts = [await client.send("s", key.encode(), key=key, delay="1h") for key in KEYS]
        await expand(client, ["s@g2"])
        monkeypatch.setattr(cluster, "route", route)
        await make_due(client, receipts)
        async with client.consumer("s", group="g", ordered=True) as consumer:
            messages = await fetch_all(consumer, len(KEYS))
            assert {message.message_id for message in messages} == {receipt.message_id for receipt in receipts}
    assert len(asked) >= 3


async def test_forwards_follow_a_route_that_changes_before_they_are_stored(nodes: list[EmbeddedBroker]) -> None:
    """The first partition that they are forwarded to refuses them, because it has been sealed in the meantime."""
    first = nodes[0]
    async with first.connect(limits=EAGER) as client:
        await client.admin.create_subject("s", partitions=1, groups=["g1"])
        receipts = [await client.send("s", key.encode(), key=key, delay="1h") for key in KEYS]
        await expand(client, ["s@g2"])
        forwards = first.server.broker.forwards
        # The broker uses this route until another broker refuses a forward.
        await make_due(client, receipts[:1])
        async with client.consumer("s", group="g", ordered=True) as consumer:
            [message] = await fetch_all(consumer, 1)
            await message.ack()
            assert str(message.partition) == "s@g2"
            await expand(client, ["s#1@g1"])
            await make_due(client, receipts[1:])
            messages = await fetch_all(consumer, len(KEYS) - 1)
            assert {str(each.partition) for each in messages} == {"s#1@g1"}
            assert {each.message_id for each in messages} == {receipt.message_id for receipt in receipts[1:]}
            await until(lambda: not forwards.waiting())


async def test_a_broker_uses_one_connection_to_a_meta_server(nodes: list[EmbeddedBroker]) -> None:
    """Several concurrent requests, just after the connection was lost."""
    first, second = nodes
    async with first.connect() as client:
        await client.admin.create_subject("s", groups=["g2"])
    brokers = [each for each in first.server.connections if each.client.startswith("%broker-")]
    assert len(brokers) == 1
    brokers[0].abort()
    await until(lambda: brokers[0] not in first.server.connections)
    # The first requests may fail because the connection is lost.
    for failures in (5, 0):
        answers = await asyncio.gather(*(second.server.cluster.route("s") for _ in range(5)), return_exceptions=True)
        assert len([each for each in answers if isinstance(each, BaseException)]) <= failures
    assert len([each for each in first.server.connections if each.client.startswith("%broker-")]) == 1
