"""The benchmark of other queues runs with a Redis process and tiny counts, and stops what it starts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.peers import PeerError, PeerUnavailable, RedisStreams, redis_awaiting_64
from benchmarks.peers.base import Peer
from benchmarks.peers.report import write_json
from benchmarks.peers.roles import Job, Stopwatch
from benchmarks.peers.server import ServerProcess, accepts
from benchmarks.peers.suite import Plan, run_peer
from tests.support.require import require_package, require_program

BODY_SIZE = 100
TINY = Plan(seconds=0.05, repeats=1, latency_count=20, body_sizes=(BODY_SIZE,))


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisStreams]:
    require_program("redis-server")
    require_package("redis")
    require_package("psutil")
    with RedisStreams() as peer:
        yield peer


def test_a_measurement_leaves_no_data_in_the_server(redis: RedisStreams):
    redis_awaiting_64(BODY_SIZE, count=64, server=redis)
    host, _, port = redis.address.rpartition(":")
    with require_package("redis").Redis(host=host, port=int(port)) as client:
        assert client.keys("*") == []


def test_a_stopped_peer_leaves_neither_listener_nor_files(redis: RedisStreams):
    with type(redis)() as other:
        (server,) = other.servers
        port = int(other.address.rpartition(":")[2])
        assert accepts(port)
        assert server.directory.exists()
    assert not accepts(port)
    assert not server.directory.exists()


@pytest.mark.usefixtures("redis")
def test_a_run_reports_all_measurements_and_writes_them_as_json(tmp_path: Path):
    report = run_peer(RedisStreams, TINY, progress=lambda _: None)
    assert report.skipped == ""
    assert {result.measurement for result in report.throughputs} == {"pipelined", "awaiting_64"}
    assert len(report.latencies) == 1
    (written,) = write_json([report], tmp_path)
    document = json.loads(written.read_text())
    assert written.name == "redis.json"
    assert document["machine"]["cores"] > 0
    assert document["peers"][0]["throughputs"][0]["messages_per_second"] > 0


class Absent(RedisStreams):
    name = "absent"
    executables = ("no-such-server",)


class Failing(RedisStreams):
    name = "failing"

    def start(self) -> None:
        server = ServerProcess(self.name)
        self.servers.append(server)
        server.start(["redis-server", "--port", "none"], ready=lambda: False)


def _raises(_: Job, __: Stopwatch) -> None:
    raise ValueError("the role failed")


def test_a_missing_server_is_skipped_and_its_package_is_named():
    report = run_peer(Absent, TINY, progress=lambda _: None)
    assert report.skipped == "absent: no-such-server not found on the PATH; tools/debian-install redis-server"
    assert write_json([report], Path()) == []


@pytest.mark.usefixtures("redis")
def test_a_server_that_ends_while_starting_is_reported_with_its_log():
    report = run_peer(Failing, TINY, progress=lambda _: None)
    assert report.skipped.startswith("failed: failing ended with status 1 while starting")
    assert "port" in report.skipped


def test_a_role_that_fails_is_raised_with_its_traceback(redis: RedisStreams):
    class Broken(Peer):
        name = "broken"
        roles = type(redis).roles.__class__(*[_raises] * 5)
        address = redis.address

        def start(self) -> None:
            raise PeerUnavailable("never started here")

        def server_version(self) -> str:
            return ""

    with pytest.raises(PeerError, match="the role failed"):
        Broken().pipelined(BODY_SIZE, 1_000)
