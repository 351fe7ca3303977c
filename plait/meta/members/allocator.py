"""Brings the allocations of ordered groups up to date: computed slice by slice, written many at a time.

A slice is short, so that heartbeats pass between two of them. What was computed may be written by another thread, while
this one answers heartbeats: a disk takes what time it likes. Every row is compared before it is set, so that is as safe
as another meta server that does the same; a group whose members change meanwhile is behind afterwards, and comes again.
"""

from __future__ import annotations

from typing import NamedTuple

from plait.meta.core import Core
from plait.meta.database.connection import ConcurrentChange
from plait.meta.database.mirror import GroupKey, Packed
from plait.meta.database.schema import AllocationRow
from plait.meta.database.store import Store, StoreChange
from plait.meta.members.allocation import allocate
from plait.meta.members.shares import Shares


class _Computed(NamedTuple):
    """A new allocation."""

    before: AllocationRow
    row: AllocationRow
    packed: Packed


class AllocationWrite:
    """Allocations on their way to the database."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.made: dict[GroupKey, _Computed] = {}
        self._change: StoreChange | None = None
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

    def result(self) -> StoreChange:
        """What was written, or why it could not be."""
        if self._error is not None:
            raise self._error
        assert self._change is not None
        return self._change


class Allocator:
    """See the module."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._made = AllocationWrite(core.store)
        #: To be carried out before the next call of ``run``, which otherwise does it.
        self.writing: AllocationWrite | None = None

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
            row = AllocationRow(*key, after.epoch, mirror.touched[key], after.encode())
            made[key] = _Computed(mirror.allocations[key], row, Packed(row.body, after, Shares(*key, after)))
            if len(made) == limits.write_groups or core.clock.monotonic() - begin >= limits.slice_seconds:
                break
        if made and (len(made) == limits.write_groups or len(made) >= len(mirror.stale)):
            self.writing, self._made = self._made, AllocationWrite(core.store)

    def _take_in(self, writing: AllocationWrite) -> None:
        core = self._core
        self.writing = None
        writing.carry_out()
        try:
            with core.noted():
                change = writing.result()
        except ConcurrentChange:
            core.refresh()
            return
        core.take_in(change, {key: made.packed for key, made in writing.made.items()})
