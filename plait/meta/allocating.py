"""Brings the allocations of ordered groups up to date: computed slice by slice, written many at a time.

A slice is short, so that heartbeats pass between two of them. What was computed may be written by another thread, while
this one answers heartbeats: a disk takes what time it likes. Every row is compared before it is set, so that is as safe
as another meta server that does the same; a group whose members change meanwhile is behind afterwards, and comes again.
"""

from __future__ import annotations

from typing import NamedTuple

from plait.meta.allocation import allocate
from plait.meta.core import Core
from plait.meta.database import Lost
from plait.meta.mirror import GroupKey, Packed
from plait.meta.schema import StoredAllocation
from plait.meta.shares import Shares
from plait.meta.store import Change, Store


class _Made(NamedTuple):
    """A new allocation."""

    before: StoredAllocation
    row: StoredAllocation
    packed: Packed


class Writing:
    """Allocations on their way to the database."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.made: dict[GroupKey, _Made] = {}
        self._change: Change | None = None
        self._error: Exception | None = None

    def carry_out(self) -> None:
        """Write them, unless that is done. Any thread may do this, while nobody else uses the object."""
        if self._change is not None or self._error is not None:
            return
        try:
            with self._store.change() as change:
                change.replace(*((each.before, each.row) for each in self.made.values()))
        except Exception as error:  # noqa: BLE001 - told to who asks for the result
            self._error = error
        else:
            self._change = change

    def result(self) -> Change:
        """What was written, or why it could not be."""
        if self._error is not None:
            raise self._error
        assert self._change is not None
        return self._change


class Allocating:
    """See the module."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._made = Writing(core.store)
        #: To be carried out before the next call of ``run``, which otherwise does it.
        self.writing: Writing | None = None

    def run(self) -> None:
        """Take in what was written, and compute some more: as much as fits into a slice of time."""
        if self.writing is not None:
            self._take_in(self.writing)
        core, mirror, made = self._core, self._core.mirror, self._made.made
        limits, begin = core.limits, core.clock.monotonic()
        for key in mirror.stale:
            if key in made:
                continue
            # Above every change that is known: a group's own epochs may be those of an older copy of the database.
            after = allocate(list(mirror.members[key]), mirror.allocation(key), above=mirror.seen)
            row = StoredAllocation(*key, after.epoch, mirror.touched[key], after.encode())
            made[key] = _Made(mirror.allocations[key], row, Packed(row.body, after, Shares(*key, after)))
            if len(made) == limits.write_groups or core.clock.monotonic() - begin >= limits.slice_seconds:
                break
        if made and (len(made) == limits.write_groups or len(made) >= len(mirror.stale)):
            self.writing, self._made = self._made, Writing(core.store)

    def _take_in(self, writing: Writing) -> None:
        core = self._core
        self.writing = None
        writing.carry_out()
        try:
            with core.noted():
                change = writing.result()
        except Lost:
            core.refresh()
            return
        core.take_in(change, {key: made.packed for key, made in writing.made.items()})
