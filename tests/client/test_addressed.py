"""Messages that are addressed to one group: every other group counts them as consumed."""

from __future__ import annotations

from typing import Any

import pytest

import plait
import plait.sync
from plait.testing import BlockingBroker, EmbeddedBroker
from tests.client.support import EAGER
from tests.client.test_expanding import settled
from tests.client.test_filtered_groups import KINDS, NAMES, nothing_left, take


async def send_some(client: plait.Client, count: int, subject: str = "orders") -> None:
    """Numbered messages: of four, one is for "g", one for "other", and two are for every group."""
    groups = ["g", None, "other", None]
    await client.send_many(
        subject,
        [b"%d" % number for number in range(count)],
        keys=[f"k{number % 5}" for number in range(count)],
        to_group=[groups[number % 4] for number in range(count)],
    )


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
async def test_other_groups_do_not_get_an_addressed_message(client: plait.Client, kind: dict[str, Any]) -> None:
    await send_some(client, 40)
    async with client.consumer("orders", **kind) as consumer:
        of_group = [n for n in range(40) if n % 4 != 2 and (n % 4 or not kind.get("broadcast"))]
        assert await take(consumer, len(of_group)) == of_group
        await nothing_left(client, 40 - len(of_group))
        await client.send("orders", b"100", to_group="other")
        await client.send("orders", b"101", to_group=kind.get("group"))
        assert await take(consumer, 1) == [101]
        await nothing_left(client, 41 - len(of_group))


async def test_a_group_looks_at_addresses_only_after_the_first_one(
    client: plait.Client, broker: EmbeddedBroker
) -> None:
    async with client.consumer("orders", "g") as consumer:
        await client.send("orders", b"1")
        assert await take(consumer, 1) == [1]
        [group] = broker.server.broker.catalog.groups.values()
        assert group.wanted is None
        await client.send("orders", b"2", to_group="other")
        assert group.wanted is not None
        await client.send("orders", b"3")
        assert await take(consumer, 1) == [3]


async def test_readers_see_every_message_and_its_group(client: plait.Client) -> None:
    await send_some(client, 4)
    async with client.reader("orders", start="earliest") as reader:
        found = await reader.fetch(10)
    assert [message.to_group for message in found] == ["g", None, "other", None]


async def test_an_address_combines_with_a_filter(client: plait.Client) -> None:
    for number, (tag, group) in enumerate([("a", "g"), ("b", "g"), ("a", "other"), ("a", None)]):
        await client.send("orders", b"%d" % number, tags=[tag], to_group=group)
    async with client.consumer("orders", "g", tags="a") as consumer:
        assert await take(consumer, 2) == [0, 3]
    await nothing_left(client, 2)


async def test_an_addressed_message_is_retried_buried_and_resent_in_its_group(client: plait.Client) -> None:
    await client.send("orders", b"1", to_group="g")
    async with client.consumer("orders", "g") as mine, client.consumer("orders", "other") as other:
        (message,) = await mine.fetch(1)
        await message.nack(delay=0)
        (message,) = await mine.fetch(1)
        assert (message.attempt, message.to_group) == (2, "g")
        await message.reject()
        await mine.flush()
        await client.admin.resend_dead("orders", "g")
        (message,) = await mine.fetch(1)
        assert (message.body, message.to_group) == (b"1", "g")
        assert len(await other.fetch(1, wait=0)) == 0


async def test_delayed_messages_and_those_of_transactions_keep_their_group(client: plait.Client) -> None:
    async with client.consumer("orders", "g") as mine, client.consumer("orders", "other") as other:
        await client.send("orders", b"1", to_group="g", delay=0.01)
        async with client.transaction("producers") as transaction:
            await transaction.send("orders", b"2", to_group="g")
            await transaction.send("orders", b"3")
        assert await take(mine, 3) == [1, 2, 3]
        assert await take(other, 1) == [3]


async def test_the_address_survives_restarts_and_new_partitions(nodes: list[EmbeddedBroker]) -> None:
    async with nodes[0].connect(limits=EAGER) as client:
        await client.admin.create_subject("orders", partitions=1)
        await send_some(client, 20)
        await client.admin.expand_subject("orders", 3)
        await settled(client, "orders")
        await send_some(client, 40)
        wanted = sorted([n for n in range(20) if n % 4 != 2] + [n for n in range(40) if n % 4 != 2])
        await nodes[0].restart()
        async with client.consumer("orders", "g", ordered=True) as consumer:
            assert await take(consumer, len(wanted)) == wanted


async def test_why_names_the_group(client: plait.Client) -> None:
    receipt = await client.send("orders", b"1", to_group="other")
    async with client.consumer("orders", "g"):
        await nothing_left(client, 1)
        found = await client.why(receipt, group="g", subject="orders")
    assert "It is addressed to group other. Group g does not get it." in found.text


async def test_every_way_of_sending_takes_a_group(client: plait.Client, broker: EmbeddedBroker) -> None:
    await client.send("s", b"1", to_group="g", oneway=True)
    await client.post("s", b"2", to_group="g")
    await client.send_many("s", [b"3"], to_group="g")
    async with client.reader("s", start="earliest") as reader:
        found: list[plait.Message] = []
        while len(found) < 3:
            found += await reader.fetch(3)
    assert [message.to_group for message in found] == ["g"] * 3
    with pytest.raises(plait.InvalidName):
        await client.send("s", b"1", to_group="%broadcast%x")
    with pytest.raises(plait.InvalidArgument):
        await client.send_many("s", [b"1"], to_group=["g", "g"])


async def test_rewound_groups_leave_addressed_messages_out_again(client: plait.Client) -> None:
    async with client.consumer("orders", "g") as consumer:
        await send_some(client, 8)
        assert await take(consumer, 6) == [0, 1, 3, 4, 5, 7]
        await consumer.flush()
    await client.admin.rewind_group("orders", "g", "earliest")
    async with client.consumer("orders", "g") as consumer:
        assert await take(consumer, 6) == [0, 1, 3, 4, 5, 7]


def test_blocking_clients_address_messages(plait_broker: BlockingBroker) -> None:
    with plait.sync.connect(plait_broker.address) as client:
        client.post("s", b"1", to_group="g")
        client.send("s", b"2", to_group="other")
        client.flush()
        with client.consumer("s", "g") as consumer:
            [message] = consumer.fetch(2)
            assert message.to_group == "g"
            message.ack()
