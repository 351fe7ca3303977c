"""``plait spark history`` as a process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from plait.cli.commands.spark import history as spark_history
from plait.cli.commands.spark.selection_options import Where
from tests.cli.commands import plait, serve
from tests.spark.histories import thirty_messages


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive and a live log, which the tests only read."""
    root = tmp_path_factory.mktemp("history")
    thirty_messages(root)
    return root


def found(root: Path, *options: str, live: tuple[str, ...] | None = None) -> list[dict[str, Any]]:
    where = live if live is not None else ("--data", str(root / "data"))
    command = ["spark", "history", "--archive", str(root / "archive"), *where, "--subject", "orders", *options]
    result = plait(*command, "-o", "json")
    assert result.returncode == 0, result.stderr.decode()
    return [json.loads(line) for line in result.stdout.splitlines()]


def numbers(rows: list[dict[str, Any]]) -> list[int]:
    return [int(row["headers"]["number"]) for row in rows]


def test_a_key_is_found_in_the_archive_and_in_the_log(root: Path):
    rows = found(root, "--key", "order-1")
    assert numbers(rows) == [1, 4, 7, 13, 16, 19, 22, 28]
    first = rows[0]
    assert {name: first[name] for name in ("subject", "partition", "sequence", "key", "tags", "body")} == {
        "subject": "orders",
        "partition": "orders@g1",
        "sequence": 1,
        "key": "order-1",
        "tags": [],
        "body": "body-1",
    }
    assert first["headers"] == {"number": "1", "half": "0.5", "odd": "true", "city": "BJS"}
    assert numbers(found(root, "--id", first["message_id"])) == [1]


def test_conditions_are_combined_and_limited(root: Path):
    assert numbers(found(root, "--header", "odd=true", "--header", "city=BJS", "--limit", "3")) == [1, 3, 5]
    assert numbers(found(root, "--since", "-1h")) == list(range(30))
    assert numbers(found(root, "--until", "-1h")) == []
    assert numbers(found(root, "--all", live=())) == list(range(20))


def test_messages_are_printed_as_a_table(root: Path):
    command = ("spark", "history", "--archive", str(root / "archive"), "--subject", "orders")
    result = plait(*command, "--header", "number=18")
    shown = result.stdout.decode()
    assert "even,größer" in shown
    assert "number=18 half=9.0 odd=false city=BJS" in shown
    assert "body-18" in shown
    nothing = plait(*command, "--key", "missing")
    assert (nothing.returncode, nothing.stdout, nothing.stderr) == (0, b"", b"no message found\n")


def test_a_table_has_a_maximum_length(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(spark_history, "TABLE_MAX", 2)
    spark_history.history(Where(str(root / "archive"), "orders", all=True))
    shown = capsys.readouterr()
    assert "body-1" in shown.out
    assert "body-2" not in shown.out
    assert shown.err == "only the first 2 are shown; use -o json or --parquet for all\n"


def test_messages_are_written_to_a_parquet_file(root: Path, tmp_path: Path):
    path = tmp_path / "found.parquet"
    command = ("spark", "history", "--archive", str(root / "archive"), "--data", str(root / "data"))
    result = plait(*command, "--subject", "orders", "--all", "--parquet", str(path))
    assert result.stderr == f"30 messages written to {path}\n".encode()
    assert pq.read_table(path)["sequence"].to_pylist() == list(range(30))
    again = plait(*command, "--subject", "orders", "--all", "--parquet", str(path))
    assert again.returncode == 2
    assert b"exists already" in again.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["found.parquet"]


def test_the_live_log_is_read_through_a_server(root: Path):
    with serve(root / "data") as server:
        rows = found(root, "--all", live=("--server", server.address))
        assert numbers(rows) == list(range(30))
        assert numbers(found(root, "--key", "order-2", live=("--server", server.address))) == [
            number for number in range(30) if number % 5 and number % 3 == 2
        ]


@pytest.mark.parametrize(
    ("options", "exit_code", "message"),
    [
        ((), 2, "select messages"),
        (("--all", "--key", "order-1"), 2, "--all selects every message"),
        (("--key", ""), 2, "empty"),
        (("--id", "x"), 2, "message id"),
        (("--header", "odd"), 2, "name=value"),
        (("--header", "odd=true", "--header", "odd=false"), 2, "header 'odd' cannot be both 'true' and 'false'"),
        (("--since", "soon"), 2, "soon"),
        (("--key", "k", "--limit", "0"), 2, "limit"),
        (("--key", "k", "--master", "local"), 2, "--spark"),
        (("--key", "k", "--parquet", "s3://bucket/found"), 2, "'s3://bucket/found' is not a file of this machine"),
        (("--key", "k", "--data", "/nowhere"), 8, "/nowhere"),
        (("--key", "k", "--subject", "missing"), 4, "missing"),
        (("--key", "k", "--archive", "/nowhere"), 8, "not an archive"),
    ],
)
def test_invalid_options_print_one_line(root: Path, options: tuple[str, ...], exit_code: int, message: str):
    given = {"--archive": str(root / "archive"), "--subject": "orders"}
    rest = [text for name, value in given.items() if name not in options for text in (name, value)]
    result = plait("spark", "history", *rest, *options)
    assert result.returncode == exit_code, result.stderr
    assert message in result.stderr.decode()
    assert result.stderr.count(b"\n") == 1
