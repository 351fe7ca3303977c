"""The manifest: what an archive is as of one commit, on any file system, and who may change it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from pyarrow import fs

from plait.errors import ArchiveConflict, ArchiveError
from plait.spark import manifest as manifest_module
from plait.spark.manifest import (
    KEEP,
    Archive,
    ArchivedFile,
    Gap,
    Life,
    Manifest,
    Source,
    day_directory,
    source_id,
    subject_directory,
    subject_of,
)


def file_of(subject: str, day: int = 1, kind: str = "messages") -> ArchivedFile:
    return msgspec.convert(
        {
            "path": f"messages/{subject}-{day}",
            "kind": kind,
            "subject": subject,
            "date": f"2025-01-0{day}",
            "count": 3,
            "size": 100,
            "checksum": 7,
            "source": "g1-1",
            "start": 0,
            "end": 10,
            "partitions": {f"{subject}@g1": (0, 2)},
            "time_min": day * 100,
            "time_max": day * 100 + 50,
        },
        ArchivedFile,
    )


@pytest.fixture(params=["local", "other"])
def archive(request: pytest.FixtureRequest, tmp_path: Path) -> Archive:
    """A local directory; and one behind a file system that can only put files."""
    if request.param == "local":
        return Archive.at(tmp_path / "archive")
    return Archive(fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "archive", "other://archive")


def test_the_highest_number_is_the_truth_and_reads_back_as_written(archive: Archive):
    assert archive.load() == Manifest()
    life = Life(number=7, offset=2, ranges=[(0, 3), (4, 9)], epochs=[(0, 1), (5, 2)])
    source = Source(group="g1", message_offset=10, gaps=[Gap("a@g1", 3, 4)], lives={"a@g1": [life]})
    assert source.sequences == {"a@g1": 9}
    first = Manifest(number=1, time=5, writer="w", sources={"g1-1": source}, files=[file_of("a")])
    archive.commit(first)
    assert archive.load() == archive.open() == first
    second = msgspec.structs.replace(first, number=2, files=[file_of("a"), file_of("b")])
    archive.commit(second)
    assert archive.load() == second
    assert archive.read(1) == first


def test_a_number_is_committed_once(archive: Archive):
    archive.commit(Manifest(number=1, writer="first"))
    with pytest.raises(ArchiveConflict, match=r"another archiver.*manifest 1.*nothing is lost"):
        archive.commit(Manifest(number=1, writer="second"))
    assert archive.load().writer == "first"
    names = [info.base_name for info in archive.list("_plait")]
    assert names == ["manifest-00000000000000000001.json"]


def test_whoever_is_about_to_commit_is_respected_until_he_is_surely_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    files = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    archive = Archive(files, "archive", "other://archive")
    archive.commit(Manifest(number=1))
    other = "_plait/claim-00000000000000000002-00ff"
    archive.write(other, b"")
    with pytest.raises(ArchiveConflict, match=r"is about to commit.*or ended while it did.*again in 10 minutes"):
        archive.commit(Manifest(number=2))
    later = datetime.now(UTC) + timedelta(seconds=manifest_module.CLAIM_SECONDS + 60)

    class Later(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return later

    monkeypatch.setattr(manifest_module, "datetime", Later)
    archive.commit(Manifest(number=2))
    assert archive.load().number == 2
    assert not [info for info in archive.list("_plait") if "claim" in info.base_name]


def test_whoever_stalled_until_he_was_taken_for_gone_does_not_replace_what_another_one_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    files = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    archive = Archive(files, "archive", "other://archive")
    numbers = archive.numbers

    def stalling() -> list[int]:
        before = numbers()
        monkeypatch.undo()
        for info in archive.list("_plait"):
            archive.remove(archive.relative(info))
        archive.commit(Manifest(number=1, writer="other"))
        return before

    monkeypatch.setattr(archive, "numbers", stalling)
    with pytest.raises(ArchiveConflict, match="manifest 1 is its own"):
        archive.commit(Manifest(number=1, writer="slow"))
    assert archive.load().writer == "other"


def test_only_the_last_few_manifests_are_kept(archive: Archive):
    for number in range(1, KEEP + 4):
        archive.commit(Manifest(number=number))
    assert archive.numbers() == list(range(4, KEEP + 4))


def test_a_place_without_an_archive_is_said_to_be_none(tmp_path: Path):
    with pytest.raises(ArchiveError, match=r"is not an archive: it has no _plait/manifest-\*\.json"):
        Archive.at(tmp_path).open()
    with pytest.raises(ArchiveError, match="nowhere://x' cannot be reached"):
        Archive.at("nowhere://x")


@pytest.mark.parametrize("damage", ["cut", "flipped", "nothing"])
def test_a_damaged_manifest_is_an_error_and_no_older_one_takes_its_place(tmp_path: Path, damage: str):
    archive = Archive.at(tmp_path)
    archive.commit(Manifest(number=1))
    archive.commit(Manifest(number=2, files=[file_of("orders")]))
    path = tmp_path / "_plait" / "manifest-00000000000000000002.json"
    data = path.read_bytes()
    path.write_bytes({"cut": data[:50], "flipped": data.replace(b"orders", b"0rders"), "nothing": b""}[damage])
    with pytest.raises(ArchiveError, match=r"manifest-0+2\.json is damaged"):
        archive.load()


def test_a_newer_format_is_refused(tmp_path: Path):
    archive = Archive.at(tmp_path)
    archive.commit(Manifest(number=1, version=9))
    with pytest.raises(ArchiveError, match="format version 9, this Plait reads up to 2"):
        archive.load()


def test_files_are_found_by_kind_subject_and_time():
    files = [file_of("a", 1), file_of("a", 2), file_of("b", 1), file_of("", 1, "actions")]
    manifest = Manifest(number=1, files=files)
    assert manifest.find("messages", subjects=["a"]) == files[:2]
    assert manifest.find("messages", time_min=160) == [files[1]]
    assert manifest.find("messages", time_max=150) == [files[0], files[2]]
    assert manifest.find("actions") == [files[3]]


def test_paths_are_as_hive_and_spark_write_them():
    assert subject_directory("order.book", "2025-01-31") == "messages/subject=order.book/date=2025-01-31"
    odd = "a/b=c%#:é"
    path = subject_directory(odd, "2025-01-31")
    assert path.count("/") == 2
    assert subject_of(path) == odd
    assert day_directory("actions", "2025-01-31") == "actions/date=2025-01-31"
    assert source_id("g1", "abcd") == "g1-abcd"
