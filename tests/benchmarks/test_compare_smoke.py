"""The comparison with an earlier commit runs, with tiny sizes and processes for both sides."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.require import require

ROOT = Path(__file__).resolve().parent.parent.parent


# Starts the servers and programs of both sides one after the other.
@pytest.mark.deep("benchmarks")
def test_a_workload_is_compared_with_the_last_commit():
    require((ROOT / ".git").exists(), "there is no repository with an earlier commit")
    command = [sys.executable, "-m", "benchmarks.compare", "HEAD", "--rounds", "1", "--share", "0.001"]
    command += ["--only", "ack_messages"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False)
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["ack_messages"], done.stderr
    assert all(line.endswith(("met", "missed")) for line in lines)
