"""The class-data archive: prepared once, used by every later session, removed when no session uses it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plait.spark.runtime.warmup import UNUSED_SECONDS_MAX, _remove_unused

PROGRAM = """
import plait.spark
archive = plait.spark.prepare()
written = archive.stat()
assert plait.spark.prepare() == archive and archive.stat() == written
spark = plait.spark.session(master="local[2]")
assert spark.range(10).count() == 10
with open(f"/proc/{spark._jvm.java.lang.ProcessHandle.current().pid()}/maps") as maps:
    print(any(str(archive) in line for line in maps), sorted(path.name for path in archive.parent.iterdir()))
"""


@pytest.mark.deep("spark")
def test_a_prepared_archive_is_used_by_the_next_session(tmp_path: Path):
    environ = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM]
    output = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout
    used, names = output.strip().split(" ", 1)
    assert used == "True"
    assert "spark.jsa" in names
    assert ".archive" not in names


def test_archives_that_no_session_has_used_for_a_long_time_are_removed(tmp_path: Path):
    used, unused = tmp_path / "spark-used", tmp_path / "spark-unused"
    for runtime in (used, unused):
        runtime.mkdir()
        (runtime / "spark.jsa").touch()
        (runtime / "log4j2.properties").touch()
    long_ago = time.time() - UNUSED_SECONDS_MAX - 60
    os.utime(unused, (long_ago, long_ago))
    _remove_unused(tmp_path)
    assert (used / "spark.jsa").exists()
    # A session may still use the other files.
    assert [path.name for path in unused.iterdir()] == ["log4j2.properties"]
