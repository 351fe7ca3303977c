"""Audits of logs that a real broker wrote for real clients: correct operation breaks no promise.

The models and simulations of ``test_models`` show the same when brokers crash, members come and go, and routes change.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

import plait
from plait.clock import ManualClock
from plait.errors import InvalidArgument, SubjectNotFound
from plait.spark.auditing.report import AuditReport
from plait.storage.logs.action_events import Action
from plait.testing import EmbeddedBroker
from plait.testing.embedded_broker import TEST_CONFIG
from tests.spark.auditing.conftest import Audit, one_group
from tests.spark.auditing.defects import Events, with_actions

SUBJECT = "order.book"


async def send(client: plait.Client, count: int, *, start: int = 0, keys: int = 5) -> None:
    numbers = range(start, start + count)
    await client.send_many(SUBJECT, [b"%d" % n for n in numbers], keys=[f"k-{n % keys}" for n in numbers])


async def consume(consumer: plait.Consumer, count: int) -> list[plait.Message]:
    """Ack ``count`` messages."""
    done: list[plait.Message] = []
    while len(done) < count:
        batch = await consumer.fetch(count - len(done), wait=10)
        done += batch
        await batch.ack()
    return done


def fates(report: AuditReport) -> dict[str, int]:
    group = one_group(report)
    names = ("acked", "dead", "expired", "in_flight", "returned", "pending", "lost", "unknown")
    return {name: getattr(group, name) for name in names if getattr(group, name)}


async def test_a_clean_run_of_a_shared_group(tmp_path: Path, audit: Audit):
    async with EmbeddedBroker(tmp_path) as broker, broker.connect() as client:
        await send(client, 100)
        async with client.consumer(SUBJECT, group="billing") as consumer:
            for _ in range(5):
                await consume(consumer, 20)
        await send(client, 10)
    report = audit(tmp_path)
    assert report.held
    group = one_group(report)
    assert (group.kind, group.messages, group.acked, group.pending) == ("shared", 110, 100, 10)
    assert group.latency is not None
    assert group.latency.count == 100
    assert group.lag[-1].lag == 10
    assert report.subjects[0].messages == 110
    assert {key.key: key.count for key in report.subjects[0].hot_keys} == {f"k-{n}": 22 for n in range(5)}


async def test_a_directory_that_a_running_server_uses(tmp_path: Path, audit: Audit):
    async with EmbeddedBroker(tmp_path) as broker, broker.connect() as client:
        await send(client, 20)
        async with client.consumer(SUBJECT, group="billing") as consumer:
            await consume(consumer, 15)
            await client.flush()
            report = await asyncio.to_thread(audit, tmp_path)
    assert report.held
    assert one_group(report).acked == 15


async def test_messages_that_failed_died_and_were_resent(tmp_path: Path, audit: Audit):
    clock = ManualClock()
    async with EmbeddedBroker(tmp_path, clock=clock) as broker, broker.connect() as client:
        await send(client, 10)
        retry = plait.Retry(attempts=2, first=1.0)
        async with client.consumer(SUBJECT, group="billing", retry=retry) as consumer:
            for _ in range(2):
                batch = await consumer.fetch(10, wait=5)
                for message in batch:
                    if message.sequence in (3, 4):
                        await message.nack(reason=ValueError("no"))
                await batch.ack()
                await broker.advance(60)
            assert await client.admin.resend_dead(SUBJECT, "billing", sequences=[3]) == 1
            await consume(consumer, 1)
    report = audit(tmp_path)
    group = one_group(report)
    assert report.held
    assert (group.acked, group.dead, group.died) == (9, 1, 2)
    assert group.redelivered == {"failed": 2, "resent": 1}
    assert group.retried == 2
    assert [(death.type, death.count) for death in group.deaths] == [("ValueError", 2)]


async def test_a_lost_consumer_and_its_late_acks(tmp_path: Path, audit: Audit):
    clock = ManualClock()
    async with (
        EmbeddedBroker(tmp_path, clock=clock) as broker,
        broker.connect(client_id="slow") as slow,
        broker.connect(client_id="quick") as quick,
    ):
        await send(slow, 10)
        async with slow.consumer(SUBJECT, group="billing") as consumer:
            batch = await consumer.fetch(10, wait=5)
            await broker.advance(3600, silent=["slow"])
            async with quick.consumer(SUBJECT, group="billing") as other:
                await consume(other, 10)
            await batch.ack()
    report = audit(tmp_path)
    group = one_group(report)
    assert report.held
    assert group.acked == 10
    assert group.redelivered == {"consumer_lost": 10}


async def test_a_broadcast_and_a_group_that_started_at_the_latest(tmp_path: Path, audit: Audit):
    async with EmbeddedBroker(tmp_path) as broker, broker.connect() as client:
        await send(client, 10)
        async with (
            client.consumer(SUBJECT, broadcast=True, group="prices") as broadcast,
            client.consumer(SUBJECT, group="late", start="latest") as late,
        ):
            await send(client, 20, start=10)
            batch = await broadcast.fetch(20, wait=5)
            for message in reversed(batch[10:]):
                await message.ack()
            await consume(late, 20)
    report = audit(tmp_path)
    assert report.held
    late_group, prices = sorted(report.groups(), key=lambda group: group.kind, reverse=True)
    assert (late_group.group, late_group.messages, late_group.acked) == ("late", 20, 20)
    assert (prices.kind, prices.messages, prices.acked, prices.pending) == ("broadcast", 20, 10, 10)


async def test_a_broadcast_at_most_once(tmp_path: Path, audit: Audit):
    settings: dict[str, Any] = {"broadcast": True, "delivery": "at_most_once", "group": "prices"}
    async with EmbeddedBroker(tmp_path) as broker, broker.connect() as client:
        async with client.consumer(SUBJECT, **settings) as consumer:
            await send(client, 30)
            seen = [len(await consumer.fetch(8, wait=5)) for _ in range(3)]
            await broker.kill()
            await broker.start()
            await send(client, 10, start=30)
            seen.append(len(await consumer.fetch(8, wait=5)))
        assert all(seen)
    report = audit(tmp_path)
    assert report.held
    group = one_group(report)
    assert (group.kind, group.delivery, group.lost) == ("broadcast", "at_most_once", 0)
    assert group.acked >= sum(seen)

    def without(events: Events) -> Events:
        return events[(events["action"] != Action.ACK) | (events["start"] > 0)]

    with_actions(tmp_path, tmp_path / "bad", without)
    bad = one_group(audit(tmp_path / "bad"))
    assert bad.broken == ["lost"]
    assert bad.examples[0].sequence == 0


@pytest.mark.parametrize(
    ("to", "skip", "acked", "outside"),
    [(0, True, 12, 0), (8, True, 4, 8), (4, True, 8, 4), (0, False, 12, 0), (8, False, 6, 6), (4, False, 8, 4)],
)
async def test_a_group_that_was_rewound(tmp_path: Path, audit: Audit, to: int, skip: bool, acked: int, outside: int):
    async with EmbeddedBroker(tmp_path) as broker, broker.connect() as client:
        await send(client, 12)
        async with client.consumer(SUBJECT, group="billing") as consumer:
            await consume(consumer, 6)
        await client.admin.rewind_group(SUBJECT, "billing", to, skip=skip)
        async with client.consumer(SUBJECT, group="billing") as consumer:
            await consume(consumer, acked)
    report = audit(tmp_path)
    assert report.held
    assert one_group(report).messages == 12 - outside
    assert fates(report) == {"acked": acked}


async def test_messages_that_expired_before_they_were_done(tmp_path: Path, audit: Audit):
    clock = ManualClock()
    async with EmbeddedBroker(tmp_path, clock=clock) as broker, broker.connect() as client:
        await client.admin.create_subject(SUBJECT, retention=3600)
        await send(client, 4)
        async with client.consumer(SUBJECT, group="billing") as consumer:
            await consume(consumer, 4)
        await send(client, 6, start=4)
        await broker.advance(7200)
        await send(client, 10, start=10)
        async with client.consumer(SUBJECT, group="billing") as consumer:
            await consume(consumer, 10)
    report = audit(tmp_path)
    group = one_group(report)
    assert report.held
    assert (group.messages, group.acked, group.expired, group.unacked) == (16, 10, 6, 0)


async def test_a_selection_of_subjects_groups_and_times(tmp_path: Path, audit: Audit):
    clock = ManualClock()
    async with EmbeddedBroker(tmp_path, clock=clock) as broker, broker.connect() as client:
        await client.send("other", b"x")
        await send(client, 5)
        await broker.advance(100)
        middle = datetime.fromtimestamp(clock.now() / 1e6 - 50, UTC)
        await send(client, 7)
        for name in ("billing", "mail"):
            async with client.consumer(SUBJECT, group=name) as consumer:
                await consume(consumer, 12)
    report = audit(tmp_path, subjects=["order.*"], groups=["mail"], since=middle)
    assert [(s.subject, s.messages) for s in report.subjects] == [(SUBJECT, 7)]
    assert fates(report) == {"acked": 7}
    assert one_group(audit(tmp_path, groups=["mail"], until=middle)).acked == 5
    with pytest.raises(SubjectNotFound, match="'nothing'"):
        audit(tmp_path, subjects=["nothing"])
    with pytest.raises(InvalidArgument, match=r"group 'unknown' is not in .*; there are billing, mail"):
        audit(tmp_path, groups=["unknown"])


@pytest.mark.parametrize("ordered", [False, True])
async def test_an_action_log_whose_first_segment_is_missing(tmp_path: Path, audit: Audit, ordered: bool):
    config = msgspec.structs.replace(TEST_CONFIG, action_segment_size=4096)
    clock = ManualClock()
    async with EmbeddedBroker(tmp_path, config=config, clock=clock) as broker, broker.connect() as client:
        async with client.consumer(SUBJECT, group="billing", ordered=ordered) as consumer:
            for number in range(25):
                await send(client, 5, start=5 * number)
                await consume(consumer, 5)
                await broker.advance(1)
        async with client.consumer(SUBJECT, group="late", ordered=ordered) as consumer:
            await consume(consumer, 125)
    first, *_ = sorted((tmp_path / "action").iterdir())
    first.unlink()
    report = audit(tmp_path)
    assert report.held
    billing, late = report.groups()
    assert (late.messages, late.acked) == (125, 125)
    assert billing.messages == 125
    assert billing.unknown == 125 if ordered else 0 < billing.unknown < 125
    assert billing.unknown + billing.acked == 125
    assert report.judged is not ordered


async def test_messages_skipped_by_a_rewind_do_not_count_as_lag(tmp_path: Path, audit: Audit):
    clock = ManualClock()
    async with EmbeddedBroker(tmp_path, clock=clock) as broker, broker.connect() as client:
        await send(client, 50)
        async with client.consumer(SUBJECT, group="billing") as consumer:
            await consume(consumer, 10)
        await broker.advance(60)
        await client.admin.rewind_group(SUBJECT, "billing", "latest", skip=True)
        (view,) = await client.admin.groups(SUBJECT)
        await broker.advance(60)
        await client.send(SUBJECT, b"one more")
    group = one_group(audit(tmp_path))
    lags = [moment.lag for moment in group.lag]
    assert view.lag == 0
    assert (max(lags), lags[len(lags) // 4], lags[3 * len(lags) // 4], lags[-1]) == (40, 40, 0, 1)


async def test_an_idle_group_is_reported_as_forgotten(tmp_path: Path, audit: Audit):
    clock = ManualClock()
    async with EmbeddedBroker(tmp_path, clock=clock) as broker, broker.connect() as client:
        await send(client, 5)
        async with client.consumer(SUBJECT, broadcast=True, start="earliest") as consumer:
            await consume(consumer, 3)
        for _ in range(3):
            await broker.advance(timedelta(days=30))
        async with broker.connect() as late, late.consumer(SUBJECT, group="billing") as consumer:
            await send(late, 5)
            await consume(consumer, 5)
    report = audit(tmp_path)
    assert report.held
    billing, *gone = sorted(report.groups(), key=lambda group: group.kind, reverse=True)
    assert billing.acked == 5
    assert [(group.kind, group.forgotten) for group in gone] == [("broadcast", True)]


async def test_a_key_that_failed_was_parked_and_resumed(tmp_path: Path, audit: Audit):
    clock = ManualClock()
    async with EmbeddedBroker(tmp_path, clock=clock) as broker, broker.connect() as client:
        await client.admin.create_subject(SUBJECT, order="strict")
        await send(client, 20, keys=4)
        failing = plait.Retry(attempts=1)
        async with client.consumer(SUBJECT, group="billing", ordered=True, retry=failing) as consumer:
            seen = 0
            while seen < 4:
                for message in await consumer.fetch(4, wait=5):
                    seen += 1
                    if message.key in ("k-1", "k-2") and message.sequence < 4:
                        await message.nack(reason=ValueError("no"))
                    else:
                        await message.ack()
            await consumer.flush()
            await consume(consumer, 8)
            await client.admin.resume_key(SUBJECT, "billing", "k-1")
            await client.admin.skip_key(SUBJECT, "billing", "k-2")
            await consume(consumer, 9)
            await client.admin.resend_dead(SUBJECT, "billing")
            await consume(consumer, 1)
    report = audit(tmp_path)
    assert report.held
    assert fates(report) == {"acked": 20}
    assert one_group(report).died == 2


@pytest.mark.parametrize("skip", [False, True])
async def test_an_ordered_group_that_was_rewound(tmp_path: Path, audit: Audit, skip: bool):
    async with EmbeddedBroker(tmp_path) as broker, broker.connect() as client:
        await client.admin.create_subject(SUBJECT, order="strict")
        await send(client, 40, keys=7)
        async with client.consumer(SUBJECT, group="billing", ordered=True) as consumer:
            await consume(consumer, 30)
        await client.admin.rewind_group(SUBJECT, "billing", 10, skip=skip)
        async with client.consumer(SUBJECT, group="billing", ordered=True) as consumer:
            await consume(consumer, 30)
    report = audit(tmp_path)
    assert report.held
    assert one_group(report).messages == 30
    assert fates(report) == {"acked": 30}


@pytest.mark.parametrize("way", ["priority", "fair_by", "at_most_once", "no_longer_fair"])
async def test_messages_that_others_overtook_are_pending(tmp_path: Path, audit: Audit, way: str):
    fair = way in ("fair_by", "no_longer_fair")
    settings: dict[str, Any] = {"group": "billing", "fair_by": "key" if fair else None}
    if way == "at_most_once":
        settings["delivery"] = "at_most_once"

    def pending() -> int:
        report = audit(tmp_path)
        assert report.held
        assert sum(fates(report).values()) == one_group(report).messages == 550
        return one_group(report).pending

    async with EmbeddedBroker(tmp_path) as broker, broker.connect() as client:
        await client.send_many(SUBJECT, [b"0"] * 500, keys=["large"] * 500)
        await client.send_many(SUBJECT, [b"1"] * 50, keys=["small"] * 50, priority=0 if fair else 9)
        async with client.consumer(SUBJECT, **settings) as consumer:
            seen = [message.body for message in await consume(consumer, 100)]
        assert b"1" in seen
        await client.flush()
        assert 0 < pending() <= 450
        if way == "no_longer_fair":
            await client.admin.set_group(SUBJECT, "billing", fair_by=None)
            settings["fair_by"] = None
        async with client.consumer(SUBJECT, **settings) as consumer:
            await consume(consumer, 100)
            await client.flush()
            assert pending() <= 350
            await send(client, 10)
            await consume(consumer, 360)
    report = audit(tmp_path)
    assert report.held
    assert fates(report) == {"acked": 560}
