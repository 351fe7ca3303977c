"""``plait query`` against a node."""

from __future__ import annotations

import json

from tests.cli.conftest import Here


def test_messages_are_found_by_key_id_and_condition(here: Here, subject: str):
    for number in range(4):
        assert here("send", subject, f"{number}", "--key", f"k{number % 2}", "--header", f"n:={number}").returncode == 0
    found = json.loads(here("query", subject, "--key", "k1", "-o", "json").stdout)
    assert [message["body"] for message in found["messages"]] == ["1", "3"]
    assert (found["partial"], found["reason"], found["token"]) == (False, None, None)
    by_id = json.loads(here("query", subject, "--id", found["messages"][1]["message_id"], "-o", "json").stdout)
    assert [message["body"] for message in by_id["messages"]] == ["3"]
    table = here("query", subject, "--where", "n >= 2", "--since", "-1h").stdout.decode().strip().split("\n")
    assert table[0].split() == ["stored", "partition", "sequence", "message", "id", "key", "body"]
    assert [line.split()[-1] for line in table[2:4]] == ["2", "3"]


def test_a_message_is_explained(here: Here, subject: str):
    receipt = json.loads(here("send", subject, "created", "-o", "json").stdout)
    here("tail", subject, "--group", "billing", "--count", "1", "-o", "json")
    lines = here("why", receipt["message_id"], "--group", "billing", "--subject", subject).stdout.decode().splitlines()
    assert "Group billing is done with it: it was acked by consumer" in lines[0]
    assert "acked by" in lines[4]
    assert "delivered to" in lines[5]
    found = json.loads(here("why", receipt["message_id"], "--group", "billing", "-o", "json").stdout)
    assert (found["state"], found["subject"], found["message_id"]) == ("done", subject, receipt["message_id"])


def test_a_cut_query_prints_the_token_that_continues_it(here: Here, subject: str):
    for number in range(3):
        here("send", subject, f"{number}")
    lines = here("query", subject, "--limit", "2").stdout.decode().splitlines()
    assert lines[-1].startswith("continue with --token ")
    rest = here("query", subject, "--token", lines[-1].split()[-1], "-o", "json")
    assert [message["body"] for message in json.loads(rest.stdout)["messages"]] == ["2"]
    partial = here("query", subject, "--where", "key = 'none'", "--scan-time", "0").stdout.decode().splitlines()
    assert partial[-2] == "partial: 0 seconds were over (scan_seconds=0)"
    wrong = here("query", subject, "--id", "nonsense")
    assert wrong.returncode == 2
    assert b"message id 'nonsense' is not understood" in wrong.stderr
