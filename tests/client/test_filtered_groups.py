"""Groups with filters, over real brokers: what members get, how the filter changes, and new partitions."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import plait
from plait.filter import scan_budget
from plait.testing import EmbeddedBroker
from tests.client.support import EAGER, PATIENCE_SECONDS
from tests.client.test_expanding import settled

KINDS: list[dict[str, Any]] = [
    {"group": "g"},
    {"group": "g", "delivery": "at_most_once"},
    {"group": "g", "ordered": True},
    {"group": "g", "affinity": "key"},
    {"broadcast": True, "start": "earliest"},
]
NAMES = ["shared", "at_most_once", "ordered", "affinity", "broadcast"]


async def send_orders(client: plait.Client, count: int, subject: str = "orders") -> None:
    numbers = range(count)
    await client.send_many(
        subject,
        [b"%d" % number for number in numbers],
        keys=[f"k{number % 5}" for number in numbers],
        tags=[["new"] if number % 3 == 0 else ["old"] for number in numbers],
        headers=[{"amount": number} for number in numbers],
    )


async def take(consumer: plait.Consumer, count: int) -> list[int]:
    """The numbers of the next messages, acked."""
    found: list[int] = []
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(found) < count:
            batch = await consumer.fetch(count - len(found), wait=1.0)
            found += [int(message.body) for message in batch]
            if consumer._fetcher.tracks:
                await batch.ack()
    return sorted(found)


async def nothing_left(client: plait.Client, filtered: int) -> None:
    """Wait until the group has no lag; checks how many messages were left out."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            [found] = await client.admin.groups("orders")
            if found.lag == 0:
                break
            await asyncio.sleep(0)
    assert found.filtered == filtered


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind.get("delivery") is None], ids=lambda kind: str([*kind])
)
async def test_members_get_what_matches_and_the_rest_is_done(client: plait.Client, kind: dict[str, Any]) -> None:
    await send_orders(client, 300)
    async with client.consumer("orders", **kind, tags=["new"], where="amount < 200") as consumer:
        assert await take(consumer, 67) == list(range(0, 200, 3))
        await nothing_left(client, 233)


async def test_an_at_most_once_group_has_a_filter(client: plait.Client) -> None:
    await send_orders(client, 300)
    async with client.consumer("orders", "g", delivery="at_most_once", where="amount >= 290") as consumer:
        assert await take(consumer, 10) == list(range(290, 300))
        await nothing_left(client, 290)


async def test_a_member_with_another_filter_is_refused_with_both(client: plait.Client) -> None:
    async with client.consumer("orders", "g", tags=["new"]):
        with pytest.raises(plait.GroupMismatch, match=r"tags=\['new'\].*where='amount > 1'"):
            async with client.consumer("orders", "g", where="amount > 1"):
                pass
    async with client.consumer("orders", "plain"):
        with pytest.raises(plait.GroupMismatch, match=r"has no filter.*tags=\['new'\]"):
            async with client.consumer("orders", "plain", tags=["new"]):
                pass


async def test_a_wrong_condition_is_refused_when_the_member_opens(client: plait.Client) -> None:
    with pytest.raises(plait.InvalidFilter, match="character 9") as error:
        async with client.consumer("orders", "g", where="amount >"):
            pass
    assert error.value.details["position"] == 8


async def test_a_member_without_a_filter_uses_that_of_the_group(client: plait.Client) -> None:
    async with client.consumer("orders", "g", tags=["new"]):
        pass
    await send_orders(client, 30)
    async with client.consumer("orders", "g") as consumer:
        assert await take(consumer, 10) == list(range(0, 30, 3))


@pytest.mark.parametrize("kind", KINDS[:4], ids=NAMES[:4])
async def test_a_change_applies_to_members_that_are_online(client: plait.Client, kind: dict[str, Any]) -> None:
    async with client.consumer("orders", **kind) as consumer:
        assert (await client.admin.group("orders", "g")).filter is None
        changed = await client.admin.set_group_filter("orders", "g", tags=["new"])
        assert (str(changed.filter), changed.filter_version) == ("tags=['new']", 1)
        await send_orders(client, 28)
        assert await take(consumer, 10) == list(range(0, 28, 3))
        await client.admin.set_group_filter("orders", "g")
        await send_orders(client, 6)
        assert await take(consumer, 6) == list(range(6))


async def test_a_member_that_states_the_old_filter_fails_after_the_change(client: plait.Client) -> None:
    async with client.consumer("orders", "g", tags=["new"]) as consumer:
        await client.admin.set_group_filter("orders", "g", tags=["old"])
        with pytest.raises(plait.GroupMismatch):
            await take(consumer, 1)


async def test_a_failed_message_is_retried_whatever_the_filter_is_by_then(client: plait.Client) -> None:
    await send_orders(client, 4)
    async with client.consumer("orders", "g", tags=["new"]) as consumer:
        batch = await consumer.fetch(2, wait=5.0)
        await client.admin.set_group_filter("orders", "g", where="amount > 100")
    async with client.consumer("orders", "g") as consumer:
        assert await take(consumer, len(batch)) == [0, 3]
        await nothing_left(client, 2)


@pytest.mark.parametrize("kind", KINDS[:4], ids=NAMES[:4])
async def test_one_pull_examines_a_bounded_part_and_the_consumer_continues(
    client: plait.Client, monkeypatch: pytest.MonkeyPatch, kind: dict[str, Any]
) -> None:
    monkeypatch.setattr(scan_budget, "FILTER_SCAN_FRAMES", 2)
    for number in range(30):
        await client.send("orders", b"%d" % number, headers={"amount": number}, key=f"k{number % 5}")
    async with client.consumer("orders", **kind, where="amount = 29") as consumer:
        assert await take(consumer, 1) == [29]
        await nothing_left(client, 29)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2]], ids=["shared", "ordered"])
async def test_a_new_partition_gets_the_changed_filter(nodes: list[EmbeddedBroker], kind: dict[str, Any]) -> None:
    async with nodes[0].connect(limits=EAGER) as client:
        await client.admin.create_subject("orders", partitions=1)
        async with client.consumer("orders", **kind):
            await client.admin.set_group_filter("orders", "g", tags=["new"])
        # No member is online while the partition is added.
        await client.admin.expand_subject("orders", 2)
        await settled(client, "orders")
        await send_orders(client, 60)
        async with client.consumer("orders", **kind) as consumer:
            assert await take(consumer, 20) == list(range(0, 60, 3))
        found = await client.admin.groups("orders")
        assert [(str(each.filter), each.filter_version) for each in found] == [("tags=['new']", 1)]


async def test_a_broadcast_replaces_its_own_filter(client: plait.Client) -> None:
    async with client.consumer("orders", broadcast=True, tags=["new"]):
        pass
    await send_orders(client, 6)
    async with client.consumer("orders", broadcast=True, tags=["old"]) as consumer:
        assert await take(consumer, 4) == [1, 2, 4, 5]


def test_blocking_code_and_apps_have_filters(plait_broker: EmbeddedBroker) -> None:
    with plait.sync.connect(plait_broker.address) as client:
        client.send("orders", b"1", tags=["new"], headers={"amount": 1})
        client.send("orders", b"2", tags=["new"], headers={"amount": 2})
        with client.consumer("orders", "g", tags="new", where="amount = 2") as consumer:
            batch = consumer.fetch(10, wait=5.0)
            assert [message.body for message in batch] == [b"2"]
            batch.ack()
    app, seen = plait.App(plait_broker.address, group="app"), []

    @app.subscriber("orders", tags=["new"], where="amount = 1")
    async def on_order(body: bytes) -> None:
        seen.append(body)
        app.stop()

    app.run_forever()
    assert seen == [b"1"]
