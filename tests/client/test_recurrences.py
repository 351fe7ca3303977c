"""Recurring messages through the client: created, fired, listed, paused; a killed node; the blocking client."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

import plait
import plait.sync
from plait.clock import ManualClock
from plait.testing import EmbeddedBroker
from plait.testing.embedded_broker import BlockingBroker


async def received(consumer: plait.Consumer, count: int) -> list[plait.Message]:
    found: list[plait.Message] = []
    async with asyncio.timeout(30):
        while len(found) < count:
            batch = await consumer.fetch(count, wait=1.0)
            found += batch
            await batch.ack()
    return found


async def test_a_recurrence_fires_on_time_with_its_message() -> None:
    clock = ManualClock()
    async with EmbeddedBroker(clock=clock) as broker, broker.connect() as client:
        made = await client.admin.create_recurrence(
            "tick", "jobs", {"a": 1}, every="1h", key="k", tags=["t"], headers={"city": "BJS"}
        )
        assert made.next is not None
        async with client.consumer("jobs", group="g") as consumer:
            await broker.advance(3_599)
            assert list(await consumer.fetch(1, wait=0.3)) == []
            await broker.advance(1)
            [message] = await received(consumer, 1)
            assert (message.body, message.key, list(message.tags)) == (b'{"a":1}', "k", ["t"])
            due = int(made.next.timestamp() * 1_000_000)
            assert message.headers == {
                "city": "BJS",
                "plait-recurrence": "tick",
                "plait-firing": 1,
                "plait-due": due,
            }
            assert message.store_time >= made.next
            await broker.advance(10 * 3_600)
            [late] = await received(consumer, 1)
            assert late.headers["plait-firing"] == 2
        row = await client.admin.recurrence("tick")
        assert (row.firings, row.last, row.subject) == (2, made.next + timedelta(hours=1), "jobs")


async def test_recurrences_are_administered() -> None:
    async with EmbeddedBroker(clock=ManualClock()) as broker, broker.connect() as client:
        admin = client.admin
        await admin.create_recurrence("a", "jobs", b"x", cron="30 2 * * *", zone="Europe/Berlin", catch_up="all")
        await admin.create_recurrence("b", "other", "text", every=2)
        assert [each.name for each in await admin.recurrences()] == ["a", "b"]
        assert [each.name for each in await admin.recurrences("other")] == ["b"]
        assert (await admin.pause_recurrence("a")).paused
        assert (await admin.resume_recurrence("a")).next is not None
        changed = await admin.set_recurrence("a", cron="0 3 * * *", body="new", tags="t", key=5)
        assert (changed.cron, changed.zone, changed.body, changed.tags, changed.key) == (
            "0 3 * * *",
            "Europe/Berlin",
            b"new",
            ["t"],
            "5",
        )
        assert len(await admin.firing_times("a", count=3)) == 3
        times = await admin.firing_times(every="90s", count=2)
        assert (times[1] - times[0]).total_seconds() == 90
        await admin.remove_recurrence("a")
        with pytest.raises(plait.RecurrenceNotFound) as missing:
            await admin.recurrence("a")
        assert missing.value.details == {"name": "a"}
        with pytest.raises(plait.RecurrenceExists):
            await admin.create_recurrence("b", "other", "text", every=3)
        for wrong in ({"cron": "x"}, {"every": 0}, {}, {"cron": 5}, {"every": 1, "catch_up": "two"}):
            with pytest.raises(plait.InvalidArgument):
                await admin.create_recurrence("c", "jobs", b"", **wrong)  # type: ignore[arg-type]
        with pytest.raises(plait.TooLarge):
            await admin.create_recurrence("c", "jobs", b"x" * 20_000, every=1)
        await admin.delete_subject("other")
        assert await admin.recurrences() == []


async def test_a_broker_without_a_meta_server_refuses() -> None:
    async with EmbeddedBroker(metas=[]) as broker, broker.connect() as client:
        with pytest.raises(plait.InvalidArgument, match="meta server"):
            await client.admin.recurrences()


async def test_each_firing_is_stored_once_while_the_node_is_killed() -> None:
    """The small form of the deep test: 50 recurrences on four partitions, six kills."""
    clock = ManualClock()
    count, rounds = 50, 6
    async with EmbeddedBroker(clock=clock) as broker:
        async with broker.connect() as client:
            await client.admin.create_subject("jobs", partitions=4)
            for number in range(count):
                key = None if number % 3 else f"k{number}"
                await client.admin.create_recurrence(f"r{number}", "jobs", b"x", every=60, key=key)
        for round_ in range(rounds):
            clock.advance(60)
            broker.server.cluster.wake()
            # After a different number of steps each time.
            for _ in range(40 * (round_ + 1)):
                await asyncio.sleep(0)
            await broker.kill()
            await broker.start()
        async with broker.connect() as client:
            await broker.advance(60)
            async with client.consumer("jobs", group="g") as consumer:
                seen: dict[tuple[str, int], int] = {}
                async with asyncio.timeout(60):
                    while True:
                        batch = await consumer.fetch(100, wait=1.5)
                        for message in batch:
                            place = (str(message.headers["plait-recurrence"]), int(message.headers["plait-firing"]))
                            assert place not in seen, "stored twice"
                            seen[place] = int(message.headers["plait-due"])
                            assert message.store_time.timestamp() * 1e6 >= seen[place], "early"
                        await batch.ack()
                        rows = await client.admin.recurrences()
                        if not batch and sum(row.firings for row in rows) == len(seen):
                            break
            assert {row.name: row.firings for row in rows} == {
                row.name: max(number for name, number in seen if name == row.name) for row in rows
            }


def test_the_blocking_client_has_recurrences(plait_broker: BlockingBroker) -> None:
    with plait.sync.connect(plait_broker.address) as client:
        client.admin.create_recurrence("tick", "jobs", b"x", every=1)
        with client.consumer("jobs", group="g") as consumer:
            message = next(iter(consumer))
            assert message.headers["plait-recurrence"] == "tick"
            message.ack()
        client.admin.remove_recurrence("tick")
        assert client.admin.recurrences() == []
