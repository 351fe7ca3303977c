"""Priorities and fairness over a real broker: every way to send them, and the order in which consumers get them."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import plait
from plait.client.consume.prefetch import RowBuffer
from plait.errors import GroupMismatch, InvalidArgument
from plait.frame.builder import build_frame
from plait.frame.view import FrameView
from plait.limits import RANKED_PREFETCH_COUNT
from plait.testing import EmbeddedBroker


async def taken(consumer: plait.Consumer, count: int) -> list[plait.Message]:
    found: list[plait.Message] = []
    async with asyncio.timeout(20):
        while len(found) < count:
            batch = await consumer.fetch(count - len(found))
            found += batch
            await batch.ack()
    return found


async def test_every_way_to_send_keeps_the_priority(client: plait.Client):
    await client.send("work", b"0")
    await client.send("work", b"1", key="k", priority=1)
    ticket = client.post("work", b"2", priority=2)
    await ticket
    await client.send_many("work", [b"3", b"4"], priority=[3, 4])
    await client.send_many("work", [b"5", b"5"], keys=["a", "b"], priority=5)
    await client.send("work", b"6", priority=6, delay=0.01)
    async with client.transaction(producer_group="g") as transaction:
        await transaction.send("work", b"7", priority=7)
    await client.send("work", b"8", priority=8, oneway=True)
    async with client.reader("work", start="earliest") as reader:
        found: dict[int, int] = {}
        async with asyncio.timeout(20):
            while len(found) < 9:
                found |= {int(message.body): message.priority for message in await reader.fetch(100)}
    assert found == {number: number for number in range(9)}


async def test_a_consumer_gets_higher_priorities_first(client: plait.Client):
    await client.send_many("work", [b"x"] * 300)
    async with client.consumer("work", "g") as consumer:
        first = await consumer.fetch(1)
        await client.send_many("work", [b"9"] * 3, priority=9)
        await client.send("work", b"5", priority=5)
        await first.ack()
        # The urgent messages overtake those that are in the consumer's buffer.
        found = await taken(consumer, 303)
        assert [m.priority for m in found].index(9) < RANKED_PREFETCH_COUNT * 20
        assert sorted(m.priority for m in found)[-4:] == [5, 9, 9, 9]
        await client.send_many("work", [b"x"] * 200)
        await client.send("work", b"9", priority=9)
        assert 9 in [m.priority for m in await taken(consumer, 2 * RANKED_PREFETCH_COUNT)]


@pytest.mark.parametrize("priority", [-1, 10, 1.5, True, "high"])
async def test_other_priorities_are_refused(client: plait.Client, priority: Any):
    for call in (client.send("work", b"x", priority=priority), client.send_many("work", [b"x"], priority=[priority])):
        with pytest.raises(InvalidArgument, match="priority"):
            await call
    with pytest.raises(InvalidArgument, match="priority"):
        client.post("work", b"x", priority=priority)


async def test_a_strict_subject_refuses_priorities(client: plait.Client):
    await client.admin.create_subject("orders", order="strict")
    for call in (
        client.send("orders", b"x", priority=1),
        client.send_many("orders", [b"x"], priority=1),
        client.send("orders", b"x", priority=1, oneway=True),
    ):
        with pytest.raises(InvalidArgument, match="'orders' is strict"):
            await call
    with pytest.raises(InvalidArgument, match="'orders' is strict"):
        client.post("orders", b"x", priority=1)
    await client.send("orders", b"x", priority=0)
    async with client.transaction(producer_group="g") as transaction:
        with pytest.raises(InvalidArgument, match="'orders' is strict"):
            await transaction.send("orders", b"x", priority=1)
        await transaction.rollback()


async def test_a_large_tenant_does_not_starve_the_others(client: plait.Client):
    await client.send_many("work", [b"x"] * 5000, keys=["large"] * 5000)
    await client.send_many("work", [b"x"] * 50, keys=[f"small-{number % 5}" for number in range(50)])
    async with client.consumer("work", "fair", fair_by="key") as consumer:
        found = await taken(consumer, 200)
        assert sum(message.key != "large" for message in found) == 50


async def test_fairness_is_a_setting_of_the_group(client: plait.Client, broker: EmbeddedBroker):
    async with client.consumer("work", "g", fair_by="tenant"):
        assert (await client.admin.group("work", "g")).fair_by == "tenant"
        async with plait.connect(broker.address) as other:
            with pytest.raises(GroupMismatch, match="fair_by='tenant'"):
                async with other.consumer("work", "g", fair_by="key"):
                    pass
    assert (await client.admin.set_group("work", "g", fair_by="key")).fair_by == "key"
    async with client.consumer("work", "g", fair_by="key"):
        pass
    assert (await client.admin.set_group("work", "g", fair_by=None)).fair_by is None
    for wrong in ({"ordered": True}, {"affinity": "key"}):
        with pytest.raises(InvalidArgument, match="shared groups"):
            client.consumer("work", "h", fair_by="key", **wrong)
    with pytest.raises(InvalidArgument, match="fair_by"):
        client.consumer("work", "h", fair_by="")


class RankedFrame:
    """A delivered frame of one priority."""

    def __init__(self, rank: int) -> None:
        self.rank, self.count, self.taken, self.partition = rank, 2, 0, None
        priority = np.array([rank, rank], np.uint8) if rank else None
        self.frame = FrameView(build_frame([b"x", b"x"], producer=1, first=1, priority=priority).tobytes())

    def messages(self, start: int, stop: int) -> list[tuple[int, int]]:
        return [(self.rank, row) for row in range(start, stop)]


def test_the_buffer_hands_out_the_highest_priority_first():
    buffer = RowBuffer()
    for rank in (0, 5, 0, 9, 5):
        buffer.append(RankedFrame(rank))  # type: ignore[arg-type]
    assert buffer.next() == (9, 0)
    buffer.append(RankedFrame(9))  # type: ignore[arg-type]
    handed = [buffer.next() for _ in range(11)]
    assert [rank for rank, _ in handed] == [9, 9, 9, 5, 5, 5, 5, 0, 0, 0, 0]  # type: ignore[misc]
    assert buffer.next() is None
