"""A sender whose numbers outlive it: what its broker does not take waits there, and is never stored elsewhere too."""

from __future__ import annotations

import asyncio

import msgspec
import pyarrow as pa
import pytest

import plait
from plait.client.send.resumable_sender import OutgoingRows, ResumableSender, SendPosition
from plait.client.send.subject_sender import SubjectSender
from plait.testing import EmbeddedBroker
from tests.client.support import EAGER, PlayedMeta, until

#: A key of each of two partitions.
KEYS = ["k0", "k1"]
ROWS = OutgoingRows(pa.array([b"0", b"1"], pa.binary()), KEYS, [b"", b""], [b"", b""], ["id0", "id1"])
#: A broker that is not connected is given up at once, by those who may.
LIMITS = msgspec.structs.replace(EAGER, unreached_seconds=0.0)


def outlet_of(client: plait.Client) -> SubjectSender:
    return client._producer.outlet("s")


def waiting(client: plait.Client) -> int:
    return sum(len(queue._frames) for queue in outlet_of(client).queues())


def refused(client: plait.Client) -> bool:
    """One row is stored, and the other was refused."""
    left = [frame for queue in outlet_of(client).queues() for frame in queue._frames]
    return len(left) == 1 and left[0].refusal is not None


async def opened(client: plait.Client) -> ResumableSender:
    """A sender that is connected to both brokers, and has sent nothing."""
    sender = ResumableSender(client, "s")
    await sender.open()
    await until(lambda: all(queue.connected for queue in outlet_of(client).queues()))
    return sender


def begin(sender: ResumableSender) -> tuple[SendPosition, asyncio.Task[None]]:
    """What is written down, and the sending of the rows after that."""
    prepared, position = sender.prepare(ROWS), sender.position
    return position, asyncio.create_task(sender.send(prepared))


async def go_on(meta: PlayedMeta, position: SendPosition) -> None:
    """Another process sends the same rows under the same numbers."""
    async with meta.client(limits=LIMITS) as client:
        sender = await opened(client)
        prepared = sender.prepare(ROWS)
        sender.go_on(position)
        await sender.send(prepared)


async def end(client: plait.Client, sending: asyncio.Task[None]) -> None:
    """The time of all that waits is over."""
    for queue in outlet_of(client).queues():
        for frame in queue._frames:
            frame.deadline = 0.0
        queue._expire()
    await asyncio.wait([sending])


async def test_a_refused_row_waits_at_its_partition_and_is_stored_once_by_who_goes_on(
    brokers: list[EmbeddedBroker], meta: PlayedMeta
) -> None:
    """The subject is ``best_tried``: what others send would go to the other partition, under other numbers."""
    async with meta.client(limits=LIMITS) as client:
        sender = await opened(client)
        brokers[1].server.broker.read_only = True
        position, sending = begin(sender)
        await until(lambda: sending.done() or refused(client))
        assert not sending.done()
        assert [row[3] for row in await meta.rows(0)] == [b"0"]
        await end(client, sending)
        assert sending.exception() is not None
    brokers[1].server.broker.read_only = False
    await go_on(meta, position)
    assert await meta.by_key() == {"k0": [b"0"], "k1": [b"1"]}


async def test_a_row_waits_for_a_broker_that_is_away_and_is_stored_once_by_who_goes_on(
    brokers: list[EmbeddedBroker], meta: PlayedMeta
) -> None:
    async with meta.client(limits=LIMITS) as client:
        sender = await opened(client)
        await brokers[1].stop()
        await until(lambda: not all(queue.connected for queue in outlet_of(client).queues()))
        position, sending = begin(sender)
        await until(lambda: waiting(client) == 1)
        # Whoever may go elsewhere has gone by then.
        await client.send("s", b"later", key="k0")
        assert waiting(client) == 1
        assert [row[3] for row in await meta.rows(0)] == [b"0", b"later"]
        await end(client, sending)
        assert sending.exception() is not None
    await brokers[1].start()
    await go_on(meta, position)
    assert await meta.by_key() == {"k0": [b"0", b"later"], "k1": [b"1"]}


async def test_a_row_that_is_refused_until_its_time_is_over_fails_with_what_refused_it(
    brokers: list[EmbeddedBroker], meta: PlayedMeta
) -> None:
    limits = msgspec.structs.replace(LIMITS, send_retry_first_seconds=60.0, send_retry_max_seconds=60.0)
    async with meta.client(limits=limits) as client:
        sender = await opened(client)
        brokers[1].server.broker.read_only = True
        position, sending = begin(sender)
        await until(lambda: sending.done() or refused(client))
        await end(client, sending)
        with pytest.raises(plait.ReadOnly):
            await sending
    brokers[1].server.broker.read_only = False
    await go_on(meta, position)
    assert await meta.by_key() == {"k0": [b"0"], "k1": [b"1"]}
