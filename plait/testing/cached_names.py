"""The file names of a simulated disk: the names that programs see now, and the names that are durable.

Creating, renaming or removing a file changes one or two names. The change is durable once the directories of these
names were synced. Until then a crash keeps or loses each change at random, but in the order of the changes of a name:

- if a crash loses a change, it also loses all later changes of the same names;
- if a change becomes durable, all earlier changes of the same names become durable too.
"""

from __future__ import annotations

import posixpath
import random
from typing import NamedTuple

from plait.testing.cached_file import SURVIVAL_ODDS, CachedFile, Keep


class NameChange(NamedTuple):
    """A change of one file's names. A new file has only ``added``, a removed file ``removed``, a renamed file both."""

    number: int
    removed: str | None
    added: str | None
    file: CachedFile
    #: Directories that must be synced before the change is durable.
    unsynced: frozenset[str]

    @property
    def names(self) -> set[str]:
        """The names that the change adds or removes."""
        return {name for name in (self.removed, self.added) if name is not None}

    def apply(self, files: dict[str, CachedFile]) -> None:
        if self.removed is not None:
            files.pop(self.removed, None)
        if self.added is not None:
            files[self.added] = self.file


class CachedNames:
    """The files of a disk by full path: those that programs see (``files``), and those whose names are durable."""

    def __init__(self, files: dict[str, CachedFile] | None = None) -> None:
        self.files = files or {}
        #: The number of changes so far. A sync makes the changes durable whose number is below its value at the sync's
        #: start.
        self.changes = 0
        self._durable = self.files.copy()
        self._unsynced: list[NameChange] = []

    def change(self, removed: str | None, added: str | None, file: CachedFile) -> None:
        """Remove the name ``removed`` of the file, and add the name ``added``, in one step."""
        directories = frozenset(posixpath.dirname(name) for name in (removed, added) if name is not None)
        change = NameChange(self.changes, removed, added, file, directories)
        self.changes += 1
        self._unsynced.append(change)
        change.apply(self.files)

    def sync(self, directory: str, until: int) -> None:
        """Sync a directory. Changes with numbers below ``until`` that need no other directory become durable."""
        self._unsynced = [
            change._replace(unsynced=change.unsynced - {directory}) if change.number < until else change
            for change in self._unsynced
        ]
        self._settle(set())

    def sync_name(self, path: str) -> None:
        """Make every change of one name durable."""
        self._settle({path})

    def after_crash(self, rng: random.Random, keep: Keep) -> CachedNames:
        """The names and contents that survive a crash. Each call makes new random choices."""
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
        files = [*self.files.values(), *self._durable.values(), *(change.file for change in self._unsynced)]
        copies = {file: file.copy() for file in dict.fromkeys(files)}
        other = CachedNames({name: copies[file] for name, file in self.files.items()})
        other.changes = self.changes
        other._durable = {name: copies[file] for name, file in self._durable.items()}
        other._unsynced = [change._replace(file=copies[change.file]) for change in self._unsynced]
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
