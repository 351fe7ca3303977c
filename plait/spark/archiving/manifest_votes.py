"""Decides which manifest of a number is valid: archivers agree on it by the names of files, on any file system.

Several archivers may want to commit a manifest with the same number, each at its own speed. Any of them may stop for a
minute or a month between two steps, and then continue. All stores have only this in common: a file with a new name
appears at once, and every listing that begins later has it. Stores differ in whether a rename replaces a file and
whether there are conditional puts, and their clocks differ. So the decision is Disk Paxos (Gafni and Lamport, 2003)
with a file's name as the unit of writing. An archiver does these steps:

1. It writes its manifest, ``manifest-<number>-<writer>.json``, which has no effect yet.
2. It writes an empty file ``ballot-<number>-<counter>-<writer>``, with a counter above all that it has seen, and lists
   the directory. If there is a higher ballot, it starts again. If there is an ``accept`` file, the manifest that this
   file names may have been chosen, so the archiver continues with the manifest of the highest accept, not its own.
3. It writes an empty file ``accept-<number>-<counter>-<writer>-<chosen writer>``, and lists the directory again. If
   there is a higher ballot, it starts again. If not, the manifest is chosen, and every later ballot finds the accept
   file.
4. It writes an empty file ``commit-<number>-<chosen writer>``, which makes the manifest visible to readers. Each
   archiver that finds a chosen manifest may create this file, so an archiver that ends after step 3 blocks no other.

No file is ever written twice with different content, and no clock is read. The proof needs every vote on a number to
exist as long as an archiver may still vote on that number. So ``prune`` removes the predecessor of a manifest before
the votes on the manifest, and no archiver writes a removed manifest again. An archiver that still finds the predecessor
of its own manifest after step 3 has therefore seen all votes. The votes on number 1, which has no predecessor, are
never removed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from plait.errors import ArchiveConflict, ArchiveError
from plait.spark.archiving.archive_files import ArchiveFiles

#: Manifests that stay, the newest included: a reader that has just listed the archive can still read the newest.
KEEP: Final = 5
#: The most ballots that one commit starts before it fails: each restart needs another archiver at the same step.
BALLOTS_MAX: Final = 8

_MANIFEST: Final = re.compile(r"manifest-(\d{20})-([0-9a-z]+)\.json")
_BALLOT: Final = re.compile(r"ballot-(\d{20})-(\d{10})-([0-9a-z]+)")
_ACCEPT: Final = re.compile(r"accept-(\d{20})-(\d{10})-([0-9a-z]+)-([0-9a-z]+)")
_COMMIT: Final = re.compile(r"commit-(\d{20})-([0-9a-z]+)")

#: Counter and writer. No two archivers start the same ballot.
Ballot = tuple[int, str]


class Votes:
    """The votes and manifests in one listing of the directory."""

    def __init__(self, location: str, names: Iterable[str]) -> None:
        #: Number → the writer whose manifest is committed.
        self.committed: dict[int, str] = {}
        #: (number, writer) of all manifests in the listing, chosen or not.
        self.manifests: set[tuple[int, str]] = set()
        self._ballots: dict[int, Ballot] = {}
        self._accepted: dict[int, tuple[Ballot, str]] = {}
        self._names: dict[str, int] = {}
        for name in names:
            if match := _MANIFEST.fullmatch(name):
                self.manifests.add((int(match[1]), match[2]))
            elif match := _BALLOT.fullmatch(name):
                self._note(int(match[1]), (int(match[2]), match[3]))
                self._names[name] = int(match[1])
            elif match := _ACCEPT.fullmatch(name):
                number, ballot = int(match[1]), (int(match[2]), match[3])
                self._note(number, ballot)
                self._accepted[number] = max(self._accepted.get(number, (ballot, match[4])), (ballot, match[4]))
                self._names[name] = number
            elif match := _COMMIT.fullmatch(name):
                number, other = int(match[1]), self.committed.get(int(match[1]), match[2])
                if other != match[2]:
                    raise ArchiveError(
                        f"{location!r} has two manifests of number {number}, {other} and {match[2]}: a file was copied "
                        "there from elsewhere. Remove the commit file of the manifest that is not of this archive"
                    )
                self.committed[number] = match[2]
                self._names[name] = number

    def _note(self, number: int, ballot: Ballot) -> None:
        self._ballots[number] = max(self._ballots.get(number, ballot), ballot)

    @property
    def newest(self) -> int:
        """The number of the newest manifest; 0: there is none."""
        return max(self.committed, default=0)

    def highest(self, number: int) -> Ballot:
        """The highest ballot on a number; counter 0: there is none."""
        return self._ballots.get(number, (0, ""))

    def accepted(self, number: int) -> str | None:
        """The writer whose manifest the highest accept names: it may have been chosen."""
        return self._accepted[number][1] if number in self._accepted else None

    def history(self, number: int) -> tuple[list[str], list[str]]:
        """Manifests up to a number, and the votes on them. They may be removed in this order."""
        manifests = [manifest_name(*each) for each in sorted(self.manifests) if each[0] <= number]
        return manifests, [name for name, each in self._names.items() if 1 < each <= number]


def look(directory: ArchiveFiles) -> Votes:
    """The votes and manifests that exist now."""
    return Votes(directory.location, directory.names())


def commit(directory: ArchiveFiles, number: int, writer: str, previous: str, data: bytes) -> None:
    """Commit a manifest as the successor of ``previous``; it is the newest and durable when this returns.

    Raises ``ArchiveConflict`` where another manifest has this number or a higher one. If this manifest was chosen and
    another archiver committed a successor before this call returned, the successor includes this manifest's changes.
    Otherwise this manifest has no effect.
    """
    directory.put(manifest_name(number, writer), data)
    chosen = _decide(directory, number, writer, previous)
    votes = look(directory)
    if chosen != writer or votes.newest != number:
        raise conflict(directory, number, votes.newest)
    prune(directory, votes)


def prune(directory: ArchiveFiles, votes: Votes) -> None:
    """Remove old manifests and votes, each manifest before the votes on its successor."""
    for names in votes.history(votes.newest - KEEP):
        for name in names:
            directory.discard(name)


def _decide(directory: ArchiveFiles, number: int, writer: str, previous: str) -> str:
    """The writer whose manifest is chosen for the number: this one, or another one that was chosen before."""
    base = manifest_name(number - 1, previous) if number > 1 else ""
    ballots: list[str] = []
    proposed = False
    for _ in range(BALLOTS_MAX):
        votes = look(directory)
        if _is_late(directory, votes, number, base):
            break
        ballot = (votes.highest(number)[0] + 1, writer)
        ballots.append(f"ballot-{number:020d}-{ballot[0]:010d}-{writer}")
        directory.put(ballots[-1])
        votes = look(directory)
        if votes.highest(number) > ballot or votes.newest >= number:
            continue
        chosen = votes.accepted(number) or writer
        proposed = proposed or chosen == writer
        directory.put(f"accept-{number:020d}-{ballot[0]:010d}-{writer}-{chosen}")
        votes = look(directory)
        # In this order: a predecessor that exists now existed while the votes were listed.
        if votes.highest(number) > ballot or _is_late(directory, votes, number, base):
            continue
        directory.put(f"commit-{number:020d}-{chosen}")
        return chosen
    if votes.committed.get(number) == writer:
        return writer
    if not proposed:
        # No other archiver can choose this manifest.
        for name in (*ballots, manifest_name(number, writer)):
            directory.discard(name)
    raise conflict(directory, number, votes.newest)


def _is_late(directory: ArchiveFiles, votes: Votes, number: int, base: str) -> bool:
    """Whether the number is decided, or so old that votes on it may have been removed."""
    return votes.newest >= number or bool(base and not directory.has(base))


def conflict(directory: ArchiveFiles, number: int, newest: int) -> ArchiveConflict:
    which = f"its newest manifest is {newest}" if newest >= number else "they commit at the same time"
    return ArchiveConflict(
        f"another archiver has changed {directory.location!r} meanwhile ({which}, this run was to commit {number}); "
        "nothing was removed and nothing is lost: run archivers again, one at a time",
        number=number,
        newest=newest,
    )


def manifest_name(number: int, writer: str) -> str:
    return f"manifest-{number:020d}-{writer}.json"
