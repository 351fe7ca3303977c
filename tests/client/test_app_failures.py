"""Every exception of a decoder or a handler fails only its message, and the log names the outcome."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pydantic
import pytest

import plait
from plait.testing import EmbeddedBroker
from tests.client.support import PATIENCE_SECONDS, fetch_all, until

AT_ONCE = plait.Retry(first=0, factor=1, jitter=0, attempts=3)


class Incomplete(plait.RetryLater):
    def __init__(self) -> None:
        """Does not call ``super().__init__()``."""


class IncompleteSuspension(plait.Suspend):
    def __init__(self) -> None:
        """Does not call ``super().__init__()``."""


class IncompleteRejection(plait.Reject):
    def __init__(self) -> None:
        """Does not call ``super().__init__()``."""


class InvalidRejection(plait.Reject):
    def __init__(self) -> None:
        super().__init__(0)  # type: ignore[arg-type]


class BrokenText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


#: Exceptions outside ``Exception``, and exceptions with broken constructors or texts.
ERRORS: list[Callable[[], BaseException]] = [
    SystemExit,
    MemoryError,
    RecursionError,
    asyncio.CancelledError,
    Incomplete,
    IncompleteSuspension,
    BrokenText,
    lambda: BaseExceptionGroup("several", [SystemExit(1), ValueError("one")]),
]


@asynccontextmanager
async def running(app: plait.App) -> AsyncIterator[None]:
    task = asyncio.ensure_future(app.run())
    try:
        yield
    finally:
        app.stop()
        await asyncio.wait_for(task, PATIENCE_SECONDS)


async def dead(client: plait.Client, count: int) -> None:
    """Wait until the group has ``count`` dead letters."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            with contextlib.suppress(plait.GroupNotFound):
                if len(await client.admin.dead_letters("s", "g")) == count:
                    return


@pytest.fixture
def app(broker: EmbeddedBroker) -> plait.App:
    return plait.App(broker.address, group="g")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logging does not print errors for exceptions whose text cannot be formatted."""
    monkeypatch.setattr(logging, "raiseExceptions", False)


class Order(pydantic.BaseModel):
    number: int

    @pydantic.model_validator(mode="after")
    def check(self) -> Order:
        if self.number < 0:
            error = ERRORS[-self.number - 1]()
            raise error
        return self


@pytest.mark.parametrize("batch", [None, 100], ids=["single", "batch"])
async def test_every_exception_of_a_decoder_fails_only_its_message(
    client: plait.Client, app: plait.App, batch: int | None
) -> None:
    seen: list[int] = []
    if batch is None:

        @app.subscriber("s", retry=AT_ONCE)
        async def handle(order: Order) -> None:
            seen.append(order.number)
    else:

        @app.subscriber("s", retry=AT_ONCE, batch=batch)
        async def handle_batch(orders: list[Order]) -> None:
            seen.extend(order.number for order in orders)

    numbers = [*range(10), *(-n for n in range(1, len(ERRORS) + 1)), *range(10, 20)]
    await client.send_many("s", [{"number": number} for number in numbers])
    async with running(app):
        await dead(client, len(ERRORS))
    assert sorted(seen) == list(range(20))
    letters = await client.admin.dead_letters("s", "g")
    # Each message has used up its attempts.
    assert {letter.attempts for letter in letters} == {3}


@pytest.mark.parametrize("kind", ["async def", "def"])
async def test_every_exception_of_a_handler_fails_only_its_message(
    client: plait.Client, app: plait.App, kind: str
) -> None:
    errors = [*ERRORS, IncompleteRejection, InvalidRejection, StopIteration, StopAsyncIteration, TimeoutError]
    if kind == "def":
        errors.append(KeyboardInterrupt)
    seen: list[int] = []

    def work(number: int) -> None:
        if number < len(errors):
            error = errors[number]()
            raise error
        seen.append(number)

    async def work_later(number: int) -> None:
        work(number)

    app.subscriber("s", retry=AT_ONCE)(work if kind == "def" else work_later)
    await client.send_many("s", list(range(len(errors) + 5)))
    async with running(app):
        await dead(client, len(errors))
    assert sorted(seen) == list(range(len(errors), len(errors) + 5))


# --- undecodable bodies --------------------------------------------------------------------------------------------


class Sale(msgspec.Struct):
    number: int


@pytest.mark.parametrize("batch", [None, 100], ids=["single", "batch"])
async def test_an_undecodable_body_is_a_dead_letter_at_once(
    client: plait.Client, app: plait.App, caplog: pytest.LogCaptureFixture, batch: int | None
) -> None:
    seen: list[int] = []
    if batch is None:

        @app.subscriber("s")
        async def handle(sale: Sale) -> None:
            seen.append(sale.number)
    else:

        @app.subscriber("s", batch=batch)
        async def handle_batch(sales: list[Sale]) -> None:
            seen.extend(sale.number for sale in sales)

    await client.send_many("s", [Sale(1), b"{}", Sale(2)])
    async with running(app):
        await until(lambda: "went to the dead letters" in caplog.text)
        await until(lambda: len(seen) == 2)
    [letter] = await client.admin.dead_letters("s", "g")
    assert (letter.sequence, letter.attempts, letter.reason.type) == (1, 1, "plait.CodecError")
    assert "the body cannot be decoded as Sale" in letter.reason.text
    assert "cannot take s#1, which goes to the dead letters: the body cannot be decoded as Sale" in caplog.text
    assert "1 message of s@" in caplog.text


async def test_an_undecodable_body_is_retried_if_the_subscriber_asks_for_it(
    client: plait.Client, app: plait.App, caplog: pytest.LogCaptureFixture
) -> None:
    @app.subscriber("s", retry=AT_ONCE, undecodable="retry")
    async def handle(sale: Sale) -> None: ...

    await client.send("s", b"{}")
    async with running(app):
        await until(lambda: "went to the dead letters" in caplog.text)
    [letter] = await client.admin.dead_letters("s", "g")
    assert letter.attempts == 3
    assert "cannot take s#0 (attempt 1 of 3), which is tried again: the body cannot be decoded as Sale" in caplog.text


def test_an_unknown_policy_for_undecodable_bodies_is_refused(app: plait.App) -> None:
    with pytest.raises(plait.InvalidArgument, match="'ignore' is not known; use 'reject' or 'retry'"):
        app.subscriber("s", undecodable="ignore")  # type: ignore[arg-type]


# --- the log ---------------------------------------------------------------------------------------------------------


async def test_the_log_names_each_failed_attempt_and_the_dead_letter(
    client: plait.Client, app: plait.App, caplog: pytest.LogCaptureFixture
) -> None:
    @app.subscriber("s", retry=AT_ONCE)
    async def handle(body: bytes) -> None:
        raise ValueError("no such order")

    await client.send("s", b"")
    async with running(app):
        await until(lambda: "went to the dead letters" in caplog.text)
    failed = [record.getMessage() for record in caplog.records if " failed on " in record.getMessage()]
    assert [text.partition(" failed on ")[2] for text in failed] == [
        "s#0 (attempt 1 of 3), which is tried again",
        "s#0 (attempt 2 of 3), which is tried again",
        "s#0 (attempt 3 of 3)",
    ]
    errors = [record.exc_info for record in caplog.records if " failed on " in record.getMessage()]
    assert [str(each[1]) for each in errors if each is not None] == ["no such order"] * 3
    [died] = [record.getMessage() for record in caplog.records if "dead letters" in record.getMessage()]
    assert died.startswith("1 message of s@")
    assert "went to the dead letters of group g: ValueError: no such order" in died


async def test_no_retry_is_logged_for_a_message_that_may_expire(
    client: plait.Client, app: plait.App, caplog: pytest.LogCaptureFixture
) -> None:
    @app.subscriber("s", retry=plait.Retry(first=0, factor=1, jitter=0, attempts=None, expires=0.000001))
    async def handle(body: bytes) -> None:
        raise ValueError

    await client.send("s", b"")
    async with running(app):
        await until(lambda: "went to the dead letters" in caplog.text)
    assert "failed on s#0 (attempt 1)" in caplog.text
    assert "tried again" not in caplog.text


async def test_rejections_of_a_consumer_are_logged_together(
    client: plait.Client, caplog: pytest.LogCaptureFixture
) -> None:
    await client.send_many("s", [b""] * 50)
    async with client.consumer("s", group="g") as consumer:
        for message in await fetch_all(consumer, 50):
            message.reject("of no use")
        await consumer.flush()
    assert [r.getMessage() for r in caplog.records if "dead letters" in r.getMessage()] == [
        f"50 messages of {message.partition} went to the dead letters of group g: of no use"
    ]


@pytest.mark.parametrize("batch", [None, 1], ids=["single", "batch"])
@pytest.mark.parametrize("waits", [True, False], ids=["and waits", "and returns"])
async def test_a_handler_that_cancels_its_own_task_fails_only_its_message(
    client: plait.Client, app: plait.App, waits: bool, batch: int | None
) -> None:
    seen: list[bytes] = []

    async def work(body: bytes) -> None:
        if body == b"bad":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            if not waits:
                return
            await asyncio.sleep(0)
        seen.append(body)

    if batch is None:
        app.subscriber("s", retry=AT_ONCE)(work)
    else:

        @app.subscriber("s", retry=AT_ONCE, batch=batch)
        async def handle_batch(bodies: list[bytes]) -> None:
            await work(*bodies)

    await client.send_many("s", [b"1", b"bad", b"2"])
    async with running(app):
        await dead(client, 1)
        await until(lambda: len(seen) == 2)
    assert sorted(seen) == [b"1", b"2"]
