"""An archiver that is killed at any moment: no row is lost or archived twice, and no file is left."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from plait.model.reason import Reason
from plait.spark.archiving.manifest import Archive
from plait.storage.disk import RealDisk
from plait.storage.marks import read_archived
from tests.spark.archives import (
    Filler,
    archived_deaths,
    archived_events,
    archived_rows,
    files_below,
    log_deaths,
    log_rows,
)
from tests.support.deep import Cycles
from tests.support.require import require_package
from tests.support.scratch import scratch_environ

SECONDS = 300.0


def run(data: Path, to: Path, step: int, how: str = "") -> subprocess.CompletedProcess[bytes]:
    arguments = [sys.executable, "-m", "tests.spark.killed_archiver", str(data), str(to), str(step), how]
    return subprocess.run(arguments, env=scratch_environ(data.parent), capture_output=True, timeout=SECONDS)


def count_steps(data: Path, to: Path, how: str = "") -> int:
    """The number of steps of the next run, counted on a copy."""
    copies = [path.with_name(f"{path.name}-copy") for path in (data, to)]
    for path, copy in zip((data, to), copies, strict=True):
        if path.exists():
            shutil.copytree(path, copy)
    ended = run(*copies, 0, how)
    assert ended.returncode == 0, ended.stderr.decode()
    for copy in copies:
        shutil.rmtree(copy)
    return int(ended.stdout.split()[-1])


class Killing:
    """A directory that is written to, and an archiver that is killed repeatedly."""

    def __init__(self, directory: Path, seed: int, how: str = "") -> None:
        self._rng = random.Random(seed)
        self._how = how
        self.data, self.to = directory / "data", directory / "archive"
        self._filler = Filler(self.data)
        self._failing = self._filler.failing()
        #: Steps of the longest run so far: the first runs have nothing to merge.
        self._steps = self._counted = 0

    def kill(self) -> None:
        self._filler.rounds(self._rng.randrange(1, 12), ("orders", "refunds"))
        self._filler.fail(self._failing, Reason("ValueError", str(self._counted)), self._rng.randrange(1, 20))
        if self._counted < 2:
            self._steps = max(self._steps, count_steps(self.data, self.to, self._how))
            self._counted += 1
        ended = run(self.data, self.to, self._rng.randrange(1, self._steps + 1), self._how)
        assert ended.returncode in (0, -signal.SIGKILL) or b"ArchiveConflict" in ended.stderr, ended.stderr.decode()
        if Archive.at(self.to).numbers():
            rows = archived_rows(self.to)
            places = {(row["partition"], row["sequence"]) for row in rows}
            assert len(places) == len(rows), "twice"
            deaths = archived_deaths(self.to)
            assert deaths == log_deaths(self.data)[: len(deaths)]

    def end(self) -> None:
        self._filler.rounds(1)
        self._filler.stop()
        ended = run(self.data, self.to, 0, self._how)
        if b"ArchiveConflict" in ended.stderr:
            # This run completed the commit of the killed archiver, and its own work was lost.
            ended = run(self.data, self.to, 0, self._how)
        assert ended.returncode == 0, ended.stderr.decode()
        assert archived_rows(self.to) == log_rows(self.data)
        acked = [n for r in archived_events(self.to) if r["action"] == "ack" for n in range(r["start"], r["end"])]
        assert acked == list(range(self._filler.node.partition("orders").next))
        assert archived_deaths(self.to) == log_deaths(self.data) != []
        manifest = Archive.at(self.to).open()
        (source,) = manifest.sources.values()
        assert read_archived(RealDisk(self.data)).message_offset == source.message_offset
        # Readers may still use the files of the manifest before the newest.
        last_two = Archive.at(self.to).numbers()[-2:]
        named = {file.path for number in last_two for file in Archive.at(self.to).read(number).files}
        assert set(files_below(self.to)) <= named


def test_an_archiver_that_is_killed_loses_nothing_and_repeats_nothing(tmp_path: Path, seed: int):
    killing = Killing(tmp_path, seed)
    for _ in range(3):
        killing.kill()
    killing.end()


@pytest.mark.deep("spark")
def test_an_archiver_that_is_killed_at_many_steps_loses_nothing(tmp_path: Path, seed: int, cycles: Cycles):
    for number in cycles(10):
        (tmp_path / str(number)).mkdir()
        killing = Killing(tmp_path / str(number), seed + number)
        for _ in range(10):
            killing.kill()
        killing.end()


@pytest.mark.deep("spark")
def test_an_archiver_on_spark_that_is_killed_loses_nothing(tmp_path: Path, seed: int, cycles: Cycles):
    require_package("pyspark", extra="spark")
    for number in cycles(5):
        (tmp_path / str(number)).mkdir()
        killing = Killing(tmp_path / str(number), seed + number, "spark")
        for _ in range(4):
            killing.kill()
        killing.end()
