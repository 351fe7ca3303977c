"""Requests and replies: correlation, timeouts, failures, late and duplicate replies, restarts, blocking clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest

import plait
import plait.sync
from plait.errors import Closed, InvalidArgument
from plait.testing import BlockingBroker, EmbeddedBroker
from tests.client.support import EAGER, PATIENCE_SECONDS, until
from tests.client.test_expanding import settled

Answer = Callable[[plait.Message], Awaitable[object]]


async def double(message: plait.Message) -> None:
    await message.reply(b"%d" % (2 * int(message.body)))


@asynccontextmanager
async def answering(client: plait.Client, answer: Answer = double, subject: str = "s") -> AsyncIterator[plait.Consumer]:
    """A consumer that calls ``answer`` with each message."""

    async def run(consumer: plait.Consumer) -> None:
        async for message in consumer:
            await answer(message)
            message.ack()

    async with client.consumer(subject, "g") as consumer:
        running = asyncio.create_task(run(consumer))
        try:
            yield consumer
        finally:
            running.cancel()
            await asyncio.wait([running])


async def test_each_of_many_requests_gets_its_own_reply(client: plait.Client) -> None:
    async with answering(client):
        replies = await asyncio.gather(*(client.request("s", b"%d" % n) for n in range(100)))
    assert [int(reply.body) for reply in replies] == [2 * n for n in range(100)]
    assert client.dropped_replies == 0
    # One subject for all replies; requests add nothing else.
    assert {info.subject for info in await client.admin.subjects()} == {"s", "plait.replies"}


async def test_clients_get_their_own_replies_only(broker: EmbeddedBroker) -> None:
    async with broker.connect() as one, broker.connect() as other, answering(one):
        replies = await asyncio.gather(*(each.request("s", b"%d" % n) for n in range(20) for each in (one, other)))
    assert [int(reply.body) for reply in replies] == [2 * n for n in range(20) for _ in "12"]
    assert one.dropped_replies == other.dropped_replies == 0


async def test_headers_keys_and_tags_travel_both_ways(client: plait.Client) -> None:
    async def answer(message: plait.Message) -> None:
        assert (message.key, message.tags, message.headers["a"]) == ("k", ["t"], 1)
        await client.reply(message, {"ok": True}, headers={"b": 2})

    async with answering(client, answer):
        reply = await client.request("s", b"1", key="k", tags=["t"], headers={"a": 1}, to_group="g")
    assert (msgspec.json.decode(reply.body), reply.headers["b"]) == ({"ok": True}, 2)


async def test_a_request_without_a_reply_times_out_and_its_late_reply_is_dropped(client: plait.Client) -> None:
    async with answering(client):
        await client.request("s", b"0")
    with pytest.raises(plait.RequestTimeout) as caught:
        await client.request("s", b"1", timeout=0.5)
    assert caught.value.details == {"subject": "s", "seconds": 0.5}
    assert isinstance(caught.value, TimeoutError)
    async with answering(client):
        reply = await client.request("s", b"2")
        assert reply.body == b"4"
        await until(lambda: client.dropped_replies == 1)


async def test_only_the_first_of_several_replies_counts(client: plait.Client) -> None:
    async def answer(message: plait.Message) -> None:
        await message.reply(b"first")
        await message.reply(b"second")

    async with answering(client, answer):
        replies = [await client.request("s", b"1") for _ in range(3)]
        assert [reply.body for reply in replies] == [b"first"] * 3
        await until(lambda: client.dropped_replies == 3)


async def test_a_handler_that_gives_up_fails_the_request(client: plait.Client) -> None:
    async with answering(client, lambda message: message.reply(failure=ValueError("no stock"))):
        with pytest.raises(plait.RequestFailed, match="ValueError: no stock") as caught:
            await client.request("s", b"1")
    assert caught.value.details == {"subject": "s", "reason": "ValueError: no stock"}


async def test_a_message_that_is_no_request_takes_no_reply(client: plait.Client) -> None:
    await client.send("s", b"1")
    async with client.consumer("s", "g") as consumer:
        (message,) = await consumer.fetch(1)
        with pytest.raises(InvalidArgument, match="is not a request"):
            await message.reply(b"2")


async def test_the_error_of_a_send_ends_the_request(client: plait.Client) -> None:
    with pytest.raises(plait.TooLarge):
        await client.request("s", bytes(17 << 20))


async def test_closing_a_client_ends_its_requests(broker: EmbeddedBroker) -> None:
    async with broker.connect() as client:
        waiting = asyncio.create_task(client.request("s", b"1"))
        async with broker.connect() as other:
            await until(lambda: client._requester._open.is_set())
            async with other.consumer("s", "g") as consumer:
                await consumer.fetch(1, wait=PATIENCE_SECONDS)
    with pytest.raises(Closed):
        await waiting
    with pytest.raises(Closed):
        await client.request("s", b"1")


async def test_requests_survive_restarts_of_the_broker_and_a_deleted_reply_subject(broker: EmbeddedBroker) -> None:
    async with broker.connect(limits=EAGER) as client, broker.connect(limits=EAGER) as other:
        async with answering(other):
            assert (await client.request("s", b"1")).body == b"2"
            await broker.restart()
            assert (await client.request("s", b"2")).body == b"4"
        waiting = asyncio.create_task(client.request("s", b"3"))
        await until(lambda: client._producer.buffered == 0)
        await broker.restart()
        async with answering(other):
            assert (await waiting).body == b"6"
            await client.admin.delete_subject("plait.replies")
            await until(lambda: client._requester._error is None)
            async with asyncio.timeout(PATIENCE_SECONDS):
                while True:
                    try:
                        assert (await client.request("s", b"4", timeout=1.0)).body == b"8"
                        break
                    except plait.RequestTimeout:
                        continue


async def test_replies_follow_the_route_of_their_subject(nodes: list[EmbeddedBroker]) -> None:
    async with nodes[0].connect(limits=EAGER) as client, nodes[0].connect(limits=EAGER) as other, answering(other):
        for partitions in (None, 3, ["plait.replies#1@g2"], 1):
            if partitions is not None:
                await client.admin.expand_subject("plait.replies", partitions)
                await settled(client, "plait.replies")
            replies = await asyncio.gather(*(client.request("s", b"%d" % n) for n in range(20)))
            assert [int(reply.body) for reply in replies] == [2 * n for n in range(20)]


async def test_a_client_may_name_its_reply_subject(broker: EmbeddedBroker) -> None:
    async with plait.connect(broker.address, reply_subject="shop.replies") as client, answering(client):
        assert (await client.request("s", b"1")).subject == "shop.replies"
        info = (await client.admin.subject("shop.replies")).subject
        assert info.retention_seconds == 3600.0


def test_blocking_clients_request_and_reply(plait_broker: BlockingBroker) -> None:
    with plait.sync.connect(plait_broker.address) as client:

        def answer() -> None:
            with client.consumer("s", "g") as consumer:
                for message in consumer:
                    with pytest.raises(InvalidArgument, match=r"client\.reply"):
                        message.reply(b"0")
                    client.reply(message, message.body * 2)
                    message.ack()
                    return

        thread = threading.Thread(target=answer)
        thread.start()
        assert client.request("s", b"12").body == b"1212"
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
        with pytest.raises(plait.RequestTimeout):
            client.request("unhandled", b"1", timeout=0.01)
        assert client.dropped_replies == 0
