"""``plait schedule``, and ``plait send`` with a delay: their output and exit codes."""

from __future__ import annotations

from datetime import datetime, timedelta
from itertools import pairwise

import pytest

from plait.cli.options import delay_of, time_of
from plait.client.send.encoding import DelayLevel
from plait.errors import InvalidArgument
from tests.cli.commands import Serving, plait
from tests.cli.conftest import Here
from tests.cli.test_talking import json_lines, json_of


def test_delays_and_times_are_parsed():
    assert (delay_of("10s"), delay_of("2.5"), delay_of("level3"), delay_of("LEVEL_18")) == (
        10.0,
        2.5,
        DelayLevel.LEVEL_3,
        DelayLevel.LEVEL_18,
    )
    with pytest.raises(InvalidArgument, match="'level19' is not a level; use level1 to level18"):
        delay_of("level19")
    assert time_of("2030-01-31T12:00") == time_of("2030-01-31T20:00+08:00") == time_of("20300131T120000Z")
    # Digits alone are a date, never microseconds or seconds.
    assert time_of("20300131") == time_of("2030-01-31")
    for wrong in ("soon", "1896091200000000", "1896091200", "5", "99999999999999999999"):
        with pytest.raises(InvalidArgument, match=f"time '{wrong}' is not understood"):
            time_of(wrong)


def test_a_delayed_message_is_sent_listed_moved_and_cancelled(here: Here, subject: str):
    receipt = json_of(here("send", subject, "later", "--key", "k", "--delay", "1h", "-o", "json"))
    assert (receipt["sequence"], receipt["number"]) == (None, 0)
    assert b"deliver at" in here("send", subject, "level", "--delay", "level18").stdout
    here("send", subject, "then", "--deliver-at", "2027-10-31T08:00+08:00")
    listed = json_of(here("schedule", "list", subject, "-o", "json"))
    assert [(row["number"], row["key"]) for row in listed] == [(0, "k"), (1, None), (2, None)]
    assert listed[0]["deliver_at"] == receipt["deliver_at"]
    assert listed[0]["message_id"] == receipt["message_id"]
    assert listed[2]["deliver_at"] == "2027-10-31T00:00:00Z"
    assert len(json_of(here("schedule", "list", subject, "--end", "90m", "-o", "json"))) == 1
    assert (
        here("schedule", "list", subject, "--limit", "1").stderr
        == b"these are the first 1 messages; there may be more, see --limit\n"
    )
    table = here("schedule", "list", subject).stdout.decode().split("\n")
    row = next(line for line in table if " k " in line).split()
    number, at = row[0], row[1]

    moved = json_of(here("schedule", "move", subject, number, at, "--delay", "3h", "-o", "json"))
    assert datetime.fromisoformat(moved["deliver_at"]) - time_of(at) > timedelta(minutes=119)
    late = here("schedule", "move", subject, number, at, "--to", "2027-01-01")
    assert (late.returncode, late.stdout) == (4, b"")
    assert late.stderr.endswith(b"(not_scheduled)\n")
    cancelled = here("schedule", "cancel", subject, str(moved["number"]), moved["deliver_at"])
    assert (cancelled.returncode, cancelled.stdout) == (0, b"")
    assert cancelled.stderr == f"cancelled number {moved['number']} of {subject}\n".encode()
    again = here("schedule", "cancel", subject, str(moved["number"]), moved["deliver_at"], "-o", "json")
    assert again.returncode == 4
    assert again.stderr.endswith(b"(not_scheduled)\n")
    counts = json_of(here("schedule", "count", subject, "-o", "json"))
    assert counts == [{"subject": subject, "time": None, "count": 2}]
    assert here("schedule", "count", subject).stdout.split()[-2:] == [subject.encode(), b"2"]
    by_time = json_of(here("schedule", "count", subject, "--by", "time", "-o", "json"))
    assert sum(row["count"] for row in by_time) == 2
    assert here("schedule", "count", subject, "--by", "time").stdout.count(b"Z") == len(by_time)


def test_lines_of_standard_input_can_be_delayed(node: Serving, here: Here, subject: str):
    lines = plait("send", subject, "--delay", "20ms", "-o", "json", stdin=b"a\nb\nc\n", PLAIT_SERVER=node.address)
    receipts = json_lines(lines)
    assert [receipt["number"] for receipt in receipts] == [0, 1, 2]
    tail = here("tail", subject, "--start", "earliest", "--count", "3", "-o", "json")
    messages = json_lines(tail)
    assert {message["body"] for message in messages} == {"a", "b", "c"}
    assert {message["deliver_at"] for message in messages} == {receipt["deliver_at"] for receipt in receipts}
    summary = plait("send", subject, "--delay", "1h", stdin=b"d\ne\n", PLAIT_SERVER=node.address)
    assert (b"3", b"4") in pairwise(summary.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("send", "s", "x", "--delay", "1ms"), b"cannot be delayed by 0.001; use 10 ms to 732 days"),
        (("send", "s", "x", "--delay", "soon"), b"'soon' is not understood"),
        (("send", "s", "x", "--delay", "5s", "--deliver-at", "2030-01-01"), b"not both"),
        (("send", "s", "x", "--deliver-at", "tomorrow"), b"time 'tomorrow' is not understood"),
        (("schedule", "cancel", "s", "1", "whenever"), b"time 'whenever' is not understood"),
        (("schedule", "move", "s", "1", "2030-01-01"), b"use --delay or --to"),
        (("schedule", "move", "s", "1", "2030-01-01", "--delay", "5s", "--to", "2030-01-01"), b"use --delay or --to"),
        (("schedule", "list", "s", "--limit", "0"), b"limit must be 1 or more"),
        (("schedule", "list", "s", "--end", "999999999d"), b"is not within the years 1970 to 9999"),
        (("schedule", "count", "--start", "-999999d"), b"is not within the years 1970 to 9999"),
        (("schedule", "cancel", "s", "1", "99999999999999999999"), b"'99999999999999999999' is not understood"),
        (("schedule", "cancel", "s", "9" * 30, "2030-01-01"), b"is out of range"),
        (("schedule", "move", "s", "9" * 30, "2030-01-01", "--delay", "5s"), b"is out of range"),
        (("send", "s", "x", "--delay", "1e400"), b"duration '1e400' is not understood"),
        (("tail", "s", "--start", "9" * 30), b"is out of range"),
        (("tail", "s", "--start", "9" * 30, "--group", "g"), b"is out of range"),
        (("schedule", "list", "s", "--start", "yesterday"), b"'yesterday' is not understood"),
    ],
)
def test_invalid_arguments_print_one_line(here: Here, arguments: tuple[str, ...], complaint: bytes):
    result = here(*arguments)
    assert (result.returncode, result.stdout, result.stderr.count(b"\n")) == (2, b"", 1)
    assert complaint in result.stderr
