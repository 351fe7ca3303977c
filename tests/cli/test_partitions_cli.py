"""Subjects of several partitions on the command line, and through the blocking client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from plait import sync
from plait.cli.entry import run
from plait.testing import EmbeddedBroker
from tests.client.support import config_of

KEYS = [f"k{n}" for n in range(20)]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A node and a second broker in its cluster, with a subject on both."""
    with (
        EmbeddedBroker(config=config_of("g1")) as first,
        EmbeddedBroker(config=config_of("g2"), metas=[first.address]),
        sync.connect(first.address) as client,
    ):
        while len(client.admin.brokers()) < 2:
            pass
        client.admin.create_subject("s", partitions=2)
        client.send_many("s", [b"x"] * 20, keys=KEYS)
        with client.consumer("s", group="g") as consumer:
            letters = 0
            while letters < 20:
                for message in consumer.fetch(20 - letters, wait=20):
                    message.reject("no good")
                    letters += 1
            consumer.flush()
        yield first.address


def listed(capsys: pytest.CaptureFixture[str], server: str, *arguments: str) -> Any:
    assert run([*arguments, "--server", server, "-o", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], server: str, *arguments: str) -> str:
    assert run([*arguments, "--server", server]) == 2
    return capsys.readouterr().err


def test_subjects_show_their_partitions(capsys: pytest.CaptureFixture[str], server: str) -> None:
    places = [(each["partition"], each["count"]) for each in listed(capsys, server, "subject", "list")]
    assert sorted(place for place, _ in places) == ["s@g1", "s@g2"]
    assert sum(count for _, count in places) == 20
    assert run(["subject", "describe", "s", "--server", server]) == 0
    shown = capsys.readouterr().out
    assert "s@g1, s@g2" in shown
    lines = [line.split()[:2] for line in shown.splitlines() if line.strip().startswith(("s@g1 ", "s@g2 "))]
    assert lines == [[place, str(count)] for place, count in sorted(places)]


def test_dead_letters_are_named_by_partition_and_sequence(capsys: pytest.CaptureFixture[str], server: str) -> None:
    letters = listed(capsys, server, "dlq", "list", "s", "g")
    assert len(letters) == 20
    letter = next(each for each in letters if each["partition"] == "s@g2")
    number = str(letter["sequence"])
    assert "name one, as in partition='s@g1'" in refused(capsys, server, "dlq", "show", "s", "g", number)
    found = listed(capsys, server, "dlq", "show", "s", "g", number, "--partition", "s@g2")
    assert found["message_id"] == letter["message_id"]
    assert "it has s@g1, s@g2" in refused(capsys, server, "dlq", "list", "s", "g", "--partition", "s@g3")


def test_scheduled_messages_are_named_by_partition_and_number(capsys: pytest.CaptureFixture[str], server: str) -> None:
    with sync.connect(server) as client:
        receipts = client.send_many("s", [b"later"] * 20, keys=KEYS, delay=3600)
    found = listed(capsys, server, "schedule", "list", "s")
    assert {(each["partition"], each["number"]) for each in found} == {(str(r.partition), r.schedule) for r in receipts}
    name = ("s", str(found[0]["number"]), found[0]["deliver_at"])
    assert "each with numbers of its own" in refused(capsys, server, "schedule", "cancel", *name)
    place = ("--partition", found[0]["partition"])
    assert listed(capsys, server, "schedule", "cancel", *name, *place)["cancelled"]
    assert sum(each["count"] for each in listed(capsys, server, "schedule", "count", "s")) == 19


def test_a_group_is_moved_in_all_partitions_or_in_one(capsys: pytest.CaptureFixture[str], server: str) -> None:
    rewind = ("group", "rewind", "s", "g")
    assert "confirm with --yes" in refused(capsys, server, *rewind, "--to", "latest")
    moved = listed(capsys, server, *rewind, "--to", "latest", "--yes")
    assert sum(each["position"] for each in moved["partitions"]) == 20
    assert "sequences of its own" in refused(capsys, server, *rewind, "--to", "1", "--yes")
    for done in (False, True):
        shown = listed(
            capsys, server, *rewind, "--sequence", "1", "--partition", "s@g2", "--yes" if done else "--preview"
        )
        [change] = shown["partitions"]
        assert (shown["done"], change["partition"], change["position"]) == (done, "s@g2", 1)
        assert change["again"] == change["before"] - 1
    one = listed(capsys, server, "group", "describe", "s", "g", "--partition", "s@g1")
    assert one["next"] + 1 == listed(capsys, server, "group", "describe", "s", "g")["next"]
