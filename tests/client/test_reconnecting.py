"""A server that restarts, crashes or drops connections causes only a pause: no row is lost or stored twice."""

from __future__ import annotations

import asyncio
import itertools
import random
from types import SimpleNamespace

import msgspec
import pytest

import plait
from plait.testing import EmbeddedBroker
from plait.wire import messages
from plait.wire.link import Link
from tests.client.support import fetch_all, numbers, send, until

#: Reconnects at once, so that tests do not wait for pauses.
EAGER = plait.ClientLimits(reconnect_first_seconds=0.001, reconnect_max_seconds=0.01)


async def everything(client: plait.Client, subject: str) -> list[plait.Message]:
    found: list[plait.Message] = []
    async with client.reader(subject, start="earliest") as reader:
        while more := await reader.fetch(100_000, wait=0):
            found += more
    return found


async def test_a_restart_costs_only_latency(broker: EmbeddedBroker, client: plait.Client) -> None:
    await send(client, 10)
    async with client.consumer("s", group="g") as consumer:
        held = await fetch_all(consumer, 10)
        await broker.restart()
        assert (await client.send("s", b"10")).sequence == 10
        for message in held:
            message.ack()
        await consumer.flush()
        [message] = await fetch_all(consumer, 1)
        assert (message.body, message.attempt) == (b"10", 1)
        await message.ack()
    info = await client.admin.group("s", "g")
    assert (info.lag, info.redelivered) == (0, 0)


async def test_held_rows_stay_held_after_a_crash(broker: EmbeddedBroker, client: plait.Client) -> None:
    """R13: a consumer that attaches again names its held rows, so that no other consumer gets them."""
    await send(client, 100)
    async with client.consumer("s", group="g", prefetch=20) as consumer, client.consumer("s", group="g") as other:
        held = await fetch_all(consumer, 10)
        await broker.kill()
        await broker.start()
        await client.send("s", b"100")
        rest = await fetch_all(other, 1)
        for message in [*held, *rest]:
            message.ack()
        seen = numbers(held) + numbers(rest)
        while len(seen) < 101:
            for source in (consumer, other):
                for message in await source.fetch(100, wait=0.01):
                    seen.append(int(message.body))
                    message.ack()
        assert sorted(seen) == list(range(101))


@pytest.mark.parametrize("crash", [False, True], ids=["restart", "crash"])
async def test_sends_in_flight_are_stored_once_and_in_order(broker: EmbeddedBroker, crash: bool) -> None:
    """R7: the client resends frames without a reply, and the broker stores each once."""
    limits = plait.ClientLimits(frame_count=7, in_flight_frames=16, reconnect_first_seconds=0.001)
    async with broker.connect(limits=limits) as client:
        tickets = []
        for number in range(4_000):
            tickets.append(client.post("s", b"%d" % number))
            if number % 1_000 == 500:
                await asyncio.sleep(0)
                if crash:
                    await broker.kill()
                    await broker.start()
                else:
                    await broker.restart()
        await client.flush()
        receipts = [await ticket for ticket in tickets]
        stored = await everything(client, "s")
        assert numbers(stored) == list(range(4_000))
        assert [m.message_id for m in stored] == [r.message_id for r in receipts]
        assert {r.sequence for r in receipts} <= {None, *range(4_000)}
        known = [(m.sequence, r.sequence) for m, r in zip(stored, receipts, strict=True) if r.sequence is not None]
        assert all(place == told for place, told in known)
        assert len(known) > 3_000


async def test_broken_connections_lose_and_repeat_no_row(broker: EmbeddedBroker, seed: int) -> None:
    """Sender and consumer repeatedly lose their connection at random moments."""
    chance = random.Random(seed)
    async with broker.connect(limits=EAGER) as sender, broker.connect(limits=EAGER) as receiver:
        seen: dict[int, int] = {}

        async def receive() -> None:
            async with receiver.consumer("s", group="g", prefetch=50) as consumer:
                async for message in consumer:
                    number = int(message.body)
                    seen[number] = seen.get(number, 0) + 1
                    message.ack()
                    if len(seen) == 3_000:
                        await consumer.flush()
                        return

        receiving = asyncio.ensure_future(receive())
        for number in range(3_000):
            sender.post("s", b"%d" % number)
            if chance.random() < 0.02:
                await asyncio.sleep(0)
            if chance.random() < 0.01:
                for client in (sender, receiver):
                    link = client._node.link
                    if link is not None and chance.random() < 0.5:
                        link.abort()
        await sender.flush()
        await asyncio.wait_for(receiving, 20)
        assert sorted(seen) == list(range(3_000))
        assert set(seen.values()) == {1}
        assert numbers(await everything(sender, "s")) == list(range(3_000))
        assert (await sender.admin.group("s", "g")).lag == 0


async def test_a_consumer_without_an_open_pull_notices_a_lost_connection(
    broker: EmbeddedBroker, client: plait.Client
) -> None:
    """Its prefetch is full, so no open pull fails."""
    await send(client, 10)
    async with client.consumer("s", group="g", prefetch=2) as consumer:
        started = await fetch_all(consumer, 2)
        await until(lambda: not consumer._fetcher.clients[0].pulls)
        await broker.restart()
        for message in started:
            message.ack()
        await asyncio.wait_for(consumer.flush(), 10)
        assert numbers(await fetch_all(consumer, 8)) == list(range(2, 10))


async def test_acks_made_while_the_server_is_down_are_sent_later(broker: EmbeddedBroker, client: plait.Client) -> None:
    await send(client, 10)
    async with client.consumer("s", group="g") as consumer:
        handed = await fetch_all(consumer, 10)
        await broker.stop()
        await until(lambda: client._node.link is None)
        for message in handed[:9]:
            message.ack()
        handed[9].nack()
        await broker.start()
        await asyncio.wait_for(consumer.flush(), 10)
        [again] = await fetch_all(consumer, 1)
        assert (again.body, again.attempt) == (b"9", 2)


async def test_an_ack_lost_in_a_crash_is_sent_again(broker: EmbeddedBroker, client: plait.Client) -> None:
    await send(client, 3)
    async with client.consumer("s", group="g") as consumer:
        for message in await fetch_all(consumer, 3):
            message.ack()
        await asyncio.sleep(0)
        await broker.kill()
        await broker.start()
        await consumer.flush()
        await client.send("s", b"3")
        [message] = await fetch_all(consumer, 1)
        assert (message.body, message.attempt) == (b"3", 1)


async def test_an_ack_times_out_while_the_server_is_down(broker: EmbeddedBroker, client: plait.Client) -> None:
    await client.send("s", b"0")
    async with client.consumer("s", group="g") as consumer:
        batch = await consumer.fetch(1, wait=20)
        await broker.stop()
        collector = consumer._fetcher.clients[0].collector
        patient, collector._limits = collector._limits, plait.ClientLimits(send_seconds=0.05)
        with pytest.raises(plait.Timeout, match="may be delivered again"):
            await batch.ack()
        collector._limits = patient
        await broker.start()
        await consumer.flush()
    assert (await client.admin.group("s", "g")).lag == 0


async def test_opening_a_consumer_survives_a_broken_connection(broker: EmbeddedBroker, client: plait.Client) -> None:
    await send(client, 1)
    link = client._node.link
    assert link is not None
    link.abort()
    async with client.consumer("s", group="g") as consumer:
        assert numbers(await fetch_all(consumer, 1)) == [0]


async def test_reconnects_back_off_when_connections_break_at_once(broker: EmbeddedBroker) -> None:
    limits = plait.ClientLimits(reconnect_first_seconds=0.01, reconnect_max_seconds=0.08)
    loop = asyncio.get_running_loop()
    async with broker.connect(limits=limits) as client:
        moments: list[float] = []

        def hang_up(link: Link) -> None:
            moments.append(loop.time())
            link.abort()

        client._node.on_link.append(hang_up)
        link = client._node.link
        assert link is not None
        link.abort()
        await until(lambda: len(moments) == 6)
        client._node.on_link.remove(hang_up)
        pauses = [later - earlier for earlier, later in itertools.pairwise(moments)]
        assert pauses[-1] >= 0.04
        assert sum(pauses) >= 0.01 + 0.02 + 0.04 + 0.04
        await client.send("s", b"still here")


async def test_a_long_lived_connection_is_replaced_at_once(broker: EmbeddedBroker) -> None:
    limits = plait.ClientLimits(reconnect_first_seconds=30, reconnect_steady_seconds=0)
    async with broker.connect(limits=limits) as client:
        for number in range(5):
            link = client._node.link
            assert link is not None
            link.abort()
            await until(lambda link=link: client._node.link not in (None, link))  # type: ignore[misc]
            assert (await asyncio.wait_for(client.send("s", b""), 10)).sequence == number


async def test_a_connection_without_replies_is_closed(broker: EmbeddedBroker) -> None:
    """Half open: the connection exists, but no reply arrives. Missing heartbeats reveal it."""
    limits = plait.ClientLimits(heartbeat_seconds=0.01, reconnect_first_seconds=0.001)
    async with broker.connect(limits=limits) as client:
        link = client._node.link
        assert link is not None
        assert link.welcome is not None
        [connection] = broker.server.connections
        connection._transport.pause_reading()  # type: ignore[union-attr]
        link.welcome = msgspec.structs.replace(link.welcome, consumer_lost_seconds=0.05)
        await until(lambda: link.closed)
        assert (await client.send("s", b"")).sequence == 0


async def test_a_server_of_another_protocol_is_refused_at_once(
    broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = SimpleNamespace(**{**vars(messages), "PROTOCOL_VERSION": 99})
    monkeypatch.setattr("plait.wire.link.m", newer)
    client = broker.connect(limits=plait.ClientLimits(request_seconds=60))
    with pytest.raises(plait.VersionMismatch, match="this server supports protocol 1, the client 99"):
        await asyncio.wait_for(client.open(), 10)
