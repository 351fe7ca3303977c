"""Help, invalid usage, and the formats of sizes and durations: tests without a node."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts import App

from plait.cli.entry import app, run
from plait.cli.options import duration_of, size_of
from plait.cli.output import format_duration, format_size, print_facts, print_table, printable
from plait.errors import InvalidArgument
from plait.version import VERSION


def commands(app: App, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command."""
    for name in app:
        if not name.startswith("-"):
            yield (*words, name)
            yield from commands(app[name], (*words, name))


def test_the_command_line_page_has_every_command_and_option(capsys: pytest.CaptureFixture[str]):
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    found = list(commands(app))
    assert {("serve",), ("subject", "expand"), ("group", "parked"), ("spark", "archive")} < set(found)
    for words in found:
        assert run([*words, "--help"]) == 0
    text = capsys.readouterr().out
    options = set(re.findall(r"--[a-z][a-z-]+", text))
    assert {"--flush", "--yes", "--embedded", "--type", "--server", "--hash", "--archive-before-delete"} <= options
    assert ["PLAIT_SERVER" in text, "PLAIT_DATABASE" in text] == [True, True]
    # Every command has these.
    general = {"--help", "--version", "--output"}
    assert sorted(option for option in options - general if option not in page) == []
    assert [words for words in found if words[-1] not in page] == []


def test_the_top_level_help_imports_no_command():
    program = (
        "import sys\nfrom plait.cli.entry import run\nrun(['--help'])\n"
        "heavy = {'uvloop', 'plait.server.broker_server', 'plait.broker.broker', 'plait.cli.serving.broker_process',"
        "'plait.cli.commands.send',"
        "'numpy', 'pyarrow', 'plait.client.client', 'rich.markdown'}\n"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, b"")


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"{VERSION}\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["sned"], 'Unknown command "sned"'),
        (["send"], "SUBJECT requires an argument"),
        (["send", "a", "b", "c"], "'c'"),
        (["send", "a", "b", "--file", "c"], "not both"),
        (["send", "a", "--file", "does-not-exist"], "'does-not-exist' cannot be read"),
        (["send", "a", "b", "--header", "city"], "header 'city'"),
        (["send", "a", "b", "--header", "amount:=five"], "'five' is not a number"),
        (["tail", "a", "--count", "0"], "--count"),
        (["tail", "a", "--wait", "soon"], "duration 'soon'"),
        (["tail", "a", "--strat", "1"], "Did you mean --start?"),
        (["group", "rewind", "a", "b"], "name one position"),
        (["subject", "list", "-o", "yaml"], '"table", "json"'),
        (["subject", "create", "a", "--retention-size", "5 stones"], "size '5 stones'"),
        (["subject", "create", "a", "--order", "loose"], '"best_tried", "strict"'),
        (["subject", "create", "a", "--partitions", "many"], "many"),
        (["subject", "expand", "a"], "--partitions requires an argument"),
        (["subject", "expand", "a", "--partitions", "2", "--timeout", "soon"], "duration 'soon'"),
        (["cluster", "state", "g1", "rw"], '"RW", "R", "W", "NRW"'),
        (["group", "skip", "a", "b"], "name one key, or its --hash, or use --all"),
        (["group", "skip", "a", "b", "key", "--all"], "name one key"),
        (["group", "skip", "a", "b", "--hash", "xyz"], "--hash 'xyz' is not hexadecimal"),
        (["bench", "--count", "0"], "--count must be 1 or more"),
        (["subject", "list", "--server", "http://localhost/x"], "plait://host:port"),
    ],
)
def test_invalid_usage_prints_one_line_and_exits_with_2(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
):
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: ")
    assert expected in err


@pytest.mark.parametrize(
    ("text", "size"), [("1GiB", 1 << 30), ("64 mib", 64 << 20), ("100MB", 10**8), ("17", 17), ("1.5KiB", 1536)]
)
def test_sizes_are_parsed(text: str, size: int):
    assert size_of(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1MiB", "1XB", "1 2"])
def test_other_sizes_are_refused(text: str):
    with pytest.raises(InvalidArgument, match="is not understood"):
        size_of(text)


def test_durations_are_parsed():
    assert [duration_of(text) for text in ("5m", "1.5h", "0.25", "7d")] == [300, 5400, 0.25, 604800]
    for text in ("soon", "-1", "nan", "inf"):
        with pytest.raises(InvalidArgument, match="duration"):
            duration_of(text)


def test_values_are_formatted():
    assert [format_size(size) for size in (0, 1023, 1536, 200 << 20)] == ["0 B", "1023 B", "1.5 KiB", "200 MiB"]
    assert [format_duration(seconds) for seconds in (None, 3 * 86400, 5400, 1.5)] == ["forever", "3d", "90m", "1.5s"]
    assert printable("grün\x07\u202e") == "grün\\x07\\u202e"


def test_control_characters_are_shown_as_escapes(capsys: pytest.CaptureFixture[str]):
    print_table(["address"], [["plait://\x1b]0;owned\x07host\r\n:1"]])
    print_facts([("broker", "\x1b[2Jgone")])
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "plait://\\x1b]0;owned\\x07host\\r\\n:1" in shown
    assert "\\x1b[2Jgone" in shown
