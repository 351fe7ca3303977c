"""Audits of archives: the same verdict as of the data directory they come from."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from plait.errors import ArchiveError, SubjectNotFound
from plait.spark import archiving
from plait.spark.auditing import archived
from plait.spark.auditing.report import AuditReport
from plait.testing import EmbeddedBroker
from tests.spark.archives import archive_here, run_here
from tests.spark.auditing.conftest import Audit
from tests.spark.auditing.defects import Events, is_ack, swapped_acks, with_actions
from tests.spark.auditing.test_defects import one_by_one
from tests.spark.auditing.test_live import SUBJECT, consume, send


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Archivers and audits of this test do without Spark."""
    monkeypatch.setattr(archiving, "run_job", run_here)


def counts(report: AuditReport) -> list[dict[str, object]]:
    """What both ways of reading know."""
    left_out = ("lag", "order", "deaths")
    groups = [msgspec.to_builtins(group) for group in report.groups()]
    return [{name: value for name, value in group.items() if name not in left_out} for group in groups]


async def test_an_archive_and_its_data_directory_are_judged_alike(
    tmp_path: Path, audit: Audit, monkeypatch: pytest.MonkeyPatch
):
    data, to = tmp_path / "data", tmp_path / "archive"
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
    monkeypatch.setattr(archived, "BLOCK_COUNT", 60)
    report = audit(archive=to)
    assert report.held
    assert counts(report) == counts(audit(data))
    assert report.subjects[0].hot_keys == audit(data).subjects[0].hot_keys
    assert [subject.messages for subject in report.subjects] == [204]


async def test_defects_are_found_in_an_archive(tmp_path: Path, audit: Audit):
    await one_by_one(tmp_path / "ordered", ordered=True)
    swapped_acks(tmp_path / "ordered", tmp_path / "swapped", 4, 6)
    archive_here(tmp_path / "swapped", tmp_path / "archive", now=True)
    assert [group.broken for group in audit(archive=tmp_path / "archive").groups()] == [["out_of_order"]]

    def again(events: Events) -> Events:
        doubled = events[is_ack(events, 7)]
        return events if not len(doubled) else events[[*range(len(events)), *is_ack(events, 7).nonzero()[0]]]

    with_actions(tmp_path / "ordered", tmp_path / "doubled", again)
    archive_here(tmp_path / "doubled", tmp_path / "archive-2", now=True)
    assert [group.broken for group in audit(archive=tmp_path / "archive-2").groups()] == [["double_acks"]]


async def test_runs_of_the_archiver_are_one_log(tmp_path: Path, audit: Audit):
    data, to = tmp_path / "data", tmp_path / "archive"
    async with (
        EmbeddedBroker(data) as broker,
        broker.connect() as client,
        client.consumer(SUBJECT, group="billing", ordered=True) as consumer,
    ):
        for _ in range(3):
            await send(client, 20)
            await consume(consumer, 20)
            await broker.stop()
            archive_here(data, to, now=True)
            await broker.start()
    report = audit(archive=to)
    assert report.held
    assert counts(report) == counts(audit(data))


def test_what_is_no_archive_and_a_subject_that_is_not_in_it(tmp_path: Path, audit: Audit):
    with pytest.raises(ArchiveError, match="is not an archive"):
        audit(archive=tmp_path)


async def test_a_subject_that_is_not_archived(tmp_path: Path, audit: Audit):
    await one_by_one(tmp_path / "data")
    archive_here(tmp_path / "data", tmp_path / "archive", now=True)
    with pytest.raises(SubjectNotFound, match="'nothing' is not in"):
        audit(archive=tmp_path / "archive", subjects=["nothing"])
