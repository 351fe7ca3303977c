"""Audits of archives in which a name had several partitions, one after another, or an empty one."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

import plait
from plait.errors import SubjectNotFound
from plait.frame.columns import Column
from plait.storage.logs.action_log import EVENTS, read_events
from plait.testing import EmbeddedBroker
from tests.spark.archives import archive_here
from tests.spark.auditing.conftest import Audit, one_group
from tests.spark.auditing.defects import Events, copied, frames_of, is_ack, undurable, whole, with_actions, write
from tests.spark.auditing.test_archived import counts
from tests.spark.auditing.test_defects import one_by_one
from tests.spark.auditing.test_live import SUBJECT, consume, send


async def handle(client: plait.Client, count: int, *, ordered: bool) -> None:
    """Send messages, and ack each before the next is sent."""
    async with client.consumer(SUBJECT, group="billing", ordered=ordered) as consumer:
        for number in range(count):
            await client.send(SUBJECT, b"%d" % number, key=f"k-{number % 2}")
            await consume(consumer, 1)
    await client.flush()


async def made_again(data: Path, to: Path | None, *, ordered: bool, order: str = "best_tried") -> None:
    """Six messages, then four in a second life of the subject; archived in between if ``to`` is given."""
    async with EmbeddedBroker(data) as broker, broker.connect() as client:
        await client.admin.create_subject(SUBJECT, order="strict")
        await handle(client, 6, ordered=ordered)
        if to is not None:
            await asyncio.to_thread(archive_here, data, to, now=True)
        await client.admin.delete_subject(SUBJECT)
        await client.admin.create_subject(SUBJECT, order=order)
        await handle(client, 4, ordered=ordered)


@pytest.mark.parametrize("ordered", [False, True])
async def test_each_life_of_a_subject_is_judged_by_its_own_events(data: Path, to: Path, audit: Audit, ordered: bool):
    await made_again(data, to, ordered=ordered)
    archive_here(data, to, now=True)
    for _ in range(2):
        report = audit(archive=to)
        group = one_group(report)
        assert report.held
        assert (group.messages, group.acked, group.lag[-1].stored, group.lag[-1].lag) == (10, 10, 10, 0)
        assert group.order == ("best_tried" if ordered else "none")
        assert [(each.messages, each.end) for each in report.subjects[0].partitions] == [(6, 6), (4, 4)]
        assert report.subjects[0].partition_skew == 1.0
        archive_here(None, to, compact=True)


async def test_a_life_after_a_crash_has_lost_nothing_that_earlier_groups_passed(
    data: Path, to: Path, tmp_path: Path, audit: Audit
):
    async with EmbeddedBroker(data) as broker, broker.connect() as client:
        await handle(client, 6, ordered=False)
        await asyncio.to_thread(archive_here, data, to, now=True)
        shutil.copytree(data, tmp_path / "crashed", ignore=shutil.ignore_patterns("LOCK"))
    async with EmbeddedBroker(tmp_path / "crashed") as broker, broker.connect() as client:
        await client.admin.delete_subject(SUBJECT)
        await client.admin.create_subject(SUBJECT)
        await send(client, 4)
    archive_here(tmp_path / "crashed", to, now=True)
    report = audit(archive=to)
    assert report.held
    assert (report.subjects[0].messages, one_group(report).messages) == (10, 6)


@pytest.mark.parametrize("life", [0, 1])
async def test_a_broken_promise_in_either_life_is_found(data: Path, to: Path, tmp_path: Path, audit: Audit, life: int):
    async with EmbeddedBroker(data) as broker, broker.connect() as client:
        await client.admin.create_subject(SUBJECT, order="strict")
        await handle(client, 6, ordered=True)
    unacked(data, tmp_path / "first", broken=life == 0)
    archive_here(tmp_path / "first", to, now=True)
    async with EmbeddedBroker(tmp_path / "first") as broker, broker.connect() as client:
        await client.admin.delete_subject(SUBJECT)
        await client.admin.create_subject(SUBJECT, order="strict" if life else "best_tried")
        await handle(client, 6, ordered=True)
    unacked(tmp_path / "first", tmp_path / "second", broken=life == 1)
    archive_here(tmp_path / "second", to, now=True)
    # In a strict subject, the unacked message holds back the later messages of its key.
    assert one_group(audit(archive=to)).broken == ["out_of_order"]


def unacked(data: Path, target: Path, *, broken: bool) -> None:
    """The last group never acked its second message."""

    last = max(
        int(read_events(frame)["group"].max()) for frame in frames_of(data, "action") if frame.partition == EVENTS
    )

    def change(events: Events) -> Events:
        gone = is_ack(events, 1) & (events["group"] == last)
        return events[~gone] if broken else events

    with_actions(data, target, change)


async def test_a_partition_that_was_deleted_while_empty_changes_nothing(tmp_path: Path, audit: Audit):
    async with EmbeddedBroker(tmp_path / "good") as broker, broker.connect() as client:
        await client.admin.create_subject(SUBJECT)
        await client.admin.delete_subject(SUBJECT)
    await one_by_one(tmp_path / "good", ordered=True)
    with_actions(tmp_path / "good", tmp_path / "bad", lambda events: events[~is_ack(events, 4)])
    archive_here(tmp_path / "bad", tmp_path / "archive", now=True)
    group = one_group(audit(archive=tmp_path / "archive"))
    assert (group.order, group.broken) == ("strict", ["out_of_order"])


async def test_an_empty_partition_is_judged_too(tmp_path: Path, audit: Audit):
    data, bad = tmp_path / "data", tmp_path / "bad"
    async with EmbeddedBroker(data) as broker, broker.connect() as client:
        async with client.consumer(SUBJECT, group="billing") as consumer:
            await client.send(SUBJECT, b"only")
            await consume(consumer, 1)
        for _ in range(20):
            await client.send("others", b"x" * 500)
    copied(data, bad)
    shutil.rmtree(bad / "message")
    frames = frames_of(data, "message")
    write(
        bad, "message", undurable(f for f in frames if not f.partition or f.binary(Column.BODY)[0].as_py() != b"only")
    )
    archive_here(bad, tmp_path / "archive", now=True)
    group = one_group(audit(archive=tmp_path / "archive"))
    assert (group.broken, group.invented) == (["invented"], 1)
    assert counts(audit(archive=tmp_path / "archive")) == counts(audit(bad))


async def test_empty_subjects_groups_and_partitions_are_listed(data: Path, to: Path, audit: Audit):
    async with EmbeddedBroker(data) as broker, broker.connect() as client:
        await client.admin.create_subject(SUBJECT, partitions=3)
        await client.admin.create_subject("gone")
        await client.admin.create_subject("quiet")
        async with (
            client.consumer(SUBJECT, group="billing") as consumer,
            client.consumer("quiet", group="idle") as waiting,
        ):
            for _ in range(6):
                await client.send(SUBJECT, b"x", key="k")
            await consume(consumer, 6)
            assert not await waiting.fetch(1, wait=0)
        await client.admin.delete_subject("gone")
    archive_here(data, to, now=True)
    report = audit(archive=to)
    assert [subject.partition_skew for subject in report.subjects] == [3.0, 1.0]
    assert counts(report) == counts(audit(data))
    assert one_group(audit(archive=to, groups=["idle"])).subject == "quiet"
    assert one_group(audit(archive=to, subjects=["quiet"])).messages == 0
    with pytest.raises(SubjectNotFound, match=r"'gone' is not in .* there are order.book, quiet"):
        audit(archive=to, subjects=["gone"])


async def test_a_partition_that_was_made_after_the_last_run_starts_with_its_first_message(
    data: Path, to: Path, tmp_path: Path, audit: Audit
):
    async with EmbeddedBroker(data) as broker, broker.connect() as client:
        await client.send("others", b"x")
    archive_here(data, to, now=True)
    archived = len(frames_of(data, "message"))
    async with EmbeddedBroker(data) as broker, broker.connect() as client:
        await client.send(SUBJECT, b"first")
        await client.send(SUBJECT, b"second")
    copied(data, tmp_path / "bad")
    shutil.rmtree(tmp_path / "bad" / "message")
    frames = frames_of(data, "message")
    later = [f for f in frames[archived:] if not f.partition or f.binary(Column.BODY)[0].as_py() != b"first"]
    write(tmp_path / "bad", "message", [*map(whole, frames[:archived]), *undurable(later)])
    archive_here(tmp_path / "bad", to, now=True)
    (subject,) = audit(archive=to, subjects=[SUBJECT]).subjects
    assert (subject.messages, subject.missing, [each.sequence for each in subject.examples]) == (1, 1, [0])


async def test_unarchived_messages_of_a_deleted_partition_are_not_missing(
    data: Path, to: Path, tmp_path: Path, audit: Audit
):
    async with EmbeddedBroker(data) as broker, broker.connect() as client:
        await send(client, 10)
    archive_here(data, to, now=True)
    async with EmbeddedBroker(data) as broker, broker.connect() as client:
        await send(client, 5, start=10)
    # The checkpoint of this stop counts fifteen messages.
    kept = tmp_path / "kept"
    shutil.copytree(data / "checkpoints", kept)
    async with EmbeddedBroker(data) as broker, broker.connect() as client:
        await client.admin.delete_subject(SUBJECT)
        await client.send("others", b"x")
    shutil.rmtree(data / "checkpoints")
    shutil.copytree(kept, data / "checkpoints")
    archive_here(data, to, now=True)
    report = audit(archive=to)
    assert report.held
    assert [(each.subject, each.messages) for each in report.subjects] == [(SUBJECT, 10), ("others", 1)]
