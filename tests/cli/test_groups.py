"""``plait serve --groups N``: a node of several processes, which start, stop and fail together."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil

import plait.sync
from tests.cli.commands import SECONDS, Serving, serve
from tests.cli.commands import plait as command

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
