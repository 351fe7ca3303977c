"""The findings of a check of a data directory: their places and severities."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import plait
from plait.broker import Broker, BrokerConfig
from plait.clock import SystemClock
from plait.doctor import CheckReport, Finding, examine
from plait.errors import DataDirError
from plait.frame.builder import build_bodies, build_frame, pack_stamp
from plait.frame.view import FrameView
from plait.server import Server
from plait.storage.disk import RealDisk, RealFile
from plait.storage.logs.action_log import EVENTS, read_events
from tests.cli import data_directory
from tests.cli.data_directory import BATCH, COUNT, SEGMENT_SIZE, check, flip, frames, make_newer

_template: list[Path] = []


@pytest.fixture
async def data(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Path:
    """A copy of a healthy data directory."""
    if not _template:
        made = tmp_path_factory.mktemp("template") / "data"
        await data_directory.make(made)
        _template.append(made)
    copy = tmp_path / "data"
    shutil.copytree(_template[0], copy)
    return copy


def damages(report: CheckReport) -> list[Finding]:
    assert report.healthy == (not any(f.severity == "damaged" for f in report.findings))
    return [finding for finding in report.findings if finding.severity == "damaged"]


def segments(data: Path, log: str = "message") -> list[Path]:
    return sorted((data / log).iterdir())


def test_a_healthy_directory_has_no_findings(data: Path):
    report = check(data)
    assert report.findings == []
    assert (report.healthy, report.in_use, report.subjects) == (True, False, 2)
    assert report.message_log.rows == 2 * COUNT
    assert report.message_log.segments == len(segments(data)) > 2
    assert report.action_log.rows > 0
    assert (report.consume_logs, report.consume_logs_damaged, report.missing_messages) == (2, 0, 0)
    assert [facts.whole for facts in report.checkpoints] == [True] * len(report.checkpoints)
    assert report.checkpoints[0].clean is True


def test_a_flipped_bit_in_a_message_frame_names_the_lost_messages(data: Path):
    file = segments(data)[1]
    position, frame = next((p, f) for p, f in frames(file)[1:] if f.partition)
    flip(file, position + frame.size // 2)
    (found,) = damages(check(data))
    assert (found.part, found.file) == ("message log", f"message/{file.name}")
    assert (found.offset, found.size) == (position, frame.size)
    assert f"{BATCH} messages, sequences {frame.base} to {frame.base + BATCH - 1}" in found.harm
    assert "restore" in found.advice


def test_every_frame_of_a_damaged_region_is_counted(data: Path):
    file = segments(data)[1]
    (first, frame), (second, other) = [(p, f) for p, f in frames(file)[1:] if f.partition][:2]
    for position in (first, second):
        flip(file, position + 4)
    report = check(data)
    assert report.missing_messages == 2 * BATCH
    assert report.message_log.damaged_bytes == frame.size + other.size


def test_a_damaged_last_frame_is_damage_when_it_was_durable(data: Path):
    file = [path for path in segments(data) if frames(path)][-1]
    position, frame = frames(file)[-1]
    flip(file, position + frame.size - 9)
    (found,) = damages(check(data))
    assert found.offset == position
    assert f"sequences {COUNT - BATCH} to {COUNT - 1}" in found.harm


@pytest.mark.parametrize("which", [0, 1, -1])
def test_a_missing_log_file_is_found(data: Path, which: int):
    gone = segments(data)[which]
    held = sum(frame.count for _, frame in frames(gone) if frame.partition)
    gone.unlink()
    report = check(data)
    assert damages(report)
    assert report.missing_messages == held


def test_a_missing_log_directory_is_found(data: Path):
    shutil.rmtree(data / "message")
    report = check(data)
    assert any("missing" in found.what for found in damages(report))
    assert report.missing_messages == 2 * COUNT


def test_a_file_that_the_disk_cannot_read_is_named_and_the_others_are_checked(
    data: Path, monkeypatch: pytest.MonkeyPatch
):
    bad = segments(data)[1]
    held = sum(frame.count for _, frame in frames(bad) if frame.partition)
    real = os.pread

    def pread(fd: int, size: int, position: int) -> bytes:
        if os.path.samestat(os.fstat(fd), bad.stat()):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, size, position)

    monkeypatch.setattr(os, "pread", pread)
    report = check(data)
    (found,) = damages(report)
    assert found.file == f"message/{bad.name}"
    assert "Input/output error" in found.what
    assert report.missing_messages == held
    assert report.message_log.rows == 2 * COUNT - held


def test_a_flipped_bit_in_the_action_log_loses_no_message(data: Path):
    file = segments(data, "action")[0]
    position, frame = frames(file)[1]
    flip(file, position + frame.size - 9)
    report = check(data)
    (found,) = damages(report)
    assert (found.part, found.offset) == ("action log", position)
    assert "none is lost" in found.harm
    assert report.missing_messages == 0


def test_an_event_with_an_unknown_action_is_reported(data: Path):
    file = segments(data, "action")[0]
    position, frame = next((p, f) for p, f in frames(file) if f.partition == EVENTS)
    events = read_events(frame).copy()
    events["action"][0] = 200
    stamp = pack_stamp(EVENTS, frame.base, frame.store_time, frame.durable, frame.epoch)
    rows = [row.tobytes() for row in np.split(events, len(events))]
    changed = build_bodies(rows, producer=frame.producer, first=frame.first, stamp=stamp).tobytes()
    assert len(changed) == frame.size
    with file.open("r+b") as target:
        target.seek(position)
        target.write(changed)
    (found,) = damages(check(data))
    assert (found.part, found.offset, found.what) == ("action log", position, "unknown actions [200]")


@pytest.mark.parametrize("newest", [True, False])
def test_a_damaged_checkpoint_is_named_and_the_one_a_start_uses_is_reported(data: Path, newest: bool):
    manifests = sorted((data / "checkpoints").glob("manifest-*"))
    assert len(manifests) > 1
    broken = manifests[-1] if newest else manifests[0]
    flip(broken, 20)
    report = check(data)
    (found,) = damages(report)
    assert found.file == f"checkpoints/{broken.name}"
    assert found.harm.startswith("none is lost: a start uses an older checkpoint" if newest else "none")
    assert [facts.whole for facts in report.checkpoints].count(False) == 1


def test_a_damaged_shard_damages_the_checkpoints_that_need_it(data: Path):
    manifest = sorted((data / "checkpoints").glob("manifest-*"))[-1]
    shard = next(iter(sorted((data / "checkpoints").glob(f"shard-*{manifest.name[-12:]}"))))
    flip(shard, 3)
    found = damages(check(data))
    assert [finding.file for finding in found] == [f"checkpoints/{manifest.name}"]
    assert "shard" in found[0].what


def test_a_partly_written_checkpoint_is_only_a_note(data: Path):
    (data / "checkpoints" / "manifest-000000000099.new").write_bytes(b"half of it")
    report = check(data)
    assert report.healthy
    assert [finding.severity for finding in report.findings] == ["note"]


def test_a_consume_log_with_wrong_offsets_is_found(data: Path):
    file = sorted((data / "consume").iterdir())[0]
    flip(file, 5 * 32 + 8, 0x08)
    report = check(data)
    (found,) = damages(report)
    assert (found.part, found.file) == ("consume log", f"consume/{file.name}")
    assert f"delete consume/{file.name}" in found.advice
    assert (report.consume_logs_damaged, report.missing_messages) == (1, 0)


def test_a_short_or_missing_consume_log_is_found(data: Path):
    one, other = sorted((data / "consume").iterdir())
    one.write_bytes(one.read_bytes()[:-32])
    other.unlink()
    found = damages(check(data))
    assert [finding.file for finding in found] == [f"consume/{one.name}", f"consume/{other.name}"]


def test_a_torn_tail_is_only_a_note(data: Path):
    file = [path for path in segments(data) if frames(path)][-1]
    last, frame = frames(file)[-1]
    end = last + frame.size
    content = bytearray(file.read_bytes())
    content[end : end + 100] = b"PL" + b"\x01" * 98
    file.write_bytes(content)
    report = check(data)
    assert report.healthy
    (note,) = report.findings
    assert (note.severity, note.offset) == ("note", end)
    assert "torn tail" in note.what


def test_quarantined_and_foreign_files_are_listed(data: Path):
    (data / "quarantine").mkdir()
    (data / "quarantine" / "message-00000000000000000123-damaged").write_bytes(b"x")
    (data / "notes.txt").write_text("mine")
    report = check(data)
    assert report.quarantine == ["quarantine/message-00000000000000000123-damaged"]
    assert [finding.file for finding in report.findings] == ["notes.txt"]
    assert report.healthy


def test_without_checkpoints_the_logs_are_still_checked(data: Path):
    shutil.rmtree(data / "checkpoints")
    report = check(data)
    assert (report.healthy, report.checkpoints) == (True, [])
    assert report.message_log.rows == 2 * COUNT


def test_a_newer_format_is_refused(data: Path):
    make_newer(data)
    with pytest.raises(DataDirError, match="version 99"):
        check(data)


@pytest.mark.parametrize("kind", ["nothing", "file", "empty"])
def test_a_path_that_is_not_a_data_directory_is_refused(tmp_path: Path, kind: str):
    path = tmp_path / "x"
    if kind == "file":
        path.write_text("")
    elif kind == "empty":
        path.mkdir()
    with pytest.raises(DataDirError, match="is no"):
        examine(path, lambda name, done, total: None)


async def test_a_directory_in_use_is_checked_while_it_is_written(tmp_path: Path):
    data = tmp_path / "data"
    server = Server(RealDisk(data), BrokerConfig(message_segment_size=SEGMENT_SIZE), port=0)
    await server.start()
    async with plait.connect(server.address) as client:
        for number in range(5):
            await client.send_many("orders", [b"x" * 100] * 50)
            report = examine(data, lambda name, done, total: None)
            assert (report.in_use, report.healthy, report.findings) == (True, True, [])
            assert report.message_log.rows == 50 * (number + 1)
    await server.stop()
    assert not check(data).in_use


# --- delayed messages ---------------------------------------------------------------------------


def delayed(data: Path) -> None:
    """Two delayed messages in a bucket, and one that was delivered."""
    broker = Broker(RealDisk(data), SystemClock(), BrokerConfig(message_segment_size=SEGMENT_SIZE))
    broker.start()
    partition = broker.schedules.partition_of("orders")
    for number, seconds in enumerate([-1, 3600, 86_400], 1):
        due = SystemClock().now() + seconds * 1_000_000
        frame = build_frame([b"later"], producer=77, first=number, previous=number - 1, deliver_at=due)
        broker.submit(partition, FrameView(frame.tobytes()), None)
        broker.turn.commit()
    broker.run_timers()
    broker.stop()


def test_delayed_messages_are_checked(data: Path):
    delayed(data)
    report = check(data)
    assert report.findings == []
    assert (report.subjects, report.scheduled) == (2, 2)
    first, second = sorted((data / "schedule").iterdir())
    flip(first, 130)
    [finding] = damages(check(data))
    assert finding.file == f"schedule/{first.name}"
    assert finding.harm == "1 delayed messages cannot be delivered"
    second.unlink()
    assert len(damages(check(data))) == 2


def test_a_bucket_that_cannot_be_opened_is_reported(data: Path, monkeypatch: pytest.MonkeyPatch):
    delayed(data)
    opened = RealDisk.open

    def refused(self: RealDisk, path: str, *, create: bool = False) -> RealFile:
        if path.startswith("schedule/"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return opened(self, path, create=create)

    monkeypatch.setattr(RealDisk, "open", refused)
    report = check(data)
    assert [finding.what for finding in damages(report)] == ["cannot be read: Permission denied"] * 2
    assert (report.scheduled, report.missing_messages) == (0, 2)
