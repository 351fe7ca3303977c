"""Servers as processes: one ready line, a clean stop, clear errors if they cannot start, their limits and leases.

``plait serve --groups N`` is a node of several processes, which start, stop and fail together.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest

import plait
import plait.sync
from plait.cli.entry import run
from plait.cli.serving.broker_process import fit_limits, segment_count
from plait.errors import LimitExceeded, PlaitError
from plait.limits import FILES_PER_SEGMENT, FILES_RESERVE, MIB, MetaLimits, ServerLimits
from plait.wire import codec
from plait.wire import messages as m
from plait.wire.link import HEADER, HEADER_SIZE
from tests.cli.commands import SECONDS, Serving, broker, environment, meta, running, serve
from tests.cli.commands import plait as command
from tests.cli.data_directory import fingerprint, flip, frames, make_newer
from tests.client.support import until


def test_it_prints_one_ready_line_and_stops_cleanly_on_sigterm(tmp_path: Path):
    data = tmp_path / "data"
    with serve(data, "--flush", "sync") as node:
        assert re.fullmatch(
            rf"ready plait://127\.0\.0\.1:\d+ data={data} flush=sync epoch=1 pid={node.process.pid} version=\S+\n",
            node.ready,
        )
        assert command("send", "orders", "created", "--server", node.address).returncode == 0
        code, out, err = node.stop(signal.SIGTERM)
    assert (code, out) == (0, "")
    assert "stopped" in err
    assert "alembic" not in err
    assert command("doctor", str(data)).returncode == 0


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
        assert command("send", "orders", "created", "--server", node.address).returncode == 0
        node.process.kill()
        node.process.wait(SECONDS)
    with serve(tmp_path / "data") as node:
        assert " epoch=2 " in node.ready
        tail = command("tail", "orders", "--start", "earliest", "--count", "1", "-o", "raw", "--server", node.address)
        assert tail.stdout == b"created\n"


def test_damage_is_reported_on_standard_error(tmp_path: Path):
    data = tmp_path / "data"
    with serve(data) as node:
        assert command("send", "orders", stdin=b"a\nb\nc\n", PLAIT_SERVER=node.address).returncode == 0
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
    result = command("serve", *arguments)
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
    doctor = command("doctor", str(data))
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
        result = command("send", "orders", "created", "--server", node.address)
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
    arguments = [sys.executable, "-c", FAILING_DISK, "serve", "--data", str(tmp_path / "data"), "--port", "0"]
    with subprocess.Popen(
        [*arguments, "--flush", "sync"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), text=True
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


NAMES = ["g1", "g2", "g3"]


def children(node: Serving) -> dict[str, psutil.Process]:
    """The processes of the additional broker groups."""
    found = psutil.Process(node.process.pid).children()
    return {process.cmdline()[process.cmdline().index("--group") + 1]: process for process in found}


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=SECONDS)[1]


def test_the_groups_share_a_subject_and_restart_with_the_node(tmp_path: Path):
    data = tmp_path / "data"
    bodies = [str(number).encode() for number in range(300)]
    with serve(data, "--groups", "3", "--flush", "sync") as node:
        assert f" groups=3 data={data} flush=sync " in node.ready
        others = children(node)
        assert sorted(others) == NAMES[1:]
        assert all("--flush sync" in " ".join(process.cmdline()) for process in others.values())
        with plait.sync.connect(node.address) as client:
            assert [(each.group, each.state) for each in client.admin.brokers()] == [(name, "RW") for name in NAMES]
            client.admin.create_subject("orders", partitions=3)
            client.send_many("orders", bodies, keys=[f"k{number}" for number in range(300)])
            assert {each.partition.partition("@")[2] for each in client.admin.route("orders").partitions} == set(NAMES)
        assert node.stop()[:2] == (0, "")
        assert gone(list(others.values()))
    assert sorted(path.name for path in (data / "groups").iterdir()) == NAMES[1:]
    with serve(data, "--groups", "4") as node:
        tail = command("tail", "orders", "--start", "earliest", "--count", "300", "-o", "raw", "--server", node.address)
        assert sorted(tail.stdout.split()) == sorted(bodies)
        assert node.stop()[0] == 0


def test_fewer_groups_than_the_node_has_are_refused(tmp_path: Path):
    (tmp_path / "data" / "groups" / "g3").mkdir(parents=True)
    for more in ((), ("--groups", "2")):
        refused = command("serve", "--data", str(tmp_path / "data"), "--port", "0", *more)
        assert (refused.returncode, refused.stdout) == (2, b"")
        assert refused.stderr.decode() == (
            f"error: {tmp_path / 'data'} has 3 broker groups; use --groups 3, or more (invalid_argument)\n"
        )


def test_a_group_that_cannot_start_is_reported_and_no_process_is_left(tmp_path: Path):
    data = tmp_path / "data"
    (data / "groups").mkdir(parents=True)
    (data / "groups" / "g2").write_text("in the way")
    refused = command("serve", "--data", str(data), "--port", "0", "--groups", "3")
    assert (refused.returncode, refused.stdout) == (3, b"")
    assert "broker group g2 ended with code 8 before it was ready" in refused.stderr.decode()
    (data / "groups" / "g2").unlink()
    with serve(data, "--groups", "3") as node:
        assert node.stop()[0] == 0


def test_the_end_of_a_group_process_stops_the_node(tmp_path: Path):
    with serve(tmp_path / "data", "--groups", "3") as node:
        others = children(node)
        others["g2"].kill()
        _, err = node.process.communicate(timeout=SECONDS)
        assert node.process.returncode == 3
        assert (
            "error: broker group g2 ended with code 137; the node stops, start it again (unavailable)" in err.decode()
        )
        assert gone(list(others.values()))


def test_killing_a_node_stops_its_groups(tmp_path: Path):
    with serve(tmp_path / "data", "--groups", "2") as node:
        others = children(node)
        os.kill(node.process.pid, signal.SIGKILL)
        node.process.wait(SECONDS)
        assert gone(list(others.values()))
    with serve(tmp_path / "data", "--groups", "2") as node:
        assert node.stop()[0] == 0


WARNING = re.compile(r"too few files may be open: (\d+) connections are served instead of 10000, (\d+) consume logs")


async def refusal(reader: asyncio.StreamReader) -> PlaitError | None:
    """The error that the server sends to a new connection; None: the connection is served."""
    try:
        async with asyncio.timeout(0.5):
            size, kind, _, _, head_size = HEADER.unpack(await reader.readexactly(HEADER_SIZE))
            body = await reader.readexactly(size - HEADER_SIZE)
    except TimeoutError:
        return None
    message = codec.decode(kind, memoryview(body)[:head_size])
    assert isinstance(message, m.ErrorReply)
    return codec.error_of(message)


async def test_connections_leave_files_for_the_logs(tmp_path: Path):
    """More connections than fit are opened, and log segments are created while the others stay open."""
    allowed = FILES_RESERVE + 100
    with serve(tmp_path / "data", files=(allowed, allowed)) as node:
        host, port = node.address.removeprefix("plait://").split(":")
        async with plait.connect(node.address) as client, contextlib.AsyncExitStack() as stack:
            await client.send("orders", b"first")
            streams = []
            for _ in range(300):
                streams.append(await asyncio.open_connection(host, int(port)))
                stack.callback(streams[-1][1].close)
            answers = await asyncio.gather(*(refusal(reader) for reader, _ in streams))
            served = answers.count(None) + 1
            assert all(isinstance(answer, LimitExceeded) for answer in answers if answer is not None)
            refused = command("send", "orders", "x", "--server", node.address)
            assert refused.returncode == 6, refused.stderr
            assert b"(limit_exceeded)" in refused.stderr
            for number in range(40):
                assert (await client.send("orders", os.urandom(1 * MIB))).sequence == number + 1
        assert len(list((tmp_path / "data" / "message").iterdir())) > 1, "a segment was created meanwhile"
        code, _, err = node.stop()
    assert code == 0
    [(connections, maps)] = WARNING.findall(err)
    assert served == int(connections)
    assert int(connections) + int(maps) == 100
    assert "raise the hard limit (ulimit -Hn" in err


def test_the_soft_limit_is_raised_to_the_hard_one(tmp_path: Path):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with serve(tmp_path / "data", files=(128, hard)) as node:
        assert psutil.Process(node.process.pid).rlimit(psutil.RLIMIT_NOFILE) == (hard, hard)
        assert node.stop()[0] == 0


def test_limits_that_fit_stay_unchanged():
    wanted = ServerLimits(connections=700, open_maps=44)
    assert fit_limits(wanted, FILES_RESERVE + 744, 0) == wanted
    assert fit_limits(wanted, FILES_RESERVE + 744 + 5 * FILES_PER_SEGMENT, 5) == wanted
    assert fit_limits(wanted, resource.RLIM_INFINITY, 5) == wanted


@pytest.mark.parametrize("files", [1, 64, 256, 258, 300, 1024, 4096, 11_000])
@pytest.mark.parametrize("segments", [0, 10, 1000])
def test_the_limits_fit_into_any_number_of_files(files: int, segments: int):
    limits = fit_limits(ServerLimits(), files, segments)
    room = files - FILES_RESERVE - segments * FILES_PER_SEGMENT
    assert limits.connections + limits.open_maps <= max(room, 2)
    assert limits.connections >= 1
    assert limits.open_maps >= 1
    if room > 8:
        assert limits.connections > 2 * limits.open_maps, "maps can be opened again, connections cannot"


def test_existing_segments_are_counted(tmp_path: Path):
    assert segment_count(tmp_path / "data") == 0
    for name in ("message/00.log", "message/01.log", "action/00.log", "consume/00000001.0", "LOCK"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert segment_count(tmp_path) == 3


CODE = """
import gc, sys
from plait.cli.serving.foreground import SWITCH_SECONDS, THRESHOLDS, keep_pauses_short
keep_pauses_short()
assert abs(sys.getswitchinterval() - SWITCH_SECONDS) < 1e-6
assert gc.get_threshold() == THRESHOLDS
assert gc.get_freeze_count() > 1000
assert gc.isenabled()
"""


def test_threads_switch_sooner_and_existing_objects_are_excluded_from_collection():
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=60)


SERVERS = {
    "serve": ("serve", "--data", "data", "--port", "0"),
    "broker": ("broker", "--group", "g1", "--meta", "plait://127.0.0.1:1", "--data", "data"),
    "meta": ("meta", "--database", "sqlite:///meta.db", "--port", "0"),
}


@pytest.mark.parametrize("arguments", SERVERS.values(), ids=SERVERS)
def test_a_lease_that_is_too_short_or_too_long_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
):
    monkeypatch.chdir(tmp_path)
    for lease in ("1s", "2h", "soon"):
        result = command(*arguments, "--lease", lease)
        assert result.returncode == 2
        assert lease.encode() in result.stderr
        assert result.stderr.endswith(b"(invalid_argument)\n")
    assert list(tmp_path.iterdir()) == []


async def leased(address: str) -> float:
    """The lease duration that a consumer receives."""
    async with plait.connect(address) as client, client.consumer("s", group="g", ordered=True) as consumer:
        (partition,) = consumer._fetcher.clients
        await until(lambda: partition.rights.open.any())  # type: ignore[attr-defined]
        return float(partition.rights.seconds)  # type: ignore[attr-defined]


async def test_consumers_of_a_node_receive_its_lease(tmp_path: Path):
    with running("serve", "--data", str(tmp_path), "--port", "0", "--lease", "4s") as node:
        assert await leased(node.address) == 4.0


async def test_consumers_of_a_cluster_receive_the_brokers_lease(tmp_path: Path):
    with (
        meta(f"sqlite:///{tmp_path}/meta.db", "--lease", "3s") as server,
        broker("g1", server.address, tmp_path / "g1", "--lease", "3s"),
    ):
        assert await leased(server.address) == 3.0


@pytest.mark.parametrize(("lease", "flush"), [(2.0, 0.5), (10.0, 2.0), (60.0, 2.0)])
def test_meta_servers_share_heartbeats_well_within_a_lease(lease: float, flush: float):
    limits = MetaLimits.of_lease(lease)
    assert (limits.member_lost_seconds, limits.heartbeat_flush_seconds) == (lease, flush)
    # A pause of the meta server and a late heartbeat together are shorter than a lease.
    assert limits.gap_seconds + 1.0 < lease
