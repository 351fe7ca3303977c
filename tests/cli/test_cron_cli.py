"""``plait cron``: its output and exit codes."""

from __future__ import annotations

from tests.cli.conftest import Here
from tests.cli.test_talking import json_of


def test_a_recurrence_is_created_listed_changed_and_removed(here: Here, subject: str) -> None:
    made = json_of(
        here(
            *("cron", "create", "nightly", subject, "report", "--cron", "30 2 * * MON-FRI", "--zone", "Europe/Berlin"),
            *("--key", "k", "--tag", "t", "--header", "n:=1", "-o", "json"),
        )
    )
    assert (made["cron"], made["zone"], made["body"], made["headers"]) == (
        "30 2 * * MON-FRI",
        "Europe/Berlin",
        "report",
        {"n": 1},
    )
    table = here("cron", "list", subject).stdout.decode()
    assert "30 2 * * MON-FRI Europe/Berlin" in table
    assert "paused" in here("cron", "pause", "nightly").stdout.decode()
    assert json_of(here("cron", "resume", "nightly", "-o", "json"))["next"] == made["next"]
    assert json_of(here("cron", "set", "nightly", "--every", "1h", "-o", "json"))["every"] == 3600
    assert len(json_of(here("cron", "next", "nightly", "--count", "3", "-o", "json"))) == 3
    assert len(here("cron", "next", "--cron", "0 0 1 * *").stdout.split(b"\n")) > 10
    assert "every 3600 s" in here("cron", "show", "nightly").stdout.decode()
    assert here("cron", "remove", "nightly").returncode == 0
    gone = here("cron", "show", "nightly")
    assert (gone.returncode, gone.stderr.endswith(b"(recurrence_not_found)\n")) == (4, True)


def test_wrong_rules_are_refused(here: Here, subject: str) -> None:
    for arguments in (
        ("create", "x", subject),
        ("create", "x", subject, "--cron", "61 * * * *"),
        ("create", "x", subject, "--cron", "* * * * *", "--zone", "Nowhere"),
        ("create", "x", subject, "--every", "10ms"),
        ("set", "x"),
        ("next",),
    ):
        assert here("cron", *arguments).returncode == 2, arguments
