"""An archive holds every row of the logs once, whatever happens to the archivers.

Spark only decides where tasks run, so most of these tests run the tasks in their own process.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import fs

import plait
from plait.broker import BrokerConfig
from plait.errors import ArchiveConflict, ArchiveError, DamageError, DataDirError, InvalidArgument, SubjectNotFound
from plait.server import Server
from plait.server.cluster.cluster_role import database_in
from plait.spark.archiving import archive_tasks as tasks
from plait.spark.archiving import archiver as archiving
from plait.spark.archiving import intake
from plait.spark.archiving.archiver import Archiver
from plait.spark.archiving.file_writer import MESSAGE_SCHEMA, read_batches
from plait.spark.archiving.manifest import Archive, ArchiveManifest
from plait.storage.disk import RealDisk
from plait.storage.marks import read_archived
from tests.spark.archives import (
    Filler,
    archive_here,
    archived_events,
    archived_rows,
    damage,
    files_below,
    log_rows,
    read_file,
    run_here,
    three_days,
)
from tests.support.broker_node import Node, Producer

pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three subjects over three days."""
    return three_days(tmp_path / "data")


# --- what is archived ---------------------------------------------------------------------------


def test_every_row_of_both_logs_is_archived_once(data: Path, to: Path):
    report = archive_here(data, to, now=True)
    rows = log_rows(data)
    assert archived_rows(to) == rows
    assert report.messages == len(rows) == 246
    events = archived_events(to)
    assert report.events == len(events)
    acked = [n for row in events if row["action"] == "ack" for n in range(row["start"], row["end"])]
    assert acked == list(range(120))
    assert (report.gaps, report.left_out, report.manifest) == (0, 0, 1)


def test_files_are_placed_by_subject_and_day_and_sorted_for_lookups(data: Path, to: Path):
    archive_here(data, to, now=True)
    manifest = Archive.at(to).open()
    assert sorted(files_below(to)) == sorted(file.path for file in manifest.files)
    for file in manifest.find("messages"):
        assert file.path.startswith(f"messages/subject={file.subject}/date={file.date}/")
        table = read_file(Archive.at(to), file.path)
        assert table.schema.equals(MESSAGE_SCHEMA)
        rows = table.to_pylist()
        order = [(row["key"] is None, row["key"] or "", row["partition"], row["sequence"]) for row in rows]
        assert order == sorted(order)
        assert {row["store_time"].date().isoformat() for row in rows} == {file.date}
        assert file.partitions == {f"{file.subject}@g1": (order_of(rows)[0], order_of(rows)[-1])}
        keys = [row["key"] for row in rows if row["key"] is not None]
        assert (file.key_min, file.key_max) == (min(keys), max(keys))
    assert {file.subject for file in manifest.find("messages")} == {"orders", "refunds", "rare"}
    assert len({file.date for file in manifest.files}) == 3


def order_of(rows: list[dict[str, Any]]) -> list[int]:
    return sorted(row["sequence"] for row in rows)


def test_full_segments_are_archived_by_default_and_the_rest_on_request(data: Path, to: Path):
    report = archive_here(data, to)
    (source,) = Archive.at(to).open().sources.values()
    last = max(int(path.stem) for path in (data / "message").iterdir() if path.read_bytes()[:2] == b"PL")
    assert source.message_offset == last
    assert 0 < report.messages < 246
    again = archive_here(data, to)
    assert (again.messages, again.events, again.manifest) == (0, 0, 1)
    rest = archive_here(data, to, now=True)
    assert report.messages + rest.messages == 246
    assert report.events + rest.events == len(archived_events(to))
    assert archived_rows(to) == log_rows(data)


def test_compressed_frames_tags_and_headers_are_archived(tmp_path: Path):
    node = Node(RealDisk(tmp_path / "data"))
    bodies = [b"body %d " % number * 20 for number in range(100)]
    from plait.frame.columns import TAG_SEPARATOR as T

    frame = Producer(5).frame(
        "orders", *bodies, compression="zstd", tags=[f"{T}a{T}b{T}", ""] * 50, headers=[b"\x81\xa1n\x01"] * 100
    )
    node.submit(frame)
    node.turn()
    node.broker.stop()
    archive_here(tmp_path / "data", tmp_path / "archive", now=True)
    rows = archived_rows(tmp_path / "archive")
    assert rows == log_rows(tmp_path / "data")
    assert [row["body"] for row in rows] == bodies
    assert rows[0]["tags"] == ["a", "b"]
    assert rows[0]["headers"] == [("n", "1")]


def test_an_empty_directory_gives_no_archive(tmp_path: Path):
    Node(RealDisk(tmp_path / "data")).broker.stop()
    report = archive_here(tmp_path / "data", tmp_path / "archive", now=True)
    assert (report.messages, report.files) == (0, 0)


def test_expired_messages_are_archived_while_they_are_in_the_log(tmp_path: Path):
    filler = Filler(tmp_path / "data", retention_seconds=5.0)
    filler.rounds(30)
    filler.node.retention.run()
    assert filler.node.partition("orders").start > 0
    filler.node.checkpoint()
    filler.stop()
    archive_here(tmp_path / "data", tmp_path / "archive", now=True)
    assert [row["sequence"] for row in archived_rows(tmp_path / "archive")] == list(range(90))


@pytest.mark.parametrize(("bound", "value"), [("HELD_SIZE_MAX", 2000), ("HELD_COUNT_MAX", 6)])
def test_a_task_holds_a_limited_number_of_bytes_and_rows(
    data: Path, to: Path, monkeypatch: pytest.MonkeyPatch, bound: str, value: int
):
    monkeypatch.setattr(tasks, bound, value)
    assert archive_here(data, to, now=True).files > 30
    assert archived_rows(to) == log_rows(data)


# --- which subjects, which data directory -------------------------------------------------------


def test_a_selection_of_subjects_is_part_of_the_archive(data: Path, to: Path):
    archive_here(data, to, now=True, subjects=["orders", "rar*"])
    assert {row["subject"] for row in archived_rows(to)} == {"orders", "rare"}
    assert read_archived(RealDisk(data)).message_offset == 0, "retention must not rely on it"
    with pytest.raises(InvalidArgument, match=r"has the subjects orders, rar\* of .*, and this run asks for all"):
        archive_here(data, to, now=True)
    assert archive_here(data, to, now=True, subjects=["rar*", "orders"]).messages == 0


def test_unknown_subjects_and_invalid_names_are_reported(data: Path, to: Path, tmp_path: Path):
    with pytest.raises(SubjectNotFound, match="'nothing' is not in"):
        archive_here(data, to, subjects=["nothing"])
    with pytest.raises(InvalidArgument, match="'no spaces' is not allowed"):
        archive_here(data, to, subjects=["no spaces"])
    with pytest.raises(DataDirError, match="is not a Plait data directory"):
        archive_here(tmp_path / "nowhere", to)
    with pytest.raises(InvalidArgument, match="nothing to do"):
        archive_here(None, to)
    assert not to.exists()


def test_two_directories_share_an_archive_and_a_directory_keeps_its_group(data: Path, to: Path, tmp_path: Path):
    archive_here(data, to, now=True, group="east")
    other = Filler(tmp_path / "other")
    other.rounds(3)
    other.stop()
    archive_here(tmp_path / "other", to, now=True, group="west")
    assert {row["partition"].partition("@")[2] for row in archived_rows(to)} == {"east", "west"}
    assert len(archived_rows(to)) == 246 + 9
    with pytest.raises(InvalidArgument, match="is in this archive as group 'east'"):
        archive_here(data, to, group="g1")


def test_an_older_copy_of_a_directory_is_refused(to: Path, tmp_path: Path):
    filler = Filler(tmp_path / "data")
    filler.rounds(10)
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    filler.rounds(10)
    filler.stop()
    archive_here(tmp_path / "data", to, now=True)
    shutil.copy(tmp_path / "data" / "identity", tmp_path / "copy" / "identity")
    with pytest.raises(DataDirError, match="this is an older copy of the data directory"):
        archive_here(tmp_path / "copy", to, now=True)


# --- damage -------------------------------------------------------------------------------------


def test_damage_fails_the_run_and_nothing_is_committed(data: Path, to: Path):
    path = sorted((data / "message").iterdir())[0]
    offset = damage(path)
    with pytest.raises(DamageError, match=rf"{path.name} is damaged.*at offset {offset}.*plait doctor.*--skip-damage"):
        archive_here(data, to, now=True)
    assert Archive.at(to).load() == ArchiveManifest()
    report = archive_here(data, to, now=True, skip_damage=True)
    assert (report.messages, report.left_out) == (243, 1)
    (source,) = Archive.at(to).open().sources.values()
    assert "3 messages of" in source.left_out[0].reason
    assert source.left_out[0].log == "message"


def test_damage_of_the_action_log_is_reported_and_left_out_on_request(data: Path, to: Path):
    path = sorted((data / "action").iterdir())[0]
    damage(path)
    with pytest.raises(DamageError, match=rf"action/{path.name} is damaged"):
        archive_here(data, to, now=True)
    assert archive_here(data, to, now=True, skip_damage=True).left_out == 1
    assert archived_rows(to) == log_rows(data)


def test_messages_that_retention_removes_after_they_were_archived_are_not_lost(to: Path, tmp_path: Path):
    data = tmp_path / "data"
    filler = Filler(data, retention_seconds=5.0, archive_before_delete=True)
    for _ in range(5):
        filler.rounds(30)
        archive_here(data, to, now=True)
        for _ in range(6):
            filler.node.clock.advance(100)
            filler.node.checkpoint()
        filler.node.retention.run()
    assert filler.node.broker.message_log.start > 0
    assert filler.node.broker.action_log.start > 0
    filler.rounds(30)
    filler.stop()
    report = archive_here(data, to, now=True)
    assert (report.gaps, report.left_out) == (0, 0)
    assert [row["sequence"] for row in archived_rows(to)] == list(range(6 * 90))
    acked = [n for r in archived_events(to) if r["action"] == "ack" for n in range(r["start"], r["end"])]
    assert acked == list(range(6 * 90))


def _with_bodies(batch: pa.RecordBatch, bodies: list[bytes]) -> pa.RecordBatch:
    place = batch.schema.get_field_index("body")
    return batch.set_column(place, batch.schema.field(place), pa.array(bodies, pa.binary()))


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda batch: [batch.slice(0, batch.num_rows - 1)], id="lost"),
        pytest.param(lambda batch: [batch, batch.slice(batch.num_rows - 1)], id="doubled"),
        pytest.param(lambda batch: [batch.take(pa.array(range(batch.num_rows)[::-1]))], id="swapped"),
        pytest.param(lambda batch: [_with_bodies(batch, batch.column("body").to_pylist()[::-1])], id="bodies swapped"),
        pytest.param(
            lambda batch: [_with_bodies(batch, [*batch.column("body").to_pylist()[:-1], b"another"])], id="changed"
        ),
    ],
)
def test_a_file_that_does_not_read_back_is_not_committed(
    data: Path, to: Path, monkeypatch: pytest.MonkeyPatch, spoil: Any
):

    def other(archive: Archive, relative: str) -> Iterator[pa.RecordBatch]:
        for batch in read_batches(archive, relative):
            yield from spoil(batch) if "body" in batch.schema.names else [batch]

    monkeypatch.setattr("plait.spark.archiving.file_writer.read_batches", other)
    with pytest.raises(ArchiveError, match=r"does not read back as it was written.*nothing was committed"):
        archive_here(data, to, now=True)
    assert Archive.at(to).load() == ArchiveManifest()


def test_rows_that_are_missing_by_the_frame_headers_are_detected(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real = tasks.read_chunk

    def forgetful(*arguments: Any, **options: Any) -> Any:
        frames = iter(real(*arguments, **options))
        next(frames)
        yield from frames

    monkeypatch.setattr(tasks, "read_chunk", forgetful)
    with pytest.raises(
        ArchiveError, match=r"has \d+ messages of orders@g1 by its frame headers, and \d+ were archived"
    ):
        archive_here(data, tmp_path / "archive", now=True)


def test_of_two_archivers_at_once_the_second_loses_nothing(data: Path, to: Path):
    first, second = (Archiver(to, spark=object()) for _ in range(2))  # type: ignore[arg-type]
    first.take_in(str(data), now=True)
    with pytest.raises(ArchiveConflict, match="another archiver has changed"):
        second.take_in(str(data), now=True)
    assert len(list(files_below(to))) > len(Archive.at(to).open().files)
    first.end()
    assert sorted(files_below(to)) == sorted(file.path for file in Archive.at(to).open().files)
    assert archived_rows(to) == log_rows(data)


# --- other archivers, crashes, left files ------------------------------------------------------


def test_files_of_an_aborted_run_are_removed_and_foreign_files_stay(data: Path, to: Path):
    archive_here(data, to)
    place = to / "messages" / "subject=orders" / "date=2023-11-14"
    old = place / "00000000000000000001-0123456789abcdef-00001.parquet"
    mine = place / "00000000000000000002-0123456789abcdef-00001.parquet"
    running = place / "00000000000000000009-0123456789abcdef-00001.parquet"
    foreign = place / "notes.txt"
    paths = (old, mine, running, foreign)
    for path in paths:
        path.write_bytes(b"x")
    assert archive_here(data, to, now=True).removed == 2
    assert [path.exists() for path in paths] == [False, False, True, True]


def test_the_archive_mark_records_how_far_the_directory_is_archived(data: Path, to: Path):
    archive_here(data, to, now=True)
    (source,) = Archive.at(to).open().sources.values()
    mark = read_archived(RealDisk(data))
    assert (mark.message_offset, mark.action_offset) == (source.message_offset, source.action_offset)
    assert (mark.archive, mark.manifest) == (str(to), 1)
    (data / "archived.json").unlink()
    archive_here(data, to, now=True)
    assert read_archived(RealDisk(data)) == mark, "also if the run before ended before it wrote the mark"


def test_each_round_writes_the_archive_mark(data: Path, to: Path, monkeypatch: pytest.MonkeyPatch):
    """Retention need not wait for the last round, and a run that fails has recorded the rounds before."""
    monkeypatch.setattr(intake.Intake.rounds, "__kwdefaults__", {"round_size": 10_000})
    rounds: list[int] = []

    def end_in_the_third(*arguments: Any) -> Any:
        rounds.append(1)
        if len(rounds) == 3:
            raise ArchiveError("the process ends here")
        return run_here(*arguments)

    monkeypatch.setattr(archiving, "run_job", end_in_the_third)
    with pytest.raises(ArchiveError, match="ends here"):
        archive_here(data, to, now=True)
    (source,) = Archive.at(to).open().sources.values()
    mark = read_archived(RealDisk(data))
    assert (mark.manifest, mark.message_offset) == (2, source.message_offset)


def test_a_directory_whose_archive_mark_cannot_be_written_is_archived(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(archiving, "write_archived", refuse)
    assert archive_here(data, tmp_path / "archive", now=True).messages == 246
    assert "its archive mark cannot be written" in caplog.text
    monkeypatch.setattr(archiving, "identity", refuse)
    with pytest.raises(DataDirError, match=r"has no directory id yet.*Permission denied"):
        archive_here(data, tmp_path / "archive", now=True)


def test_an_archive_that_cannot_be_written_is_reported_in_one_line(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("plait.spark.archiving.file_writer.pq.write_table", full)
    with pytest.raises(ArchiveError, match=r"cannot write to .*No space left.*nothing was committed"):
        archive_here(data, tmp_path / "archive", now=True)


def test_tasks_find_the_archive_from_any_working_directory(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    seen: list[str] = []

    def elsewhere(spark: object, job: Any, *rest: Any) -> Any:
        seen.append(job.archive)
        return run_here(spark, job, *rest)

    monkeypatch.setattr(archiving, "run_job", elsewhere)
    archive_here(Path("data"), "archive", now=True)
    assert seen == [str(tmp_path / "archive")] == [read_archived(RealDisk(data)).archive]


# --- merging, reading back, whole segments ------------------------------------------------------


def test_small_files_are_merged_and_the_originals_are_removed_with_the_next_commit(to: Path, tmp_path: Path):
    data = tmp_path / "data"
    filler = Filler(data)
    for _ in range(5):
        filler.rounds(4, ("orders", "refunds"))
        archive_here(data, to, now=True)
    before = Archive.at(to).open()
    report = archive_here(None, to, compact=True)
    after = Archive.at(to).open()
    assert report.merged == len(before.files) > 10
    assert len(after.files) == report.files == 3
    assert set(files_below(to)) == {file.path for file in [*before.files, *after.files]}
    assert archived_rows(to) == log_rows(data)
    events = archived_events(to)
    filler.rounds(1)
    filler.stop()
    archive_here(data, to, now=True, compact=True, verify=True)
    assert archived_events(to)[: len(events)] == events
    assert archived_rows(to) == log_rows(data)
    assert not set(files_below(to)) & {file.path for file in before.files}
    assert archive_here(None, to, compact=True).merged == 0


def test_reading_back_finds_damaged_and_missing_files(data: Path, to: Path, tmp_path: Path):
    archive_here(data, to, now=True)
    files = Archive.at(to).open().find("messages")
    assert archive_here(None, to, verify=True).verified == len(Archive.at(to).open().files)
    others = [file for file in files if file.subject == files[0].subject and file.date != files[0].date]
    shutil.copy(to / others[0].path, to / files[0].path)
    with pytest.raises(ArchiveError, match=r"is damaged: it has checksum [0-9a-f]{8}, the manifest says"):
        archive_here(None, to, verify=True)
    (to / files[0].path).unlink()
    with pytest.raises(ArchiveError, match="cannot be read"):
        archive_here(None, to, verify=True)
    with pytest.raises(ArchiveError, match="is not an archive"):
        archive_here(None, tmp_path / "nothing", verify=True)


def test_segments_are_copied_whole_and_read_as_a_log(data: Path, to: Path, tmp_path: Path):
    report = archive_here(data, to, raw=True)
    copies = list(to.glob("raw/*/message/*.log"))
    assert report.segments == len(list(to.glob("raw/*/*/*.log"))) > len(copies) > 2
    rows = log_rows(copies[0].parent)
    assert rows == log_rows(data)[: len(rows)] or [row for row in log_rows(data) if row in rows] == rows
    assert len(rows) > 200
    mark = read_archived(RealDisk(data))
    assert mark.message_offset > 0
    assert archive_here(data, to, raw=True).segments == 0
    assert archive_here(None, to, verify=True).verified == report.segments
    damage(copies[0])
    with pytest.raises(ArchiveError, match=rf"{copies[0].name} is damaged"):
        archive_here(None, to, verify=True)
    damage(sorted((data / "message").iterdir())[0])
    with pytest.raises(DamageError, match="is damaged"):
        archive_here(data, tmp_path / "other", raw=True)
    for options in ({"now": True}, {"subjects": ["orders"]}):
        with pytest.raises(InvalidArgument, match="exclude each other"):
            archive_here(data, to, raw=True, **options)


# --- other file systems, live servers -----------------------------------------------------------


def test_a_store_that_can_only_put_files_is_sufficient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    other = Archive(fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "archive", "other://archive")
    monkeypatch.setattr(Archive, "at", lambda place: other)
    filler = Filler(tmp_path / "data")
    for _ in range(3):
        filler.rounds(10, ("orders", "refunds"))
        archive_here(tmp_path / "data", "other://archive", now=True)
    filler.stop()
    report = archive_here(None, "other://archive", compact=True, verify=True)
    assert report.verified == len(other.open().files) == 3
    archive_here(tmp_path / "data", "other://archive", raw=True, verify=True)
    assert archived_rows("other://archive") == log_rows(tmp_path / "data")


def test_an_archive_may_be_named_by_a_uri(data: Path, tmp_path: Path):
    archive_here(data, (tmp_path / "archive").as_uri(), now=True)
    assert archived_rows(tmp_path / "archive") == log_rows(data)


async def test_messages_and_events_of_a_live_server_are_archived(tmp_path: Path):
    settings = BrokerConfig(disk_free_min=0, disk_used_max=1.0)
    server = Server(RealDisk(tmp_path / "data"), settings, port=0, meta=database_in(tmp_path / "data"))
    await server.start()
    try:
        async with plait.connect(server.address) as client:
            keys = [f"order-{number % 10}" for number in range(100)]
            await client.send_many("orders", [b"%d" % number for number in range(100)], keys=keys)
            late = await client.send("orders", b"never", delay=3600)
            async with client.consumer("orders", group="ordered", ordered=True) as consumer:
                for _ in range(100):
                    await (await anext(aiter(consumer))).ack()
            async with client.consumer("orders", group="plain") as consumer:
                batch = await consumer.fetch(100, wait=5.0)
                await batch[0].nack(delay=60)
                await batch.ack()
            await client.cancel(late)
            report = await asyncio.to_thread(archive_here, tmp_path / "data", tmp_path / "archive", now=True)
    finally:
        await server.stop()
    assert report.messages == 100
    assert [row["body"] for row in archived_rows(tmp_path / "archive")] == [b"%d" % number for number in range(100)]
    events = archived_events(tmp_path / "archive")
    actions = {
        group: {row["action"] for row in events if row["consumer_group"] == group} for group in ("ordered", "plain")
    }
    assert {"group", "consumer", "lock", "ack"} <= actions["ordered"]
    assert {"group", "consumer", "pull", "ack", "nack"} <= actions["plain"]
    (cancel,) = [row for row in events if row["action"] == "cancel"]
    assert (cancel["subject"], cancel["consumer_group"]) == ("orders", None)
    assert cancel["due"] is not None
    assert {row["subject"] for row in events} == {"orders"}
