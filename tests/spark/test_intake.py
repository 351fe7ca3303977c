"""What an archiver reads of a log that retention, damage or a power failure has shortened."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from plait.errors import DataDirError, Expired
from plait.spark.archiving import intake
from plait.spark.archiving.manifest import Archive, ArchivedGap, ArchivedSource, ArchiveManifest
from plait.storage.disk import RealDisk
from tests.spark.archives import Filler, archive_here, archived_events, archived_rows, log_rows
from tests.support.broker_node import Node, Producer

pytestmark = pytest.mark.usefixtures("here")


def source_of(to: Path) -> ArchivedSource:
    (source,) = Archive.at(to).open().sources.values()
    return source


def break_frame(path: Path) -> None:
    """Give a frame in the middle of a segment a size that points nowhere."""
    content = bytearray(path.read_bytes())
    content[content.index(b"PL", 2000) + 4] ^= 0xFF
    path.write_bytes(content)


def expire(filler: Filler) -> None:
    """Let all messages sent so far expire, and remove their segments."""
    filler.node.clock.advance(100)
    # Later messages must not share a segment with those that expire.
    filler.node.broker.message_log.roll()
    for _ in range(6):
        filler.node.send("others", b"x" * 4000)
        filler.node.checkpoint()
    for _ in range(2):
        filler.node.retention.run()
        filler.node.turn()


# --- removed by retention ----------------------------------------------------------------------


def test_gaps_left_by_retention_are_recorded_as_expired_in_the_run_that_finds_them(data: Path, to: Path):
    filler = Filler(data, retention_seconds=5.0)
    filler.rounds(10, ("orders", "rare"))
    archive_here(data, to, now=True)
    filler.rounds(30, ("orders", "rare"))
    expire(filler)
    filler.rounds(10)
    archive_here(data, to, now=True)
    source = source_of(to)
    assert [each.reason for each in source.left_out if each.log == "message"] == [
        "retention removed it before it was archived"
    ]
    assert source.gaps == [ArchivedGap("orders@g1", 1, 30, 120, expired=True)]
    filler.rounds(1, ("rare",))
    archive_here(data, to, now=True)
    assert source_of(to).gaps[1:] == [ArchivedGap("rare@g1", 2, 30, 120, expired=True)]
    assert source_of(to).overtaken == []
    filler.stop()


def test_a_recreated_partition_without_its_first_messages_stays_incomplete(data: Path, to: Path):
    """Later runs still find the deleted partition of that name in the log."""
    filler = Filler(data, retention_seconds=5.0)
    filler.rounds(10)
    expire(filler)
    filler.node.send("rare", b"1")
    filler.node.broker.delete_subject("rare")
    filler.node.turn()
    for number in range(2):
        filler.node.send("rare", b"2", producer=Producer(100 + number))
        archive_here(data, to, now=True)
        assert not source_of(to).settings["rare@g1"].whole
    filler.stop()


@pytest.mark.parametrize("log", ["message", "action"])
def test_a_segment_that_is_removed_before_it_is_synced_is_reported_as_expired(
    data: Path, to: Path, monkeypatch: pytest.MonkeyPatch, log: str
):
    """Retention runs between planning and syncing; with ``--follow`` the next run continues."""
    filler = Filler(data)
    filler.rounds(30)
    filler.stop()
    gone = min((data / log).iterdir())
    make_durable = intake.Intake._make_durable

    def remove_then_sync(*arguments: Any) -> None:
        gone.unlink(missing_ok=True)
        make_durable(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(intake.Intake, "_make_durable", remove_then_sync)
        with pytest.raises(Expired, match=f"{log}/{gone.name} was removed by retention"):
            archive_here(data, to)
    archive_here(data, to, now=True)
    assert archived_rows(to) == log_rows(data)


def test_damage_and_losses_are_recorded_with_the_round_that_has_them(
    data: Path, to: Path, monkeypatch: pytest.MonkeyPatch
):
    filler = Filler(data, retention_seconds=5.0)
    filler.rounds(10)
    archive_here(data, to, now=True)
    filler.rounds(30)
    expire(filler)
    filler.rounds(60)
    filler.stop()
    path = sorted((data / "message").iterdir())[-3]
    break_frame(path)
    monkeypatch.setattr(intake.Intake.rounds, "__kwdefaults__", {"round_size": 1})
    committed: list[ArchivedSource] = []
    commit = Archive.commit

    def watched(self: Archive, manifest: ArchiveManifest) -> None:
        committed.extend(manifest.sources.values())
        commit(self, manifest)

    monkeypatch.setattr(Archive, "commit", watched)
    archive_here(data, to, now=True, skip_damage=True)
    assert len(committed) > 3
    for source in committed:
        messages = [each for each in source.left_out if each.log == "message"]
        assert "retention" in messages[0].reason
        inside = [each.offset for each in messages[1:]]
        assert len(inside) == (source.message_offset > int(path.stem))
        assert all(int(path.stem) <= offset < source.message_offset for offset in inside)


def test_the_sequences_of_a_checkpoint_are_recorded_with_the_round_that_reaches_them(
    data: Path, to: Path, monkeypatch: pytest.MonkeyPatch
):
    filler = Filler(data)
    filler.rounds(60)
    filler.node.checkpoint()
    filler.stop()
    monkeypatch.setattr(intake.Intake.rounds, "__kwdefaults__", {"round_size": 1})
    committed: list[tuple[int, int]] = []
    commit = Archive.commit

    def watched(self: Archive, manifest: ArchiveManifest) -> None:
        (source,) = manifest.sources.values()
        committed.append((source.settings["orders@g1"].next, source.sequences["orders@g1"]))
        commit(self, manifest)

    monkeypatch.setattr(Archive, "commit", watched)
    archive_here(data, to, now=True)
    assert len(committed) > 2
    assert committed[-1] == (180, 180)
    assert {seen for seen, _ in committed[:-1]} == {0}


# --- torn tails --------------------------------------------------------------------------------


def torn(filler: Filler) -> Path:
    """After a power failure: a segment lacks its end, which was never durable; the next segment exists."""
    data = filler.node.disk.root
    used = [path for path in sorted((data / "message").iterdir()) if path.read_bytes()[:2] == b"PL"]
    content = bytearray(used[-2].read_bytes())
    places = [place for place in range(0, len(content), 8) if content[place : place + 2] == b"PL"]
    content[places[-3] :] = bytes(len(content) - places[-3])
    used[-2].write_bytes(content)
    return used[-2]


@pytest.mark.parametrize("now", [False, True])
def test_segments_behind_a_torn_tail_are_not_archived_before_a_server_has_recovered_the_log(
    data: Path, to: Path, now: bool
):
    filler = Filler(data)
    filler.rounds(60)
    path = torn(filler)
    archive_here(data, to, now=now)
    assert int(path.stem) < source_of(to).message_offset < int(path.stem) + path.stat().st_size - 300
    node = Node(RealDisk(data))
    producer = Producer(9)
    for number in range(40):
        node.send("orders", b"new %d" % number, b"y" * 100, producer=producer)
    node.broker.stop()
    archive_here(data, to, now=True)
    assert archived_rows(to) == log_rows(data)
    assert source_of(to).gaps == []


def test_a_segment_with_a_torn_tail_is_not_copied(data: Path, to: Path):
    filler = Filler(data)
    filler.rounds(60)
    path = torn(filler)
    archive_here(data, to, raw=True)
    assert source_of(to).raw_message_offset == int(path.stem)
    assert path.name not in [copy.name for copy in to.glob("raw/*/message/*.log")]
    node = Node(RealDisk(data))
    producer = Producer(9)
    for number in range(80):
        node.send("orders", b"new %d" % number, b"y" * 100, producer=producer)
    node.broker.stop()
    archive_here(data, to, raw=True)
    (copies,) = to.glob("raw/*/message")
    rows = log_rows(copies)
    assert rows == log_rows(data)[: len(rows)]
    assert any(row["body"].startswith(b"new") for row in rows)


def test_the_frame_that_shows_that_a_segment_is_full_is_synced_with_it(
    data: Path, to: Path, monkeypatch: pytest.MonkeyPatch
):
    filler = Filler(data)
    filler.rounds(60)
    synced: list[str] = []
    monkeypatch.setattr(intake, "sync_path", synced.append)
    archive_here(data, to)
    assert str(data / f"message/{source_of(to).message_offset:020d}.log") in synced
    filler.stop()


# --- another log --------------------------------------------------------------------------------


def test_an_older_copy_that_continued_by_itself_is_refused(tmp_path: Path):
    data, copy, to = tmp_path / "data", tmp_path / "copy", tmp_path / "archive"
    filler = Filler(data)
    filler.rounds(10)
    shutil.copytree(data, copy)
    filler.rounds(10)
    filler.stop()
    archive_here(data, to, now=True)
    node = Node(RealDisk(copy))
    # One frame that spans the offset at which the archive ends.
    node.send("orders", b"z" * 5000, producer=Producer(50))
    log = node.broker.message_log
    assert log.segments[-1].header_end < source_of(to).message_offset < log.end
    node.broker.stop()
    shutil.copy(data / "identity", copy / "identity")
    before = Archive.at(to).open()
    with pytest.raises(DataDirError, match="it continued from an older copy of the data directory"):
        archive_here(copy, to, now=True)
    assert Archive.at(to).open() == before


@pytest.mark.parametrize("now", [True, False])
def test_another_log_with_other_frames_at_the_same_offsets_is_refused(tmp_path: Path, now: bool):
    data, copy, to = tmp_path / "data", tmp_path / "copy", tmp_path / "archive"
    logs = []
    for place, body in ((data, b"a"), (copy, b"b")):
        # Frames of the same sizes at the same time, with different bodies.
        node = Node(RealDisk(place))
        for number in range(30):
            node.send("orders", body * 500, producer=Producer(50 + number))
        logs.append((node.broker.message_log.end, [segment.base for segment in node.broker.message_log.segments]))
        node.broker.stop()
    assert logs[0] == logs[1]
    archive_here(data, to, now=now)
    archive_here(data, to, now=now)
    assert source_of(to).message_offset > 0
    (copy / "identity").unlink(missing_ok=True)
    shutil.copy(data / "identity", copy / "identity")
    before = Archive.at(to).open()
    with pytest.raises(DataDirError, match=r"another frame at offset [0-9]+ than the log that was archived"):
        archive_here(copy, to, now=now)
    assert Archive.at(to).open() == before


def test_names_are_archived_once_though_archived_segments_are_removed(data: Path, to: Path):
    filler = Filler(data, retention_seconds=5.0, archive_before_delete=True)
    for now in (False, True, False, True):
        filler.rounds(60)
        archive_here(data, to, now=now)
        expire(filler)
    assert filler.node.broker.action_log.start > 0
    filler.rounds(60)
    filler.stop()
    archive_here(data, to, now=True)
    named = [(row["action"], row["consumer_group"]) for row in archived_events(to) if row["detail"] is not None]
    assert sorted(named) == [("consumer", "billing"), ("group", "billing")]


def test_archiving_continues_after_a_segment_that_is_full_to_the_last_byte(data: Path, to: Path):
    node = Node(RealDisk(data))
    log = node.broker.message_log
    # Only the broker's own frames use the last bytes of a segment; in this test frames of producers do.
    log.margin = 0
    node.send("orders", b"x" * 800)
    before = log.end
    node.send("orders", b"x" * 800)
    overhead = log.end - before - 800
    while log.end + 2 * (overhead + 800) <= 8192:
        node.send("orders", b"x" * 800)
    node.send("orders", b"x" * (8192 - log.end - overhead))
    assert log.end == 8192
    sent = len(node.stored("orders"))
    # Allocated ahead, as before its first frame is written.
    (data / "message" / f"{8192:020d}.log").write_bytes(bytes(8192))
    for _ in range(2):
        archive_here(data, to, now=True)
        assert source_of(to).message_offset == 8192
    (data / "message" / f"{8192:020d}.log").unlink()
    node.send("orders", b"y")
    node.broker.stop()
    archive_here(data, to, now=True)
    assert [row["sequence"] for row in archived_rows(to)] == list(range(sent + 1))
