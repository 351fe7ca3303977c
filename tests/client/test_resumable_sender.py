"""A resumable sender: a row that its broker refuses waits for that broker and is never stored in two partitions."""

from __future__ import annotations

import asyncio

import msgspec
import pyarrow as pa
import pytest

import plait
from plait.client.send.open_rows import hash_keys
from plait.client.send.resumable_sender import ResumableSender, SendPosition
from plait.client.send.row_columns import RowColumns
from plait.client.send.subject_sender import SubjectSender
from plait.testing import EmbeddedBroker
from tests.client.support import EAGER, PlayedMeta, until

#: One key of each of the two partitions.
KEYS = ["k0", "k1"]
ROWS = RowColumns(pa.array([b"0", b"1"], pa.binary()), pa.array(KEYS), hash_keys(KEYS, 2))
IDS = ["id0", "id1"]
#: Other senders leave an unreachable broker at once.
LIMITS = msgspec.structs.replace(EAGER, unreached_seconds=0.0)


def subject_sender_of(client: plait.Client) -> SubjectSender:
    return client._senders.sender("s")


def waiting(client: plait.Client) -> int:
    return sum(len(sender.window.frames) for sender in subject_sender_of(client).senders())


def refused(client: plait.Client) -> bool:
    """One row is stored, and the broker refused the other."""
    left = [frame for sender in subject_sender_of(client).senders() for frame in sender.window.frames]
    return len(left) == 1 and left[0].refusal is not None


async def opened(client: plait.Client) -> ResumableSender:
    """A sender that is connected to both brokers and has sent nothing."""
    sender = ResumableSender(client, "s")
    await sender.open()
    await until(lambda: all(sender.target.connected for sender in subject_sender_of(client).senders()))
    return sender


def start(sender: ResumableSender) -> tuple[SendPosition, asyncio.Task[None]]:
    """Start to send the rows; return the position to resume at, and the task."""
    prepared, position = sender.prepare(ROWS, IDS), sender.position
    return position, asyncio.create_task(sender.send(prepared))


async def resume(meta: PlayedMeta, position: SendPosition) -> None:
    """Another process sends the same rows under the same producer sequences."""
    async with meta.client(limits=LIMITS) as client:
        sender = await opened(client)
        prepared = sender.prepare(ROWS, IDS)
        sender.resume_at(position)
        await sender.send(prepared)


async def time_out(client: plait.Client, sending: asyncio.Task[None]) -> None:
    """Let all waiting frames time out."""
    for sender in subject_sender_of(client).senders():
        for frame in sender.window.frames:
            frame.deadline = 0.0
        sender._expire()
    await asyncio.wait([sending])


#: With a long pause, the row is not under way when it times out; its outcome would be unknown then.
PATIENT = msgspec.structs.replace(LIMITS, send_retry_first_seconds=60.0, send_retry_max_seconds=60.0)


@pytest.mark.parametrize(("limits", "error"), [(LIMITS, plait.PlaitError), (PATIENT, plait.ReadOnly)])
async def test_a_refused_row_waits_for_its_partition_and_is_stored_once_after_a_resume(
    brokers: list[EmbeddedBroker], meta: PlayedMeta, limits: plait.ClientLimits, error: type[plait.PlaitError]
) -> None:
    """The subject is ``best_tried``: other senders would move the row to the other partition."""
    async with meta.client(limits=limits) as client:
        sender = await opened(client)
        brokers[1].server.broker.turn.read_only = True
        position, sending = start(sender)
        await until(lambda: sending.done() or refused(client))
        assert not sending.done()
        assert [row[3] for row in await meta.rows(0)] == [b"0"]
        await time_out(client, sending)
        with pytest.raises(error):
            await sending
    brokers[1].server.broker.turn.read_only = False
    await resume(meta, position)
    assert await meta.by_key() == {"k0": [b"0"], "k1": [b"1"]}


async def test_a_row_waits_for_an_unreachable_broker_and_is_stored_once_after_a_resume(
    brokers: list[EmbeddedBroker], meta: PlayedMeta
) -> None:
    async with meta.client(limits=LIMITS) as client:
        sender = await opened(client)
        await brokers[1].stop()
        await until(lambda: not all(sender.target.connected for sender in subject_sender_of(client).senders()))
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
