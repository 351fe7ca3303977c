"""Audits of archives whose files overlap in the log: merged around a larger one, or shared by two days."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.clock import ManualClock
from plait.spark.archiving.archive_tasks import CompactTask
from plait.spark.archiving.file_writer import FileWriter
from plait.spark.archiving.manifest import Archive, ArchivedFile
from plait.spark.auditing.job import open_input
from plait.spark.inputs import archive_audit as units
from plait.spark.inputs.archive_audit import ArchivedInput
from plait.spark.runtime.job_runner import NoProgress
from plait.testing import EmbeddedBroker
from tests.spark.archives import archive_here, commit_next
from tests.spark.auditing.conftest import Audit
from tests.spark.auditing.test_archived import counts
from tests.spark.auditing.test_live import SUBJECT, consume, send


def merge_every_other(to: Path, kind: str) -> None:
    """Merge every other file, like an archiver that merged small files and skipped the larger ones between them."""
    archive = Archive.at(to)
    manifest = archive.open()
    files = sorted(manifest.find(kind), key=lambda file: file.start)
    assert len(files) >= 4
    rest: list[ArchivedFile] = [file for file in manifest.files if file.kind != kind]
    for some in (files[::2], files[1::2]):
        rest += CompactTask(tuple(some)).run(FileWriter(archive, manifest.number + 1, some[0].source)).files
    commit_next(archive, files=rest)


async def in_runs(data: Path, to: Path, *, ordered: bool, runs: int = 5) -> None:
    """Archive in several runs; each leaves a file of each log."""
    async with (
        EmbeddedBroker(data) as broker,
        broker.connect() as client,
        client.consumer(SUBJECT, group="billing", ordered=ordered) as consumer,
    ):
        for _ in range(runs):
            await send(client, 20)
            await consume(consumer, 20)
            await broker.stop()
            archive_here(data, to, now=True)
            await broker.start()


@pytest.mark.parametrize(
    ("ordered", "kind", "block"),
    [(False, "messages", 1 << 20), (True, "messages", 30), (False, "actions", 30), (True, "actions", 1 << 20)],
)
async def test_overlapping_merged_files_are_judged_as_one_log(
    data: Path, to: Path, audit: Audit, monkeypatch: pytest.MonkeyPatch, kind: str, ordered: bool, block: int
):
    await in_runs(data, to, ordered=ordered)
    merge_every_other(to, kind)
    monkeypatch.setattr(units, "BLOCK_COUNT", block)
    report = audit(archive=to)
    assert report.held
    assert report.subjects[0].messages == 100
    assert counts(report) == counts(audit(data))


async def test_events_of_a_message_in_several_files_are_read_in_log_order(data: Path, to: Path, audit: Audit):
    async with EmbeddedBroker(data) as broker, broker.connect() as client:
        await send(client, 20)
        for step in range(5):
            if step < 3:
                async with client.consumer(SUBJECT, group="billing") as consumer:
                    batch = await consumer.fetch(20, wait=5)
                    if step < 2:
                        await next(message for message in batch if message.sequence == 3).nack(delay=0)
                    await batch.ack()
            else:
                await client.admin.rewind_group(SUBJECT, "billing", 15 if step == 3 else 5, skip=True)
            await broker.stop()
            archive_here(data, to, now=True)
            await broker.start()
    merge_every_other(to, "actions")
    report = audit(archive=to)
    assert report.held
    (group,) = report.groups()
    assert group.messages == 15
    assert "after_ack" not in group.redelivered
    assert counts(report) == counts(audit(data))


async def test_a_part_of_the_log_that_two_days_share_is_read_in_log_order(data: Path, to: Path, audit: Audit):
    clock = ManualClock()
    async with EmbeddedBroker(data, clock=clock) as broker, broker.connect() as client:
        for _ in range(4):
            await send(client, 10)
            async with client.consumer(SUBJECT, group="billing", ordered=True) as consumer:
                await consume(consumer, 10)
            await broker.advance(40_000)
    archive_here(data, to, now=True)
    files = Archive.at(to).open().find("actions")
    assert len({file.date for file in files}) >= 2
    assert len({file.start for file in files}) == 1
    report = audit(archive=to)
    assert report.held
    assert counts(report) == counts(audit(data))


async def test_a_recreated_subject_is_not_merged_with_its_earlier_life(data: Path, to: Path, audit: Audit):
    async with EmbeddedBroker(data) as broker, broker.connect() as client:
        for _ in range(2):
            await send(client, 10)
            async with client.consumer(SUBJECT, group="billing") as consumer:
                await consume(consumer, 10)
            await client.flush()
            await broker.stop()
            archive_here(data, to, now=True)
            await broker.start()
            await client.admin.delete_subject(SUBJECT)
    report = audit(archive=to)
    assert report.subjects[0].messages == 20
    source = open_input(None, to, progress=NoProgress())
    assert isinstance(source, ArchivedInput)
    assert [(len(unit.paths), unit.low, unit.high) for part in source.parts for unit in part] == [(1, 0, 10)] * 2
