"""``around_handle`` and ``around_send``: hooks around the calls of an app."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

import plait
from plait.testing import EmbeddedBroker
from tests.client.support import fetch_all, send
from tests.client.test_app import running, settled

Proceed = Callable[[], Awaitable[None]]
SendOn = Callable[[], Awaitable[plait.Receipt]]


@pytest.fixture
def app(broker: EmbeddedBroker) -> plait.App:
    return plait.App(broker.address, group="g")


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async def", "def"])
async def test_hooks_wrap_each_call_with_the_first_outermost(
    client: plait.Client, app: plait.App, asynchronous: bool
) -> None:
    seen: list[str] = []

    @app.around_handle
    async def outer(messages: list[plait.Message], proceed: Proceed) -> None:
        seen.append(f"outer {messages[0].body.decode()}")
        await proceed()
        seen.append("outer done")

    @app.around_handle
    async def inner(messages: list[plait.Message], proceed: Proceed) -> None:
        seen.append("inner")
        await proceed()

    if asynchronous:

        @app.subscriber("s")
        async def handle(body: bytes) -> None:
            seen.append("handler")
    else:

        @app.subscriber("s")
        def handle_blocking(body: bytes) -> None:
            seen.append("handler")

    await send(client, 1)
    async with running(app):
        await settled(client)
    assert seen == ["outer 0", "inner", "handler", "outer done"]


async def test_a_hook_sees_failures_and_may_replace_or_suppress_them(client: plait.Client, app: plait.App) -> None:
    failures: list[str] = []

    @app.around_handle
    async def judge(messages: list[plait.Message], proceed: Proceed) -> None:
        try:
            await proceed()
        except KeyError as error:
            failures.append(repr(error))
            if messages[0].attempt == 1:
                raise plait.RetryLater(0) from error

    @app.subscriber("s", retry=plait.Retry.constant(3600))
    async def handle(body: bytes) -> None:
        raise KeyError("no such order")

    await send(client, 1)
    async with running(app):
        await settled(client)
    assert failures == ["KeyError('no such order')"] * 2


async def test_a_hook_around_a_batch_gets_all_its_messages(client: plait.Client, app: plait.App) -> None:
    sizes: list[int] = []

    @app.around_handle
    async def measure(messages: list[plait.Message], proceed: Proceed) -> None:
        sizes.append(len(messages))
        await proceed()

    @app.subscriber("s", batch=10)
    async def handle(bodies: list[bytes]) -> None: ...

    await send(client, 10)
    async with running(app):
        await settled(client)
    assert sum(sizes) == 10


async def test_a_send_hook_may_change_the_message_and_sees_the_receipt(client: plait.Client, app: plait.App) -> None:
    receipts: list[plait.Receipt] = []

    @app.around_send
    async def trace(outgoing: plait.Outgoing, proceed: SendOn) -> plait.Receipt:
        outgoing.headers["trace"] = "abc"
        outgoing.tags.append("traced")
        receipt = await proceed()
        receipts.append(receipt)
        return receipt

    @app.around_send
    async def redirect(outgoing: plait.Outgoing, proceed: SendOn) -> plait.Receipt:
        assert outgoing.headers == {"trace": "abc", "city": "BJS"}
        outgoing.subject = "elsewhere"
        return await proceed()

    @app.subscriber("s")
    async def handle(message: plait.Message) -> None:
        sent.append(await app.send("there", message.body, key="k", headers={"city": "BJS"}, tags="urgent"))

    sent: list[plait.Receipt] = []
    await send(client, 1)
    async with running(app):
        await settled(client)
    assert sent == receipts
    async with client.consumer("elsewhere", group="g") as consumer:
        [message] = await fetch_all(consumer, 1)
    assert (message.body, message.key, message.tags, message.headers) == (
        b"0",
        "k",
        ["urgent", "traced"],
        {"trace": "abc", "city": "BJS"},
    )


async def test_a_send_hook_may_refuse_a_message(client: plait.Client, app: plait.App) -> None:
    @app.around_send
    async def refuse(outgoing: plait.Outgoing, proceed: SendOn) -> plait.Receipt:
        raise plait.InvalidArgument("not today")

    @app.on_startup
    async def start() -> None:
        with pytest.raises(plait.InvalidArgument, match="not today"):
            await app.send("there", b"x")
        refused.set()

    @app.subscriber("s")
    async def handle(body: bytes) -> None: ...

    refused = asyncio.Event()
    async with running(app):
        await refused.wait()
    assert "there" not in [subject.subject for subject in await client.admin.subjects()]


@pytest.mark.parametrize("name", ["around_handle", "around_send"])
def test_a_hook_must_be_an_async_function(app: plait.App, name: str) -> None:
    with pytest.raises(plait.InvalidArgument, match=f"{name} takes an async def, not"):
        getattr(app, name)(lambda message, proceed: None)
