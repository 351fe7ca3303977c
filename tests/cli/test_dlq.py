"""``plait dlq``: its tables, its JSON, and its confirmation before a purge."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

import plait
import plait.sync
from tests.cli.commands import SECONDS, Serving, answered, environment
from tests.cli.conftest import Here
from tests.cli.test_talking import json_of

BINARY = b"\xff\xfe\x1b[31m"


@pytest.fixture
def dead(node: Serving, subject: str) -> Callable[[list[tuple[bytes, plait.Reason]]], None]:
    def bury(messages: list[tuple[bytes, plait.Reason]]) -> None:
        with plait.sync.connect(node.address) as client:
            for body, _ in messages:
                client.post(subject, body, key="order-1", tags=["new"], headers={"city": "BJS"})
            client.flush()
            with client.consumer(subject, group="g", prefetch=len(messages)) as consumer:
                for _, reason in messages:
                    next(iter(consumer)).reject(reason)

    return bury


Bury = Callable[[list[tuple[bytes, plait.Reason]]], None]
THREE = [
    (b"first", plait.Reason("ValueError", "no amount\x1b[2J", "on_order")),
    (BINARY, plait.Reason("ValueError", "x" * 100, "on_order")),
    (b"third", plait.Reason("app.Refused", "fraud", "check")),
]


def test_queues_and_letters_are_listed(here: Here, subject: str, dead: Bury):
    dead(THREE)
    # Other tests have dead letters on this node.
    assert {"subject": subject, "group": "g", "count": 3} in json_of(here("dlq", "list", "-o", "json"))
    assert here("dlq", "list", subject).stdout.split()[-3:] == [subject.encode(), b"g", b"3"]
    found = json_of(here("dlq", "list", subject, "g", "-o", "json"))
    assert [letter["sequence"] for letter in found] == [0, 1, 2]
    assert found[0]["reason"] == {"type": "ValueError", "text": "no amount\x1b[2J", "handler": "on_order"}
    assert found[0]["last_time"].endswith("Z")
    assert "body" not in found[0]
    shown = here("dlq", "list", subject, "g").stdout.decode()
    assert [word in shown for word in ("app.Refused", "fraud", "check", "order-1", r"\x1b[2J")] == [True] * 5
    assert "x" * 57 + "..." in shown
    assert "x" * 60 not in shown
    some = here("dlq", "list", subject, "g", "--limit", "2", "-o", "json")
    assert len(json_of(some)) == 2
    assert some.stderr == b""
    assert (
        here("dlq", "list", subject, "g", "--limit", "2").stderr
        == b"these are the first 2 letters; there may be more, see --limit\n"
    )
    assert len(json_of(here("dlq", "list", subject, "g", "--type", "ValueError", "-o", "json"))) == 2
    assert json_of(here("dlq", "list", subject, "g", "--before", "-1h", "-o", "json")) == []
    assert "3 dead letters" in here("group", "describe", subject, "g").stdout.decode()
    assert json_of(here("group", "list", subject, "-o", "json"))[0]["dead"] == 3


def test_a_letter_is_shown_in_full_with_control_characters_escaped(here: Here, subject: str, dead: Bury):
    dead(THREE)
    letter = json_of(here("dlq", "show", subject, "g", "0", "-o", "json"))
    assert (letter["body"], letter["key"], letter["tags"], letter["headers"]) == (
        "first",
        "order-1",
        ["new"],
        {"city": "BJS"},
    )
    assert (letter["attempts"], letter["history"]) == (1, [])
    assert json_of(here("dlq", "show", subject, "g", "1", "-o", "json"))["body_base64"] == "//4bWzMxbQ=="
    shown = here("dlq", "show", subject, "g", "1").stdout
    assert rb"\xff\xfe\x1b[31m" in shown
    assert b"\x1b" not in shown
    assert b"city=BJS" in shown
    none = here("dlq", "show", subject, "g", "77")
    assert (none.returncode, none.stdout) == (4, b"")
    assert none.stderr.endswith(b"is not a dead letter of group 'g' (dead_letter_not_found)\n")
    here("dlq", "resend", subject, "g", "0")
    with_history = here("tail", subject, "--group", "g", "--count", "1", "-o", "json")
    assert b'"attempt":2' in with_history.stdout


def test_messages_with_undecodable_headers_are_shown(
    here: Here, subject: str, dead: Bury, monkeypatch: pytest.MonkeyPatch
):
    """A sender other than Plait's client may store any bytes as headers."""
    with monkeypatch.context() as patch:
        patch.setattr("plait.client.send.open_rows.encode_headers", lambda headers: b"\xc1\x1b[2J")
        dead(THREE[:1])
    dead(THREE[2:])
    found = json_of(here("dlq", "list", subject, "g", "-o", "json"))
    assert [letter["headers"] for letter in found] == [{"plait-unreadable": "c11b5b324a"}, {"city": "BJS"}]
    assert b"plait-unreadable=c11b5b324a" in here("dlq", "show", subject, "g", "0").stdout
    lines = here("tail", subject, "--start", "earliest", "--count", "2").stdout.decode().splitlines()
    assert ["plait-unreadable=c11b5b324a" in lines[0], "city=BJS" in lines[1]] == [True, True]


def test_a_letter_that_died_again_shows_its_earlier_death(node: Serving, here: Here, subject: str, dead: Bury):
    dead(THREE[:1])
    here("dlq", "resend", subject, "g", "--all")
    with plait.sync.connect(node.address) as client, client.consumer(subject, group="g") as consumer:
        next(iter(consumer)).reject("again")
    shown = here("dlq", "show", subject, "g", "0").stdout.decode()
    assert "after 1 attempts: ValueError: no amount" in shown
    (old,) = json_of(here("dlq", "show", subject, "g", "0", "-o", "json"))["history"]
    assert (old["attempts"], old["reason"]["type"]) == (1, "ValueError")


def test_reasons_are_counted(here: Here, subject: str, dead: Bury):
    dead(THREE)
    found = json_of(here("dlq", "reasons", subject, "g", "-o", "json"))
    assert [(r["count"], r["type"], r["handler"]) for r in found] == [
        (2, "ValueError", "on_order"),
        (1, "app.Refused", "check"),
    ]
    assert b"fraud" in here("dlq", "reasons", subject, "g").stdout


def test_letters_are_resent_and_purged_by_selection(here: Here, subject: str, dead: Bury):
    dead(THREE)

    def run(*arguments: str) -> subprocess.CompletedProcess[bytes]:
        return here("dlq", arguments[0], subject, "g", *arguments[1:])

    for command in ("resend", "purge"):
        refused = run(command)
        assert (refused.returncode, refused.stdout) == (2, b"")
        assert b"select the letters to" in refused.stderr
        assert b"not both" in run(command, "1", "--all").stderr
    assert json_of(run("resend", "--all", "--dry-run", "-o", "json")) == {
        "subject": subject,
        "group": "g",
        "dry_run": True,
        "resent": 3,
    }
    assert b"would be purged" in run("purge", "--all", "--dry-run").stdout
    assert b"rate must be more than 0" in run("resend", "--all", "--rate", "0").stderr
    assert json_of(run("resend", "1", "2", "--rate", "1000", "-o", "json"))["resent"] == 2
    tail = here("tail", subject, "--group", "g", "--count", "2", "-o", "raw")
    assert tail.stdout == BINARY + b"\nthird\n"
    unconfirmed = run("purge", "--type", "ValueError")
    assert (unconfirmed.returncode, unconfirmed.stdout) == (2, b"")
    assert b"confirm with --yes" in unconfirmed.stderr
    assert json_of(run("purge", "--type", "ValueError", "--yes", "-o", "json"))["purged"] == 1
    assert json_of(here("dlq", "list", subject, "-o", "json")) == []
    assert run("resend", "--all").stdout.split() == [b"subject", subject.encode(), b"group", b"g", b"resent", b"0"]


@pytest.mark.parametrize("before", ["7d", "1m", "2999-01-01", "29990101"])
def test_a_time_in_the_future_is_refused(here: Here, subject: str, dead: Bury, before: str):
    dead(THREE)
    for command in (("purge", "--yes"), ("resend",), ("list",)):
        refused = here("dlq", command[0], subject, "g", "--before", before, *command[1:])
        assert (refused.returncode, refused.stdout) == (2, b"")
        assert b"is in the future; write -7d for seven days ago" in refused.stderr
    assert json_of(here("group", "describe", subject, "g", "-o", "json"))["dead"] == 3
    assert json_of(here("dlq", "purge", subject, "g", "--before", "0s", "--yes", "-o", "json"))["purged"] == 3


@pytest.mark.parametrize(
    "option", [("--type", "X"), ("--handler", "h"), ("--before", "-1h"), ("--limit", "5"), ("--limit", "100")]
)
def test_letters_are_selected_in_one_group_only(here: Here, subject: str, option: tuple[str, str]):
    for names in ((), (subject,)):
        refused = here("dlq", "list", *names, *option)
        assert (refused.returncode, refused.stdout) == (2, b"")
        assert b"name the group too" in refused.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("list", "--before", "-999999d"),
        ("list", "--before", "999999999d"),
        ("list", "--limit", "-99999999999999999999999"),
        ("show", "99999999999999999999999"),
        ("resend", "99999999999999999999999"),
        ("purge", "-1"),
        ("resend", "--all", "--rate", "1e400"),
    ],
)
def test_huge_values_print_one_line(here: Here, subject: str, dead: Bury, arguments: tuple[str, ...]):
    dead(THREE[:1])
    refused = here("dlq", arguments[0], subject, "g", *arguments[1:])
    assert (refused.returncode, refused.stdout, refused.stderr.count(b"\n")) == (2, b"", 1)
    assert refused.stderr.startswith(b"error: ")


def test_an_interrupt_prints_how_many_letters_were_done(node: Serving, subject: str, dead: Bury):
    dead([(b"x", plait.Reason("E"))] * 30)
    with (
        plait.sync.connect(node.address) as client,
        subprocess.Popen(
            [sys.executable, "-m", "plait.cli", "dlq", "resend", subject, "g", "--all", "--rate", "20"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(PLAIT_SERVER=node.address),
        ) as resending,
    ):
        while client.admin.group(subject, "g").dead > 28:
            assert resending.poll() is None
        resending.send_signal(signal.SIGINT)
        out, err = resending.communicate(timeout=SECONDS)
    assert (resending.returncode, out) == (130, b"")
    assert re.fullmatch(rb"at least [1-9]\d* dead letters? resent; run again for the rest\n", err)


def test_a_failure_before_the_first_letter_prints_no_count(here: Here, subject: str):
    gone = here("dlq", "resend", subject, "g", "--all")
    assert (gone.returncode, gone.stderr.count(b"\n")) == (4, 1)
    here("send", subject, "x")
    gone = here("dlq", "resend", subject, "g", "--all")
    assert (gone.returncode, gone.stderr.count(b"\n")) == (4, 1)
    assert gone.stderr.endswith(b"(group_not_found)\n")


def test_purging_asks_at_a_terminal(node: Serving, here: Here, subject: str, dead: Bury):
    dead(THREE)
    for answer, code, left in ((b"yes\n", 2, 3), (b"g\n", 0, 0)):
        purging = answered(answer, "dlq", "purge", subject, "g", "--all", "--server", node.address)
        assert purging.returncode == code
        assert b"Type the group's name" in purging.stderr
        assert json_of(here("group", "describe", subject, "g", "-o", "json"))["dead"] == left


def test_missing_subjects_and_groups_print_one_line(here: Here, subject: str):
    for arguments in (("list", subject, "g"), ("reasons", subject, "g"), ("resend", subject, "g", "--all")):
        gone = here("dlq", *arguments)
        assert (gone.returncode, gone.stderr.count(b"\n")) == (4, 1)
        assert gone.stderr.endswith(b"(subject_not_found)\n")
