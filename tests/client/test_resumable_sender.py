"""A resumable sender: a row that its broker refuses waits for that broker and is never stored in two partitions."""

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

#: One key of each of the two partitions.
KEYS = ["k0", "k1"]
ROWS = OutgoingRows(pa.array([b"0", b"1"], pa.binary()), KEYS, [b"", b""], [b"", b""], ["id0", "id1"])
#: Other senders leave an unreachable broker at once.
LIMITS = msgspec.structs.replace(EAGER, unreached_seconds=0.0)


def subject_sender_of(client: plait.Client) -> SubjectSender:
    return client._producer.subject_sender("s")


def waiting(client: plait.Client) -> int:
    return sum(len(queue._frames) for queue in subject_sender_of(client).queues())


def refused(client: plait.Client) -> bool:
    """One row is stored, and the broker refused the other."""
    left = [frame for queue in subject_sender_of(client).queues() for frame in queue._frames]
    return len(left) == 1 and left[0].refusal is not None


async def opened(client: plait.Client) -> ResumableSender:
    """A sender that is connected to both brokers and has sent nothing."""
    sender = ResumableSender(client, "s")
    await sender.open()
    await until(lambda: all(queue.connected for queue in subject_sender_of(client).queues()))
    return sender


def start(sender: ResumableSender) -> tuple[SendPosition, asyncio.Task[None]]:
    """Start to send the rows; return the position to resume at, and the task."""
    prepared, position = sender.prepare(ROWS), sender.position
    return position, asyncio.create_task(sender.send(prepared))


async def resume(meta: PlayedMeta, position: SendPosition) -> None:
    """Another process sends the same rows under the same producer sequences."""
    async with meta.client(limits=LIMITS) as client:
        sender = await opened(client)
        prepared = sender.prepare(ROWS)
        sender.resume_at(position)
        await sender.send(prepared)


async def time_out(client: plait.Client, sending: asyncio.Task[None]) -> None:
    """Let all waiting frames time out."""
    for queue in subject_sender_of(client).queues():
        for frame in queue._frames:
            frame.deadline = 0.0
        queue._expire()
    await asyncio.wait([sending])


async def test_a_refused_row_waits_for_its_partition_and_is_stored_once_after_a_resume(
    brokers: list[EmbeddedBroker], meta: PlayedMeta
) -> None:
    """The subject is ``best_tried``: other senders would move the row to the other partition."""
    async with meta.client(limits=LIMITS) as client:
        sender = await opened(client)
        brokers[1].server.broker.read_only = True
        position, sending = start(sender)
        await until(lambda: sending.done() or refused(client))
        assert not sending.done()
        assert [row[3] for row in await meta.rows(0)] == [b"0"]
        await time_out(client, sending)
        assert sending.exception() is not None
    brokers[1].server.broker.read_only = False
    await resume(meta, position)
    assert await meta.by_key() == {"k0": [b"0"], "k1": [b"1"]}


async def test_a_row_waits_for_an_unreachable_broker_and_is_stored_once_after_a_resume(
    brokers: list[EmbeddedBroker], meta: PlayedMeta
) -> None:
    async with meta.client(limits=LIMITS) as client:
        sender = await opened(client)
        await brokers[1].stop()
        await until(lambda: not all(queue.connected for queue in subject_sender_of(client).queues()))
        position, sending = start(sender)
        await until(lambda: waiting(client) == 1)
        # A plain send of the same client passes the waiting row.
        await client.send("s", b"later", key="k0")
        assert waiting(client) == 1
        assert [row[3] for row in await meta.rows(0)] == [b"0", b"later"]
        await time_out(client, sending)
        assert sending.exception() is not None
    await brokers[1].start()
    await resume(meta, position)
    assert await meta.by_key() == {"k0": [b"0", b"later"], "k1": [b"1"]}


async def test_a_row_that_is_refused_until_it_times_out_fails_with_the_refusal(
    brokers: list[EmbeddedBroker], meta: PlayedMeta
) -> None:
    limits = msgspec.structs.replace(LIMITS, send_retry_first_seconds=60.0, send_retry_max_seconds=60.0)
    async with meta.client(limits=limits) as client:
        sender = await opened(client)
        brokers[1].server.broker.read_only = True
        position, sending = start(sender)
        await until(lambda: sending.done() or refused(client))
        await time_out(client, sending)
        with pytest.raises(plait.ReadOnly):
            await sending
    brokers[1].server.broker.read_only = False
    await resume(meta, position)
    assert await meta.by_key() == {"k0": [b"0"], "k1": [b"1"]}
