"""The names of a simulated disk: those visible now, and those that certainly survive a crash.

A change of names (a file created, renamed or removed) is certain once its directories were synced. Until
then a crash keeps or loses each change independently, but the changes of one name keep their order: a lost change
loses the later changes of its names too, a certain change makes the earlier ones certain.
"""

from __future__ import annotations

import posixpath
import random
from collections.abc import Callable
from typing import NamedTuple

from plait.testing.cached_file import SURVIVAL_ODDS, CachedFile, Keep


class NameChange(NamedTuple):
    """A removed name, an added name, or both, when a file was renamed."""

    number: int
    removed: str | None
    added: str | None
    file: CachedFile
    #: Directories to be synced before the change is certain.
    unsynced: frozenset[str]

    @property
    def names(self) -> set[str]:
        """The names it changes."""
        return {name for name in (self.removed, self.added) if name is not None}

    def apply(self, files: dict[str, CachedFile]) -> None:
        """Apply the change to ``files``."""
        if self.removed is not None:
            files.pop(self.removed, None)
        if self.added is not None:
            files[self.added] = self.file


class CachedNames:
    """Full path → file, as seen now (``files``) and as certain to survive."""

    def __init__(self, files: dict[str, CachedFile] | None = None) -> None:
        self.files = files or {}
        #: Changes made so far; a sync covers those below the value it saw when it began.
        self.changes = 0
        self._durable = self.files.copy()
        self._unsynced: list[NameChange] = []

    def change(self, removed: str | None, added: str | None, file: CachedFile) -> None:
        """Remove a name of the file, add one, or both in one step."""
        directories = frozenset(posixpath.dirname(name) for name in (removed, added) if name is not None)
        change = NameChange(self.changes, removed, added, file, directories)
        self.changes += 1
        self._unsynced.append(change)
        change.apply(self.files)

    def sync(self, directory: str, until: int) -> None:
        """A sync of a directory: changes below ``until`` no longer depend on it to be certain."""
        self._unsynced = [
            change._replace(unsynced=change.unsynced - {directory}) if change.number < until else change
            for change in self._unsynced
        ]
        self._settle(set())

    def sync_name(self, path: str) -> None:
        """Every change of one name is certain."""
        self._settle({path})

    def after_crash(self, rng: random.Random, keep: Keep) -> CachedNames:
        """The names and contents that survive, by a new random choice on each call."""
        odds = rng.choice(SURVIVAL_ODDS) if keep == "random" else float(keep == "all")
        files = self._durable.copy()
        lost: set[str] = set()
        for change in self._unsynced:
            if lost.isdisjoint(change.names) and rng.random() < odds:
                change.apply(files)
            else:
                lost |= change.names
        return CachedNames({name: file.after_crash(rng, keep) for name, file in files.items()})

    def copy(self) -> CachedNames:
        """The same names and contents, with the same unsynced changes."""
        copied = _once_each(CachedFile.copy)
        other = CachedNames({name: copied(file) for name, file in self.files.items()})
        other.changes = self.changes
        other._durable = {name: copied(file) for name, file in self._durable.items()}
        other._unsynced = [change._replace(file=copied(change.file)) for change in self._unsynced]
        return other

    def _settle(self, certain: set[str]) -> None:
        settled = []
        waiting = []
        for change in reversed(self._unsynced):
            if change.unsynced and certain.isdisjoint(change.names):
                waiting.append(change)
            else:
                certain |= change.names
                settled.append(change)
        for change in reversed(settled):
            change.apply(self._durable)
        self._unsynced = waiting[::-1]


def _once_each(copy: Callable[[CachedFile], CachedFile]) -> Callable[[CachedFile], CachedFile]:
    copies: dict[int, CachedFile] = {}

    def copied(file: CachedFile) -> CachedFile:
        if id(file) not in copies:
            copies[id(file)] = copy(file)
        return copies[id(file)]

    return copied
