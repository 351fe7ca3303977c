"""A cancelled call leaves the client usable: a close still completes (R27), and no row is lost or duplicated."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import plait
from plait.client.net.node import ConsumerSession
from plait.testing import EmbeddedBroker
from tests.client.support import PATIENCE_SECONDS, fetch_all, numbers, send
from tests.support.cancelling import every_step, no_new_tasks

KINDS: list[Any] = [pytest.param({}, id="shared"), pytest.param({"ordered": True}, id="ordered")]
ALL: list[Any] = [pytest.param(False, id="the call"), pytest.param(True, id="all its tasks")]


async def rest(client: plait.Client, subject: str, count: int, **kind: Any) -> list[int]:
    """The numbers that another member of the group gets at once."""
    async with asyncio.timeout(PATIENCE_SECONDS), client.consumer(subject, group="g", **kind) as consumer:
        return sorted(numbers(await fetch_all(consumer, count)))


@pytest.mark.parametrize("everything", ALL)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_cancelled_close_of_a_consumer_returns_its_held_rows(
    timed_broker: EmbeddedBroker, kind: dict[str, Any], everything: bool
) -> None:
    async with timed_broker.connect() as client, timed_broker.connect() as other:
        async for at in every_step():
            subject = f"s{at.step}"
            await send(client, 20, subject)
            with no_new_tasks():
                consumer = client.consumer(subject, group="g", **kind)
                await consumer.__aenter__()
                for message in (await fetch_all(consumer, 10))[:5]:
                    message.ack()
                outcome = await at.cancel(consumer.close(), everything=everything)
            assert outcome.cancelled or outcome.error is None
            assert await rest(other, subject, 15, **kind) == list(range(5, 20))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_cancelled_close_of_a_client_closes_its_consumers_and_sends_posted_rows(
    timed_broker: EmbeddedBroker, kind: dict[str, Any]
) -> None:
    async with timed_broker.connect() as other:
        async for at in every_step():
            subject = f"s{at.step}"
            with no_new_tasks():
                client = await timed_broker.connect().open()
                consumer = await client.consumer(subject, group="g", **kind).__aenter__()
                await send(client, 20, subject)
                await fetch_all(consumer, 10)
                client.post(subject, b"20")
                outcome = await at.cancel(client.close())
            assert outcome.cancelled or outcome.error is None
            assert await rest(other, subject, 21, **kind) == list(range(21))
            with pytest.raises(plait.Closed):
                await client.send(subject, b"late")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_cancelled_open_of_a_consumer_leaves_no_member(
    timed_broker: EmbeddedBroker, kind: dict[str, Any]
) -> None:
    async with timed_broker.connect() as client, timed_broker.connect() as other:
        async for at in every_step():
            subject = f"s{at.step}"
            await send(other, 5, subject)
            consumer = client.consumer(subject, group="g", **kind)
            with no_new_tasks():
                outcome = await at.cancel(consumer.__aenter__())
                await consumer.close()
            assert outcome.cancelled or outcome.error is None
            assert await rest(other, subject, 5, **kind) == list(range(5))


async def test_a_close_during_an_attach_leaves_no_session(timed_broker: EmbeddedBroker) -> None:
    async with timed_broker.connect() as client:
        for turns in range(5):
            consumer = await client.consumer("s", group="g").__aenter__()
            [pulls] = consumer._fetcher.clients
            assert pulls.session is not None
            link, request = pulls.session.link, pulls.terms.attach_request("s", 0, [], 0)
            pulls.session.end()
            pulls.lost()
            # The reply to the next attach is late.
            transport: Any = link._transport
            transport.pause_reading()
            asyncio.get_running_loop().call_later(0.01, transport.resume_reading)
            for _ in range(turns):
                await asyncio.sleep(0)
            await consumer.close()
            # The next one with the same client id is accepted at once.
            (await ConsumerSession.start(link, request)).end()


async def test_a_client_can_be_opened_after_a_cancelled_open(broker: EmbeddedBroker) -> None:
    async for at in every_step():
        client = broker.connect()
        outcome = await at.cancel(client.open())
        assert outcome.cancelled or outcome.error is None
        async with client:
            await client.send("s", b"body")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_cancelled_fetch_loses_and_repeats_no_row(client: plait.Client, kind: dict[str, Any]) -> None:
    got: list[int] = []
    sent = 0
    async with client.consumer("s", group="g", **kind) as consumer:
        async for at in every_step():
            waiting = asyncio.ensure_future(at.cancel(consumer.fetch(3, wait=PATIENCE_SECONDS)))
            await send(client, 3, first=sent)
            sent += 3
            outcome = await waiting
            batch = outcome.result or await consumer.fetch(3, wait=PATIENCE_SECONDS)
            got += numbers(batch)
            await batch.ack()
        got += numbers(await fetch_all(consumer, sent - len(got)))
    assert sorted(got) == list(range(sent))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_cancelled_ack_is_still_sent(client: plait.Client, kind: dict[str, Any]) -> None:
    async with client.consumer("s", group="g", **kind) as consumer:
        async for at in every_step():
            await send(client, 2, first=2 * at.step)
            batch = await consumer.fetch(2, wait=PATIENCE_SECONDS)
            assert batch[0].attempt == 1
            await at.cancel(batch.ack())
        await consumer.flush()
        assert (await client.admin.group("s", "g")).lag == 0


async def test_a_cancelled_nack_is_still_sent(client: plait.Client) -> None:
    await send(client, 1)
    async with client.consumer("s", group="g", retry=plait.Retry(attempts=None)) as consumer:
        async for at in every_step():
            batch = await consumer.fetch(1, wait=PATIENCE_SECONDS)
            assert batch[0].attempt == at.step
            await at.cancel(batch.nack(delay=0))


async def test_a_cancelled_send_is_stored_in_order_at_most_once(client: plait.Client) -> None:
    sent: list[int] = []
    async with client.consumer("s", group="g") as consumer:
        async for at in every_step():
            await at.cancel(client.send("s", b"%d" % (2 * at.step), key="k"))
            await client.send("s", b"%d" % (2 * at.step + 1), key="k")
            sent.append(2 * at.step + 1)
        got = []
        while not got or got[-1] != sent[-1]:
            got += numbers(await consumer.fetch(100, wait=PATIENCE_SECONDS))
    assert got == sorted(set(got))
    assert [number for number in got if number % 2] == sent


async def test_posted_rows_are_stored_after_a_cancelled_flush(client: plait.Client) -> None:
    async for at in every_step():
        ticket = client.post("s", b"body")
        await at.cancel(client.flush())
        assert (await ticket).sequence == at.step - 1
