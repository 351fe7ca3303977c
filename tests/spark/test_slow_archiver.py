"""An archiver that others overtake changes nothing, removes nothing and reports nothing to retention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

from plait.errors import ArchiveConflict
from plait.spark.archiving import archiver as archiving
from plait.spark.archiving.manifest import Archive
from plait.spark.archiving.manifest_votes import KEEP
from plait.storage.disk import RealDisk
from plait.storage.marks import read_archived
from tests.spark.archives import Filler, archive_here, archived_rows, files_below, log_rows, run_here


def put_only(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open archives as on a store that can only put files."""

    def at(place: str | Path) -> Archive:
        name = Path(place).name
        return Archive(fs.SubTreeFileSystem(str(root), fs.LocalFileSystem()), name, f"put://{name}")

    monkeypatch.setattr(Archive, "at", staticmethod(at))


def stopped_at(moment: str, others: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the next run at ``moment``, once, while ``others`` runs."""
    if moment == "before its tasks":

        def run(*arguments: Any) -> Any:
            monkeypatch.setattr(archiving, "run_job", run_here)
            others()
            return run_here(*arguments)

        monkeypatch.setattr(archiving, "run_job", run)
        return
    inner = Archive.commit

    def commit(archive: Archive, *arguments: Any) -> Any:
        monkeypatch.setattr(Archive, "commit", inner)
        if moment == "before its commit":
            others()
            return inner(archive, *arguments)
        result = inner(archive, *arguments)
        others()
        return result

    monkeypatch.setattr(Archive, "commit", commit)


@pytest.mark.parametrize(
    ("store", "moment", "count"),
    [
        ("local", "before its tasks", KEEP + 1),
        ("local", "before its commit", 1),
        ("local", "after its commit", KEEP + 1),
        ("put only", "before its commit", KEEP + 1),
    ],
)
def test_an_archiver_that_others_overtake_loses_nothing(
    tmp_path: Path, store: str, moment: str, count: int, monkeypatch: pytest.MonkeyPatch
):
    to = tmp_path / "archive"
    if store == "put only":
        put_only(tmp_path, monkeypatch)
    monkeypatch.setattr(archiving, "run_job", run_here)
    data = tmp_path / "data"
    filler = Filler(data)
    filler.rounds(2)
    archive_here(data, to, now=True)
    filler.rounds(2)

    def others() -> None:
        for _ in range(count):
            filler.rounds(1)
            archive_here(data, to, now=True, compact=True)

    stopped_at(moment, others, monkeypatch)
    if moment == "after its commit":
        # Its commit is done; it removes and reports only what is right for the newest manifest.
        archive_here(data, to, now=True)
    else:
        with pytest.raises(ArchiveConflict, match="another archiver has changed"):
            archive_here(data, to, now=True)
    manifest = Archive.at(to).open()
    assert {file.path for file in manifest.files} <= set(files_below(to))
    assert archived_rows(to) == log_rows(data)
    (source,) = manifest.sources.values()
    assert read_archived(RealDisk(data)).message_offset == source.message_offset
    filler.rounds(1)
    archive_here(data, to, now=True)
    assert archived_rows(to) == log_rows(data)
    filler.stop()
