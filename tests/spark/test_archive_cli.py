"""``plait spark archive``: its output and its exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.cli.commands.spark import archive as spark_archive
from plait.cli.entry import run
from plait.errors import ArchiveConflict, ArchiveError
from plait.model.reason import Reason
from plait.spark.archiving import archiver as archiving
from tests.spark.archives import Filler, archived_rows, log_rows, run_here

Call = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run the command and its tasks in this process."""
    monkeypatch.setattr(archiving, "run_job", run_here)
    monkeypatch.setattr(sys.modules["plait.spark.runtime.session"], "session", lambda *_, **__: object())

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        code = run(["spark", "archive", *arguments])
        out, err = capfd.readouterr()
        return subprocess.CompletedProcess(arguments, code, out, err)

    return call


@pytest.fixture
def data(tmp_path: Path) -> Path:
    filler = Filler(tmp_path / "data")
    filler.rounds(60, ("orders", "refunds"))
    filler.stop()
    return tmp_path / "data"


def test_it_prints_what_it_has_archived(call: Call, data: Path, tmp_path: Path):
    to = tmp_path / "archive"
    first = call("--data", str(data), "--to", str(to))
    assert first.returncode == 0
    assert "messages and" in first.stdout
    assert "of log" in first.stdout
    assert call("--data", str(data), "--to", str(to)).stdout.startswith("nothing new")
    rest = json.loads(call("--data", str(data), "--to", str(to), "--now", "-o", "json").stdout)
    assert rest["manifest"] == 2
    assert archived_rows(to) == log_rows(data)
    assert "merged" in call("--to", str(to), "--compact").stdout
    assert "read back and found whole" in call("--to", str(to), "--verify").stdout
    raw = call("--data", str(data), "--to", str(to), "--raw")
    assert "segments copied" in raw.stdout


def test_it_prints_how_many_deaths_it_has_archived(call: Call, tmp_path: Path):
    filler = Filler(tmp_path / "data")
    failing = filler.failing()
    filler.rounds(2)
    filler.fail(failing, Reason("ValueError"))
    filler.stop()
    output = call("--data", str(tmp_path / "data"), "--to", str(tmp_path / "archive"), "--now").stdout
    assert output.startswith("6 messages, ")
    assert " events and 6 deaths archived in 3 files" in output


def test_a_selection_of_subjects_is_archived(call: Call, data: Path, tmp_path: Path):
    to = tmp_path / "archive"
    call("--data", str(data), "--to", str(to), "--now", "--subject", "ref*", "--subject", "orders")
    assert len(archived_rows(to)) == 360


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--to", "x"), 2, "nothing to do: give a data directory"),
        (("--to", "x", "--follow", "--verify"), 2, "--follow needs --data"),
        (("--to", "x", "--data", "x", "--follow", "--every", "10ms"), 2, "is too short"),
        (("--to", "x", "--data", "/nowhere"), 8, "is not a Plait data directory"),
        (("--to", "nowhere://x", "--data", "x"), 8, "cannot be reached"),
        (("--data", "x"), 2, "--to"),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(call: Call, arguments: tuple[str, ...], code: int, message: str):
    ended = call(*arguments)
    assert (ended.returncode, ended.stdout) == (code, "")
    assert message in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_damage_that_is_left_out_is_reported(call: Call, data: Path, tmp_path: Path):
    path = sorted((data / "message").iterdir())[0]
    content = bytearray(path.read_bytes())
    content[content.index(b"PL", 2000) + 90] ^= 0xFF
    path.write_bytes(content)
    to = tmp_path / "archive"
    failed = call("--data", str(data), "--to", str(to), "--now")
    assert failed.returncode == 8
    assert "--skip-damage" in failed.stderr
    done = call("--data", str(data), "--to", str(to), "--now", "--skip-damage")
    assert done.returncode == 0
    assert "warning: 1 gap in sequences, damaged or lost ranges: 1" in done.stderr


def test_following_continues_after_another_archiver_was_faster(
    call: Call, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    to = tmp_path / "archive"
    real, failures = archiving.archive, [ArchiveConflict("another archiver was faster")]

    def faster(*arguments: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return real(*arguments, **options)

    def pause(seconds: float) -> None:
        if (to / "_plait").exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(archiving, "archive", faster)
    monkeypatch.setattr(spark_archive, "pause", pause)
    ended = call("--data", str(data), "--to", str(to), "--now", "--follow", "-o", "json")
    assert json.loads(ended.stdout)["messages"] == 360
    assert ended.stderr == "warning: another archiver was faster; the next run starts in 60 s\n"


def test_following_continues_after_failures_with_longer_pauses(
    call: Call, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    to = tmp_path / "archive"
    real, runs, waits = archiving.archive, [0], list[float]()

    def failing(*arguments: Any, **options: Any) -> Any:
        runs[0] += 1
        if 2 <= runs[0] <= 5:
            raise ArchiveError("it cannot be written")
        return real(*arguments, **options)

    def pause(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 7:
            raise KeyboardInterrupt

    monkeypatch.setattr(archiving, "archive", failing)
    monkeypatch.setattr(spark_archive, "pause", pause)
    ended = call("--data", str(data), "--to", str(to), "--now", "--follow", "--every", "150s", "-o", "json")
    assert ended.returncode == 130
    assert waits == [150.0, 150.0, 300.0, 600.0, 600.0, 150.0, 150.0]
    assert ended.stderr.startswith("warning: it cannot be written; the next run starts in 150 s\n")


def test_following_ends_if_the_first_run_fails(call: Call, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def failing(*_: Any, **__: Any) -> Any:
        raise ArchiveError("it is not an archive")

    monkeypatch.setattr(archiving, "archive", failing)
    ended = call("--data", str(data), "--to", str(tmp_path / "archive"), "--follow")
    assert (ended.returncode, ended.stdout) == (8, "")


def test_it_follows_until_it_is_stopped(call: Call, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    to = tmp_path / "archive"
    waits: list[float] = []

    def pause(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(spark_archive, "pause", pause)
    ended = call("--data", str(data), "--to", str(to), "--now", "--follow", "--every", "5m", "-o", "json")
    assert ended.returncode == 130
    reports = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [report["manifest"] for report in reports] == [1, 1, 1]
    assert waits == [300.0] * 3
