"""What an archiver takes in of a log that retention, damage or a loss of power has shortened."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.spark import archiving
from plait.spark.manifest import Archive, Gap, Source
from tests.spark.archives import Filler, archive_here, run_here


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks run in this process."""
    monkeypatch.setattr(archiving, "run_job", run_here)


def source_of(to: Path) -> Source:
    (source,) = Archive.at(to).open().sources.values()
    return source


def expire(filler: Filler) -> None:
    """All that was sent so far goes, and the segments with it."""
    filler.node.clock.advance(100)
    for _ in range(6):
        filler.node.send("others", b"x" * 4000)
        filler.node.checkpoint()
    for _ in range(2):
        filler.node.retention.run()
        filler.node.turn()


# --- what retention took ------------------------------------------------------------------------


def test_gaps_behind_what_retention_took_are_noted_as_expired_in_whichever_run_they_show(tmp_path: Path):
    data, to = tmp_path / "data", tmp_path / "archive"
    filler = Filler(data, retention_seconds=5.0)
    filler.rounds(10, ("orders", "rare"))
    archive_here(data, to, now=True)
    filler.rounds(30, ("orders", "rare"))
    expire(filler)
    filler.rounds(10)
    archive_here(data, to, now=True)
    source = source_of(to)
    assert [each.reason for each in source.left_out if each.log == "message"] == [
        "retention removed it before it was archived"
    ]
    assert source.gaps == [Gap("orders@g1", 30, 120, expired=True)]
    filler.rounds(1, ("rare",))
    archive_here(data, to, now=True)
    assert source_of(to).gaps[1:] == [Gap("rare@g1", 30, 120, expired=True)]
    assert source_of(to).overtaken == []
    filler.stop()


def test_gaps_of_damage_are_not_expired(tmp_path: Path):
    data, to = tmp_path / "data", tmp_path / "archive"
    filler = Filler(data)
    filler.rounds(40)
    filler.stop()
    path = sorted((data / "message").iterdir())[0]
    content = bytearray(path.read_bytes())
    # A size that leads nowhere.
    content[content.index(b"PL", 2000) + 4] ^= 0xFF
    path.write_bytes(content)
    archive_here(data, to, now=True, skip_damage=True)
    (gap,) = source_of(to).gaps
    assert (gap.partition, gap.end - gap.start, gap.expired) == ("orders@g1", 3, False)
