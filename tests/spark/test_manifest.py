"""The manifest: the content of an archive as of one commit, on any file system, and how archivers commit it."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

import msgspec
import pytest
from pyarrow import fs

from plait.errors import ArchiveConflict, ArchiveError
from plait.spark.archiving.manifest import (
    Archive,
    ArchivedFile,
    ArchivedGap,
    ArchivedSource,
    ArchiveManifest,
    PartitionLife,
    directory_of,
    source_id,
)
from plait.spark.archiving.manifest_votes import KEEP


def file_of(subject: str, day: int = 1, kind: str = "messages") -> ArchivedFile:
    return msgspec.convert(
        {
            "path": f"messages/{subject}-{day}",
            "kind": kind,
            "subject": subject,
            "date": f"2025-01-0{day}",
            "count": 3,
            "size": 100,
            "crc": 7,
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
    """A local directory, and one behind a file system that can only put files."""
    if request.param == "local":
        return Archive.at(tmp_path / "archive")
    return Archive(fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "archive", "other://archive")


def chain(archive: Archive, count: int) -> ArchiveManifest:
    """Commit ``count`` manifests, one after another; returns the last."""
    manifest = archive.load()
    for number in range(manifest.number + 1, manifest.number + count + 1):
        manifest = ArchiveManifest(number=number, writer=f"w{number}", previous=manifest.writer)
        archive.commit(manifest)
    return manifest


def test_the_manifest_with_the_highest_number_is_current_and_reads_back_as_written(archive: Archive):
    assert archive.load() == ArchiveManifest()
    life = PartitionLife(number=7, offset=2, ranges=[(0, 3), (4, 9)], epochs=[(0, 1), (5, 2)])
    source = ArchivedSource(group="g1", message_offset=10, gaps=[ArchivedGap("a@g1", 7, 3, 4)], lives={"a@g1": [life]})
    assert source.sequences == {"a@g1": 9}
    first = ArchiveManifest(number=1, time=5, writer="w", sources={"g1-1": source}, files=[file_of("a")])
    archive.commit(first)
    assert archive.load() == archive.open() == first
    files = [file_of("a"), file_of("b")]
    second = msgspec.structs.replace(first, number=2, files=files, writer="x", previous="w")
    archive.commit(second)
    assert archive.load() == second
    assert archive.read(1) == first


def test_a_number_is_committed_once(archive: Archive):
    archive.commit(ArchiveManifest(number=1, writer="first"))
    before = archive.names()
    with pytest.raises(ArchiveConflict, match=r"another archiver.*newest manifest is 1.*nothing is lost"):
        archive.commit(ArchiveManifest(number=1, writer="second"))
    assert archive.load().writer == "first"
    assert archive.names() == before


@pytest.mark.parametrize("others", [1, KEEP + 1])
def test_a_number_is_committed_once_however_late_the_second_commit_is(archive: Archive, others: int):
    before = chain(archive, 3)
    late = ArchiveManifest(number=4, writer="late", previous=before.writer)
    newest = chain(archive, others)
    with pytest.raises(ArchiveConflict, match=rf"newest manifest is {3 + others}, this run was to commit 4"):
        archive.commit(late)
    assert archive.load() == newest
    assert not [name for name in archive.names() if "late" in name]


def test_two_manifests_of_one_number_are_reported_as_damage(archive: Archive):
    chain(archive, 2)
    archive.put("commit-00000000000000000002-copied")
    with pytest.raises(ArchiveError, match="two manifests of number 2"):
        archive.load()


def test_only_the_newest_manifests_and_votes_are_kept(archive: Archive):
    chain(archive, KEEP + 3)
    assert archive.numbers() == list(range(4, KEEP + 4))
    votes = {int(name.split("-")[1]) for name in archive.names()}
    # Number 1 stays: only the first manifest may have no predecessor.
    assert votes == {1, *range(4, KEEP + 4)}


def test_a_place_without_an_archive_is_an_error(tmp_path: Path):
    with pytest.raises(ArchiveError, match=r"is not an archive: it has no _plait/commit-\* file"):
        Archive.at(tmp_path).open()
    with pytest.raises(ArchiveError, match="nowhere://x' cannot be reached"):
        Archive.at("nowhere://x")


@pytest.mark.parametrize("damage", ["cut", "flipped", "nothing"])
def test_a_damaged_manifest_is_an_error_and_no_older_one_is_used(tmp_path: Path, damage: str):
    archive = Archive.at(tmp_path)
    archive.commit(ArchiveManifest(number=1, writer="w1"))
    archive.commit(ArchiveManifest(number=2, writer="w2", previous="w1", files=[file_of("orders")]))
    path = tmp_path / "_plait" / "manifest-00000000000000000002-w2.json"
    data = path.read_bytes()
    path.write_bytes({"cut": data[:50], "flipped": data.replace(b"orders", b"0rders"), "nothing": b""}[damage])
    with pytest.raises(ArchiveError, match=r"manifest-0+2-w2\.json is damaged"):
        archive.load()


def test_a_newer_format_is_refused(tmp_path: Path):
    archive = Archive.at(tmp_path)
    archive.commit(ArchiveManifest(number=1, writer="w", version=9))
    with pytest.raises(ArchiveError, match="format version 9, this Plait reads 1"):
        archive.load()


def test_files_are_found_by_kind_subject_and_time():
    files = [file_of("a", 1), file_of("a", 2), file_of("b", 1), file_of("", 1, "actions")]
    manifest = ArchiveManifest(number=1, files=files)
    assert manifest.find("messages", subjects=["a"]) == files[:2]
    assert manifest.find("messages", time_min=160) == [files[1]]
    assert manifest.find("messages", time_max=150) == [files[0], files[2]]
    assert manifest.find("actions") == [files[3]]


def test_paths_are_those_of_hive_and_spark():
    assert directory_of("messages", "2025-01-31", "order.book") == "messages/subject=order.book/date=2025-01-31"
    odd = "a/b=c%#:é"
    path = directory_of("messages", "2025-01-31", odd)
    assert path.count("/") == 2
    assert unquote(path.split("/")[1]) == f"subject={odd}"
    assert directory_of("actions", "2025-01-31") == "actions/date=2025-01-31"
    assert source_id("g1", "abcd") == "g1-abcd"


def test_directories_of_a_local_archive_are_private(tmp_path: Path):
    archive = Archive.at(tmp_path / "made" / "archive")
    archive.make_directory("messages/day")
    made = [tmp_path / "made", tmp_path / "made/archive", tmp_path / "made/archive/messages/day"]
    assert {path.stat().st_mode & 0o777 for path in made} == {0o750}
    archive.make_directory("messages/day")
