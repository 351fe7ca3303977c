"""Help, invalid usage, and the formats of sizes and durations: tests without a node."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from plait.cli.entry import run
from plait.cli.options import duration_of, size_of
from plait.cli.output import format_duration, format_size, printable
from plait.errors import InvalidArgument
from plait.version import VERSION
from tests.cli.commands import plait

COMMANDS = {
    "serve": [
        "--data",
        "--port",
        "--flush",
        "--segment-size",
        "--retention",
        "--dead-retention",
        "--archive-before-delete",
    ],
    "meta": ["--database", "PLAIT_DATABASE", "--port", "--host", "--no-auto-create", "--log-level"],
    "broker": ["--group", "--meta", "--data", "--port", "--http", "--flush", "--segment-size", "--dead-retention"],
    "send": [
        "SUBJECT",
        "BODY",
        "--key",
        "--tag",
        "--header",
        "--file",
        "--lines",
        "--delay",
        "--deliver-at",
        "--server",
    ],
    "tail": ["SUBJECT", "--start", "--count", "--group", "--wait", "PLAIT_SERVER", "raw"],
    "subject": ["list", "describe", "create", "expand", "route", "delete"],
    "subject create": ["--retention", "--retention-size", "--partitions", "--order", "strict", "--group"],
    "subject expand": ["--partitions", "--wait", "--timeout", "--output"],
    "subject route": ["SUBJECT", "--server", "--output"],
    "subject set": ["SUBJECT", "--retention", "--retention-size", "--output"],
    "subject delete": ["--yes"],
    "group": ["list", "describe", "reset", "set", "delete", "parked", "resume", "skip"],
    "group set": ["SUBJECT", "GROUP", "--attempts", "--first", "--steps", "--expires", "--output"],
    "group delete": ["SUBJECT", "GROUP", "--yes"],
    "group parked": ["SUBJECT", "GROUP", "--partition", "--output"],
    "group resume": ["SUBJECT", "GROUP", "KEY", "--hash", "--all", "--output"],
    "group skip": ["SUBJECT", "GROUP", "KEY", "--hash", "--all", "--output"],
    "group reset": ["--to", "earliest"],
    "dlq": ["list", "show", "reasons", "resend", "purge"],
    "dlq list": ["SUBJECT", "GROUP", "--limit", "--type", "--handler", "--before", "--output"],
    "dlq resend": ["SEQUENCES", "--type", "--handler", "--before", "--rate", "--dry-run", "--all"],
    "dlq purge": ["--yes", "--all"],
    "schedule": ["list", "count", "cancel", "move"],
    "schedule list": ["--start", "--end", "--limit", "--output"],
    "schedule move": ["--delay", "--to"],
    "cluster": ["brokers", "state"],
    "cluster brokers": ["--server", "--output"],
    "cluster state": ["GROUP", "RW", "NRW", "--output"],
    "spark": ["archive"],
    "spark archive": ["--data", "--to", "--now", "--raw", "--follow", "--every", "--compact", "--verify", "--master"],
    "bench": ["--count", "--size", "--keys", "--batch", "--embedded"],
    "doctor": ["DATA", "--output"],
}


def test_help_names_every_command():
    result = plait("--help")
    assert (result.returncode, result.stderr) == (0, b"")
    missing = [name for name in COMMANDS if " " not in name and name not in result.stdout.decode()]
    assert missing == []


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_names_its_arguments(command: str, capsys: pytest.CaptureFixture[str]):
    assert run([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert [word for word in COMMANDS[command] if word not in text] == []


def test_the_top_level_help_imports_no_command():
    program = (
        "import sys\nfrom plait.cli.entry import run\nrun(['--help'])\n"
        "heavy = {'uvloop', 'plait.server.broker_server', 'plait.broker.broker', 'plait.cli.serving.serve',"
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
        (["group", "reset", "a", "b"], "--to requires an argument"),
        (["subject", "list", "-o", "yaml"], '"table", "json"'),
        (["subject", "create", "a", "--retention-size", "5 stones"], "size '5 stones'"),
        (["subject", "create", "a", "--order", "loose"], '"best_tried", "strict"'),
        (["subject", "create", "a", "--partitions", "many"], "many"),
        (["subject", "expand", "a"], "--partitions requires an argument"),
        (["subject", "expand", "a", "--partitions", "2", "--timeout", "soon"], "duration 'soon'"),
        (["cluster", "state", "g1", "rw"], '"RW", "R", "W", "NRW"'),
        (["group", "resume", "a", "b"], "name one key, or its --hash, or use --all"),
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


def test_the_command_line_page_has_every_option(capsys: pytest.CaptureFixture[str]):
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    commands = [*COMMANDS, "subject list", "subject describe", "group list", "group describe"]
    for command in commands:
        assert run([*command.split(), "--help"]) == 0
    options = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    assert {"--flush", "--yes", "--embedded"} <= options
    # Every command has these.
    general = {"--help", "--version", "--output"}
    assert sorted(option for option in options - general if option not in page) == []
