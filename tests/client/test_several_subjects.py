"""Consumers of several subjects: lists and prefixes, subjects that come and go, and what the subjects share."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import plait
from plait import limits
from plait.client.consume.several.several_fetcher import SeveralFetcher
from plait.model.subject_patterns import SubjectPatterns
from plait.testing import EmbeddedBroker
from tests.client.support import until
from tests.support.cancelling import every_step, no_new_tasks


async def bodies(consumer: plait.Consumer, count: int) -> list[tuple[str, bytes]]:
    """(subject, body) of the next messages, which are acked."""
    found: list[tuple[str, bytes]] = []
    async with asyncio.timeout(60):
        while len(found) < count:
            batch = await consumer.fetch(count - len(found), wait=1.0)
            found += [(message.subject, message.body) for message in batch]
            await batch.ack()
    return found


async def test_a_list_of_subjects_is_consumed_by_one_consumer(client: plait.Client) -> None:
    await client.send("a", b"1")
    await client.send("b", b"2")
    async with client.consumer(["a", "b", "c"], group="g") as consumer:
        assert sorted(await bodies(consumer, 2)) == [("a", b"1"), ("b", b"2")]
        await client.send("c", b"3")
        assert await bodies(consumer, 1) == [("c", b"3")]
    assert {info.subject: info.lag for info in await client.admin.groups()} == {"a": 0, "b": 0, "c": 0}


@pytest.mark.parametrize("mode", [{}, {"ordered": True}, {"affinity": "key"}, {"delivery": "at_most_once"}])
async def test_a_new_subject_that_a_prefix_covers_joins_by_itself(client: plait.Client, mode: dict[str, Any]) -> None:
    await client.send("order.new", b"1", key="k")
    await client.send("orders", b"not covered", key="k")
    async with client.consumer("order.*", group="g", **mode) as consumer:
        assert await bodies(consumer, 1) == [("order.new", b"1")]
        for number in range(3):
            await client.send(f"order.{number}", b"first", key="k")
        assert sorted(await bodies(consumer, 3)) == [(f"order.{number}", b"first") for number in range(3)]
        await client.send("order.1", b"second", key="k")
        assert await bodies(consumer, 1) == [("order.1", b"second")]


async def test_a_prefix_that_covers_no_subject_waits_for_one(client: plait.Client) -> None:
    async with client.consumer("later.*", group="g") as consumer:
        assert len(await consumer.fetch(wait=0)) == 0
        await client.send("later.1", b"x")
        assert await bodies(consumer, 1) == [("later.1", b"x")]


async def test_a_group_continues_on_all_subjects_after_a_restart_of_its_consumer(client: plait.Client) -> None:
    for name in ("a.1", "a.2"):
        await client.send_many(name, [b"%d" % number for number in range(10)])
    async with client.consumer("a.*", group="g", prefetch=4) as consumer:
        first = await bodies(consumer, 7)
    async with client.consumer("a.*", group="g") as consumer:
        second = await bodies(consumer, 13)
    assert sorted(first + second) == sorted((name, b"%d" % n) for name in ("a.1", "a.2") for n in range(10))


@pytest.mark.parametrize("mode", [{}, {"ordered": True}])
async def test_a_deleted_subject_leaves_and_is_not_created_again(client: plait.Client, mode: dict[str, Any]) -> None:
    for name in ("a.1", "a.2"):
        await client.send(name, b"x")
    async with client.consumer("a.*", group="g", **mode) as consumer:
        await bodies(consumer, 2)
        fetcher = consumer._fetcher
        await client.admin.delete_subject("a.1")
        await until(lambda: fetcher.subjects == ["a.2"])  # type: ignore[union-attr]
        await client.send("a.2", b"y")
        assert await bodies(consumer, 1) == [("a.2", b"y")]
        assert [info.subject for info in await client.admin.subjects()] == ["a.2"]
        await client.send("a.1", b"z")
        assert await bodies(consumer, 1) == [("a.1", b"z")]


@pytest.mark.parametrize("mode", [{}, {"ordered": True}])
async def test_outcomes_of_messages_whose_subject_was_deleted_have_no_effect(
    client: plait.Client, mode: dict[str, Any]
) -> None:
    await client.send_many("a.1", [b"x"] * 6)
    await client.send("a.2", b"x")
    async with client.consumer("a.*", group="g", **mode) as consumer:
        held: list[plait.Batch] = []
        async with asyncio.timeout(60):
            while sum(map(len, held)) < 7:
                held.append(await consumer.fetch(3))
        await client.admin.delete_subject("a.1")
        await until(lambda: consumer._fetcher.subjects == ["a.2"])  # type: ignore[union-attr]
        await until(lambda: not consumer._fetcher._changing)  # type: ignore[union-attr]
        for batch in held:
            await batch[0].ack()
            batch[-1].nack()
            await batch.ack()
        await consumer.flush()
        await client.send("a.2", b"y")
        assert await bodies(consumer, 1) == [("a.2", b"y")]
    with pytest.raises(plait.Closed):
        next(message for batch in held for message in batch if message.subject == "a.2").ack()


async def test_a_busy_subject_does_not_starve_the_others(client: plait.Client) -> None:
    await client.send_many("a.busy", [b"x"] * 20_000)
    await client.send("a.quiet", b"y")
    async with client.consumer("a.*", group="g") as consumer:
        seen = 0
        async for message in consumer:
            await message.ack()
            seen += 1
            if message.body == b"y":
                break
    assert seen < 5_000


async def test_the_prefetch_limit_is_one_for_all_subjects(client: plait.Client) -> None:
    names = [f"a.{number}" for number in range(10)]
    for name in names:
        await client.send_many(name, [b"x"] * 200)
    async with client.consumer("a.*", group="g", prefetch=100) as consumer:
        batch = await consumer.fetch(50)
        assert len(batch)
        await asyncio.sleep(0)
        held = sum(each.deliveries.held + each.asked for each in consumer._fetcher.clients)
        # Each partition may have at least its share of one half, the other half is common.
        assert held <= 100 + len(names)


async def test_a_key_that_fails_in_one_subject_holds_nothing_in_another(client: plait.Client) -> None:
    for name in ("a.1", "a.2"):
        await client.admin.create_subject(name, order="strict")
        await client.send_many(name, [b"1", b"2"], keys=["k", "k"])
    async with client.consumer("a.*", group="g", ordered=True) as consumer:
        failed: str | None = None
        seen: list[tuple[str, bytes]] = []
        async with asyncio.timeout(60):
            while len(seen) < 2:
                for message in await consumer.fetch(1):
                    if failed in (None, message.subject):
                        failed = message.subject
                        await message.nack(delay=3600)
                    else:
                        seen.append((message.subject, message.body))
                        await message.ack()
    assert {name for name, _ in seen} == {"a.1", "a.2"} - {failed}
    assert [body for _, body in seen] == [b"1", b"2"]


async def test_a_broadcast_gets_the_messages_of_all_subjects(client: plait.Client) -> None:
    await client.send("a.1", b"before")
    async with client.consumer("a.*", broadcast=True) as consumer:
        await client.send("a.1", b"1")
        await client.send("a.2", b"2")
        assert sorted(await bodies(consumer, 2)) == [("a.1", b"1"), ("a.2", b"2")]


async def test_consumers_of_one_client_with_a_subject_in_common_have_different_ids(client: plait.Client) -> None:
    async with (
        client.consumer("a.*", group="g") as one,
        client.consumer("a.1", group="g") as two,
        client.consumer(["b", "a.2"], group="g") as three,
        client.consumer("c", group="g") as four,
    ):
        ids = [each.client_id for each in (one, two, three, four)]
    assert ids == [client.client_id, f"{client.client_id}:2", f"{client.client_id}:2", client.client_id]


async def test_a_group_with_other_settings_on_a_new_subject_fails_the_consumer(
    client: plait.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    defined = asyncio.Event()
    join = SeveralFetcher._join

    async def join_later(self: SeveralFetcher, name: str) -> None:
        await defined.wait()
        await join(self, name)

    monkeypatch.setattr(SeveralFetcher, "_join", join_later)
    async with (
        asyncio.timeout(60),
        client.consumer("a.*", group="g") as consumer,
        client.consumer("a.1", group="g", delivery="at_most_once"),
    ):
        defined.set()
        with pytest.raises(plait.GroupMismatch, match="at_most_once"):
            await anext(consumer)


@pytest.mark.parametrize(
    ("subject", "error"),
    [
        ([], "names no subject"),
        ("a.*.b", r"\* stands for the rest"),
        ("*.b", r"\* stands for the rest"),
        (["a", "b c"], "'b c'"),
        ([1], "subject name 1"),
        ("a b*", "'a b'"),
    ],
)
async def test_an_invalid_subject_is_refused_with_the_reason(client: plait.Client, subject: Any, error: str) -> None:
    with pytest.raises(plait.PlaitError, match=error):
        client.consumer(subject, group="g")
    with pytest.raises(plait.PlaitError, match=error):
        plait.App(group="g").subscriber(subject)


async def test_more_subjects_than_a_consumer_may_have_are_refused(
    client: plait.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("meta.subjects", "model.subject_patterns", "client.consume.several.subject_watch"):
        monkeypatch.setattr(f"plait.{module}.SUBSCRIBED_SUBJECTS_MAX", 3)
    for number in range(4):
        await client.send(f"a.{number}", b"x")
    with pytest.raises(plait.LimitExceeded, match=r"more than 3 subjects match 'a\.\*'"):
        async with client.consumer("a.*", group="g"):
            pass
    with pytest.raises(plait.LimitExceeded, match="4 subjects are over the limit of 3"):
        client.consumer(["a", "b", "c", "d"], group="g")
    async with client.consumer(["b", "a.1*"], group="g") as consumer:
        assert await bodies(consumer, 1) == [("a.1", b"x")]
    assert limits.SUBSCRIBED_SUBJECTS_MAX == 1_000


async def test_a_handler_of_a_prefix_gets_new_subjects_and_knows_them(broker: EmbeddedBroker) -> None:
    app = plait.App(broker.address, group="g")
    seen: list[tuple[str, bytes]] = []

    @app.subscriber(["order.*", "paid"])
    async def handle(body: bytes, message: plait.Message) -> None:
        seen.append((message.subject, body))

    with pytest.raises(plait.InvalidArgument, match=r"'paid, order\.\*'"):
        app.subscriber("order.book")
    async with broker.connect() as client:
        await client.send("order.a", b"1")
        running = asyncio.ensure_future(app.run())
        await until(lambda: len(seen) == 1)
        await client.send("order.b", b"2")
        await client.send("paid", b"3")
        await until(lambda: len(seen) == 3)
        app.stop()
        await running
    assert sorted(seen) == [("order.a", b"1"), ("order.b", b"2"), ("paid", b"3")]


def test_a_blocking_consumer_takes_prefixes_too(plait_broker: EmbeddedBroker) -> None:
    with plait.sync.connect(plait_broker.address) as client:
        client.send("a.1", b"1", key="k")
        client.send("a.2", b"2", key="k")
        with client.consumer("a.*", group="g", ordered=True) as consumer:
            seen = []
            for message in consumer:
                seen.append(message.subject)
                message.ack()
                if len(seen) == 2:
                    break
    assert sorted(seen) == ["a.1", "a.2"]


@pytest.mark.parametrize("mode", [{}, {"ordered": True}])
async def test_a_cancelled_open_leaves_no_member_on_any_subject(
    timed_broker: EmbeddedBroker, mode: dict[str, Any]
) -> None:
    async with timed_broker.connect() as client, timed_broker.connect() as other:
        async for at in every_step():
            for name in ("1", "2"):
                await other.send(f"s{at.step}.{name}", b"x")
            consumer = client.consumer([f"s{at.step}.*", f"t{at.step}"], group="g", **mode)
            with no_new_tasks():
                outcome = await at.cancel(consumer.__aenter__())
                await consumer.close()
            assert outcome.cancelled or outcome.error is None
            async with other.consumer(f"s{at.step}.*", group="g", **mode) as rest:
                assert len(await bodies(rest, 2)) == 2


async def test_a_cancelled_close_returns_the_rows_of_all_subjects(timed_broker: EmbeddedBroker) -> None:
    async with timed_broker.connect() as client, timed_broker.connect() as other:
        async for at in every_step():
            for name in ("1", "2"):
                await other.send(f"s{at.step}.{name}", b"x")
            consumer = client.consumer(f"s{at.step}.*", group="g")
            with no_new_tasks():
                await consumer.__aenter__()
                async with asyncio.timeout(60):
                    while consumer._fetcher.buffer.count < 2:  # noqa: ASYNC110
                        await asyncio.sleep(0)
                outcome = await at.cancel(consumer.close())
            assert outcome.cancelled or outcome.error is None
            async with other.consumer(f"s{at.step}.*", group="g") as rest:
                assert len(await bodies(rest, 2)) == 2


async def test_a_subject_joins_once_its_client_id_is_free(
    broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    matched = SeveralFetcher._matched
    monkeypatch.setattr(SeveralFetcher, "_matched", lambda *_: None)
    async with (
        broker.connect(client_id="twin") as client,
        broker.connect(client_id="twin") as other,
        client.consumer("a.*", group="g") as consumer,
    ):
        async with other.consumer("a.1", group="g"):
            matched(consumer._fetcher, ["a.1"])  # type: ignore[arg-type]
            await until(lambda: "already attached" in caplog.text)
        await client.send("a.1", b"x")
        assert await bodies(consumer, 1) == [("a.1", b"x")]


def test_patterns_cover_and_overlap() -> None:
    patterns = SubjectPatterns.of(["a", "b.*"])
    assert [name for name in ("a", "a.1", "b", "b.", "b.c", "%b.x") if patterns.covers(name)] == ["a", "b.", "b.c"]
    assert SubjectPatterns.of("*").covers("x")
    assert not SubjectPatterns.of("*").covers("%x")
    assert str(patterns) == "a, b.*"
    for other, overlaps in {"a": True, "b.c": True, "b*": True, "b.c.*": True, "c*": False, "c": False}.items():
        assert SubjectPatterns.of(other).overlaps(patterns) is overlaps
        assert patterns.overlaps(SubjectPatterns.of(other)) is overlaps
