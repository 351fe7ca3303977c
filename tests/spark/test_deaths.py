"""Deaths in an archive: each is archived once, with its reason and without the body."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

from plait.broker.groups.dead_letters import Choice
from plait.errors import ArchiveError, DamageError, FrameError
from plait.frame.builder import build_frame, pack_stamp
from plait.frame.slicing import keep_mask
from plait.frame.view import FrameView
from plait.model.reason import Reason
from plait.spark.archiving import intake
from plait.spark.archiving.event_tables import DEATH_SCHEMA, Names, death_table
from plait.spark.archiving.manifest import Archive, ArchivedSource
from plait.storage.catalog import PartitionRow
from plait.storage.disk import RealDisk
from plait.storage.logs.retained_log import DeathRecord, Note, retained_frames
from plait.storage.marks import read_archived
from plait.storage.reading.action_reader import open_retained
from plait.storage.reading.log_chunks import WantedRows
from tests.spark.archives import (
    DAY,
    Filler,
    archive_here,
    archived_deaths,
    archived_events,
    damage,
    death_rows,
    files_below,
    log_deaths,
    read_file,
)
from tests.support.broker_node import Node

WRONG = Reason("ValueError", "no amount", "on_order")


pytestmark = pytest.mark.usefixtures("here")


def source_of(to: Path) -> ArchivedSource:
    (source,) = Archive.at(to).open().sources.values()
    return source


def test_each_death_is_archived_with_its_reason_and_without_the_body(data: Path, to: Path):
    filler = Filler(data)
    failing = filler.failing()
    filler.rounds(4, ("orders", "refunds"), seconds=DAY / 2)
    assert filler.fail(failing, WRONG, 5) == 5
    filler.node.clock.advance(2 * DAY)
    assert filler.fail(failing, Reason(), 2) == 2
    report = archive_here(data, to, now=True)
    filler.stop()
    assert report.deaths == 7
    assert archived_deaths(to) == log_deaths(data)
    rows = death_rows(to)
    assert {(row["subject"], row["partition"], row["consumer_group"]) for row in rows} == {
        ("orders", "orders@g1", "failing")
    }
    assert [(row["sequence"], row["epoch"]) for row in rows] == [(n, filler.node.broker.turn.epoch) for n in range(7)]
    assert {row["group_number"] for row in rows} == {filler.node.group("orders", "failing").id}
    assert [(row["type"], row["text"], row["handler"]) for row in rows[4:6]] == [
        ("ValueError", "no amount", "on_order"),
        (None, None, None),
    ]
    files = Archive.at(to).open().find("deaths")
    assert [(file.count, file.date == str(row["time"].date())) for file, row in zip(files, rows[4:6], strict=True)] == [
        (5, True),
        (2, True),
    ]
    for file in files:
        assert read_file(Archive.at(to), file.path).schema.equals(DEATH_SCHEMA)
        assert b"xxxx" not in (to / file.path).read_bytes()


def test_a_run_continues_at_the_end_of_the_last_one(data: Path, to: Path):
    filler = Filler(data)
    failing = filler.failing(attempts=2)
    counts = []
    for number in range(4):
        filler.rounds(6)
        for _ in range(2):
            filler.fail(failing, msgspec.structs.replace(WRONG, text=f"{number} " + "x" * 900))
        counts.append(archive_here(data, to, now=True).deaths)
    assert counts == [18] * 4
    assert archive_here(data, to, now=True).deaths == 0
    assert len(filler.node.broker.retained_log.segments) > 2
    assert archived_deaths(to) == log_deaths(data)
    assert {row["attempts"] for row in death_rows(to)} == {2}
    group = filler.node.group("orders", "failing")
    letters, _ = filler.node.broker.dead_letters.page(group, Choice(sequences=[3, 4]), -1, 10)
    assert filler.node.broker.dead_letters.resend(group, letters) == 2
    filler.node.turn()
    for _ in range(2):
        filler.fail(failing, Reason("KeyError"))
    archive_here(data, to, now=True)
    filler.stop()
    assert archived_deaths(to) == log_deaths(data)
    assert [row["type"] for row in death_rows(to) if row["sequence"] == 3] == ["ValueError", "KeyError"]
    (source,) = Archive.at(to).open().sources.values()
    assert (
        source.retained_offset == open_retained(str(data)).look().end == read_archived(RealDisk(data)).retained_offset
    )


def test_deaths_of_archived_events_are_archived_even_if_their_segment_is_not_full(data: Path, to: Path):
    filler = Filler(data)
    failing = filler.failing()
    for _ in range(60):
        filler.rounds(1)
        filler.fail(failing, WRONG)
    assert len(filler.node.broker.action_log.segments) > 2
    archive_here(data, to)
    buried = [n for row in archived_events(to) if row["action"] == "bury" for n in range(row["start"], row["end"])]
    assert 60 < len(buried) < 180
    assert [row["sequence"] for row in death_rows(to)] == buried
    archive_here(data, to, now=True)
    filler.stop()
    assert archived_deaths(to) == log_deaths(data)


def test_a_message_that_is_retained_for_another_attempt_has_not_died(data: Path, to: Path):
    filler = Filler(data, retention_seconds=5.0)
    failing = filler.failing(attempts=2)
    filler.rounds(5)
    filler.node.nack(failing, *[(s, e) for s, e, _ in filler.node.pull(failing).ranges], delay=3600.0)
    filler.node.clock.advance(100)
    filler.node.retention.run()
    filler.node.turn()
    assert len(filler.node.group("orders", "failing").retained) == 15
    filler.rounds(1)
    report = archive_here(data, to, now=True)
    filler.stop()
    assert (report.deaths, Archive.at(to).open().find("deaths")) == (0, [])
    assert source_of(to).retained_offset > 0


def test_only_deaths_of_selected_subjects_are_archived(tmp_path: Path):
    data = tmp_path / "data"
    filler = Filler(data)
    failing = filler.failing()
    filler.rounds(2, ("orders", "refunds"))
    filler.fail(failing, WRONG)
    filler.stop()
    assert archive_here(data, tmp_path / "archive", now=True, subjects=["orders"]).deaths == 6
    assert archive_here(data, tmp_path / "other", now=True, subjects=["refunds"]).deaths == 0


# --- damage, loss, merging ----------------------------------------------------------------------


def with_deaths(data: Path, *, rounds: int = 12) -> None:
    filler = Filler(data)
    failing = filler.failing()
    for number in range(rounds):
        filler.rounds(3)
        filler.fail(failing, Reason("ValueError", f"{number} " + "x" * 200))
    filler.stop()


def test_damage_in_the_retained_log_fails_the_run_or_is_recorded(data: Path, to: Path):
    with_deaths(data)
    good = log_deaths(data)
    path = sorted((data / "retained").iterdir())[0]
    offset = damage(path)
    with pytest.raises(DamageError, match=rf"retained/.* is damaged.*at offset {offset}.*--skip-damage"):
        archive_here(data, to, now=True)
    assert not Archive.at(to).numbers()
    report = archive_here(data, to, now=True, skip_damage=True)
    assert (report.left_out, [(each.log, each.offset) for each in source_of(to).left_out]) == (
        1,
        [("retained", offset)],
    )
    assert archived_deaths(to) == [death for death in good if death[0] != offset]
    assert len(archived_deaths(to)) == len(good) - 3


def test_a_note_that_does_not_decode_is_reported_as_damage():
    original = build_frame([b"x"], producer=5, first=1)
    original.stamp_with(pack_stamp(7, 0, 1, 0, 1))
    frame = FrameView(original.tobytes())
    everything = np.ones(1, bool)
    ((parts, _),) = retained_frames(frame, everything, Note(3, DeathRecord(1, 2, 3, WRONG)))
    broken = keep_mask(frame, everything, b"\xc1")
    names = Names({7: PartitionRow(7, "orders", "orders", 0)}, "g1")
    table = death_table([(40, FrameView(parts.tobytes()))], names, WantedRows(prefixes=("",)))
    (row,) = table.to_pylist()
    assert (row["consumer_group"], row["group_number"], row["partition"]) == (None, 3, "orders@g1")
    with pytest.raises(FrameError, match="the note of a retained frame does not decode"):
        death_table([(40, FrameView(broken.tobytes()))], names, WantedRows(prefixes=("",)))


def test_segments_of_the_retained_log_that_were_removed_before_archiving_are_recorded(data: Path, to: Path):
    filler = Filler(data, dead_seconds=50.0)
    failing = filler.failing()
    filler.rounds(2)
    filler.fail(failing, WRONG)
    archive_here(data, to, now=True)
    for _ in range(20):
        filler.rounds(3)
        filler.fail(failing, Reason("ValueError", "x" * 900))
    filler.node.clock.advance(100)
    for _ in range(6):
        filler.node.retention.run()
        filler.node.checkpoint()
    assert filler.node.broker.retained_log.start > source_of(to).retained_offset
    archive_here(data, to, now=True)
    filler.stop()
    assert [each.log for each in source_of(to).left_out if each.log != "action"] == ["retained"]
    assert archived_deaths(to)[6:] == log_deaths(data)


def test_files_of_deaths_are_merged_and_read_back(data: Path, to: Path):
    filler = Filler(data)
    failing = filler.failing()
    for _ in range(4):
        filler.rounds(3)
        filler.fail(failing, WRONG)
        archive_here(data, to, now=True)
    filler.stop()
    before = Archive.at(to).open().find("deaths")
    archive_here(None, to, compact=True, verify=True)
    (merged,) = Archive.at(to).open().find("deaths")
    assert len(before) >= 4
    assert (merged.start, merged.end) == (0, before[-1].end)
    assert archived_deaths(to) == log_deaths(data)
    shutil.copy(to / before[0].path, to / merged.path)
    with pytest.raises(ArchiveError, match=r"deaths/.* is damaged: it has checksum"):
        archive_here(None, to, verify=True)
    (to / merged.path).unlink()
    with pytest.raises(ArchiveError, match=r"deaths/.* cannot be read"):
        archive_here(None, to, verify=True)


def test_files_of_an_aborted_run_are_removed(data: Path, to: Path):
    with_deaths(data, rounds=1)
    left = to / "deaths" / "date=2023-11-14" / "00000000000000000001-0123456789abcdef-00001.parquet"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"x")
    assert archive_here(data, to, now=True).removed == 1
    assert sorted(files_below(to)) == sorted(file.path for file in Archive.at(to).open().files)


def test_segments_of_the_retained_log_are_copied(data: Path, to: Path):
    with_deaths(data, rounds=30)
    archive_here(data, to, raw=True, verify=True)
    copies = sorted(path.name for path in to.glob("raw/*/retained/*.log"))
    assert copies == sorted(path.name for path in (data / "retained").iterdir())[: len(copies)] != []
    assert read_archived(RealDisk(data)).retained_offset == source_of(to).raw_retained_offset > 0
    assert archive_here(data, to, raw=True).segments == 0


def test_events_whose_dead_letters_a_power_failure_lost_are_not_archived(data: Path, to: Path):
    filler = Filler(data)
    failing = filler.failing()
    filler.rounds(4)
    filler.fail(failing, WRONG, 3)
    filler.fail(failing, WRONG, 3)
    # The last dead letters never reached the disk, but their events did.
    *_, (lost, *_) = log_deaths(data)
    (segment,) = (data / "retained").iterdir()
    content = segment.read_bytes()
    segment.write_bytes(content[:lost] + bytes(len(content) - lost))
    archive_here(data, to, now=True)
    assert [row["sequence"] for row in death_rows(to)] == [0, 1, 2]
    assert [(row["start"], row["end"]) for row in archived_events(to) if row["action"] == "bury"] == [(0, 3)]
    again = Node(RealDisk(data))
    again.send("orders", b"next")
    archive_here(data, to, now=True)
    again.broker.stop()
    assert archived_deaths(to) == log_deaths(data)


def test_a_power_failure_loses_no_archived_death(data: Path, to: Path, monkeypatch: pytest.MonkeyPatch):
    with_deaths(data, rounds=2)
    synced: list[str] = []
    monkeypatch.setattr(intake, "sync_path", lambda path: synced.append(Path(path).relative_to(data).parts[0]))
    archive_here(data, to, now=True)
    assert synced.index("retained") < synced.index("action"), "a server syncs in the same order"
