"""``plait serve`` as a process: one ready line, a clean stop, and clear errors if it cannot start."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from plait.cli.entry import run
from tests.cli.commands import SECONDS, environment, plait, serve
from tests.cli.data_directory import fingerprint, flip, frames, make_newer


def test_it_prints_one_ready_line_and_stops_cleanly_on_sigterm(tmp_path: Path):
    data = tmp_path / "data"
    with serve(data, "--flush", "sync") as node:
        assert re.fullmatch(
            rf"ready plait://127\.0\.0\.1:\d+ data={data} flush=sync epoch=1 pid={node.process.pid} version=\S+\n",
            node.ready,
        )
        assert plait("send", "orders", "created", "--server", node.address).returncode == 0
        code, out, err = node.stop(signal.SIGTERM)
    assert (code, out) == (0, "")
    assert "stopped" in err
    assert "alembic" not in err
    assert plait("doctor", str(data)).returncode == 0


def test_sigint_stops_it_cleanly_and_the_epoch_stays(tmp_path: Path):
    for _ in range(2):
        with serve(tmp_path / "data") as node:
            assert " epoch=1 " in node.ready
            assert node.stop(signal.SIGINT)[:2] == (0, "")


def test_it_reports_its_health_over_http(tmp_path: Path):
    with serve(tmp_path / "data", "--http", "0") as node:
        found = re.search(r"http=(\S+)", node.ready)
        assert found is not None
        with urllib.request.urlopen(found[1], timeout=60) as answer:
            assert json.load(answer)["status"] == "ready"
        assert node.stop()[0] == 0


def test_after_sigkill_it_recovers_with_a_new_epoch(tmp_path: Path):
    with serve(tmp_path / "data") as node:
        assert plait("send", "orders", "created", "--server", node.address).returncode == 0
        node.process.kill()
        node.process.wait(SECONDS)
    with serve(tmp_path / "data") as node:
        assert " epoch=2 " in node.ready
        tail = plait("tail", "orders", "--start", "earliest", "--count", "1", "-o", "raw", "--server", node.address)
        assert tail.stdout == b"created\n"


def test_damage_is_reported_on_standard_error(tmp_path: Path):
    data = tmp_path / "data"
    with serve(data) as node:
        assert plait("send", "orders", stdin=b"a\nb\nc\n", PLAIT_SERVER=node.address).returncode == 0
        assert node.stop()[0] == 0
    (log,) = (data / "message").iterdir()
    position, frame = frames(log)[-1]
    flip(log, position + frame.size - 9)
    # Without checkpoints the start reads the whole log.
    for path in (data / "checkpoints").iterdir():
        path.unlink()
    with serve(data) as node:
        _, _, err = node.stop()
    assert f"message log, offset {position}, {frame.size} bytes" in err


def failing(*arguments: str) -> tuple[int, str]:
    """(exit code, standard error) of a ``plait serve`` that must fail."""
    result = plait("serve", *arguments)
    assert result.stdout == b""
    return result.returncode, result.stderr.decode()


def test_a_directory_in_use_prints_one_line(tmp_path: Path):
    with serve(tmp_path / "data"):
        code, err = failing("--data", str(tmp_path / "data"), "--port", "0")
    assert code == 8
    assert err == (
        f"error: data directory {tmp_path / 'data'} is in use by another plait process; stop it first (data_dir)\n"
    )


def test_a_newer_format_is_refused_and_left_unchanged(tmp_path: Path):
    data = tmp_path / "data"
    with serve(data) as node:
        assert node.stop()[0] == 0
    make_newer(data)
    before = fingerprint(data)
    code, err = failing("--data", str(data), "--port", "0")
    assert code == 8
    assert "format version 99" in err
    assert err.count("\n") == 1
    assert fingerprint(data) == before
    doctor = plait("doctor", str(data))
    assert doctor.returncode == 8
    assert b"format version 99" in doctor.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("serve", "--port", "0"), "--data"),
        (("serve", "--data", "x", "--port", "70000"), "port 70000"),
        (("serve", "--data", "x", "--groups=0"), "--groups 0 is out of range; use 1 to 64"),
        (("serve", "--data", "x", "--groups", "65"), "--groups 65 is out of range"),
        (("serve", "--data", "x", "--flush", "never"), '"async", "sync"'),
        (("serve", "--data", "x", "--segment-size", "1KiB"), "--segment-size 1KiB is too small"),
        (("serve", "--data", "x", "--segment-size", "big"), "size 'big'"),
        (("serve", "--data", "x", "--retention", "soon"), "duration 'soon'"),
        (("serve", "--data", "x", "--dead-retention", "never"), "duration 'never'"),
        (("serve", "--data", "x", "--host", "0.0.0.0"), "loopback"),
        (("meta",), "--database"),
        (("meta", "--database", "nonsense"), "'nonsense' is not a database URL"),
        (("meta", "--database", "mysql://x/y", "--port", "0"), "use sqlite:///FILE or postgresql://"),
        (("meta", "--database", "sqlite://"), "a meta database in memory is lost"),
        (("meta", "--database", "sqlite:///m.db", "--port", "70000"), "port 70000"),
        (("meta", "--database", "sqlite:///m.db", "--host", "0.0.0.0"), "loopback"),
        (("broker", "--group", "g1", "--data", "d"), "--meta"),
        (("broker", "--meta", "plait://127.0.0.1:1", "--data", "d"), "--group"),
        (("broker", "--group", "g 1", "--meta", "plait://127.0.0.1:1", "--data", "d"), "broker group name 'g 1'"),
        (("broker", "--group", "g1", "--meta", "http://localhost/x", "--data", "d"), "plait://host:port"),
        (("broker", "--group", "g1", "--meta", "plait://a:1,plait://a:1", "--data", "d"), "names an address twice"),
        (("broker", "--group", "g1", "--meta", "plait://a:1", "--data", "d", "--segment-size", "1KiB"), "too small"),
        (("broker", "--group", "g1", "--meta", "plait://a:1", "--data", "d", "--host", "0.0.0.0"), "loopback"),
    ],
)
def test_invalid_arguments_print_one_line(
    arguments: tuple[str, ...],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PLAIT_DATABASE", raising=False)
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: ")
    assert expected in err
    assert list(tmp_path.iterdir()) == []


def test_a_data_directory_that_cannot_be_created_prints_one_line(tmp_path: Path):
    (tmp_path / "file").write_text("")
    code, err = failing("--data", str(tmp_path / "file" / "data"), "--port", "0")
    assert code == 8
    assert "cannot be used" in err
    assert "Traceback" not in err


def test_with_no_auto_create_the_first_use_does_not_create_a_subject(tmp_path: Path):
    with serve(tmp_path / "data", "--no-auto-create") as node:
        result = plait("send", "orders", "created", "--server", node.address)
        assert (result.returncode, result.stdout) == (4, b"")
        assert b"plait subject create orders" in result.stderr
        assert result.stderr.endswith(b"(subject_not_found)\n")


#: ``plait`` on a disk whose syncs fail after SIGUSR1.
FAILING_DISK = """
import signal
from plait.cli import main
from plait.storage.disk import RealFile

def fail(self):
    raise OSError(5, "Input/output error")

signal.signal(signal.SIGUSR1, lambda *_: setattr(RealFile, "sync", fail))
main()
"""


def test_failed_storage_ends_the_process_with_its_exit_code(tmp_path: Path):
    command = [sys.executable, "-c", FAILING_DISK, "serve", "--data", str(tmp_path / "data"), "--port", "0"]
    with subprocess.Popen(
        [*command, "--flush", "sync"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), text=True
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[1]
        process.send_signal(signal.SIGUSR1)
        send = [sys.executable, "-m", "plait.cli", "send", "orders", "created", "--server", address]
        with subprocess.Popen(send, stdout=subprocess.PIPE, env=environment()) as sending:
            _, err = process.communicate(timeout=SECONDS)
            # The client would wait for the server to come back.
            sending.kill()
            assert sending.communicate()[0] == b""
    assert process.returncode == 9
    assert "error: writing or syncing a log failed" in err
    assert "(storage_failed)" in err
