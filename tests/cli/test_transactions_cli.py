"""``plait transactions``: its output and exit codes."""

from __future__ import annotations

import plait.sync
from tests.cli.commands import Serving
from tests.cli.conftest import Here
from tests.cli.test_talking import json_of


def test_transactions_are_listed_shown_and_decided(node: Serving, here: Here, subject: str):
    with plait.sync.connect(node.address) as client:
        transactions = [client.transaction("cli-shop") for _ in range(2)]
        for number, transaction in enumerate(transactions):
            transaction.__enter__()
            transaction.send(subject, f"body {number}", key="k")
        one, two = (transaction.id for transaction in transactions)
        listed = json_of(here("transactions", "list", "--producer-group", "cli-shop", "-o", "json"))
        assert [(row["id"], row["state"], row["count"], row["subjects"]) for row in listed] == [
            (one, "open", 1, [subject]),
            (two, "open", 1, [subject]),
        ]
        table = here("transactions", "list", "--state", "open").stdout.decode()
        assert one in table
        assert "broker group" in table
        parked = here("transactions", "list", "--state", "parked", "--producer-group", "cli-shop", "-o", "json")
        assert json_of(parked) == []
        shown = json_of(here("transactions", "show", one, "-o", "json"))
        assert [(each["subject"], each["key"], each["body"]) for each in shown["messages"]] == [
            (subject, "k", "body 0")
        ]
        assert b"body 0" in here("transactions", "show", one).stdout

        assert json_of(here("transactions", "commit", one, "-o", "json")) == {"id": one, "outcome": "committed"}
        done = here("transactions", "rollback", two)
        assert (done.returncode, done.stderr) == (0, f"transaction {two} is rolled back\n".encode())
        late = here("transactions", "rollback", one)
        assert (late.returncode, late.stdout) == (5, b"")
        assert late.stderr.endswith(b"(transaction_decided)\n")
        missing = here("transactions", "commit", "00000000000000ab")
        assert missing.returncode == 4
        assert here("transactions", "show", "17").returncode == 2
        with client.reader(subject, start="earliest") as reader:
            assert [each.body for each in reader.fetch(10, wait=20)] == [b"body 0"]
