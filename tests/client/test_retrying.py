"""Failures through the client: delays, policies, ``RetryLater``, ``Suspend`` and time-outs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from datetime import timedelta

import pytest

import plait
from plait.testing import EmbeddedBroker
from tests.client.support import fetch_all, numbers, send, until
from tests.client.test_app import running, settled

AT_ONCE = plait.Retry.constant(0)


@pytest.fixture
def app(broker: EmbeddedBroker) -> plait.App:
    return plait.App(broker.address, group="g")


async def waiting(client: plait.Client) -> int:
    return (await client.admin.group("s", "g")).waiting


# --- nack -----------------------------------------------------------------------------------------


async def test_a_nack_waits_by_the_policy_or_by_its_own_delay(timed_broker: EmbeddedBroker) -> None:
    async with (
        timed_broker.connect() as client,
        client.consumer("s", group="g", retry=plait.Retry.constant(5)) as consumer,
    ):
        await send(client, 4)
        by_policy, soon, later, at_once = await fetch_all(consumer, 4)
        by_policy.nack()
        soon.nack(delay=timedelta(seconds=2))
        later.nack(delay="1m")
        at_once.nack(delay=0)
        assert numbers(await fetch_all(consumer, 1)) == [3]
        assert await waiting(client) == 3
        for seconds, number in [(2.1, 1), (3.1, 0), (56, 2)]:
            assert len(await consumer.fetch(10, wait=0)) == 0
            await timed_broker.advance(seconds)
            [again] = await fetch_all(consumer, 1)
            assert (again.body, again.attempt) == (b"%d" % number, 2)
        assert await waiting(client) == 0


async def test_nacked_batches_and_tables_wait_by_the_policy(timed_broker: EmbeddedBroker) -> None:
    async with timed_broker.connect() as client, client.consumer("s", group="g") as consumer:
        await send(client, 4)
        batch = await consumer.fetch(2, wait=5)
        await batch.nack(delay=3)
        table = await consumer.fetch_arrow(2, wait=5)
        await table.nack([1], delay=6)
        await table.ack()
        await timed_broker.advance(3.1)
        assert numbers(await fetch_all(consumer, 2)) == [0, 1]
        await timed_broker.advance(3.1)
        assert numbers(await fetch_all(consumer, 1)) == [3]


@pytest.mark.parametrize(
    ("delay", "reason"),
    [(-1, "must be 0 or more"), ("soon", "not understood"), (timedelta(days=800), "limit is 732 days")],
)
async def test_an_invalid_delay_is_refused_and_changes_nothing(
    client: plait.Client, delay: object, reason: str
) -> None:
    await send(client, 1)
    async with client.consumer("s", group="g") as consumer:
        [message] = await fetch_all(consumer, 1)
        with pytest.raises(plait.InvalidArgument, match=reason):
            message.nack(delay=delay)  # type: ignore[arg-type]
        await message.ack()
        await consumer.flush()
    assert (await client.admin.group("s", "g")).lag == 0


async def test_a_member_with_another_policy_is_refused_with_both_policies_named(client: plait.Client) -> None:
    async with client.consumer("s", group="g", retry=plait.Retry.constant(5)):
        with pytest.raises(
            plait.GroupMismatch, match=r"has retry policy 5 s, 16 attempts, this member asks for 1 s, then"
        ):
            async with client.consumer("s", group="g", retry=plait.Retry()):
                pass
        async with client.consumer("s", group="g"):
            pass
    with pytest.raises(plait.InvalidArgument, match=r"retry is 5; use plait.Retry"):
        client.consumer("s", group="g", retry=5)  # type: ignore[arg-type]


# --- App ------------------------------------------------------------------------------------------


async def test_retry_later_waits_for_its_delay_and_logs_no_error(
    client: plait.Client, app: plait.App, caplog: pytest.LogCaptureFixture
) -> None:
    attempts: list[int] = []

    @app.subscriber("s", retry=plait.Retry.constant(3600))
    async def handle(message: plait.Message) -> None:
        attempts.append(message.attempt)
        if message.attempt == 1:
            raise plait.RetryLater(0.05)

    await send(client, 1)
    async with running(app):
        await settled(client)
    assert attempts == [1, 2]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_suspend_stops_the_handler_and_leaves_its_messages_to_others(
    client: plait.Client, app: plait.App
) -> None:
    seen: list[bytes] = []
    suspended = asyncio.Event()

    @app.subscriber("s")
    async def handle(body: bytes) -> None:
        seen.append(body)
        if len(seen) == 1:
            suspended.set()
            raise plait.Suspend(3600)

    await send(client, 50)
    async with running(app):
        await suspended.wait()
        async with client.consumer("s", group="g") as other:
            # The failed message waits for its retry; the prefetched messages of the app were returned.
            assert numbers(await fetch_all(other, 49)) == list(range(1, 50))
            await send(client, 1)
            assert len(await fetch_all(other, 1)) == 1
        assert seen == [b"0"]
        assert await waiting(client) == 1


async def test_a_suspended_handler_resumes_afterwards(client: plait.Client, app: plait.App) -> None:
    moments: list[float] = []

    @app.subscriber("s", suspend=0.2, retry=AT_ONCE)
    async def handle(message: plait.Message) -> None:
        moments.append(asyncio.get_running_loop().time())
        if len(moments) == 1:
            raise ValueError("the database is away")

    await send(client, 5)
    async with running(app):
        await settled(client)
    assert len(moments) == 6
    assert moments[1] - moments[0] >= 0.2


async def test_retry_later_and_reject_do_not_suspend(client: plait.Client, app: plait.App) -> None:
    @app.subscriber("s", suspend=3600)
    async def handle(message: plait.Message) -> None:
        if message.attempt == 1:
            raise plait.RetryLater(0)
        raise plait.Reject("no")

    await send(client, 5)
    async with running(app):
        await settled(client)


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async def", "def"])
async def test_a_call_that_exceeds_its_timeout_fails(
    client: plait.Client, app: plait.App, caplog: pytest.LogCaptureFixture, asynchronous: bool
) -> None:
    attempts: list[int] = []
    cancelled: list[bool] = []
    let_go = threading.Event()

    if asynchronous:

        @app.subscriber("s", timeout=0.05, retry=AT_ONCE)
        async def handle(message: plait.Message) -> None:
            attempts.append(message.attempt)
            if message.attempt == 1:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    cancelled.append(True)
                    raise
    else:

        @app.subscriber("s", timeout=0.05, retry=AT_ONCE, concurrency=2)
        def handle_blocking(message: plait.Message) -> None:
            attempts.append(message.attempt)
            if message.attempt == 1:
                let_go.wait(20)

    await send(client, 1)
    async with running(app):
        await settled(client)
        let_go.set()
    assert attempts == [1, 2]
    assert cancelled == ([True] if asynchronous else [])
    [failure] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert failure.exc_info is not None
    assert "did not return within 0.05 s" in str(failure.exc_info[1])


async def test_a_timeout_error_of_a_handler_is_not_mistaken_for_its_time_limit(
    client: plait.Client, app: plait.App, caplog: pytest.LogCaptureFixture
) -> None:
    @app.subscriber("s", timeout=20, retry=AT_ONCE)
    async def handle(message: plait.Message) -> None:
        if message.attempt == 1:
            raise TimeoutError("the database took too long")

    await send(client, 1)
    async with running(app):
        await settled(client)
    assert "the database took too long" in caplog.text


@pytest.mark.parametrize("seconds", [0.0104, 1 / 3, 0.1237])
async def test_a_suspension_ends_despite_timer_rounding(client: plait.Client, app: plait.App, seconds: float) -> None:
    attempts: list[int] = []

    @app.subscriber("s")
    async def handle(message: plait.Message) -> None:
        attempts.append(message.attempt)
        if len(attempts) == 1:
            raise plait.Suspend(seconds)

    await send(client, 1)
    async with running(app):
        await settled(client)
    assert attempts == [1, 1]


async def test_a_stuck_blocking_handler_takes_no_thread_of_others_and_fails_only_its_message(
    client: plait.Client, app: plait.App
) -> None:
    let_go = threading.Event()
    began: list[bytes] = []
    others: list[bytes] = []

    @app.subscriber("s", timeout=0.05, retry=plait.Retry.constant(3600))
    def stick(body: bytes) -> None:
        began.append(body)
        let_go.wait(20)

    @app.subscriber("other")
    def handle(body: bytes) -> None:
        others.append(body)

    await send(client, 5)
    async with running(app):
        await until(lambda: began)
        async with asyncio.timeout(20):
            while not await waiting(client):
                pass
        await send(client, 3, subject="other")
        await until(lambda: len(others) == 3)
        assert (len(began), await waiting(client)) == (1, 1)
        let_go.set()


async def test_an_async_handler_that_suppresses_its_cancellation_still_fails(
    client: plait.Client, app: plait.App
) -> None:
    attempts: list[int] = []

    @app.subscriber("s", timeout=0.05, retry=AT_ONCE)
    async def handle(message: plait.Message) -> None:
        attempts.append(message.attempt)
        if message.attempt == 1:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    await send(client, 1)
    async with running(app):
        await settled(client)
    assert attempts == [1, 2]
