"""Groups: separate progress, members that share it, settings that must agree, and lost consumers."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest

import plait
from plait.testing import EmbeddedBroker
from tests.client.support import fetch_all, lose, numbers, send, until


async def test_every_group_has_its_own_progress(client: plait.Client) -> None:
    await send(client, 10)
    async with client.consumer("s", group="a") as a, client.consumer("s", group="b") as b:
        await (await a.fetch(10)).ack()
        assert numbers(await b.fetch(10)) == list(range(10))
    lags = {info.group: info.lag for info in await client.admin.groups("s")}
    assert lags == {"a": 0, "b": 10}


async def test_members_share_a_group_and_no_message_is_delivered_twice(
    broker: EmbeddedBroker, client: plait.Client
) -> None:
    async with (
        broker.connect() as other_client,
        client.consumer("s", group="g", prefetch=10) as one,
        other_client.consumer("s", group="g", prefetch=10) as two,
        client.consumer("s", group="g") as three,
    ):
        await send(client, 300)
        seen: list[int] = []

        async def work(consumer: plait.Consumer) -> None:
            async for message in consumer:
                seen.append(int(message.body))
                await message.ack()

        tasks = [asyncio.ensure_future(work(consumer)) for consumer in (one, two, three)]
        await until(lambda: len(seen) == 300)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert sorted(seen) == list(range(300))


async def test_members_with_other_settings_are_refused_with_both_values(client: plait.Client) -> None:
    async with client.consumer("s", group="g"):
        with pytest.raises(plait.GroupMismatch, match=r"'at_least_once'.*'at_most_once'"):
            async with client.consumer("s", group="g", delivery="at_most_once"):
                pass


async def test_two_processes_with_one_client_id_are_refused(broker: EmbeddedBroker) -> None:
    async with (
        broker.connect(client_id="worker-1") as first,
        broker.connect(client_id="worker-1") as second,
        first.consumer("s", group="g") as consumer,
    ):
        assert consumer.client_id == "worker-1"
        with pytest.raises(plait.GroupBusy, match=r"'worker-1' is already attached.*different client id"):
            async with second.consumer("s", group="g"):
                pass
        async with second.consumer("s", group="other"):
            pass


async def test_a_client_without_an_id_gets_a_unique_one(broker: EmbeddedBroker) -> None:
    assert broker.connect().client_id != broker.connect().client_id


@pytest.mark.parametrize("name", ["", ".x", "a b", 5])
async def test_invalid_names_are_refused(client: plait.Client, name: Any) -> None:
    with pytest.raises(plait.InvalidName, match="client name"):
        plait.connect(client_id=name)
    with pytest.raises(plait.InvalidName, match="group name"):
        client.consumer("s", group=name)


async def test_unknown_settings_are_refused(client: plait.Client) -> None:
    sometimes: Any = "sometimes"
    with pytest.raises(plait.InvalidArgument, match="'sometimes' is not known"):
        client.consumer("s", group="g", delivery=sometimes)
    with pytest.raises(plait.InvalidArgument, match="prefetch must be 1 or more"):
        client.consumer("s", group="g", prefetch=0)


# --- lost consumers ---------------------------------------------------------------------------------------------------


async def test_rows_of_a_lost_consumer_go_to_the_others(timed_broker: EmbeddedBroker) -> None:
    async with timed_broker.connect() as alive:
        await send(alive, 10)
        dead = timed_broker.connect()
        await dead.open()
        lost = await dead.consumer("s", group="g").__aenter__()
        messages = await fetch_all(lost, 10)
        await messages[0].ack()
        await lost.flush()
        await lose(dead)
        async with alive.consumer("s", group="g") as consumer:
            await timed_broker.advance(4.9)
            assert list(await consumer.fetch(10, wait=0)) == []
            await timed_broker.advance(0.2)
            again = await fetch_all(consumer, 9)
            assert numbers(again) == list(range(1, 10))
            assert {message.attempt for message in again} == {2}
        assert (await alive.admin.group("s", "g")).redelivered == 9


async def test_a_silent_consumer_drops_rows_that_were_not_handed_out(timed_broker: EmbeddedBroker) -> None:
    async with timed_broker.connect(client_id="silent") as silent, timed_broker.connect() as other:
        await send(other, 10)
        async with silent.consumer("s", group="g") as sleeper, other.consumer("s", group="g") as consumer:
            started = await fetch_all(sleeper, 3)
            await until(lambda: sleeper._buffer.count == 7 and consumer._fetcher.clients[0].pulls)
            await timed_broker.advance(6, silent={"silent"})
            assert numbers(await fetch_all(consumer, 10)) == list(range(10))
            await until(lambda: sleeper._fetcher.clients[0].session and sleeper._buffer.count == 0)
            started[0].ack()
            await sleeper.flush()
            assert list(await sleeper.fetch(10, wait=0)) == []


async def test_a_consumer_with_heartbeats_keeps_its_held_rows(timed_broker: EmbeddedBroker) -> None:
    async with timed_broker.connect() as client:
        await send(client, 5)
        async with client.consumer("s", group="g") as consumer, client.consumer("s", group="g") as idle:
            messages = await fetch_all(consumer, 5)
            for _ in range(10):
                await timed_broker.advance(4)
            assert list(await idle.fetch(5, wait=0)) == []
            for message in messages:
                message.ack()
            await consumer.flush()
        assert (await client.admin.group("s", "g")).lag == 0


async def test_a_named_client_that_comes_back_gets_its_held_rows(timed_broker: EmbeddedBroker) -> None:
    async with timed_broker.connect() as other:
        await send(other, 5)
        crashed = timed_broker.connect(client_id="worker-1")
        await crashed.open()
        consumer = await crashed.consumer("s", group="g").__aenter__()
        await fetch_all(consumer, 5)
        await lose(crashed)
        async with timed_broker.connect(client_id="worker-1") as again, again.consumer("s", group="g") as consumer:
            messages = await fetch_all(consumer, 5)
            assert [message.attempt for message in messages] == [2] * 5


async def test_a_broadcast_group_without_consumers_is_forgotten(timed_broker: EmbeddedBroker) -> None:
    async with timed_broker.connect() as client:
        async with client.consumer("s", broadcast=True):
            assert len(await client.admin.groups("s")) == 1
        await timed_broker.advance("3d")
        assert await client.admin.groups("s") == []


# --- administration ---------------------------------------------------------------------------------------------------


async def test_a_rewound_group_continues_from_the_new_position(client: plait.Client) -> None:
    await send(client, 10)
    async with client.consumer("s", group="g") as consumer:
        await (await consumer.fetch(10)).ack()
        with pytest.raises(plait.GroupBusy, match="stop it first"):
            await client.admin.rewind_group("s", "g", "earliest")
    assert (await client.admin.rewind_group("s", "g", 7)).again == 3
    async with client.consumer("s", group="g") as consumer:
        assert numbers(await fetch_all(consumer, 3)) == [7, 8, 9]


async def test_subjects_and_groups_are_described(client: plait.Client) -> None:
    created = await client.admin.create_subject("s", retention="1h", retention_bytes=1_000_000)
    assert (created.retention_seconds, created.retention_bytes) == (3600.0, 1_000_000)
    with pytest.raises(plait.SubjectExists):
        await client.admin.create_subject("s")
    await send(client, 10)
    async with client.consumer("s", group="g") as consumer:
        await fetch_all(consumer, 4)
        details = await client.admin.subject("s")
        assert (details.subject.count, details.subject.groups, details.groups[0].group) == (10, 1, "g")
        [member] = details.groups[0].consumers
        assert (member.client, member.online) == (client.client_id, True)
    with pytest.raises(plait.GroupNotFound, match="it has: g"):
        await client.admin.group("s", "h")
    with pytest.raises(plait.SubjectNotFound):
        await client.admin.subject("t")
    await client.admin.delete_subject("s")
    assert await client.admin.subjects() == []
    assert (await client.admin.server())["connections"] == 1


Deliveries = Literal["at_least_once", "at_most_once"]


@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
async def test_consumers_attach_to_a_recreated_subject(client: plait.Client, delivery: Deliveries) -> None:
    await send(client, 1)
    async with client.consumer("s", group="g", delivery=delivery) as consumer:
        await fetch_all(consumer, 1)
        waiting = asyncio.ensure_future(consumer.fetch(1, wait=20))
        await until(lambda: consumer._fetcher.clients[0].pulls)
        await client.admin.delete_subject("s")
        await send(client, 1, first=7)
        # The send created the subject again, and the consumer attaches to the new one.
        assert numbers(await asyncio.wait_for(waiting, 10)) == [7]


async def test_an_ack_of_a_deleted_subjects_message_does_not_affect_the_new_subject(
    broker: EmbeddedBroker, client: plait.Client
) -> None:
    await send(client, 5)
    async with client.consumer("s", group="g") as consumer, broker.connect() as other_client:
        old = await fetch_all(consumer, 5)
        await client.admin.delete_subject("s")
        await send(client, 5, first=10)
        for message in old:
            message.ack()
        await consumer.flush()
        new = await fetch_all(consumer, 5)
        assert numbers(new) == [10, 11, 12, 13, 14]
        old[0].nack()
        await consumer.flush()
        assert (await other_client.admin.group("s", "g")).unacked == 5


async def test_at_most_once_rows_survive_a_long_absence_of_the_broker(
    timed_broker: EmbeddedBroker,
) -> None:
    async with timed_broker.connect() as client:
        await send(client, 20)
        async with client.consumer("s", group="g", delivery="at_most_once") as consumer:
            first = await anext(consumer)
            await timed_broker.kill()
            await until(lambda: not consumer._fetcher.clients[0].session)
            consumer._fetcher.clients[0]._stale = True
            await timed_broker.start()
            await until(lambda: consumer._fetcher.clients[0].session)
            rest = [await anext(consumer) for _ in range(19)]
    assert numbers([first, *rest]) == list(range(20))
