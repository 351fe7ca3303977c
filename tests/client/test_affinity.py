"""Affinity, end to end: one member gets a key's messages until members change, and a failure holds nothing back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

import plait
import plait.sync
from plait.cli.commands.group import kind_of
from plait.limits import LOGICAL_PARTITIONS
from plait.testing import EmbeddedBroker
from tests.client.cluster import cluster_of
from tests.client.support import PATIENCE_SECONDS, fetch_all, numbers

KEYS = [f"key-{n}" for n in range(60)]


@pytest.fixture
async def strict(client: plait.Client) -> plait.Client:
    """A client of a broker with a strict subject."""
    await client.admin.create_subject("s", order="strict")
    return client


@pytest.fixture
async def members(broker: EmbeddedBroker, client: plait.Client) -> AsyncIterator[Members]:
    async with AsyncExitStack() as stack:
        yield Members(broker, client, stack)


class Members:
    """Members of one group with affinity, each with its own client."""

    def __init__(self, broker: EmbeddedBroker, client: plait.Client, stack: AsyncExitStack) -> None:
        self._broker = broker
        self._client = client
        self._stack = stack
        self.consumers: list[plait.Consumer] = []

    async def join(self, count: int = 1) -> None:
        """Add members, and wait until each has its share."""
        for _ in range(count):
            client = await self._stack.enter_async_context(self._broker.connect())
            self.consumers.append(
                await self._stack.enter_async_context(client.consumer("s", group="g", affinity="key"))
            )
        await self.settle()

    async def leave(self) -> None:
        """Close the last member, and wait until each has its share."""
        await self.consumers.pop().close()
        await self.settle()

    async def settle(self) -> None:
        """Wait until each member has its share."""
        least = LOGICAL_PARTITIONS // len(self.consumers)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                group = await self._client.admin.group("s", "g")
                locks = [consumer.locks for consumer in group.consumers]
                if len(locks) == len(self.consumers) and min(locks) >= least and sum(locks) == LOGICAL_PARTITIONS:
                    return

    async def send(self, keys: list[str]) -> dict[str, plait.Consumer]:
        """Send and handle a message of each key; return the consumer that got each key."""
        await self._client.send_many("s", [b""] * len(keys), keys=keys)
        found = await self.take(len(keys))
        for message, _ in found.values():
            await message.ack()
        return {key: consumer for key, (_, consumer) in found.items()}

    async def take(self, count: int) -> dict[str, tuple[plait.Message, plait.Consumer]]:
        """Fetch this many messages of different keys, with the consumer that got each."""
        found: dict[str, tuple[plait.Message, plait.Consumer]] = {}
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(found) < count:
                for consumer in self.consumers:
                    batch = await consumer.fetch(count, wait=0.01)
                    found |= {message.key: (message, consumer) for message in batch if message.key is not None}
        return found


async def test_a_key_has_one_member_and_every_member_has_keys(members: Members) -> None:
    await members.join(3)
    first = await members.send(KEYS)
    assert set(first.values()) == set(members.consumers)
    for _ in range(3):
        assert await members.send(KEYS) == first


async def test_a_join_or_leave_moves_only_the_share_of_that_member(members: Members) -> None:
    await members.join(2)
    before = await members.send(KEYS)
    await members.join()
    after = await members.send(KEYS)
    moved = {key for key in KEYS if after[key] != before[key]}
    assert moved == {key for key in KEYS if after[key] is members.consumers[2]}
    assert 0 < len(moved) < len(KEYS) / 2
    await members.leave()
    left = await members.send(KEYS)
    assert {key for key in KEYS if left[key] != after[key]} == moved


async def test_messages_without_a_key_go_to_any_member(members: Members, client: plait.Client) -> None:
    await members.join(2)
    await client.send_many("s", [b"%d" % n for n in range(100)])
    shares = [await consumer.fetch(100, wait=PATIENCE_SECONDS) for consumer in members.consumers]
    assert all(shares)
    assert sorted(number for share in shares for number in numbers(share)) == list(range(100))


async def test_a_failed_message_of_a_strict_subject_does_not_hold_back_its_key(strict: plait.Client) -> None:
    async with strict.consumer("s", group="g", affinity="key") as consumer:
        await strict.send_many("s", [b"0", b"1", b"2"], keys=["k"] * 3)
        (failing,) = await consumer.fetch(1, wait=PATIENCE_SECONDS)
        failing.nack(delay=60)
        found = await fetch_all(consumer, 2)
        assert numbers(found) == [1, 2]
        for message in found:
            await message.ack()
        group = await strict.admin.group("s", "g")
        assert (group.waiting, group.holding, group.parked) == (1, 0, 0)


async def test_an_ack_behind_a_failed_message_of_the_same_batch_counts(strict: plait.Client) -> None:
    async with strict.consumer("s", group="g", affinity="key") as consumer:
        await strict.send_many("s", [b"0", b"1", b"2"], keys=["k"] * 3)
        batch = await fetch_all(consumer, 3)
        batch[0].nack(delay=0)
        for message in batch[1:]:
            message.ack()
        (again,) = await fetch_all(consumer, 1)
        assert (int(again.body), again.attempt) == (0, 2)
        await again.ack()
        assert (await strict.admin.group("s", "g")).lag == 0


async def test_retries_are_delivered_to_the_same_member(strict: plait.Client, members: Members) -> None:
    await members.join(3)
    owners = await members.send(KEYS)
    await strict.send_many("s", [b""] * len(KEYS), keys=KEYS)
    for attempt in range(1, 4):
        found = await members.take(len(KEYS))
        assert {message.attempt for message, _ in found.values()} == {attempt}
        assert {key: consumer for key, (_, consumer) in found.items()} == owners
        for message, _ in found.values():
            message.nack(delay=0)


async def test_a_dead_letter_of_a_strict_subject_parks_no_key_and_is_resent_to_its_member(
    strict: plait.Client, members: Members
) -> None:
    await members.join(2)
    owner = (await members.send(["k"]))["k"]
    await strict.send_many("s", [b"0", b"1"], keys=["k", "k"])
    (failing,) = await owner.fetch(1, wait=PATIENCE_SECONDS)
    failing.reject()
    (following,) = await fetch_all(owner, 1)
    await following.ack()
    group = await strict.admin.group("s", "g")
    assert (group.dead, group.parked) == (1, 0)
    assert await strict.admin.parked("s", "g") == []
    await strict.admin.resend_dead("s", "g")
    assert numbers(await fetch_all(owner, 1)) == [0]


async def test_a_failed_message_on_an_old_partition_does_not_hold_back_the_next_partition(tmp_path: Path) -> None:
    async with cluster_of(tmp_path) as cluster:
        await cluster.open("g1")
        await cluster.send_keyed("g1", [("k", 0), ("k", 1)])
        await cluster.seal("g1", version=2)
        await cluster.open("g2", version=2)
        await cluster.send_keyed("g2", [("k", 2)])
        cluster.version = 2
        cluster.histories = [(0, LOGICAL_PARTITIONS, [(0, 2), (1, None)])]
        async with cluster.connect() as client, client.consumer("s", group="g", affinity="key") as consumer:
            found = await fetch_all(consumer, 1)
            found[0].nack(delay=60)
            found += await fetch_all(consumer, 2)
            assert sorted(numbers(found)) == [0, 1, 2]


async def test_listings_name_the_affinity(client: plait.Client, members: Members) -> None:
    await members.join(2)
    group = await client.admin.group("s", "g")
    assert (group.affinity, group.ordered, kind_of(group)) == ("key", False, "affinity key")
    shares = await client.admin.allocation("s", "g")
    assert [member.count for member in shares.members] == [512, 512]


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        ({"affinity": "key"}, {"ordered": True}, r"affinity='key', this member asks for ordered=True"),
        ({"ordered": True}, {"affinity": "key"}, r"ordered=True, this member asks for affinity='key'"),
        ({"affinity": "key"}, {}, r"affinity='key', this member asks for ordered=False"),
        ({}, {"affinity": "key"}, r"ordered=False, this member asks for affinity='key'"),
    ],
)
async def test_a_member_with_another_mode_is_refused_with_both_modes_named(
    client: plait.Client, first: dict[str, Any], second: dict[str, Any], named: str
) -> None:
    async with client.consumer("s", group="g", **first):
        with pytest.raises(plait.GroupMismatch, match=named):
            await client.consumer("s", group="g", **second).__aenter__()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"affinity": "key", "ordered": True}, "ordered=True already gives a key's messages to one member"),
        ({"affinity": "tag"}, "affinity 'tag' is not known; use 'key'"),
        ({"affinity": "key", "broadcast": True}, "a broadcast cannot have affinity"),
        ({"affinity": "key", "group": None}, "a broadcast cannot have affinity"),
        ({"affinity": "key", "delivery": "at_most_once"}, "at_most_once cannot have affinity"),
        ({"affinity": "key", "handling": 0}, "handling must be more than 0, not 0"),
    ],
)
async def test_settings_that_exclude_affinity_are_refused(
    client: plait.Client, arguments: dict[str, Any], reason: str
) -> None:
    with pytest.raises(plait.InvalidArgument, match=reason):
        client.consumer("s", **{"group": "g", **arguments})
    if arguments.get("group", "g") is not None:
        with pytest.raises(plait.InvalidArgument, match=reason):
            plait.App().subscriber("s", **{"group": "g", **arguments})
