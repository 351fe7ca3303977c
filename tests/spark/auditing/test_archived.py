"""Audits of archives: the verdict is the same as for the data directory that was archived."""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

import plait
from plait.clock import ManualClock
from plait.errors import ArchiveError, SubjectNotFound
from plait.model.reason import Reason
from plait.spark.archiving.manifest import Archive
from plait.spark.auditing.report import AuditReport
from plait.spark.auditing.report_files import page
from plait.spark.inputs import archive_audit as units
from plait.testing import EmbeddedBroker
from tests.spark.archives import Filler, archive_here
from tests.spark.auditing.conftest import Audit, one_group
from tests.spark.auditing.test_defects import one_by_one
from tests.spark.auditing.test_live import SUBJECT, consume, send


def counts(report: AuditReport) -> list[dict[str, object]]:
    """The counts that an archive and a data directory have in common."""
    groups = [msgspec.to_builtins(group) for group in report.groups()]
    return [{name: value for name, value in group.items() if name != "lag"} for group in groups]


async def test_an_archive_and_its_data_directory_get_the_same_verdict(
    data: Path, to: Path, audit: Audit, monkeypatch: pytest.MonkeyPatch
):
    async with EmbeddedBroker(data) as broker, broker.connect() as client:
        for _ in range(4):
            await send(client, 50, keys=13)
            await client.send(SUBJECT, b"no key")
        async with (
            client.consumer(SUBJECT, group="billing") as shared,
            client.consumer(SUBJECT, group="mail", ordered=True) as ordered,
        ):
            batch = await shared.fetch(10, wait=5)
            await batch[3].nack(delay=0)
            await batch.ack()
            await consume(shared, 150)
            await consume(ordered, 120)
    archive_here(data, to, now=True)
    monkeypatch.setattr(units, "BLOCK_COUNT", 60)
    report = audit(archive=to)
    assert report.held
    assert counts(report) == counts(audit(data))
    assert [group.order for group in report.groups()] == ["none", "best_tried"]
    assert report.subjects[0].hot_keys == audit(data).subjects[0].hot_keys
    assert [subject.messages for subject in report.subjects] == [204]


async def with_dead_letters(data: Path) -> datetime:
    """A strict subject of several partitions, with deaths of several reasons; returns a time between two of them."""
    clock = ManualClock()
    retry = plait.Retry(attempts=1)
    async with EmbeddedBroker(data, clock=clock) as broker, broker.connect() as client:
        await client.admin.create_subject(SUBJECT, order="strict", partitions=3)
        await send(client, 60, keys=13)
        for number in range(30):
            await client.send(SUBJECT, b"no key %d" % number)
        async with (
            client.consumer(SUBJECT, group="billing", retry=retry) as shared,
            client.consumer(SUBJECT, group="mail", ordered=True, retry=retry) as ordered,
        ):
            await consume(ordered, 80)
            seen = 0
            while seen < 90:
                batch = await shared.fetch(90, wait=5)
                for message in batch:
                    seen += 1
                    if seen in (3, 10, 20):
                        await message.reject(ValueError("no") if seen < 15 else KeyError("what"))
                await batch.ack()
            await shared.flush()
            await broker.advance(60)
            middle = datetime.fromtimestamp(clock.now() / 1e6, UTC)
            await client.send(SUBJECT, b"late", key="k")
            await (await shared.fetch(1, wait=5))[0].reject("in words")
    return middle


async def test_dead_letters_and_strict_order_are_reported_as_for_the_data_directory(data: Path, to: Path, audit: Audit):
    middle = await with_dead_letters(data)
    archive_here(data, to, now=True)
    report = audit(archive=to)
    assert report.held
    assert counts(report) == counts(audit(data))
    billing, mail = report.groups()
    assert [(death.type, death.count) for death in billing.deaths] == [("ValueError", 2), (None, 1), ("KeyError", 1)]
    assert (mail.order, mail.acked, mail.deaths) == ("strict", 80, [])
    assert "strict order" in page(report)
    for times in ({"since": middle}, {"until": middle}):
        assert counts(audit(archive=to, **times)) == counts(audit(data, **times))
    # Merged files give the same report.
    archive_here(None, to, compact=True)
    assert counts(audit(archive=to)) == counts(report)


async def test_only_deaths_of_the_selected_messages_are_reported(data: Path, to: Path, audit: Audit):
    clock = ManualClock()
    async with EmbeddedBroker(data, clock=clock) as broker, broker.connect() as client:
        await send(client, 4)
        await broker.advance(60)
        middle = datetime.fromtimestamp(clock.now() / 1e6, UTC)
        await broker.advance(60)
        async with client.consumer(SUBJECT, group="billing", retry=plait.Retry(attempts=1)) as consumer:
            for message in await consumer.fetch(4, wait=5):
                await message.reject(ValueError("no"))
    archive_here(data, to, now=True)
    for place in ({"data": data}, {"archive": to}):
        assert one_group(audit(**place, since=middle)).deaths == []
        (death,) = one_group(audit(**place, until=middle)).deaths
        assert (death.type, death.count) == ("ValueError", 4)


def test_groups_of_several_directories_have_their_own_dead_letters(to: Path, tmp_path: Path, audit: Audit):
    for number, name in enumerate(("g1", "g2")):
        filler = Filler(tmp_path / name)
        for other in range(number):
            # Groups of the same name have other numbers in the second directory.
            filler.failing(f"quiet-{other}")
        failing = filler.failing()
        filler.rounds(4)
        assert filler.fail(failing, Reason("ValueError" if number else "KeyError")) == 12
        filler.stop()
        archive_here(tmp_path / name, to, now=True, group=name)
    deaths_of = {group.group: group.deaths for group in audit(archive=to).groups()}
    assert {name: [(death.type, death.count) for death in deaths] for name, deaths in deaths_of.items()} == {
        "billing": [],
        "failing": [("KeyError", 12), ("ValueError", 12)],
        "quiet-0": [],
    }


def test_events_of_messages_that_are_not_archived_yet_break_no_promise(data: Path, to: Path, audit: Audit):
    filler = Filler(data)
    filler.rounds(60)
    archive_here(data, to)
    (source,) = Archive.at(to).open().sources.values()
    assert source.rests_on > source.message_offset
    assert audit(archive=to).held
    archive_here(data, to, now=True)
    filler.stop()
    (source,) = Archive.at(to).open().sources.values()
    assert source.has_all_of("orders@g1")
    assert audit(archive=to).held


@pytest.mark.parametrize("again", [False, True])
async def test_a_subject_that_was_deleted_before_all_of_it_was_archived(
    data: Path, to: Path, audit: Audit, again: bool
):
    async with EmbeddedBroker(data) as broker, broker.connect() as client:
        await send(client, 10)
        async with client.consumer(SUBJECT, group="billing", ordered=True) as consumer:
            await consume(consumer, 10)
            await client.flush()
            await asyncio.to_thread(archive_here, data, to, now=True)
            assert [group.order for group in audit(archive=to).groups()] == ["best_tried"]
            await send(client, 5, start=10)
            await consume(consumer, 5)
        await client.admin.delete_subject(SUBJECT)
        if again:
            await client.admin.create_subject(SUBJECT, order="strict")
            await send(client, 3)
    for _ in range(2):
        archive_here(data, to, now=True)
        report = audit(archive=to)
        assert report.held
        assert [(group.order, group.invented) for group in report.groups()] == [("best_tried", 0)]
        async with EmbeddedBroker(data) as broker, broker.connect() as client:
            await client.send("others", b"x")


async def test_a_damaged_or_missing_file_of_deaths_is_reported(data: Path, to: Path, audit: Audit):
    await with_dead_letters(data)
    archive_here(data, to, now=True)
    for file in Archive.at(to).open().find("deaths"):
        (to / file.path).write_bytes(b"")
        with pytest.raises(ArchiveError, match=r"deaths/.* cannot be read.*--verify"):
            audit(archive=to)
        (to / file.path).unlink()
        with pytest.raises(ArchiveError, match=r"deaths/.* does not exist"):
            audit(archive=to)


def test_copied_segments_are_audited_like_a_data_directory(data: Path, to: Path, audit: Audit):
    filler = Filler(data)
    filler.rounds(60)
    filler.stop()
    archive_here(data, to, raw=True)
    ((source, facts),) = Archive.at(to).open().sources.items()
    assert facts.raw
    with pytest.raises(ArchiveError, match=f"--data {re.escape(str(to))}/raw/{source}"):
        audit(archive=to)
    report = audit(to / "raw" / source)
    assert report.held
    assert 0 < report.subjects[0].messages < 180
    archive_here(data, to, now=True)
    assert audit(archive=to).subjects[0].messages == 180


async def test_a_subject_that_is_not_archived_is_an_error(tmp_path: Path, audit: Audit):
    await one_by_one(tmp_path / "data")
    archive_here(tmp_path / "data", tmp_path / "archive", now=True)
    for name in ("nothing", "nothing*"):
        with pytest.raises(SubjectNotFound, match=f"'{re.escape(name)}' is not in .*; there are {SUBJECT}"):
            audit(archive=tmp_path / "archive", subjects=[name])
        with pytest.raises(SubjectNotFound, match=f"'{re.escape(name)}' is not in .*; there are {SUBJECT}"):
            audit(tmp_path / "data", subjects=[name])
