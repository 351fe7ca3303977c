"""A running ``App``: a handler that returns acks its message, and one that raises nacks it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

import plait
from plait.testing import EmbeddedBroker
from plait.testing.embedded_broker import TEST_CONFIG
from tests.client.support import fetch_all, numbers, send, until

#: Failed messages are redelivered at once.
AT_ONCE = plait.Retry.constant(0)


class Order(msgspec.Struct):
    number: int


@asynccontextmanager
async def running(app: plait.App) -> AsyncIterator[None]:
    """Run the app until the block ends, then drain it."""
    task = asyncio.ensure_future(app.run())
    try:
        yield
    finally:
        app.stop()
        await asyncio.wait_for(task, 60)


@pytest.fixture
def app(broker: EmbeddedBroker) -> plait.App:
    return plait.App(broker.address, group="g")


async def settled(client: plait.Client, lag: int = 0) -> None:
    """Wait until the group has ``lag`` messages left."""
    async with asyncio.timeout(20):
        while True:
            groups = await client.admin.groups("s")
            if groups and groups[0].lag == lag:
                return


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async def", "def"])
async def test_a_handler_gets_body_and_message_and_acks_by_returning(
    client: plait.Client, app: plait.App, asynchronous: bool
) -> None:
    seen: list[tuple[int, str | None, int]] = []

    if asynchronous:

        @app.subscriber("s")
        async def handle(order: Order, message: plait.Message) -> None:
            seen.append((order.number, message.key, message.attempt))
    else:

        @app.subscriber("s")
        def handle_blocking(order: Order, message: plait.Message) -> None:
            assert threading.current_thread() is not threading.main_thread()
            seen.append((order.number, message.key, message.attempt))

    async with running(app):
        for number in range(10):
            await client.send("s", Order(number), key=number)
        await settled(client)
    assert seen == [(number, str(number), 1) for number in range(10)]


async def test_a_batch_is_acked_except_the_messages_that_the_handler_nacked(
    client: plait.Client, app: plait.App
) -> None:
    sizes: list[int] = []
    seen: list[tuple[int, int]] = []

    @app.subscriber("s", batch=40)
    async def handle(orders: list[Order], messages: list[plait.Message]) -> None:
        sizes.append(len(orders))
        for order, message in zip(orders, messages, strict=True):
            seen.append((order.number, message.attempt))
            if order.number % 25 == 0 and message.attempt == 1:
                message.nack()

    await client.send_many("s", [Order(n) for n in range(100)])
    async with running(app):
        await settled(client)
    assert max(sizes) == 40
    assert sorted(seen) == sorted([(n, 1) for n in range(100)] + [(n, 2) for n in (0, 25, 50, 75)])


async def test_a_blocking_batch_handler_may_nack_from_its_thread(client: plait.Client, app: plait.App) -> None:
    seen: list[tuple[bytes, int]] = []

    @app.subscriber("s", batch=10)
    def handle(messages: list[plait.Message]) -> None:
        for message in messages:
            seen.append((message.body, message.attempt))
            if message.body == b"3" and message.attempt == 1:
                message.nack()

    await send(client, 10)
    async with running(app):
        await settled(client)
    assert sorted(seen) == sorted([(b"%d" % n, 1) for n in range(10)] + [(b"3", 2)])


async def test_a_failed_batch_is_nacked_as_a_whole(client: plait.Client, app: plait.App) -> None:
    calls: list[list[int]] = []

    @app.subscriber("s", batch=10)
    async def handle(orders: list[Order]) -> None:
        calls.append([order.number for order in orders])
        if len(calls) == 1:
            raise ValueError

    await client.send_many("s", [Order(n) for n in range(5)])
    async with running(app):
        await settled(client)
    assert calls == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async def", "def"])
async def test_concurrency_is_the_number_of_calls_that_run_at_a_time(
    client: plait.Client, app: plait.App, asynchronous: bool
) -> None:
    gate = threading.Barrier(4, timeout=60)
    at_once = 0
    most = 0
    all_there = asyncio.Event()

    async def handle(body: bytes) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        if at_once == 4:
            all_there.set()
        await asyncio.wait_for(all_there.wait(), 60)
        at_once -= 1

    def handle_blocking(body: bytes) -> None:
        # Returns when four calls run together; otherwise the barrier breaks.
        gate.wait()

    app.subscriber("s", concurrency=4)(handle if asynchronous else handle_blocking)
    await send(client, 12)
    async with running(app):
        await settled(client)
    assert most == (4 if asynchronous else 0)
    assert not gate.broken


async def test_several_subscribers_and_groups_in_one_app(client: plait.Client, app: plait.App) -> None:
    seen: dict[str, list[int]] = {"a": [], "b": [], "all": []}

    @app.subscriber("s", group="a")
    async def first(body: bytes) -> None:
        seen["a"].append(int(body))

    @app.subscriber("s", group="b", start=5, prefetch=1, delivery="at_most_once")
    def second(body: bytes) -> None:
        seen["b"].append(int(body))

    @app.subscriber("s", broadcast=True, start="earliest")
    async def every(text: str) -> None:
        seen["all"].append(int(text))

    await send(client, 10)
    async with running(app):
        await until(lambda: (len(seen["a"]), len(seen["b"]), len(seen["all"])) == (10, 5, 10))
    assert seen == {"a": list(range(10)), "b": list(range(5, 10)), "all": list(range(10))}


async def test_hooks_run_around_the_messages_and_may_send(client: plait.Client, app: plait.App) -> None:
    events: list[str] = []

    @app.on_startup
    async def open_pool() -> None:
        events.append("start")
        await app.send("s", b"hello")

    @app.on_startup
    def plain() -> None:
        events.append("plain")

    @app.on_shutdown
    def close_pool() -> None:
        events.append("stop")
        app.post("done", b"bye")

    @app.on_shutdown
    async def first_to_stop() -> None:
        events.append("first")

    @app.subscriber("s")
    async def handle(body: bytes) -> None:
        events.append(body.decode())
        await app.send("reply", b"to " + body)
        app.post("reply", b"posted")

    await client.admin.create_subject("s")
    async with running(app):
        await settled(client)
    assert events == ["start", "plain", "hello", "first", "stop"]
    counts = {info.subject: info.count for info in await client.admin.subjects()}
    assert counts == {"s": 1, "reply": 2, "done": 1}


async def test_the_apps_client_is_refused_to_other_threads(client: plait.Client, app: plait.App) -> None:
    errors: list[str] = []

    @app.subscriber("s")
    def handle(body: bytes) -> None:
        try:
            app.post("t", body)
        except plait.InvalidArgument as error:
            errors.append(str(error))

    await client.send("s", b"")
    async with running(app):
        await settled(client)
    assert len(errors) == 1
    assert "plait.sync" in errors[0]


async def test_a_plain_function_around_an_asynchronous_one_is_awaited(client: plait.Client, app: plait.App) -> None:
    seen: list[bytes] = []

    async def inner(body: bytes) -> None:
        seen.append(body)

    @app.subscriber("s")
    def outer(body: bytes) -> Any:
        return inner(body)

    await client.send("s", b"x")
    async with running(app):
        await settled(client)
    assert seen == [b"x"]


async def test_an_at_most_once_app_returns_the_messages_that_it_has_not_begun(
    client: plait.Client, app: plait.App
) -> None:
    seen: list[int] = []

    @app.subscriber("s", delivery="at_most_once")
    async def handle(body: bytes) -> None:
        seen.append(int(body))
        if len(seen) in (5, 105):
            app.stop()
        await asyncio.sleep(0)

    await send(client, 300)
    for _ in range(2):
        await asyncio.wait_for(app.run(), 60)
    async with client.consumer("s", group="g", delivery="at_most_once") as consumer:
        rest = numbers(await fetch_all(consumer, 300 - len(seen)))
    assert len(rest) > 100
    assert seen + rest == list(range(300))


# --- stopping ---------------------------------------------------------------------------------------------------------


async def test_an_app_runs_again_after_it_stopped_but_not_twice_at_once(client: plait.Client, app: plait.App) -> None:
    @app.subscriber("s")
    async def handle(body: bytes) -> None: ...

    for round_number in range(2):
        await send(client, 5)
        async with running(app):
            await settled(client)
            with pytest.raises(plait.InvalidArgument, match="already running"):
                await app.run()
        assert (await client.admin.subject("s")).subject.count == 5 * (round_number + 1)


async def test_run_raises_errors_that_prevent_the_start(
    broker: EmbeddedBroker, client: plait.Client, app: plait.App
) -> None:
    @app.subscriber("s")
    async def handle(body: bytes) -> None: ...

    async with client.consumer("s", group="g", delivery="at_most_once"):
        with pytest.raises(plait.GroupMismatch):
            await app.run()
    nowhere = plait.App("plait://127.0.0.1:1", group="g", limits=plait.ClientLimits(request_seconds=0.05))
    nowhere.subscriber("s")(handle)
    with pytest.raises(plait.Unavailable):
        await nowhere.run()

    @app.on_startup
    def fail() -> None:
        raise LookupError("no configuration")

    with pytest.raises(LookupError):
        await app.run()
    assert broker.server.connections
    await until(lambda: len(broker.server.connections) == 1)


async def test_a_permanently_deleted_subject_ends_the_app(tmp_path: Path) -> None:
    config = msgspec.structs.replace(TEST_CONFIG, auto_create=False)
    async with EmbeddedBroker(tmp_path / "data", config=config) as broker, broker.connect() as client:
        await client.admin.create_subject("s")
        await client.admin.create_subject("t")
        app = plait.App(broker.address, group="g")

        @app.subscriber("s")
        async def handle(body: bytes) -> None: ...

        app.subscriber("t")(handle)
        service = asyncio.ensure_future(app.run())
        await until(lambda: len(broker.server.broker.sessions) == 2)
        await client.admin.delete_subject("s")
        with pytest.raises(plait.SubjectNotFound):
            await asyncio.wait_for(service, 60)
