"""The core's benchmarks run: tiny sizes, all real parts; what they would prove is not looked at."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.__main__ import SUITES
from tests.support.require import require_package, require_program


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments], capture_output=True, text=True, timeout=280, check=False
    )


#: They start Spark, which takes longer than all others together.
SPARK = ("spark", "archive", "audit", "history", "sink")
#: Another suite of the same module is run by the ordinary tests, or the same is measured in a cluster.
BESIDE = (
    "batches", "sync", "latency", "subjects", "restart", "idle", "storm", "scheduled", "lateness", "owners", "handover"
)  # fmt: skip


def marked(suite: str) -> object:
    return pytest.param(suite, marks=pytest.mark.deep("benchmarks")) if suite in BESIDE else suite


@pytest.mark.parametrize("suite", [marked(suite) for suite in SUITES if suite not in SPARK])
def test_a_suite_measures_what_it_is_for(suite: str):
    if suite == "redis":
        require_program("redis-server")
        require_package("redis")
    done = run("--smoke", suite)
    assert done.returncode == 0, done.stderr
    assert "Plait against its bars" in done.stdout
    assert " met" in done.stdout or " missed" in done.stdout


def test_an_unknown_suite_is_named():
    done = run("speed")
    assert done.returncode == 2
    assert "no such suite: speed; there are batches," in done.stderr
