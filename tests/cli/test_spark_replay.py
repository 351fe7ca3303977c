"""``plait spark replay`` as a process, also when it is killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from plait.sync import connect
from tests.cli.commands import environment, plait, serve
from tests.spark.histories import thirty_messages

HEADER = "plait-replayed-from"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive and a live log, which the tests only read."""
    root = tmp_path_factory.mktemp("replay")
    thirty_messages(root)
    return root


def command(root: Path, *options: str) -> list[str]:
    where = ["--archive", str(root / "archive"), "--data", str(root / "data"), "--subject", "orders"]
    return ["spark", "replay", *where, "--to", "copy", *options]


def stored(address: str, wanted: int = 0) -> list[str]:
    """The bodies in the target subject, once it has ``wanted`` messages."""
    found: list[str] = []
    with connect(address) as client, client.reader("copy", start="earliest") as reader:
        while (rows := reader.fetch(1000, 10.0 if len(found) < wanted else 0.0)) or len(found) < wanted:
            found += [message.body.decode() for message in rows]
    return found


def test_a_selection_is_counted_and_then_sent(root: Path, tmp_path: Path):
    with serve(tmp_path) as server:
        to = ("--server", server.address, "-o", "json")
        counted = plait(*command(root, "--key", "order-1", "--count", *to))
        assert json.loads(counted.stdout)["messages"] == 8
        done = json.loads(plait(*command(root, "--key", "order-1", "--rate", "100/s", *to)).stdout)
        assert (done["to"], done["sent"], done["before"]) == ("copy", 8, 0)
        assert stored(server.address) == [f"body-{number}" for number in (1, 4, 7, 13, 16, 19, 22, 28)]
        shown = plait(*command(root, "--all", "--limit", "2", "--server", server.address)).stdout.decode()
        assert "sent  2" in shown


def test_a_replay_that_is_killed_repeatedly_sends_every_message_once(root: Path, tmp_path: Path):
    state = str(tmp_path / "state.json")
    with serve(tmp_path / "target") as server:
        with connect(server.address) as client:
            # A read does not create the subject, and the test reads before the first process has sent.
            client.admin.create_subject("copy")
        options = ("--all", "--rate", "20/s", "--state", state, "--server", server.address)
        for wanted in (3, 11, 20):
            with subprocess.Popen(
                [sys.executable, "-m", "plait.cli", *command(root, *options)],
                stdout=subprocess.DEVNULL,
                env=environment(),
            ) as process:
                try:
                    stored(server.address, wanted)
                finally:
                    process.kill()
        rest = plait(*command(root, "--all", "--state", state, "--server", server.address, "-o", "json"))
        done = json.loads(rest.stdout)
        assert done["sent"] + done["before"] == 30
        assert done["before"] >= 16
        assert stored(server.address) == [f"body-{number}" for number in range(30)]
        again = json.loads(plait(*command(root, *options, "-o", "json")).stdout)
        assert (again["sent"], again["before"]) == (0, 30)


@pytest.mark.parametrize(
    ("options", "exit_code", "message"),
    [
        ((), 2, "select messages"),
        (("--all", "--rate", "fast"), 2, "rate 'fast'"),
        (("--all", "--rate", "0/s"), 2, "rate '0/s'"),
        (("--all", "--to", "bad name"), 2, "bad name"),
        (("--all", "--live"), 2, "give one of them"),
        (("--all", "--state", "/nowhere/state", "--server", "plait://127.0.0.1:9"), 3, "127.0.0.1:9"),
    ],
)
def test_invalid_options_print_one_line(root: Path, options: tuple[str, ...], exit_code: int, message: str):
    given = command(root)
    if "--to" in options:
        given = given[: given.index("--to")]
    result = plait(*given, *options)
    assert result.returncode == exit_code, result.stderr
    assert message in result.stderr.decode()
    assert result.stderr.count(b"\n") == 1
