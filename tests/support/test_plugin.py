"""The pytest plugin, run on small suites in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).resolve().parents[2]


class Suite:
    """A directory with one test file, run by a separate pytest that loads only our plugin."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "pytest.ini").write_text("[pytest]\nending_seconds = 0.3\nmarkers =\n    deep(suite): long\n")

    def run(self, source: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        (self.directory / "test_inner.py").write_text(dedent(source))
        command = [sys.executable, "-m", "pytest", "-p", "tests.support.plugin", "-p", "no:cacheprovider"]
        inherited = {k: v for k, v in os.environ.items() if k not in ("PLAIT_REQUIRE", "PLAIT_SEED")}
        inherited |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment}
        return subprocess.run(
            [*command, "-rs", *arguments], cwd=self.directory, env=inherited, capture_output=True, text=True
        )


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path)


WANTS = """
    from tests.support.require import require
    def test_wants():
        require(False, "the frobnicator is not installed")
"""


def test_a_missing_requirement_skips_with_the_reason(suite: Suite):
    result = suite.run(WANTS)
    assert result.returncode == 0, result.stdout
    assert "1 skipped" in result.stdout
    assert "the frobnicator is not installed" in result.stdout


SKIPS = """
    import pytest
    @pytest.mark.skipif(True, reason="of the moon")
    def test_skips(): ...
"""
SKIPS_ALL = """
    import pytest
    pytest.importorskip("no_such_module_anywhere")
"""


@pytest.mark.parametrize(
    ("source", "reason"),
    [(WANTS, "the frobnicator is not installed"), (SKIPS, "of the moon"), (SKIPS_ALL, "no_such_module_anywhere")],
)
def test_a_skip_fails_where_everything_is_required(suite: Suite, source: str, reason: str):
    result = suite.run(source, PLAIT_REQUIRE="all")
    assert result.returncode not in (0, 5)
    assert reason in result.stdout


LEAKS_A_DAEMON = """
    import subprocess, sys
    ORPHAN = (
        "import os, signal; os.fork() and os._exit(0); os.setsid();"
        "print(os.getpid(), flush=True); signal.pause()"
    )
    def test_leaks():
        child = subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True)
        with open("pid", "w") as file:
            file.write(child.stdout.readline())
        child.stdout.close()
        child.wait()
"""


#: Without workers, and with one.
SHARED = ((), ("-p", "xdist", "-n", "1"))


@pytest.mark.parametrize("shared", SHARED, ids=["alone", "shared"])
def test_an_orphaned_process_fails_the_run_and_is_ended(suite: Suite, shared: tuple[str, ...]):
    result = suite.run(LEAKS_A_DAEMON, "-W", "ignore", *shared)
    assert result.returncode == 1, result.stdout
    assert "1 passed" in result.stdout
    pid = int((suite.directory / "pid").read_text())
    assert f"process {pid}:" in result.stdout
    status = Path(f"/proc/{pid}/stat")
    assert not status.exists() or status.read_text().split()[2] == "Z"


@pytest.mark.parametrize("shared", SHARED, ids=["alone", "shared"])
def test_a_listening_port_fails_the_run(suite: Suite, shared: tuple[str, ...]):
    source = """
        import socket
        held = []
        def test_leaks():
            held.append(socket.create_server(("127.0.0.1", 0)))
    """
    result = suite.run(source, *shared)
    assert result.returncode == 1, result.stdout
    assert "port 127.0.0.1:" in result.stdout


DEEP = """
    import os, pytest
    @pytest.mark.deep("crash")
    def test_crash(seed): print("seed", seed)
    @pytest.mark.deep("speed")
    def test_speed(cycles):
        done = list(cycles(3)) if "FAIL" not in os.environ else [next(cycles(3)), next(iter([]))]
"""


def test_a_suite_runs_its_own_deep_tests_only(suite: Suite):
    result = suite.run(DEEP, "--suite", "crash", "-v")
    assert result.returncode == 0, result.stdout
    assert "test_crash PASSED" in result.stdout
    assert "test_speed" not in result.stdout


def test_an_unknown_suite_is_refused_with_the_known_ones(suite: Suite):
    result = suite.run(DEEP, "--suite", "crush")
    assert result.returncode == 4
    assert "all, crash, speed" in result.stdout + result.stderr


def test_an_interrupted_deep_run_resumes_with_the_remaining_tests(suite: Suite):
    first = suite.run(DEEP, "--suite", "all", "-v", FAIL="1")
    assert "test_crash PASSED" in first.stdout
    assert "1 failed" in first.stdout
    assert "make test-deep SUITE=speed" in first.stdout
    second = suite.run(DEEP, "--suite", "all", "-v")
    assert second.returncode == 0, second.stdout
    assert "test_crash" not in second.stdout
    assert "test_speed PASSED" in second.stdout
    third = suite.run(DEEP, "--suite", "all")
    assert "2 passed" in third.stdout


def test_the_same_seed_gives_a_test_the_same_number(suite: Suite):
    seeds = [suite.run(DEEP, "-k", "crash", "-s", PLAIT_SEED=seed).stdout for seed in ("7", "7", "8")]
    numbers = [text.split("seed ")[1].split()[0] for text in seeds]
    assert numbers[0] == numbers[1] != numbers[2]


def test_examples_are_the_same_in_every_run_unless_a_seed_is_given(suite: Suite):
    source = """
        from hypothesis import given, strategies as st
        drawn = []
        @given(st.integers())
        def test_draws(number):
            drawn.append(number)
        def test_tells():
            print("drawn", drawn)
    """
    lines = []
    for environment in ({}, {}, {"PLAIT_SEED": "5"}, {"PLAIT_SEED": "5"}, {"PLAIT_SEED": "6"}):
        result = suite.run(source, "-s", "-p", "_hypothesis_pytestplugin", **environment)
        lines += [line for line in result.stdout.splitlines() if "drawn" in line]
    first, again, five, five_again, six = lines
    assert first == again
    assert five == five_again
    assert len({first, five, six}) == 3
