"""A reader of a subject with several partitions reads all of them, each in order, including later ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

import plait
from plait.testing import EmbeddedBroker
from tests.client.support import EAGER, PATIENCE_SECONDS, PlayedMeta, until

KEYS = [f"k{n}" for n in range(20)]


@pytest.fixture
async def client(meta: PlayedMeta) -> AsyncIterator[plait.Client]:
    async with meta.client(limits=EAGER) as connected:
        yield connected


async def fetched(reader: plait.Reader, count: int) -> list[plait.Message]:
    found: list[plait.Message] = []
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(found) < count:
            found += await reader.fetch(count - len(found), wait=PATIENCE_SECONDS)
    return found


async def test_all_partitions_are_read_each_in_its_order(client: plait.Client) -> None:
    receipts = await client.send_many("s", [b"%d" % n for n in range(200)], keys=[KEYS[n % 20] for n in range(200)])
    async with client.reader("s", start="earliest") as reader:
        found = await fetched(reader, 200)
        assert await reader.fetch(1, wait=0) == []
    assert {(m.message_id, m.partition, m.sequence) for m in found} == {
        (r.message_id, r.partition, r.sequence) for r in receipts
    }
    for partition in ("s@g1", "s#1@g2"):
        sequences = [m.sequence for m in found if str(m.partition) == partition]
        assert sequences == sorted(sequences)


async def test_a_reader_at_the_latest_waits_for_messages_of_any_partition(client: plait.Client) -> None:
    await client.send_many("s", [b"before"] * 20, keys=KEYS)
    async with client.reader("s") as reader:
        for key in ("k0", "k1", "k0", "k1"):
            reading = asyncio.ensure_future(reader.fetch(10, wait=PATIENCE_SECONDS))
            await asyncio.sleep(0)
            await client.send("s", b"after", key=key)
            assert [(m.key, m.body) for m in await reading] == [(key, b"after")]
        positions = reader.position
    assert set(positions) == {"s@g1", "s#1@g2"}


async def test_a_sequence_is_refused_as_the_start_of_several_partitions(client: plait.Client) -> None:
    reader = client.reader("s", start=3)
    with pytest.raises(plait.InvalidArgument, match="2 partitions, each with sequences of its own"):
        await reader.__aenter__()


async def test_added_partitions_are_read_from_their_first_message(meta: PlayedMeta, client: plait.Client) -> None:
    async with client.reader("s") as reader:
        await meta.change(4)
        await client.send_many("s", [b"x"] * 20, keys=KEYS)
        found = await fetched(reader, 20)
    assert {m.key for m in found} == set(KEYS)
    assert {m.partition.name for m in found} == {"s", "s#1", "s#2", "s#3"}


async def test_an_unreachable_broker_does_not_stop_the_others(
    brokers: list[EmbeddedBroker], client: plait.Client
) -> None:
    await client.send_many("s", [b"x"] * 2, keys=["k0", "k1"])
    async with client.reader("s", start="earliest") as reader:
        await brokers[1].stop()
        assert [m.key for m in await fetched(reader, 1)] == ["k0"]
        await brokers[1].start()
        assert [m.key for m in await fetched(reader, 1)] == ["k1"]


async def test_routes_are_refreshed_periodically(meta: PlayedMeta) -> None:
    limits = plait.ClientLimits(route_seconds=0.001, pull_wait_seconds=0.01)
    async with meta.client(limits=limits) as client, client.reader("s") as reader:
        await meta.change(3)
        await until(lambda: (route := client._router.known("s")) is not None and route.version == meta.version)
        async with meta.client() as other:
            await other.send_many("s", [b"x"] * 20, keys=KEYS)
        assert {m.partition.name for m in await fetched(reader, 20)} == {"s", "s#1", "s#2"}


@pytest.mark.parametrize("wait", [0.0, PATIENCE_SECONDS])
async def test_a_fetch_cancelled_at_any_moment_skips_no_message(client: plait.Client, wait: float) -> None:
    await client.send_many("s", [b"%d" % n for n in range(60)], keys=[KEYS[n % 20] for n in range(60)])
    turns, cancelled = 0, 0
    async with client.reader("s", start="earliest") as reader:
        while turns < 40:
            # Cancel one turn later each time, until the fetch completes first.
            fetching = asyncio.ensure_future(reader.fetch(1, wait=wait))
            for _ in range(turns):
                await asyncio.sleep(0)
            before = reader.position
            if fetching.cancel():
                cancelled += 1
            done = await asyncio.gather(fetching, return_exceptions=True)
            turns += 1
            if done[0] and not isinstance(done[0], BaseException):
                break
        found = [] if isinstance(done[0], BaseException) else done[0]
        found += await fetched(reader, 60 - len(found))
    assert cancelled
    assert set(before) == {"s@g1", "s#1@g2"}
    assert sorted(int(m.body) for m in found) == list(range(60))


async def test_the_position_precedes_the_unfetched_messages(client: plait.Client) -> None:
    await client.send_many("s", [b"%d" % n for n in range(40)], keys=[KEYS[n % 20] for n in range(40)])
    async with client.reader("s", start="earliest") as reader:
        first = await reader.fetch(1, wait=PATIENCE_SECONDS)
        positions = dict(reader.position)
        rest = await fetched(reader, 39)
    for name, (_, sequence) in positions.items():
        left = [m.sequence for m in rest if str(m.partition) == name]
        assert left == list(range(sequence, sequence + len(left)))
    assert len(first) == 1
