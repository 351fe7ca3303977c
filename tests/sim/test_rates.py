"""Servers and clients reach the limits of subjects and groups, within five percent, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import plait
from plait.broker.broker import Broker
from plait.client.send.numbered_sender import NumberedSender
from plait.client.send.producer import new_producer_id
from plait.frame.builder import build_frame
from plait.testing.sim import Simulation
from tests.sim.cluster import ADDRESS, CONFIG, serve

SECONDS = 10.0
Work = Callable[[Simulation, plait.Client], Awaitable[None]]


async def posting(sim: Simulation, client: plait.Client) -> None:
    """Post more than the limit allows; the buffer limits what waits."""
    while True:
        try:
            for _ in range(20):
                client.post("s", bytes(500), key="k")
        except plait.BufferFull:
            pass
        await sim.sleep(0.01)


async def awaiting(sim: Simulation, client: plait.Client) -> None:
    while True:
        await client.send("s", bytes(500))


async def sending_many(sim: Simulation, client: plait.Client) -> None:
    while True:
        await client.send_many("s", [bytes(500)] * 10)


async def delaying(sim: Simulation, client: plait.Client) -> None:
    while True:
        await client.send("s", bytes(500), delay=0.01)


async def halves(sim: Simulation, client: plait.Client) -> None:
    while True:
        async with client.transaction(producer_group="p", check=lambda _: None) as transaction:
            for _ in range(5):
                await transaction.send("s", bytes(500))


async def numbered(sim: Simulation, client: plait.Client) -> None:
    """Send as the relay of an outbox does."""
    sender, producer, number = NumberedSender(client), new_producer_id(), 1
    place = (await sender.route("s")).partitions[0]
    while True:
        parts = build_frame([bytes(500)], producer=producer, first=number, previous=number - 1)
        await sender.store((place, False), parts, lambda: None)
        number += 1


def reached(work: Work, producers: int, **limit: float) -> Any:
    """What producers that send as fast as they can store in 10 s: messages and bytes a second."""
    limits = plait.ClientLimits(buffer_bytes=100_000, send_seconds=3.0)
    found: list[Any] = []
    with Simulation(3) as sim:
        server = sim.process("server", lambda process: serve(process, CONFIG))
        server.start()

        async def main() -> None:
            async with plait.connect(ADDRESS, client_id="main") as admin:
                await admin.admin.create_subject("s")
                await admin.admin.set_send_rate("s", **limit)
                clients = [
                    await sim.process("test").connect(ADDRESS, client_id=f"p{number}", limits=limits).open()
                    for number in range(producers)
                ]
                tasks = [asyncio.ensure_future(work(sim, client)) for client in clients]
                for _ in range(2):
                    # The first second is that of the start.
                    await sim.sleep(1.0 if not found else SECONDS)
                    found.append((await admin.admin.subject("s")).subject)
                assert not any(task.done() for task in tasks)
                for task in tasks:
                    task.cancel()
                await admin.admin.set_send_rate("s")
                for client in clients:
                    # Nothing has failed or timed out, although posts waited for longer than ``send_seconds``.
                    await client.flush()
                    await client.close()

        sim.run(main(), seconds=60.0)
    before, after = found
    return (after.count - before.count) / SECONDS, (after.size - before.size) / SECONDS


@pytest.mark.parametrize(
    ("work", "producers"),
    [(posting, 1), (posting, 5), (awaiting, 1), (awaiting, 8), (sending_many, 2), (delaying, 2), (numbered, 2)],
)
def test_producers_reach_the_limit_of_messages(work: Work, producers: int):
    messages, _ = reached(work, producers, messages_per_second=200)
    assert messages == pytest.approx(200, rel=0.05)


def test_transactions_count_when_they_are_stored():
    # What is committed is published a moment later.
    messages, _ = reached(halves, 2, messages_per_second=100)
    assert messages == pytest.approx(100, rel=0.06)


def test_producers_reach_the_limit_of_bytes():
    _, size = reached(posting, 3, bytes_per_second=50_000)
    assert size == pytest.approx(50_000, rel=0.05)


async def handled(sim: Simulation, consumer: plait.Consumer, seconds: float) -> int:
    """How many messages a consumer gets in this time."""
    end, count = sim.now + seconds, 0
    while sim.now < end:
        batch = await consumer.fetch(50, wait=0.2)
        count += len(batch)
        await batch.ack()
    return count


@pytest.mark.parametrize("settings", [{}, {"delivery": "at_most_once"}, {"broadcast": True}], ids=str)
def test_a_group_reaches_its_limit_without_asking_again_and_again(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    pull, pulls = Broker.pull, []
    monkeypatch.setattr(Broker, "pull", lambda *arguments: pulls.append(1) or pull(*arguments))
    with Simulation(4) as sim:
        server = sim.process("server", lambda process: serve(process, CONFIG))
        server.start()

        async def main() -> None:
            name = None if "broadcast" in settings else "g"
            async with (
                sim.process("test").connect(ADDRESS, client_id="c") as client,
                client.consumer("s", group=name, **settings) as consumer,
            ):
                await client.send_many("s", [b"x"] * 4_000, keys=[f"k{number}" for number in range(4_000)])
                [group] = await client.admin.groups("s")
                await client.admin.set_group_rate("s", group.group, messages_per_second=200)
                # What was delivered before the limit.
                await handled(sim, consumer, 1.0)
                pulls.clear()
                assert await handled(sim, consumer, SECONDS) / SECONDS == pytest.approx(200, rel=0.05)
                # Twenty deliveries a second, each with another one of the message that they had a part of.
                assert len(pulls) <= 2 * 20 * SECONDS

        sim.run(main(), seconds=60.0)
