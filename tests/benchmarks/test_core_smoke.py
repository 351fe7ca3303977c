"""The core benchmarks run with tiny sizes; their figures are not checked."""

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


#: Suites that start Spark, which takes longer than all other suites together.
SPARK = ("spark", "archive", "audit", "history", "sink")
#: Suites that only deep tests run: another suite of the same module, or of a cluster, covers them.
BESIDE = (
    "batches", "sync", "latency", "subjects", "restart", "idle", "storm", "scheduled", "lateness", "owners", "handover"
)  # fmt: skip


def marked(suite: str) -> object:
    return pytest.param(suite, marks=pytest.mark.deep("benchmarks")) if suite in BESIDE else suite


@pytest.mark.parametrize("suite", [marked(suite) for suite in SUITES if suite not in SPARK])
def test_a_suite_runs_and_compares_its_figures(suite: str):
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
