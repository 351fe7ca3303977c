"""A cluster of processes: ``plait meta``, ``plait broker``, and the commands that manage them."""

from __future__ import annotations

import json
import re
import signal
import socket
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import plait.sync
from plait.limits import LOGICAL_PARTITIONS
from plait.model.retry_policy import Retry
from tests.cli.commands import Serving, broker, meta
from tests.cli.commands import plait as command
from tests.cli.conftest import Here

#: A wait of this length fails the test.
PATIENCE_SECONDS = 30.0


class Cluster(NamedTuple):
    """One meta server and two brokers."""

    meta: Serving
    brokers: dict[str, Serving]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    path = tmp_path_factory.mktemp("cluster")
    with (
        meta(f"sqlite:///{path}/meta.db") as server,
        broker("g1", server.address, path / "g1") as first,
        broker("g2", server.address, path / "g2") as second,
    ):
        yield Cluster(server, {"g1": first, "g2": second})


@pytest.fixture
def there(cluster: Cluster, call: Here, monkeypatch: pytest.MonkeyPatch) -> Here:
    monkeypatch.setenv("PLAIT_SERVER", cluster.meta.address)
    return call


def json_of(result: subprocess.CompletedProcess[bytes]) -> Any:
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def refused(result: subprocess.CompletedProcess[bytes]) -> tuple[int, str]:
    """(exit code, error line) of a refused command."""
    err = result.stderr.decode()
    assert (result.stdout, err.count("\n")) == (b"", 1)
    assert err.startswith("error: ")
    return result.returncode, err


def test_ready_lines_name_the_role_of_each_process(cluster: Cluster):
    assert re.fullmatch(
        r"ready plait://127\.0\.0\.1:\d+ database=sqlite:///\S+/meta\.db cluster=[0-9a-f]{16} pid=\d+ version=\S+\n",
        cluster.meta.ready,
    )
    for group, serving in cluster.brokers.items():
        assert re.fullmatch(
            rf"ready plait://127\.0\.0\.1:\d+ group={group} data=\S+ flush=async epoch=1 pid=\d+ version=\S+\n",
            serving.ready,
        )


def test_brokers_are_listed_and_their_states_set(cluster: Cluster, there: Here):
    found = json_of(there("cluster", "brokers", "-o", "json"))
    assert [(each["group"], each["address"], each["state"]) for each in found] == [
        (group, serving.address, "RW") for group, serving in cluster.brokers.items()
    ]
    assert json_of(there("cluster", "state", "g2", "R", "-o", "json")) == {"group": "g2", "wished": "R"}
    table = there("cluster", "brokers").stdout.decode()
    assert [line.split()[2:4] for line in table.splitlines() if " plait://" in line] == [["RW", "RW"], ["R", "R"]]
    assert b"wished  RW" in there("cluster", "state", "g2", "RW").stdout
    assert refused(there("cluster", "state", "g7", "R")) == (
        2,
        "error: there is no broker group 'g7'; there are g1, g2 (invalid_argument)\n",
    )


def test_a_live_broker_group_cannot_be_forgotten(there: Here):
    assert refused(there("cluster", "forget", "g2")) == (
        2,
        "error: broker group 'g2' is alive; stop its broker first (invalid_argument)\n",
    )
    assert refused(there("cluster", "forget", "g7", "--lost")) == (
        2,
        "error: there is no broker group 'g7'; there are g1, g2 (invalid_argument)\n",
    )


def test_a_subject_is_created_expanded_and_reduced_again(there: Here, subject: str):
    created = json_of(there("subject", "create", subject, "--partitions", "2", "--order", "strict", "-o", "json"))
    assert created["partition"] == f"{subject}@g1, {subject}@g2"
    for number in range(4):
        assert there("send", subject, f"body {number}", "--key", f"k{number}").returncode == 0
    route = json_of(there("subject", "route", subject, "-o", "json"))
    assert (route["order"], route["reached"], route["moving"]) == ("strict", True, 0)
    half = LOGICAL_PARTITIONS // 2
    assert [(p["partition"], p["takes"], p["wanted"], p["draining"], p["state"]) for p in route["partitions"]] == [
        (f"{subject}@g1", half, half, 0, "RW"),
        (f"{subject}@g2", half, half, 0, "RW"),
    ]
    wider = json_of(there("subject", "expand", subject, "--partitions", "4", "--wait", "-o", "json"))
    assert (wider["reached"], wider["version"] > route["version"]) == (True, True)
    assert [p["takes"] for p in wider["partitions"]] == [LOGICAL_PARTITIONS // 4] * 4
    # The old partitions are retired once both brokers have reported that every group has finished them.
    until = time.monotonic() + PATIENCE_SECONDS
    while any(p["draining"] for p in json_of(there("subject", "route", subject, "-o", "json"))["partitions"]):
        assert time.monotonic() < until
    one = there("subject", "expand", subject, "--partitions", f"{subject}@g2", "--wait")
    assert one.returncode == 0, one.stderr
    assert b"target   reached" in one.stdout
    rows = [line.split() for line in one.stdout.decode().splitlines() if f" {subject}" in line and "@" in line]
    assert {row[0]: row[2] for row in rows}[f"{subject}@g2"] == str(LOGICAL_PARTITIONS)
    assert {row[2] for row in rows if row[0] != f"{subject}@g2"} == {"0"}
    tail = there("tail", subject, "--start", "earliest", "--count", "4", "-o", "raw")
    assert sorted(tail.stdout.splitlines()) == [b"body %d" % number for number in range(4)]


def test_a_subject_is_created_on_the_given_broker_groups(there: Here, subject: str):
    created = json_of(there("subject", "create", subject, "--group", "g2", "--partitions", "2", "-o", "json"))
    assert created["partition"] == f"{subject}@g2, {subject}#1@g2"


@pytest.mark.parametrize(
    ("partitions", "expected"),
    [
        ("-1", "a subject has 1 to 1024"),
        ("two", "partition 'two' is invalid; write name@group"),
        ("{0}@g1,{0}@g1", "is named twice"),
    ],
)
def test_invalid_partitions_of_an_expansion_print_one_line(there: Here, subject: str, partitions: str, expected: str):
    assert there("subject", "create", subject).returncode == 0
    code, err = refused(there("subject", "expand", subject, f"--partitions={partitions.format(subject)}"))
    assert code == 2
    assert expected in err
    assert json_of(there("subject", "route", subject, "-o", "json"))["reached"]


def test_an_expansion_that_waits_for_a_broker_reports_it_and_continues_when_the_broker_is_back(tmp_path: Path):
    with (
        meta(f"sqlite:///{tmp_path}/meta.db") as server,
        broker("g1", server.address, tmp_path / "g1") as first,
        broker("g2", server.address, tmp_path / "g2"),
    ):
        there = ("--server", server.address)
        assert command("subject", "create", "s", "--group", "g1", *there).returncode == 0
        first.process.kill()
        first.process.wait(PATIENCE_SECONDS)
        code, err = refused(
            command("subject", "expand", "s", "--partitions", "s@g1,s@g2", "--wait", "--timeout", "1s", *there)
        )
        assert code == 3
        assert "512 of 1024 logical partitions of 's' have not moved within 1 s (--timeout)" in err
        with broker("g1", server.address, tmp_path / "g1") as again:
            assert " epoch=2 " in again.ready
            waited = command("subject", "expand", "s", "--partitions", "2", "--wait", *there)
            assert (waited.returncode, b"target   reached" in waited.stdout) == (0, True), waited.stderr


def test_the_shares_and_the_parked_keys_of_an_ordered_group(cluster: Cluster, there: Here, subject: str):
    assert there("subject", "create", subject, "--order", "strict").returncode == 0
    with plait.sync.connect(cluster.meta.address, client_id="member") as client:
        for key in ("bad", "good"):
            client.send_many(subject, [f"{key} {n}".encode() for n in range(2)], keys=[key] * 2)
        with client.consumer(subject, group="g", ordered=True, retry=Retry(attempts=1)) as consumer:
            failed = done = 0
            while failed + done < 3:
                for message in consumer.fetch(10, wait=PATIENCE_SECONDS):
                    if message.key == "good":
                        message.ack()
                        done += 1
                    elif message.body == b"bad 0":
                        message.nack(reason=ValueError("no such account"))
                        failed += 1
                consumer.flush()
            described = json_of(there("group", "describe", subject, "g", "-o", "json"))
            assert (described["ordered"], described["holding"], described["parked"]) == (True, 1, 1)
            assert described["allocation"]["members"] == [
                {
                    "client": "member",
                    "count": LOGICAL_PARTITIONS,
                    "lps": [[0, LOGICAL_PARTITIONS, described["allocation"]["epoch"]]],
                }
            ]
            table = there("group", "describe", subject, "g").stdout.decode()
            assert re.search(r"member +yes +1024 of 1024 +1024 +\d", table)
            [key] = json_of(there("group", "parked", subject, "g", "-o", "json"))
            assert (key["key"], key["sequence"], key["attempts"]) == ("bad", 0, 1)
            assert key["reason"] == {"type": "ValueError", "text": "no such account", "handler": ""}
            listed = there("group", "parked", subject, "g").stdout.decode()
            assert re.search(
                rf"bad +\d{{4}}-.* ValueError: no such account +0 +{subject}@g[12] +\d+ +{key['hash']}", listed
            )
            assert refused(there("group", "resume", subject, "g", "good")) == (
                4,
                f"error: key 'good' is not parked in group 'g' on '{subject}' (key_not_parked)\n",
            )
            assert refused(there("group", "skip", subject, "g", "--hash", "0"))[0] == 4
            assert json_of(there("group", "resume", subject, "g", "bad", "-o", "json"))["resumed"] == 1
            [again] = consumer.fetch(10, wait=PATIENCE_SECONDS)
            assert again.body == b"bad 0"
            again.nack(reason="still no account")
            consumer.flush()
            assert b"skipped  1 key\n" in there("group", "skip", subject, "g", "--hash", key["hash"]).stdout
            [behind] = consumer.fetch(10, wait=PATIENCE_SECONDS)
            assert behind.body == b"bad 1"
            behind.ack()
            consumer.flush()
    assert json_of(there("group", "parked", subject, "g", "-o", "json")) == []
    assert json_of(there("group", "skip", subject, "g", "--all", "-o", "json"))["skipped"] == 0
    assert json_of(there("dlq", "list", subject, "-o", "json"))[0]["count"] == 1


def test_a_group_with_affinity_has_shares_and_holds_no_keys(cluster: Cluster, there: Here, subject: str):
    with (
        plait.sync.connect(cluster.meta.address, client_id="member") as client,
        client.consumer(subject, group="g", affinity="key"),
    ):
        table = there("group", "describe", subject, "g").stdout.decode()
        assert re.search(r"kind +affinity key\n", table)
        assert re.search(r"member +yes +1024 of 1024 +\d", table)
        assert "holding" not in table


def test_parked_keys_of_a_group_that_is_not_ordered_are_refused(there: Here, subject: str):
    assert there("send", subject, "x").returncode == 0
    assert there("tail", subject, "--group", "g", "--start", "earliest", "--count", "1").returncode == 0
    code, err = refused(there("group", "parked", subject, "g"))
    assert code == 2
    assert "is not ordered" in err
    assert refused(there("group", "resume", subject, "missing", "--all"))[0] == 4


def test_sigterm_stops_every_process_cleanly(tmp_path: Path):
    database = f"sqlite:///{tmp_path}/meta.db"
    with meta(database) as server, broker("g1", server.address, tmp_path / "g1", "--http", "0") as part:
        assert " http=http://127.0.0.1:" in part.ready
        assert command("send", "orders", "x", "--server", server.address).returncode == 0
        for serving, number in ((part, signal.SIGTERM), (server, signal.SIGINT)):
            code, out, err = serving.stop(number)
            assert (code, out) == (0, "")
            assert err.rstrip().endswith("stopped")
            assert "Traceback" not in err
    with meta(database) as server, broker("g1", server.address, tmp_path / "g1") as part:
        tail = command("tail", "orders", "--start", "earliest", "--count", "1", "-o", "raw", "--server", server.address)
        assert tail.stdout == b"x\n"
        assert " epoch=1 " in part.ready


def failing(*arguments: str) -> tuple[int, str]:
    return refused(command(*arguments))


def test_a_database_in_use_prints_one_line(tmp_path: Path):
    path = tmp_path / "meta.db"
    with meta(f"sqlite:///{path}"):
        code, err = failing("meta", "--database", f"sqlite:///{path}", "--port", "0")
    assert code == 8
    assert f"database {path} is in use by another plait meta" in err


def test_a_newer_database_is_refused_and_left_unchanged(tmp_path: Path):
    path = tmp_path / "meta.db"
    with meta(f"sqlite:///{path}") as server:
        assert server.stop()[0] == 0
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE plait_schema SET version_num = '9999'")
    code, err = failing("meta", "--database", f"sqlite:///{path}", "--port", "0")
    assert code == 3
    assert "has schema 9999" in err
    assert "(nothing was changed) (version_mismatch)" in err


def test_an_unavailable_database_prints_one_line_without_its_password():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    code, err = failing("meta", "--database", f"postgresql://u:secret@127.0.0.1:{port}/x", "--port", "0")
    assert code == 3
    assert f"meta database postgresql://u:***@127.0.0.1:{port}/x is unavailable" in err
    assert "secret" not in err


def test_a_port_in_use_prints_one_line(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments in (
            ("serve", "--data", str(tmp_path / "data")),
            ("meta", "--database", f"sqlite:///{tmp_path}/meta.db"),
            ("broker", "--group", "g1", "--meta", "plait://127.0.0.1:1", "--data", str(tmp_path / "data")),
        ):
            code, err = failing(*arguments, "--port", port)
            assert code == 2
            assert f"port {port} of 127.0.0.1 is in use by another process" in err
    assert not (tmp_path / "data").exists()
