"""Client commands as processes: their tables, their JSON and their exit codes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import SECONDS, Serving, answered, environment, plait
from tests.cli.conftest import Here


def json_of(result: subprocess.CompletedProcess[bytes]) -> Any:
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def json_lines(result: subprocess.CompletedProcess[bytes]) -> list[Any]:
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_a_message_with_key_tags_and_headers_is_sent_and_read_back(node: Serving, subject: str):
    sent = plait(
        *("send", subject, "created", "--key", "order-1", "--tag", "new", "--tag", "vip"),
        *("--header", "city=BJS", "--header", "amount:=5", "--header", "gift:=true", "-o", "json"),
        PLAIT_SERVER=node.address,
    )
    receipt = json_of(sent)
    assert (receipt["subject"], receipt["partition"], receipt["sequence"]) == (subject, f"{subject}@g1", 0)
    tail = plait("tail", subject, "--start", "earliest", "--count", "1", "-o", "json", "--server", node.address)
    (message,) = json_lines(tail)
    assert message.pop("store_time").endswith("Z")
    assert message.pop("send_time").endswith("Z")
    assert message == {
        **receipt,
        "key": "order-1",
        "tags": ["new", "vip"],
        "headers": {"city": "BJS", "amount": 5, "gift": True},
        "attempt": 1,
        "body": "created",
    }


def test_each_line_of_standard_input_is_a_message_with_the_same_bytes(node: Serving, subject: str):
    lines = b"first\n\n\xff\xfe binary\n" + b"x" * 3_000_000 + b"\nno newline at the end"
    sent = json_lines(plait("send", subject, "-o", "json", stdin=lines, PLAIT_SERVER=node.address))
    assert [receipt["sequence"] for receipt in sent] == [0, 1, 2, 3, 4]
    raw = plait(
        "tail", subject, "--start", "0", "--count", "5", "-o", "raw", "--group", "readers", PLAIT_SERVER=node.address
    )
    assert raw.stdout == lines + b"\n"
    group = json_of(plait("group", "describe", subject, "readers", "-o", "json", "--server", node.address))
    assert (group["lag"], group["next"], group["redelivered"]) == (0, 5, 0)


def test_a_table_summarizes_many_lines(node: Serving, subject: str):
    lines = b"".join(b"line %d\n" % number for number in range(20_000))
    sent = plait("send", subject, "--key", "k", stdin=lines, PLAIT_SERVER=node.address)
    assert sent.returncode == 0, sent.stderr
    assert subject.encode() in sent.stdout
    assert b"20,000" in sent.stdout
    tail = plait("tail", subject, "--start", "19998", "--wait", "0.1s", PLAIT_SERVER=node.address)
    shown = [line.split("  ") for line in tail.stdout.decode().splitlines()]
    assert [line[1:] for line in shown] == [["#19998", "key=k", "line 19998"], ["#19999", "key=k", "line 19999"]]


def test_a_file_is_one_message_or_its_lines(here: Here, subject: str, tmp_path: Path):
    file = tmp_path / "orders.txt"
    file.write_bytes(b"a\nb\n")
    options = ("--file", str(file), "-o", "json")
    assert len(json_lines(here("send", subject, *options))) == 1
    assert len(json_lines(here("send", subject, "--lines", *options))) == 2
    raw = here("tail", subject, "--start", "earliest", "--count", "3", "-o", "raw")
    assert raw.stdout == b"a\nb\n\na\nb\n"


def test_only_messages_that_match_are_printed(here: Here, subject: str):
    for number, tag in enumerate(("new", "old", "new")):
        here("send", subject, str(number), "--tag", tag, "--header", f"amount:={number}")
    options = ("tail", subject, "--start", "earliest", "--wait", "0.1s", "-o", "raw")
    assert here(*options, "--where", "amount > 0", "--tag", "new", "--tag", "big").stdout == b"2\n"
    wrong = here(*options, "--where", "amount >")
    assert wrong.returncode == 2
    assert b"at character 9" in wrong.stderr
    member = here(*options, "--group", "g", "--tag", "new")
    assert (member.returncode, b"leave --group out" in member.stderr) == (2, True)


def test_control_characters_do_not_reach_the_terminal(here: Here, subject: str):
    here("send", subject, "\x1b[2J\tred")
    shown = here("tail", subject, "--start", "-5m", "--count", "1")
    assert b"\x1b" not in shown.stdout
    assert b"\\x1b[2J\\tred" in shown.stdout


def test_a_subject_is_created_changed_described_and_deleted(here: Here, subject: str):
    def run(*arguments: str) -> subprocess.CompletedProcess[bytes]:
        return here("subject", *arguments)

    created = json_of(run("create", subject, "--retention", "7d", "--retention-size", "1GiB", "-o", "json"))
    assert (created["retention_seconds"], created["retention_bytes"]) == (7 * 86400, 1 << 30)
    again = run("create", subject)
    assert (again.returncode, again.stderr.decode()) == (
        5,
        f"error: subject '{subject}' exists already (subject_exists)\n",
    )
    assert subject in [info["subject"] for info in json_of(run("list", "-o", "json"))]
    table = run("list").stdout.decode()
    assert next(line.split() for line in table.splitlines() if subject in line)[1:4] == [f"{subject}@g1", "0", "0"]
    details = json_of(run("describe", subject, "-o", "json"))
    assert (details["subject"], details["groups"]) == (created, [])
    assert "kept for" in run("describe", subject).stdout.decode()
    changed = json_of(run("set", subject, "--retention", "1h", "-o", "json"))
    assert (changed["retention_seconds"], changed["retention_bytes"]) == (3600, 1 << 30)
    assert "3d" in run("set", subject, "--retention", "default", "--retention-size", "default").stdout.decode()
    assert b"use --retention, --retention-size or --send-rate" in run("set", subject).stderr
    limited = json_of(run("set", subject, "--send-rate", "10MiB, 500", "-o", "json"))
    assert limited["send_rate"] == {"messages_per_second": 500.0, "bytes_per_second": 10 << 20}
    assert b"500 messages/s, 10,485,760 bytes/s at most" in run("describe", subject).stdout
    assert b"two numbers of messages" in run("set", subject, "--send-rate", "5,6").stderr
    assert b"use a number from 0.01 to" in run("set", subject, "--send-rate", "0").stderr
    assert b"at most" not in run("set", subject, "--send-rate", "none", "--retention", "2d").stdout
    unconfirmed = run("delete", subject)
    assert unconfirmed.returncode == 2
    assert b"--yes" in unconfirmed.stderr
    assert json_of(run("delete", subject, "--yes", "-o", "json")) == {"subject": subject, "deleted": True}
    gone = run("describe", subject)
    assert gone.returncode == 4
    assert gone.stderr.endswith(b"(subject_not_found)\n")


def test_a_group_is_described_and_moved(node: Serving, here: Here, subject: str):
    plait("send", subject, stdin=b"a\nb\nc\nd\n", PLAIT_SERVER=node.address)

    def tail(count: int) -> bytes:
        return here("tail", subject, "--group", "readers", "--count", str(count), "-o", "raw").stdout

    def group(*arguments: str) -> subprocess.CompletedProcess[bytes]:
        return here("group", *arguments)

    assert tail(3) == b"a\nb\nc\n"
    (listed,) = json_of(group("list", subject, "-o", "json"))
    assert (listed["group"], listed["lag"], listed["unacked"]) == ("readers", 1, 0)
    assert listed == json_of(group("describe", subject, "readers", "-o", "json"))
    assert b"1 not done yet" in group("describe", subject, "readers").stdout
    preview = group("rewind", subject, "readers", "--to", "1", "--preview").stdout
    assert b"3 messages come again; 2 of them were handled" in preview
    assert b"nothing is changed yet" in preview
    unconfirmed = group("rewind", subject, "readers", "--to", "1")
    assert b"3 messages come again" in unconfirmed.stdout
    assert b"confirm with --yes" in unconfirmed.stderr
    [moved] = json_of(group("rewind", subject, "readers", "--to", "1", "--yes", "-o", "json"))["partitions"]
    assert (moved["position"], moved["again"], moved["handled"]) == (1, 3, 2)
    assert tail(2) == b"b\nc\n"
    [moved] = json_of(group("rewind", subject, "readers", "--to", "latest", "--yes", "-o", "json"))["partitions"]
    assert (moved["position"], moved["skipped"]) == (4, 1)
    nonsense = group("rewind", subject, "readers", "--to", "yesterday")
    assert (nonsense.returncode, nonsense.stderr.count(b"\n")) == (2, 1)
    changed = json_of(group("set", subject, "readers", "--attempts", "3", "--steps", "1s,5m", "-o", "json"))
    assert (changed["retry"]["attempts"], changed["retry"]["steps"]) == (3, [1.0, 300.0])
    assert b"within 86400 s" in group("set", subject, "readers", "--attempts", "unlimited", "--expires", "1d").stdout
    filtered = json_of(group("set", subject, "readers", "--where", "amount > 1", "--tag", "new", "-o", "json"))
    assert (filtered["filter"]["where"], filtered["filter"]["tags"]["any"]) == ("amount > 1", ["new"])
    assert b"where='amount > 1', tags=['new']" in group("describe", subject, "readers").stdout
    assert b"leave --where and --tag out" in group("set", subject, "readers", "--tag", "a", "--no-filter").stderr
    assert b"filter" not in group("set", subject, "readers", "--no-filter").stdout
    limited = json_of(group("set", subject, "readers", "--rate", "500,10MiB", "-o", "json"))
    assert limited["rate"] == {"messages_per_second": 500.0, "bytes_per_second": 10 << 20}
    assert b"500 messages/s, 10,485,760 bytes/s at most" in group("describe", subject, "readers").stdout
    assert b"at most" not in group("set", subject, "readers", "--rate", "none").stdout
    assert b"--rate '5 stones' is not understood" in group("set", subject, "readers", "--rate", "5 stones").stderr
    assert group("set", subject, "readers").returncode == group("set", subject, "readers", "--attempts", "x").returncode
    assert b"confirm with --yes" in group("delete", subject, "readers").stderr
    assert group("delete", subject, "readers", "--yes").returncode == 0
    assert json_of(group("list", subject, "-o", "json")) == []
    unknown = group("describe", subject, "writers")
    assert unknown.returncode == 4
    assert unknown.stderr.endswith(b"(group_not_found)\n")


def test_an_unreachable_server_prints_one_line_at_once():
    result = plait("subject", "list", "--server", "plait://127.0.0.1:1")
    assert (result.returncode, result.stdout) == (3, b"")
    assert result.stderr == (
        b"error: cannot connect to plait://127.0.0.1:1 (Connection refused); is 'plait serve' running there? "
        b"(unavailable)\n"
    )


def test_a_closed_pipe_ends_the_command_without_an_error(node: Serving, subject: str):
    plait("send", subject, stdin=b"x\n" * 10_000, PLAIT_SERVER=node.address)
    command = [sys.executable, "-m", "plait.cli", "tail", subject, "--start", "earliest", "-o", "json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(PLAIT_SERVER=node.address)
    ) as tail:
        assert tail.stdout is not None
        assert tail.stderr is not None
        assert json.loads(tail.stdout.readline())["sequence"] == 0
        tail.stdout.close()
        assert (tail.wait(SECONDS), tail.stderr.read()) == (141, b"")


def test_ctrl_c_ends_a_tail_without_a_traceback(node: Serving, here: Here, subject: str):
    here("send", subject, "x")
    command = [sys.executable, "-m", "plait.cli", "tail", subject, "--start", "earliest", "--server", node.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as tail:
        assert tail.stdout is not None
        assert tail.stdout.readline().endswith(b"  x\n")
        tail.send_signal(signal.SIGINT)
        _, err = tail.communicate(timeout=SECONDS)
    assert (tail.returncode, err) == (130, b"")


@pytest.mark.parametrize("how", [["--debug"], []])
def test_a_traceback_is_shown_on_request_only(how: list[str]):
    result = plait("subject", "list", "--server", "plait://127.0.0.1:1", *how)
    assert result.returncode == 3
    assert (b"Traceback" in result.stderr) is bool(how)
    assert result.stderr.splitlines()[-1].startswith(b"error: ")


def test_a_deletion_asks_for_confirmation_at_a_terminal(node: Serving, here: Here, subject: str):
    here("subject", "create", subject)
    for answer, code in ((b"no\n", 2), (subject.encode() + b"\n", 0)):
        deleting = answered(answer, "subject", "delete", subject, "--server", node.address)
        assert deleting.returncode == code
    assert here("subject", "describe", subject).returncode == 4
