"""Apps that handle requests: the value that a handler returns is the reply, and its last failure ends the request."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

import plait
from plait.testing import EmbeddedBroker
from tests.client.test_app import AT_ONCE, Order, running, settled


@pytest.fixture
def app(broker: EmbeddedBroker) -> plait.App:
    return plait.App(broker.address, group="g")


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async def", "def"])
async def test_the_value_of_a_handler_is_the_reply(client: plait.Client, app: plait.App, asynchronous: bool) -> None:
    if asynchronous:

        @app.subscriber("s")
        async def handle(order: Order) -> Order:
            return Order(order.number + 1)
    else:

        @app.subscriber("s")
        def handle_blocking(order: Order) -> Order:
            return Order(order.number + 1)

    async with running(app):
        replies = await asyncio.gather(*(client.request("s", Order(n)) for n in range(20)))
        # A message that is no request has no reply.
        await client.send("s", Order(1))
        await settled(client)
    assert [msgspec.json.decode(reply.body, type=Order) for reply in replies] == [Order(n + 1) for n in range(20)]
    assert client.dropped_replies == 0


async def test_a_handler_that_returns_none_may_reply_by_itself(client: plait.Client, app: plait.App) -> None:
    @app.subscriber("s")
    async def handle(message: plait.Message) -> None:
        await message.reply(b"by itself")

    async with running(app):
        assert (await client.request("s", b"1")).body == b"by itself"


async def test_the_last_failure_of_a_handler_ends_the_request(client: plait.Client, app: plait.App) -> None:
    attempts: list[int] = []

    @app.subscriber("s", retry=plait.Retry(attempts=2, first=0, longest=0))
    async def handle(order: Order, message: plait.Message) -> None:
        attempts.append(message.attempt)
        raise ValueError("no stock")

    async with running(app):
        with pytest.raises(plait.RequestFailed, match="ValueError: no stock"):
            await client.request("s", Order(1))
        assert attempts == [1, 2]
        with pytest.raises(plait.RequestFailed, match="CodecError"):
            await client.request("s", b"no order")
        await settled(client)
    assert len(await client.admin.dead_letters("s", "g")) == 2


async def test_a_rejected_request_fails_at_once_and_a_retried_one_succeeds(
    client: plait.Client, app: plait.App
) -> None:
    @app.subscriber("s", retry=AT_ONCE)
    async def handle(order: Order, message: plait.Message) -> int:
        if order.number == 0:
            raise plait.Reject("not for sale")
        if message.attempt < 3:
            raise ValueError("not yet")
        return message.attempt

    async with running(app):
        with pytest.raises(plait.RequestFailed, match="not for sale"):
            await client.request("s", Order(0))
        assert (await client.request("s", Order(1))).body == b"3"


async def test_a_handler_may_request_from_another_app(client: plait.Client, app: plait.App) -> None:
    @app.subscriber("prices")
    async def price(order: Order) -> int:
        return order.number * 10

    @app.subscriber("orders")
    async def total(order: Order) -> int:
        reply = await app.client.request("prices", order)
        return int(reply.body) + 1

    async with running(app):
        assert (await client.request("orders", Order(2))).body == b"21"
