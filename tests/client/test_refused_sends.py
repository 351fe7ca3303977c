"""A send that a broker refuses, or whose reply is lost, moves, waits or fails, and is never stored twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
from xxhash import xxh3_64_intdigest

import plait
from plait.client.net.node import Node
from plait.client.send.partition_sender import PartitionSender
from plait.frame.columns import Column
from plait.testing import EmbeddedBroker
from tests.client.support import EAGER, PlayedMeta, until

#: Keys of partition 0 and of partition 1, of two.
LEFT, RIGHT = "k0", "k1"


@pytest.fixture
async def client(meta: PlayedMeta) -> AsyncIterator[plait.Client]:
    async with meta.client(limits=EAGER) as connected:
        yield connected


strict = pytest.mark.parametrize("meta", ["strict"], indirect=True)
both = pytest.mark.parametrize("meta", ["strict", "best_tried"], indirect=True)


def node_of(client: plait.Client, group: str) -> Node:
    return client._router._nodes[group]


async def test_the_keys_of_these_tests_are_in_different_partitions(client: plait.Client) -> None:
    assert (await client.send("s", b"x", key=LEFT)).partition.name == "s"
    assert (await client.send("s", b"x", key=RIGHT)).partition.name == "s#1"


async def test_best_tried_a_refused_row_moves_to_an_lp_of_the_other_partition(
    brokers: list[EmbeddedBroker], meta: PlayedMeta, client: plait.Client
) -> None:
    """R6: the bits of the hash that distinguish the key stay the same."""
    await client.send("s", b"before", key=RIGHT)
    brokers[1].server.broker.turn.read_only = True
    receipt = await client.send("s", b"moved", key=RIGHT, tags=["t"], headers={"h": 1})
    assert str(receipt.partition) == "s@g1"
    [frame] = await meta.frames(0)
    stamped = int(frame.fixed(Column.KEY_HASH)[0])
    assert stamped >> 10 == xxh3_64_intdigest(RIGHT.encode()) >> 10
    assert stamped % 1024 < 512
    async with client.reader("s", start="earliest") as reader:
        rows = [message for message in await reader.fetch(10, wait=0) if message.body == b"moved"]
    assert [(r.key, r.tags, r.headers, r.message_id) for r in rows] == [(RIGHT, ["t"], {"h": 1}, receipt.message_id)]
    brokers[1].server.broker.turn.read_only = False
    assert (await client.send("s", b"after", key=RIGHT)).partition.name == "s#1"


async def test_best_tried_a_row_that_all_brokers_refuse_fails(
    brokers: list[EmbeddedBroker], meta: PlayedMeta, client: plait.Client
) -> None:
    await client.send_many("s", [b"x"] * 2, keys=[LEFT, RIGHT])
    for broker in brokers:
        broker.server.broker.turn.read_only = True
    for arguments in ({"key": LEFT}, {"key": RIGHT}, {}):
        with pytest.raises(plait.ReadOnly):
            await client.send("s", b"refused", **arguments)  # type: ignore[arg-type]
    with pytest.raises(plait.ReadOnly):
        await client.send_many("s", [b"refused"] * 10, keys=[f"k{n}" for n in range(10)])
    for broker in brokers:
        broker.server.broker.turn.read_only = False
    await client.send("s", b"y", key=LEFT)
    stored = [*await meta.rows(0), *await meta.rows(1)]
    assert sorted(row[3] for row in stored) == [b"x", b"x", b"y"]


async def test_rows_without_keys_avoid_a_broker_that_refuses(
    brokers: list[EmbeddedBroker], meta: PlayedMeta, client: plait.Client
) -> None:
    await client.send_many("s", [b"x"] * 2, keys=[LEFT, RIGHT])
    brokers[1].server.broker.turn.read_only = True
    receipts = [await client.send("s", b"%d" % n) for n in range(40)]
    assert {str(r.partition) for r in receipts} == {"s@g1"}
    assert client._producer.health.seconds("g2") >= 3.0


async def test_rows_without_keys_avoid_broker_groups_that_the_route_marks_unwritable(
    meta: PlayedMeta, client: plait.Client
) -> None:
    meta.states["g1"] = "R"
    receipts = [await client.send("s", b"%d" % n) for n in range(20)]
    assert {str(r.partition) for r in receipts} == {"s#1@g2"}
    meta.states["g1"], meta.states["g2"] = "RW", "NRW"
    await client._router.refresh("s")
    receipts = [await client.send("s", b"%d" % n) for n in range(20)]
    assert {str(r.partition) for r in receipts} == {"s@g1"}


@strict
async def test_strict_a_refused_row_waits_for_its_partition(
    brokers: list[EmbeddedBroker], meta: PlayedMeta, client: plait.Client
) -> None:
    await client.send("s", b"0", key=RIGHT)
    brokers[1].server.broker.turn.read_only = True
    sending = [asyncio.ensure_future(client.send("s", b"1", key=RIGHT))]
    await until(lambda: node_retries(client, "s#1"))
    sending += [asyncio.ensure_future(client.send("s", b"%d" % n, key=RIGHT)) for n in range(2, 50)]
    assert (await client.send("s", b"other key", key=LEFT)).partition.name == "s"
    assert not any(one.done() for one in sending)
    brokers[1].server.broker.turn.read_only = False
    receipts = await asyncio.gather(*sending)
    assert {str(r.partition) for r in receipts} == {"s#1@g2"}
    assert (await meta.by_key())[RIGHT] == [b"%d" % n for n in range(50)]


def node_sender(client: plait.Client, name: str) -> PartitionSender:
    [sender] = [
        s for s in client._senders.sender("s").senders() if s.target.name is not None and s.target.name.name == name
    ]
    return sender


def node_retries(client: plait.Client, name: str) -> bool:
    """Whether a refused frame waits for its resend."""
    return any(frame.refusal is not None for frame in node_sender(client, name).window.frames)


def expire(client: plait.Client, name: str) -> None:
    """Let all waiting frames time out."""
    sender = node_sender(client, name)
    for frame in sender.window.frames:
        frame.deadline = 0.0
    sender._expire()


@strict
async def test_strict_a_row_that_is_refused_until_it_times_out_fails_with_the_refusal(
    brokers: list[EmbeddedBroker], meta: PlayedMeta
) -> None:
    # A long pause, so that the frame is not in flight when it times out; its outcome would be unknown then.
    limits = msgspec.structs.replace(EAGER, send_retry_first_seconds=60.0, send_retry_max_seconds=60.0)
    async with meta.client(limits=limits) as client:
        await client.send("s", b"0", key=RIGHT)
        brokers[1].server.broker.turn.read_only = True
        sending = asyncio.ensure_future(client.send("s", b"1", key=RIGHT))
        await until(lambda: node_retries(client, "s#1"))
        expire(client, "s#1")
        with pytest.raises(plait.ReadOnly):
            await sending
        brokers[1].server.broker.turn.read_only = False
        node_sender(client, "s#1")._try_again()
        await client.send("s", b"2", key=RIGHT)
    assert (await meta.by_key())[RIGHT] == [b"0", b"2"]


async def stored_unanswered(client: plait.Client, broker: EmbeddedBroker, body: bytes, name: str) -> plait.Ticket:
    """Post a row of RIGHT that the broker stores; its reply is lost with the link."""
    link = node_of(client, broker.config.group).link
    assert link is not None
    assert link._transport is not None
    before = broker.server.broker.subjects[name].next
    link._transport.pause_reading()
    ticket = client.post("s", body, key=RIGHT)
    await until(lambda: broker.server.broker.subjects[name].next > before)
    link.abort()
    await until(lambda: link.closed)
    return ticket


@both
async def test_a_row_whose_reply_was_lost_does_not_move_with_its_key(
    brokers: list[EmbeddedBroker], meta: PlayedMeta, client: plait.Client
) -> None:
    """R8: the client resends the row to its first partition; only rows that are not stored there move."""
    await client.send("s", b"0", key=RIGHT)
    ticket = await stored_unanswered(client, brokers[1], b"1", "s#1")
    later = [client.post("s", b"%d" % n, key=RIGHT) for n in range(2, 60)]
    await meta.change(1)
    await client._router.refresh("s")
    assert str((await ticket).partition) == "s#1@g2"
    assert {str((await one).partition) for one in later} == {"s@g1"}
    assert (await meta.by_key())[RIGHT] == [b"%d" % n for n in range(60)]


@both
async def test_a_row_whose_reply_was_lost_is_not_failed_by_a_later_refusal(
    brokers: list[EmbeddedBroker], meta: PlayedMeta, client: plait.Client
) -> None:
    await client.send("s", b"0", key=RIGHT)
    ticket = await stored_unanswered(client, brokers[1], b"1", "s#1")
    brokers[1].server.broker.turn.read_only = True
    await until(lambda: node_retries(client, "s#1"))
    assert not ticket.done
    brokers[1].server.broker.turn.read_only = False
    assert (await ticket).sequence == 1
    assert (await meta.by_key())[RIGHT] == [b"0", b"1"]


@both
async def test_a_row_in_doubt_that_times_out_fails_and_the_rows_behind_it_continue(
    brokers: list[EmbeddedBroker], meta: PlayedMeta, client: plait.Client
) -> None:
    """The row is stored or never will be, so the order of its key holds either way."""
    await client.send("s", b"0", key=RIGHT)
    ticket = await stored_unanswered(client, brokers[1], b"1", "s#1")
    expire(client, "s#1")
    with pytest.raises(plait.Timeout, match="no answer for a send"):
        await ticket
    await brokers[1].stop()
    with pytest.raises(plait.Timeout, match="no answer for a send"):
        await client.flush()
    await brokers[1].start()
    await client.send("s", b"2", key=RIGHT)
    assert (await meta.by_key())[RIGHT] == [b"0", b"1", b"2"]


async def test_best_tried_unsent_rows_leave_an_unreachable_broker(
    brokers: list[EmbeddedBroker], meta: PlayedMeta
) -> None:
    limits = msgspec.structs.replace(EAGER, unreached_seconds=0.0)
    async with meta.client(limits=limits) as client:
        await client.send("s", b"0", key=RIGHT)
        await brokers[1].stop()
        await until(lambda: node_of(client, "g2").link is None)
        assert str((await client.send("s", b"1", key=RIGHT)).partition) == "s@g1"
        receipts = await client.send_many("s", [b"2"] * 10, keys=[f"k{n}" for n in range(10)])
        assert {str(r.partition) for r in receipts} == {"s@g1"}
        await brokers[1].start()


@strict
async def test_strict_unsent_rows_wait_for_an_unreachable_broker(
    brokers: list[EmbeddedBroker], meta: PlayedMeta
) -> None:
    limits = msgspec.structs.replace(EAGER, unreached_seconds=0.0)
    async with meta.client(limits=limits) as client:
        await client.send("s", b"0", key=RIGHT)
        await brokers[1].stop()
        await until(lambda: node_of(client, "g2").link is None)
        ticket = client.post("s", b"1", key=RIGHT)
        await client.send("s", b"other key", key=LEFT)
        assert not ticket.done
        await brokers[1].start()
        assert str((await ticket).partition) == "s#1@g2"
