"""Audits of ordered groups that a real broker and real clients ran: cursors, held and parked keys, affinity."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

import plait
from plait.clock import ManualClock
from plait.testing import EmbeddedBroker
from tests.spark.auditing.conftest import Audit, one_group
from tests.spark.auditing.test_live import SUBJECT, consume, fates, send


@pytest.mark.parametrize("order", ["strict", "best_tried"])
async def test_an_ordered_group_with_one_member(tmp_path: Path, audit: Audit, order: str):
    async with EmbeddedBroker(tmp_path) as broker, broker.connect() as client:
        await client.admin.create_subject(SUBJECT, order=order)
        await send(client, 60, keys=7)
        await client.send(SUBJECT, b"no key")
        async with client.consumer(SUBJECT, group="billing", ordered=True) as consumer:
            for _ in range(3):
                await consume(consumer, 20)
            await consume(consumer, 1)
    report = audit(tmp_path)
    assert report.held
    assert (one_group(report).kind, one_group(report).order) == ("ordered", order)
    assert fates(report) == {"acked": 61}
    assert one_group(report).out_of_order == 0


@pytest.mark.parametrize("settings", [{"ordered": True}, {"affinity": "key"}], ids=["ordered", "affinity"])
async def test_members_that_come_and_go(tmp_path: Path, audit: Audit, settings: dict[str, object]):
    async with AsyncExitStack() as stack:
        broker = await stack.enter_async_context(EmbeddedBroker(tmp_path))
        client = await stack.enter_async_context(broker.connect())
        await client.admin.create_subject(SUBJECT, order="strict")
        done = 0
        for step in range(4):
            await send(client, 100, keys=40)
            member = await stack.enter_async_context(broker.connect(client_id=f"m-{step}"))
            consumer = member.consumer(SUBJECT, group="billing", **settings)  # type: ignore[arg-type]
            async with consumer:
                batch = await consumer.fetch(30, wait=10)
                done += len(batch)
                await batch.ack()
                async with client.consumer(SUBJECT, group="billing", **settings) as other:  # type: ignore[arg-type]
                    for each in (consumer, other, consumer, other):
                        batch = await each.fetch(10, wait=2)
                        done += len(batch)
                        await batch.ack()
        async with client.consumer(SUBJECT, group="billing", **settings) as consumer:  # type: ignore[arg-type]
            await consume(consumer, 400 - done)
    report = audit(tmp_path)
    assert report.held
    assert fates(report) == {"acked": 400}


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


async def test_an_ordered_group_whose_broker_was_killed(tmp_path: Path, audit: Audit):
    async with EmbeddedBroker(tmp_path) as broker, broker.connect() as client:
        await client.admin.create_subject(SUBJECT, order="strict")
        await send(client, 40, keys=7)
        async with client.consumer(SUBJECT, group="billing", ordered=True) as consumer:
            await consume(consumer, 10)
            await broker.kill()
            await broker.start()
            await consume(consumer, 30)
    report = audit(tmp_path)
    assert report.held
    assert fates(report) == {"acked": 40}


async def test_an_ordered_group_that_was_reset(tmp_path: Path, audit: Audit):
    async with EmbeddedBroker(tmp_path) as broker, broker.connect() as client:
        await client.admin.create_subject(SUBJECT, order="strict")
        await send(client, 40, keys=7)
        async with client.consumer(SUBJECT, group="billing", ordered=True) as consumer:
            await consume(consumer, 30)
        await client.admin.reset_group(SUBJECT, "billing", 10)
        async with client.consumer(SUBJECT, group="billing", ordered=True) as consumer:
            await consume(consumer, 30)
    report = audit(tmp_path)
    assert report.held
    assert one_group(report).messages == 30
    assert fates(report) == {"acked": 30}


async def test_a_subject_of_several_partitions(tmp_path: Path, audit: Audit):
    async with EmbeddedBroker(tmp_path) as broker, broker.connect() as client:
        await client.admin.create_subject(SUBJECT, order="strict", partitions=3)
        await send(client, 90, keys=30)
        async with client.consumer(SUBJECT, group="billing", ordered=True) as consumer:
            await consume(consumer, 90)
    report = audit(tmp_path)
    assert report.held
    assert len(report.subjects[0].partitions) == 3
    assert fates(report) == {"acked": 90}
    assert report.subjects[0].partition_skew >= 1


async def test_a_subject_that_got_more_partitions_while_it_was_used(tmp_path: Path, audit: Audit):
    async with EmbeddedBroker(tmp_path) as broker, broker.connect() as client:
        await client.admin.create_subject(SUBJECT, order="strict")
        async with (
            client.consumer(SUBJECT, group="mail", ordered=True) as ordered,
            client.consumer(SUBJECT, group="billing") as shared,
        ):
            for partitions in (2, 4, 1):
                await send(client, 60, keys=20)
                await consume(ordered, 30)
                await client.admin.expand_subject(SUBJECT, partitions)
                await send(client, 60, start=60, keys=20)
                await consume(ordered, 90)
                await consume(shared, 120)
    report = audit(tmp_path)
    assert report.held
    assert [(group.group, group.acked, group.unacked) for group in report.groups()] == [
        ("billing", 360, 0),
        ("mail", 360, 0),
    ]
