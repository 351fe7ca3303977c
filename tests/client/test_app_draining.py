"""Stopping an app: it drains within its time limit, and no two threads handle the same key."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import plait
from plait.testing import EmbeddedBroker
from tests.client.support import PATIENCE_SECONDS, fetch_all, numbers, send, until
from tests.client.test_lifecycle import silent_server
from tests.support.cancelling import every_step, no_new_tasks

AT_ONCE = plait.Retry.constant(0)
#: Round trips to the broker, after which earlier requests have taken effect.
ROUND_TRIPS = 20


@pytest.mark.parametrize("ordered", [False, True], ids=["shared", "ordered"])
async def test_an_app_cancelled_at_any_step_leaves_no_member_and_loses_no_message(
    timed_broker: EmbeddedBroker, ordered: bool
) -> None:
    async with timed_broker.connect() as client:
        async for at in every_step(stride=5 if ordered else 2):
            subject = f"s{at.step}"
            app = plait.App(timed_broker.address, group="g")
            handled: list[int] = []

            @app.subscriber(subject, ordered=ordered)
            async def handle(body: bytes, app: plait.App = app, handled: list[int] = handled) -> None:
                # Cancelled while it handles the message, which is then returned.
                await asyncio.sleep(0)
                handled.append(int(body))
                app.stop()

            await send(client, 5, subject)
            with no_new_tasks():
                outcome = await at.cancel(app.run())
            assert outcome.cancelled or outcome.error is None
            async with client.consumer(subject, group="g", ordered=ordered) as consumer:
                rest = numbers(await fetch_all(consumer, 5 - len(handled)))
            assert sorted(handled + rest) == list(range(5))


@pytest.mark.parametrize("batch", [None, 1], ids=["single", "batch"])
@pytest.mark.parametrize("kind", [{"ordered": True}, {"affinity": "key"}], ids=["ordered", "affinity"])
async def test_a_blocking_handler_past_its_timeout_holds_its_key_until_its_thread_ends(
    broker: EmbeddedBroker, client: plait.Client, kind: dict[str, Any], batch: int | None
) -> None:
    app = plait.App(broker.address, group="g")
    release, expired = threading.Event(), asyncio.Event()
    calls: list[tuple[str, bytes]] = []

    @app.around_handle
    async def watch(messages: list[plait.Message], proceed: Any) -> None:
        try:
            await proceed()
        except asyncio.CancelledError:
            expired.set()
            raise

    def work(body: bytes) -> None:
        first = not calls
        calls.append(("begins with", body))
        if first:
            release.wait()
        calls.append(("ends with", body))

    if batch is None:

        @app.subscriber("s", timeout=0.05, retry=AT_ONCE, concurrency=3, **kind)
        def handle(body: bytes) -> None:
            work(body)
    else:

        @app.subscriber("s", timeout=0.05, retry=AT_ONCE, concurrency=3, batch=1, **kind)
        def handle_batch(bodies: list[bytes]) -> None:
            work(bodies[0])

    await client.admin.create_subject("s", order="strict")
    await client.send("s", b"0", key="k")
    await client.send("s", b"1", key="k")
    running = asyncio.ensure_future(app.run())
    try:
        await asyncio.wait_for(expired.wait(), PATIENCE_SECONDS)
        for _ in range(ROUND_TRIPS):
            await client.admin.subject("s")
        assert calls == [("begins with", b"0")]
    finally:
        release.set()
    await until(lambda: len(calls) >= 6)
    app.stop()
    await asyncio.wait_for(running, PATIENCE_SECONDS)
    # No two calls overlap.
    assert [what for what, _ in calls] == ["begins with", "ends with"] * (len(calls) // 2)
    if "ordered" in kind:
        assert [body for _, body in calls[::2]] == [b"0", b"0", b"1"]


async def test_a_blocking_handler_that_outlives_the_drain_keeps_its_lock_until_the_lease_ends(
    timed_broker: EmbeddedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    app = plait.App(timed_broker.address, group="g", limits=plait.ClientLimits(drain_seconds=0.02))
    begun, release = threading.Event(), threading.Event()

    @app.subscriber("s", ordered=True)
    def handle(body: bytes) -> None:
        begun.set()
        release.wait()

    try:
        async with timed_broker.connect() as client:
            await client.send("s", b"0", key="k")
            running = asyncio.ensure_future(app.run())
            await until(begun.is_set)
            app.stop()
            await asyncio.wait_for(running, PATIENCE_SECONDS)
            assert "a handler did not end" in caplog.text
            async with client.consumer("s", group="g", ordered=True) as successor:
                for _ in range(ROUND_TRIPS):
                    await client.admin.subject("s")
                assert list(await successor.fetch(1, wait=0)) == []
                await timed_broker.advance(timed_broker.server.broker.limits.lease_seconds + 1)
                assert numbers(await fetch_all(successor, 1)) == [0]
    finally:
        release.set()


async def test_an_async_handler_that_ignores_cancellation_does_not_block_the_app(
    broker: EmbeddedBroker, client: plait.Client
) -> None:
    app = plait.App(broker.address, group="g", limits=plait.ClientLimits(drain_seconds=0.01, cancel_seconds=0.01))
    begun, release = asyncio.Event(), asyncio.Event()

    @app.subscriber("s")
    async def handle(body: bytes) -> None:
        begun.set()
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                pass

    await client.send("s", b"0")
    running = asyncio.ensure_future(app.run())
    await begun.wait()
    app.stop()
    await asyncio.wait_for(running, PATIENCE_SECONDS)
    release.set()
    assert (await client.admin.group("s", "g")).online == 0
    await until(lambda: not [task for task in asyncio.all_tasks() if task.get_name().startswith("plait-test_")])


async def test_an_app_stopped_while_connecting_does_not_wait_for_the_server() -> None:
    async with silent_server() as address:
        app = plait.App(address, group="g")

        @app.subscriber("s")
        async def handle(body: bytes) -> None: ...

        task = asyncio.ensure_future(app.run())
        await asyncio.sleep(0)
        app.stop()
        # The client itself would wait for ten seconds.
        async with asyncio.timeout(app.limits.request_seconds / 2):
            await task


async def test_an_app_stopped_while_opening_consumers_does_not_wait_for_them(
    broker: EmbeddedBroker, client: plait.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = plait.App(broker.address, group="g")
    opening = asyncio.Event()

    @app.subscriber("s")
    async def handle(body: bytes) -> None: ...

    async def never(*_: Any) -> None:
        opening.set()
        await asyncio.Event().wait()

    monkeypatch.setattr("plait.client.consume.fetcher.find_start_version", never)
    task = asyncio.ensure_future(app.run())
    await asyncio.wait_for(opening.wait(), PATIENCE_SECONDS)
    app.stop()
    async with asyncio.timeout(app.limits.request_seconds / 2):
        await task
