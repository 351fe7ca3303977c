"""Concurrent opens and closes: each task gets only its own errors, and a close does not affect a successor."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest

import plait
from plait.server.connection import Connection
from plait.testing import EmbeddedBroker
from tests.client.support import EAGER, PATIENCE_SECONDS, fetch_all, numbers, send, until

KINDS: list[Any] = [pytest.param({}, id="shared"), pytest.param({"ordered": True}, id="ordered")]


@asynccontextmanager
async def silent_server() -> AsyncIterator[str]:
    """A server that accepts connections and sends nothing."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield f"plait://127.0.0.1:{listening.getsockname()[1]}"


# --- successors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_a_consumer_that_opens_while_its_predecessor_closes_gets_every_message(
    client: plait.Client, kind: dict[str, Any]
) -> None:
    for turns in (0, 1, 2, 3, 5, 8, 13, 21, 34, 55):
        subject = f"s{turns}"
        await send(client, 20, subject)
        first = await client.consumer(subject, group="g", **kind).__aenter__()
        for message in (await fetch_all(first, 10))[:5]:
            message.ack()
        closing = asyncio.ensure_future(first.close())
        for _ in range(turns):
            await asyncio.sleep(0)
        async with client.consumer(subject, group="g", **kind) as second:
            assert sorted(numbers(await fetch_all(second, 15))) == list(range(5, 20))
            await closing
            # The successor stays a member after its predecessor has left.
            await send(client, 5, subject, first=20)
            assert sorted(numbers(await fetch_all(second, 5))) == list(range(20, 25))


async def test_a_successor_has_the_member_id_of_its_predecessor(client: plait.Client) -> None:
    first = await client.consumer("s", group="g", ordered=True).__aenter__()
    closing = asyncio.ensure_future(first.close())
    await asyncio.sleep(0)
    second = client.consumer("s", group="g", ordered=True)
    third = client.consumer("s", group="g", ordered=True)
    assert (second.client_id, third.client_id) == (client.client_id, f"{client.client_id}:2")
    await closing


# --- other tasks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_a_flush_interrupted_by_a_close_raises_closed(timed_broker: EmbeddedBroker, kind: dict[str, Any]) -> None:
    limits = msgspec.structs.replace(EAGER, request_seconds=0.1)
    async with timed_broker.connect(limits=limits) as client:
        await send(client, 2)
        consumer = await client.consumer("s", group="g", **kind).__aenter__()
        messages = await fetch_all(consumer, 2)
        # The broker stops answering.
        session = consumer._fetcher.clients[0].session
        assert session is not None
        link = session.link
        assert link._transport is not None
        link._transport.pause_reading()
        messages[0].ack()
        flushing = asyncio.ensure_future(consumer.flush())
        await until(lambda: consumer._fetcher.clients[0].collector._in_flight)
        await consumer.close()
        # At once, and not when the link is given up.
        with pytest.raises(plait.Closed, match=r"the consumer .*is closed"):
            await asyncio.wait_for(flushing, 2.0)
        link.abort()


async def test_a_consumer_that_closes_while_its_broker_is_stalled_releases_its_client_id(
    broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = msgspec.structs.replace(EAGER, request_seconds=0.1)
    async with broker.connect(limits=limits, client_id="screen-1") as client:
        await send(client, 2)
        consumer = await client.consumer("s", broadcast=True, start="earliest").__aenter__()
        await fetch_all(consumer, 1)
        with monkeypatch.context() as patch:
            # The server handles the requests of the pause afterwards.
            serving: list[Callable[[], None]] = []
            serve = Connection._serve
            patch.setattr(Connection, "_serve", lambda self, *rest: serving.append(partial(serve, self, *rest)))
            await consumer.close()
        for each in serving:
            each()
        async with client.consumer("s", broadcast=True) as successor:
            assert successor.client_id == "screen-1"
            assert len(await fetch_all(successor, 2)) == 2


@pytest.mark.parametrize("kind", KINDS)
async def test_a_consumer_closed_while_it_opens_raises_closed(
    broker: EmbeddedBroker, client: plait.Client, kind: dict[str, Any]
) -> None:
    async with client.consumer("s", group="g", **kind):
        pass
    for turns in (*range(20), *range(20, 300, 9)):
        consumer = client.consumer("s", group="g", **kind)
        opening = asyncio.ensure_future(consumer.__aenter__())
        for _ in range(turns):
            await asyncio.sleep(0)
        await consumer.close()
        [outcome] = await asyncio.gather(opening, return_exceptions=True)
        assert outcome is consumer or (
            isinstance(outcome, plait.Closed)
            and ("closed before it was open" in str(outcome) or "opened before" in str(outcome))
        )
    assert (await client.admin.group("s", "g")).online == 0


async def test_closing_a_client_ends_the_opening_of_its_consumers(broker: EmbeddedBroker) -> None:
    client = await broker.connect().open()
    asked = asyncio.Event()

    async def never(subject: str, create: bool) -> Any:
        asked.set()
        await asyncio.Event().wait()

    client._router.find = never  # type: ignore[method-assign]
    opening = asyncio.ensure_future(client.consumer("s", group="g").__aenter__())
    sending = asyncio.ensure_future(client.admin.subject("s"))
    await asked.wait()
    await client.close()
    for waiting in (opening, sending):
        with pytest.raises(plait.Closed):
            await waiting


async def test_a_closing_client_refuses_new_consumers_and_readers(client: plait.Client) -> None:
    closing = asyncio.ensure_future(client.close())
    await asyncio.sleep(0)
    with pytest.raises(plait.Closed):
        client.consumer("s", group="g")
    with pytest.raises(plait.Closed):
        client.reader("s")
    await closing
    with pytest.raises(plait.Closed, match="the client is closed"):
        await client.open()


# --- opening ---------------------------------------------------------------------------------------------------------


async def test_an_open_after_a_failed_one_connects_or_fails_again() -> None:
    limits = plait.ClientLimits(request_seconds=0.05)
    async with silent_server() as address:
        client = plait.connect(address, limits=limits)
        for _ in range(2):
            with pytest.raises(plait.Unavailable):
                await client.open()
            with pytest.raises(plait.Closed, match="not connected"):
                await client.send("s", b"body")
        await client.close()


async def test_a_client_that_failed_to_connect_can_be_opened_later(broker: EmbeddedBroker) -> None:
    await broker.stop()
    client = broker.connect(limits=plait.ClientLimits(request_seconds=0.05))
    with pytest.raises(plait.Unavailable):
        await client.open()
    await broker.start()
    client._node._limits = plait.ClientLimits()
    async with client:
        await client.send("s", b"body")


async def test_two_tasks_that_open_a_client_both_find_it_connected(broker: EmbeddedBroker) -> None:
    client = broker.connect()

    async def use() -> None:
        await client.open()
        await client.send("s", b"body")

    async with asyncio.timeout(PATIENCE_SECONDS):
        await asyncio.gather(use(), use())
    await client.close()


async def test_every_close_of_a_client_waits_for_the_end_and_one_raises_the_error(
    broker: EmbeddedBroker,
) -> None:
    client = await broker.connect(limits=plait.ClientLimits(send_seconds=0.05)).open()
    await broker.stop()
    client.post("s", b"body")
    outcomes = await asyncio.gather(client.close(), client.close(), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes if outcome is not None] == [plait.Timeout]
    await broker.start()
