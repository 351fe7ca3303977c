"""Defective ways to commit a manifest; ``slow_archivers`` has to find each of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from plait.spark.archiving import manifest_votes as commits
from plait.spark.archiving.archive_files import ArchiveFiles
from plait.spark.archiving.manifest import Archive
from plait.spark.archiving.manifest_votes import Votes, conflict, look, manifest_name
from tests.spark.slow_archivers import Archivers

Plant = Callable[[pytest.MonkeyPatch, Archivers], None]


def checks_only_its_own_number(patch: pytest.MonkeyPatch, archivers: Archivers) -> None:
    """Creates a file that must not exist, but does not check whether later numbers exist."""

    def commit(directory: ArchiveFiles, number: int, writer: str, previous: str, data: bytes) -> None:
        directory.put(manifest_name(number, writer), data)
        archivers.turns.step()
        if any(f"/commit-{number:020d}-" in path for path in archivers.store.files):
            raise conflict(directory, number, number)
        name = f"archive/_plait/commit-{number:020d}-{writer}"
        archivers.judge.put(name, b"")
        archivers.store.files[name] = (b"", archivers.turns.count)
        prune_all(directory)

    patch.setattr(commits, "commit", commit)


def prune_all(directory: ArchiveFiles) -> None:
    """Remove all but the last five manifests, number 1 too."""
    votes = look(directory)
    for number, writer in sorted(votes.committed.items())[:-5]:
        directory.discard(manifest_name(number, writer))
        directory.discard(f"commit-{number:020d}-{writer}")


def claims_that_expire_by_the_clock(patch: pytest.MonkeyPatch, archivers: Archivers) -> None:
    """Puts a claim and looks for other claims; a claim that is ten minutes old by the clock counts as abandoned."""
    claims = re.compile(r"claim-(\d{20})-([0-9a-f]+)")

    def commit(directory: ArchiveFiles, number: int, writer: str, previous: str, data: bytes) -> None:
        assert isinstance(directory, Archive)
        directory.put(manifest_name(number, writer), data)
        claim = f"claim-{number:020d}-{writer}"
        directory.put(claim)
        try:
            now = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=archivers.turns.count)
            for info in directory.list("_plait"):
                match = claims.fullmatch(info.base_name)
                if match is None or match[2] == writer:
                    continue
                if info.mtime < now - timedelta(seconds=600):
                    directory.discard(info.base_name)
                elif int(match[1]) == number:
                    raise conflict(directory, number, number)
            if look(directory).newest >= number or not directory.has(claim):
                raise conflict(directory, number, number)
            directory.put(f"commit-{number:020d}-{writer}")
        finally:
            directory.discard(claim)
        prune_all(directory)

    patch.setattr(commits, "commit", commit)


def never_checks_again(patch: pytest.MonkeyPatch, archivers: Archivers) -> None:
    """After its accept, takes its manifest as chosen, whatever other ballots there are."""
    found = Votes.highest
    asked: dict[int, int] = {}

    def highest(votes: Votes, number: int) -> tuple[int, str]:
        asked[archivers_turn()] = asked.get(archivers_turn(), 0) + 1
        return (0, "") if asked[archivers_turn()] % 3 == 0 else found(votes, number)

    def archivers_turn() -> int:
        return hash(archivers.turns.me)

    patch.setattr(Votes, "highest", highest)


def prefers_its_own_manifest(patch: pytest.MonkeyPatch, archivers: Archivers) -> None:
    """Ignores the manifests that another archiver has accepted."""
    patch.setattr(Votes, "accepted", lambda votes, number: None)


def removes_votes_too_soon(patch: pytest.MonkeyPatch, archivers: Archivers) -> None:
    """Removes the votes on a number with its commit."""
    history = Votes.history
    patch.setattr(Votes, "history", lambda votes, number: history(votes, number + commits.KEEP + 1)[::-1][:1])


def ignores_later_manifests(patch: pytest.MonkeyPatch, archivers: Archivers) -> None:
    """Checks neither later manifests nor its own predecessor."""
    patch.setattr(commits, "_is_late", lambda directory, votes, number, base: number in votes.committed)
    patch.setattr(Votes, "newest", property(lambda votes: max(votes.committed, default=0)))


DEFECTS: list[Plant] = [
    checks_only_its_own_number,
    claims_that_expire_by_the_clock,
    never_checks_again,
    prefers_its_own_manifest,
    removes_votes_too_soon,
    ignores_later_manifests,
]
