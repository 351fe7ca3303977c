"""The examples of README.md run against a server process."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
ADDRESS = "plait://127.0.0.1:7450"


def example(containing: str) -> str:
    found = [text for text in EXAMPLES if containing in text]
    assert len(found) == 1, f"README.md has {len(found)} examples with {containing!r}"
    return found[0]


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """The address of a server that is started as in README.md, on a free port."""
    command = [Path(sys.executable).with_name("plait"), "serve", "--data", tmp_path / "data", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        ready = server.stdout.readline()
        assert ready.startswith("ready plait://"), ready
        yield ready.split()[1]
    finally:
        server.terminate()
        server.communicate()
    assert server.returncode == 0


def run(source: str, address: str) -> subprocess.CompletedProcess[str]:
    program = source.replace(ADDRESS, address)
    assert program != source, "the example names no address"
    return subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)


def test_the_asynchronous_example_runs(address: str):
    result = run(example("client.send_many"), address)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert (lines[0].split()[-1], lines[1]) == ("0", "4")
    bodies = [line.split()[-1] for line in lines[2:]]
    assert bodies == ["b'created'", "b'paid'", "b'packed'", "b'shipped'", "b'closed'"]


def test_the_blocking_example_runs(address: str):
    result = run(example("plait.sync.connect"), address)
    assert result.returncode == 0, result.stderr


def test_the_service_example_defines_its_subscribers():
    module: dict[str, object] = {"__name__": "readme"}
    exec(example("plait.App("), module)
    exec(example("ordered=True"), module)
    assert module["app"].__class__.__name__ == "App"


def test_every_example_is_python():
    assert len(EXAMPLES) == 5
    for number, source in enumerate(EXAMPLES):
        compile(source, f"README.md example {number}", "exec")


def test_the_two_commands_are_at_the_top():
    first = README.split("```")[1].splitlines()
    assert [line.split("#")[0].strip() for line in first[1:] if line] == ["make demo", "make test"]
