"""Dead letters through the client: how a message becomes one, what it records, and how it is resent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest

import plait
import plait.sync
from plait.client.admin import dead_letter_admin as dead
from plait.client.admin.dead_letter_admin import LetterRate
from plait.testing import EmbeddedBroker
from tests.client.support import fetch_all, numbers, send
from tests.client.test_app import running, settled

TWICE = plait.Retry.constant(0, attempts=2)


@pytest.fixture
def app(broker: EmbeddedBroker) -> plait.App:
    return plait.App(broker.address, group="g")


@asynccontextmanager
async def member(client: plait.Client, **settings: Any) -> AsyncIterator[plait.Consumer]:
    async with client.consumer("s", group="g", **settings) as consumer:
        yield consumer


async def reject(client: plait.Client, count: int, reason: object = "no") -> None:
    """Reject the next messages of the group."""
    async with member(client, prefetch=count) as consumer:
        for message in await fetch_all(consumer, count):
            message.reject(reason)  # type: ignore[arg-type]


async def letters(client: plait.Client, **how: Any) -> list[plait.DeadLetter]:
    return await client.admin.dead_letters("s", "g", **how)


async def resent(client: plait.Client, **how: Any) -> list[plait.Message]:
    """Resend dead letters, and fetch them."""
    count = await client.admin.resend_dead("s", "g", **how)
    async with member(client) as consumer:
        batch = await fetch_all(consumer, count) if count else []
        assert len(await consumer.fetch(10, wait=0)) == 0
        for message in batch:
            message.ack()
        return batch


# --- becoming a dead letter ------------------------------------------------------------------------------


async def test_a_message_out_of_attempts_is_a_dead_letter_with_all_its_fields(
    timed_broker: EmbeddedBroker,
) -> None:
    async with (
        timed_broker.connect() as client,
        member(client, retry=plait.Retry.constant(5, attempts=3)) as consumer,
    ):
        receipt = await client.send("s", b"body", key="k", tags=["a", "b"], headers={"city": "BJS", "n": 5})
        for attempt in (1, 2, 3):
            [message] = await fetch_all(consumer, 1)
            assert message.attempt == attempt
            message.nack(reason=ValueError(f"number {attempt}"))
            await consumer.flush()
            await timed_broker.advance(6)
        assert len(await consumer.fetch(1, wait=0)) == 0
        letter = await client.admin.dead_letter("s", "g", 0)
        assert (letter.subject, letter.group, letter.sequence) == ("s", "g", 0)
        assert letter.message_id == receipt.message_id
        assert (letter.key, letter.tags, letter.headers) == ("k", ["a", "b"], {"city": "BJS", "n": 5})
        assert (letter.body, letter.size, letter.attempts) == (b"body", 4, 3)
        assert letter.reason == plait.Reason("ValueError", "number 3")
        assert letter.history == []
        assert letter.send_time is not None
        assert letter.store_time >= letter.send_time
        assert timedelta(seconds=11) < letter.last_time - letter.first_time < timedelta(seconds=13)
        info = await client.admin.group("s", "g")
        assert (info.dead, info.lag, info.waiting) == (1, 0, 0)
        assert await client.admin.dead_queues() == [plait.DeadQueue("s", "g", 1)]
        assert await client.admin.dead_queues("s") == [plait.DeadQueue("s", "g", 1)]


async def test_a_message_that_fails_after_it_expired_is_a_dead_letter(timed_broker: EmbeddedBroker) -> None:
    async with (
        timed_broker.connect() as client,
        member(client, retry=plait.Retry.constant(10, expires=15)) as consumer,
    ):
        await send(client, 1)
        for _ in range(2):
            [message] = await fetch_all(consumer, 1)
            message.nack(reason="too slow")
            await consumer.flush()
            await timed_broker.advance(11)
        [message] = await fetch_all(consumer, 1)
        message.nack(reason="too late")
        await consumer.flush()
        [letter] = await letters(client)
        assert (letter.attempts, letter.reason.text) == (3, "too late")


async def test_a_rejected_message_is_a_dead_letter_at_once(client: plait.Client) -> None:
    await send(client, 6)
    async with member(client) as consumer:
        first, *_ = await consumer.fetch(1, wait=5)
        first.reject(KeyError("order"))
        batch = await consumer.fetch(2, wait=5)
        batch[0].ack()
        await batch.reject("the batch")
        table = await consumer.fetch_arrow(3, wait=5)
        await table.reject([1], plait.Reason("Mine", "the row", "by hand"))
        await table.ack()
    found = await letters(client)
    assert [(letter.sequence, letter.reason) for letter in found] == [
        (0, plait.Reason("KeyError", "'order'")),
        (2, plait.Reason("", "the batch")),
        (4, plait.Reason("Mine", "the row", "by hand")),
    ]
    assert [letter.body for letter in found] == [None] * 3
    assert (await client.admin.group("s", "g")).lag == 0


async def test_many_failures_are_reported_in_few_requests(
    client: plait.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    from plait.wire import messages as m
    from plait.wire.link import Link

    reasons: list[plait.Reason | None] = []
    request = Link.request

    async def record(self: Link, message: Any) -> Any:
        if isinstance(message, m.NackRequest):
            reasons.append(message.reason)
        return await request(self, message)

    monkeypatch.setattr(Link, "request", record)
    await send(client, 200)
    async with member(client, retry=plait.Retry.constant(0, attempts=3)) as consumer:
        for _ in range(2):
            for message in await fetch_all(consumer, 200):
                message.nack(reason=f"{message.sequence} of attempt {message.attempt}")
            await consumer.flush()
        assert set(reasons) == {None}
        assert len(reasons) <= 4
        for message in await fetch_all(consumer, 200):
            message.nack(reason=f"{message.sequence} of attempt {message.attempt}")
        await consumer.flush()
    assert len(reasons) > 200
    found = await letters(client, limit=500)
    assert [letter.reason.text for letter in found] == [f"{n} of attempt 3" for n in range(200)]


async def test_a_prefetched_message_that_no_handler_began_uses_up_no_attempt(client: plait.Client) -> None:
    await send(client, 10)
    for _ in range(5):
        async with member(client, retry=TWICE) as consumer:
            # One message is acked; the others were prefetched and are returned.
            [message] = await consumer.fetch(1, wait=5)
            message.ack()
            left = (await client.admin.group("s", "g")).unacked
            assert left > 0
    async with member(client) as consumer:
        rest = await fetch_all(consumer, 5)
        assert {message.attempt for message in rest} == {1}


async def test_blocking_consumers_return_prefetched_messages_without_an_attempt(
    broker: EmbeddedBroker, client: plait.Client
) -> None:
    await send(client, 10)

    def look() -> bytes:
        with plait.sync.connect(broker.address) as blocking, blocking.consumer("s", group="g", retry=TWICE) as consumer:
            message = next(iter(consumer))
            message.ack()
            return message.body

    assert [await asyncio.to_thread(look) for _ in range(4)] == [b"0", b"1", b"2", b"3"]
    async with member(client) as consumer:
        assert {message.attempt for message in await fetch_all(consumer, 6)} == {1}


# --- App ------------------------------------------------------------------------------------------


async def test_a_dead_letter_records_the_exception_of_its_handler(client: plait.Client, app: plait.App) -> None:
    @app.subscriber("s", retry=TWICE, timeout=0.05)
    async def handle(number: int) -> None:
        if number == 1:
            raise plait.Reject("no such order")
        if number == 2:
            raise ZeroDivisionError("by zero")
        if number == 3:
            await asyncio.Event().wait()
        if number == 4:
            raise plait.RetryLater(0)
        if number == 5:
            raise plait.Reject from LookupError("gone")

    for body in (b"0", b"1", b"2", b"3", b"4", b"5", b"no number"):
        await client.send("s", body)
    async with running(app):
        await settled(client)
    name = handle.__qualname__.replace("<locals>.", "")
    found = await letters(client, bodies=True)
    assert {letter.reason.handler for letter in found} == {name}
    told = {letter.body: (letter.attempts, letter.reason.type, letter.reason.text) for letter in found}
    assert told[b"1"] == (1, "plait.Reject", "no such order")
    assert told[b"2"] == (2, "ZeroDivisionError", "by zero")
    assert told[b"3"] == (2, "TimeoutError", f"{name} did not return within 0.05 s")
    assert told[b"4"] == (2, "plait.RetryLater", "again in 0 s")
    assert told[b"5"] == (1, "LookupError", "gone")
    attempts, kind, _ = told[b"no number"]
    assert (attempts, kind) == (1, "plait.CodecError")
    assert len(told) == 6


async def test_a_batch_handler_rejects_its_batch_or_single_messages(client: plait.Client, app: plait.App) -> None:
    @app.subscriber("s", batch=3)
    async def handle(messages: list[plait.Message]) -> None:
        if messages[0].sequence == 0:
            raise plait.Reject("all of them")
        messages[1].reject("one of them")

    await send(client, 6)
    async with running(app):
        await settled(client)
    assert [(letter.sequence, letter.reason.text) for letter in await letters(client)] == [
        (0, "all of them"),
        (1, "all of them"),
        (2, "all of them"),
        (4, "one of them"),
    ]


@pytest.mark.parametrize("batch", [None, 1])
async def test_suspensions_make_no_dead_letters(client: plait.Client, app: plait.App, batch: int | None) -> None:
    attempts: list[int] = []

    def work(message: plait.Message) -> None:
        attempts.append(message.attempt)
        if len(attempts) <= 5:
            raise plait.Suspend(0.001)
        if len(attempts) == 6:
            raise ValueError("an attempt")

    async def one(message: plait.Message) -> None:
        work(message)

    async def many(messages: list[plait.Message]) -> None:
        work(messages[0])

    app.subscriber("s", batch=batch, retry=TWICE)(one if batch is None else many)
    await send(client, 1)
    async with running(app):
        await settled(client)
    assert attempts == [1] * 6 + [2]
    assert await letters(client) == []


@pytest.mark.parametrize("threads", [False, True])
async def test_deploys_use_up_no_attempts(broker: EmbeddedBroker, client: plait.Client, threads: bool) -> None:
    await send(client, 200)
    attempts: dict[int, list[int]] = {}

    async def deploy() -> None:
        """Run an app that stops at its first message."""
        app = plait.App(broker.address, group="g")
        before = len(attempts)

        def take(message: plait.Message) -> None:
            attempts.setdefault(message.sequence, []).append(message.attempt)
            if len(attempts) == before + 1:
                # Once: a second stop would skip the drain.
                app.stop()

        async def take_async(message: plait.Message) -> None:
            take(message)
            await asyncio.sleep(0)

        app.subscriber("s", retry=plait.Retry(attempts=1))(take if threads else take_async)
        await app.run()

    for _ in range(5):
        await deploy()
    assert {tuple(numbers) for numbers in attempts.values()} == {(1,)}
    async with member(client) as consumer:
        rest = await fetch_all(consumer, 200 - len(attempts))
        assert {message.attempt for message in rest} == {1}
    assert await letters(client) == []


# --- listing ------------------------------------------------------------------------------


async def test_letters_are_selected_by_every_given_criterion(timed_broker: EmbeddedBroker) -> None:
    async with timed_broker.connect() as client:
        await send(client, 6)
        async with member(client, prefetch=6) as consumer:
            held = await fetch_all(consumer, 6)
            for message in held[:3]:
                message.reject(plait.Reason("A", f"{message.sequence}", "first"))
            await consumer.flush()
            await timed_broker.advance(60)
            for message in held[3:]:
                message.reject(plait.Reason("A" if message.sequence == 3 else "B", "text", "second"))
            await consumer.flush()

        async def selected(**how: Any) -> list[int]:
            return [letter.sequence for letter in await letters(client, **how)]

        [*_, last] = await letters(client)
        assert await selected() == [0, 1, 2, 3, 4, 5]
        assert await selected(limit=2) == [0, 1]
        assert await selected(type="A") == [0, 1, 2, 3]
        assert await selected(type="A", handler="second") == [3]
        assert await selected(before=last.last_time) == [0, 1, 2]
        assert await selected(sequences=[5, 1, 77, 1]) == [1, 5]
        assert await selected(sequences=[5, 1], type="B") == [5]
        assert await selected(sequences=[]) == []

        reasons = await client.admin.dead_reasons("s", "g")
        assert [(r.type, r.handler, r.count) for r in reasons] == [
            ("A", "first", 3),
            ("B", "second", 2),
            ("A", "second", 1),
        ]
        assert reasons[0].first_time < reasons[1].first_time
        assert reasons[0].text in ("0", "1", "2")


async def test_letters_are_listed_resent_and_purged_in_pages(
    client: plait.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead, "DEAD_LIST_MAX", 7)
    monkeypatch.setattr(dead, "DEAD_PAGE_MAX", 6)
    monkeypatch.setattr(dead, "SEQUENCES_MAX", 4)
    await send(client, 30)
    async with member(client) as consumer:
        for message in await fetch_all(consumer, 30):
            message.reject(plait.Reason("A" if message.sequence % 3 else "B", f"{message.sequence}"))
    assert [letter.sequence for letter in await letters(client)] == list(range(30))
    assert [letter.sequence for letter in await letters(client, limit=20)] == list(range(20))
    assert [letter.sequence for letter in await letters(client, type="B")] == list(range(0, 30, 3))
    assert [letter.sequence for letter in await letters(client, sequences=range(3, 13))] == list(range(3, 13))
    assert [(r.type, r.count) for r in await client.admin.dead_reasons("s", "g")] == [("A", 20), ("B", 10)]
    progress: list[int] = []
    assert await client.admin.resend_dead("s", "g", dry_run=True, progress=progress.append) == 30
    assert progress == [6, 12, 18, 24, 30]
    assert await client.admin.purge_dead("s", "g", type="B") == 10
    assert await client.admin.purge_dead("s", "g", sequences=range(15)) == 10
    assert sorted(numbers(await resent(client))) == [n for n in range(15, 30) if n % 3]
    assert await client.admin.dead_queues() == []


async def test_invalid_requests_are_refused_and_change_nothing(client: plait.Client) -> None:
    await send(client, 1)
    await reject(client, 1)
    admin = client.admin
    with pytest.raises(plait.DeadLetterNotFound, match="message 7 of 's' is not a dead letter of group 'g'"):
        await admin.dead_letter("s", "g", 7)
    with pytest.raises(plait.GroupNotFound):
        await admin.dead_letters("s", "missing")
    with pytest.raises(plait.SubjectNotFound):
        await admin.dead_letters("none", "g")
    with pytest.raises(plait.InvalidArgument, match="limit must be 1 or more, not 0"):
        await letters(client, limit=0)
    with pytest.raises(plait.InvalidArgument, match="sequence -1 is out of range"):
        await admin.purge_dead("s", "g", sequences=[-1])
    with pytest.raises(plait.InvalidArgument, match="cannot be selected by 'kind'; use sequences, type"):
        await admin.purge_dead("s", "g", kind="A")  # type: ignore[call-arg]
    with pytest.raises(plait.InvalidArgument, match="before 5 is a int; use a datetime"):
        await admin.purge_dead("s", "g", before=5)  # type: ignore[arg-type]
    for rate in (0, -1, float("nan"), float("inf")):
        with pytest.raises(plait.InvalidArgument, match="rate must be more than 0"):
            await admin.resend_dead("s", "g", rate=rate)
    assert len(await letters(client)) == 1


# --- resending ------------------------------------------------------------------------------------


async def test_a_resent_letter_goes_only_to_its_group_with_its_id_attempts_and_history(client: plait.Client) -> None:
    receipt = await client.send("s", b"body", key="k")
    async with client.consumer("s", group="other") as other:
        [message] = await fetch_all(other, 1)
        message.ack()
        await other.flush()
        await reject(client, 1, ValueError("first"))
        assert await client.admin.resend_dead("s", "g") == 1
        async with member(client) as consumer:
            [again] = await fetch_all(consumer, 1)
            assert (again.message_id, again.sequence, again.key, again.attempt) == (receipt.message_id, 0, "k", 2)
            again.reject(KeyError("second"))
        assert len(await other.fetch(1, wait=0)) == 0
    [letter] = await letters(client)
    assert (letter.attempts, letter.reason.type) == (2, "KeyError")
    assert [(old.attempts, old.reason) for old in letter.history] == [(1, plait.Reason("ValueError", "first"))]
    assert letter.history[0].time <= letter.last_time
    [message] = await resent(client, sequences=[0])
    assert message.body == b"body"
    assert await letters(client) == []
    assert (await client.admin.group("s", "g")).lag == 0


async def test_a_resent_letter_gets_as_many_attempts_as_a_new_message(client: plait.Client) -> None:
    await send(client, 1)
    async with member(client, retry=TWICE) as consumer:
        for life in range(3):
            for attempt in (1, 2):
                [message] = await fetch_all(consumer, 1)
                assert message.attempt == 2 * life + attempt
                message.nack(reason=f"{life}")
                await consumer.flush()
            [letter] = await letters(client)
            assert (letter.attempts, letter.reason.text) == (2 * (life + 1), f"{life}")
            assert [(old.attempts, old.reason.text) for old in letter.history] == [
                (2 * (before + 1), f"{before}") for before in range(life)
            ]
            assert await client.admin.resend_dead("s", "g") == 1


async def test_letters_survive_restarts(broker: EmbeddedBroker, client: plait.Client) -> None:
    await send(client, 3)
    await reject(client, 3, "why")
    for end in (broker.stop, broker.kill):
        await end()
        await broker.start()
        found = await letters(client, bodies=True)
        assert [(letter.body, letter.reason.text) for letter in found] == [(b"%d" % n, "why") for n in range(3)]
    assert numbers(await resent(client)) == [0, 1, 2]


class Loop:
    """A loop whose clock moves only by ``sleep``."""

    def __init__(self) -> None:
        self.now = 100.0

    def time(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


async def paced(monkeypatch: pytest.MonkeyPatch, rate: float, total: int, stall: float) -> list[tuple[float, int]]:
    """(time, count) of each page; requests take 2 ms, some 40 ms, and one takes ``stall`` seconds."""
    loop = Loop()
    monkeypatch.setattr(dead.asyncio, "get_running_loop", lambda: loop)
    monkeypatch.setattr(dead.asyncio, "sleep", loop.sleep)
    pace = LetterRate(rate)
    done: list[tuple[float, int]] = []
    while pace.count < total:
        count = min(await pace.turn(), total - pace.count)
        turn = len(done)
        loop.now += stall if turn == 5 else 0.04 if turn % 10 == 0 else 0.002
        done.append((loop.now - 100.0, count))
        # Pages without a match do not count.
        pace.did(0)
        pace.did(count)
    return done


PACES = [(10_000, 100_000), (7, 30), (0.5, 8), (123_456, 500_000)]


@pytest.mark.parametrize(("rate", "total"), PACES)
async def test_a_rate_is_kept_without_drift(monkeypatch: pytest.MonkeyPatch, rate: float, total: int) -> None:
    done = await paced(monkeypatch, rate, total, 0.002)
    assert abs(done[-1][0] / (total / rate) - 1) <= max(0.02, 2 / total)
    assert len(done) >= 0.5 * min(total, total / rate / dead.PACE_SECONDS)


@pytest.mark.parametrize("stall", [1.0, 30.0])
@pytest.mark.parametrize(("rate", "total"), PACES)
async def test_a_rate_is_not_exceeded_after_a_stall(
    monkeypatch: pytest.MonkeyPatch, rate: float, total: int, stall: float
) -> None:
    done = await paced(monkeypatch, rate, total, stall)
    for at, _ in done:
        window = sum(count for moment, count in done if at <= moment < at + 1)
        # The first page of the window was due earlier, and requests take up to 40 ms.
        assert window <= rate * (1 + dead.PACE_SECONDS + dead.CATCH_UP_SECONDS + 0.04) + 2
    # The time lost in the stall is not caught up.
    assert done[-1][0] >= total / rate + stall - 2 / rate - 0.3


async def test_a_resend_keeps_its_rate(client: plait.Client) -> None:
    await send(client, 60)
    await reject(client, 60)
    loop = asyncio.get_running_loop()
    begun = loop.time()
    assert await client.admin.resend_dead("s", "g", rate=200) == 60
    assert loop.time() - begun >= 0.24
