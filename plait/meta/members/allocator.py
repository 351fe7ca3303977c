"""Recomputes the allocations of ordered groups whose members changed.

Allocations are computed in short slices, so that heartbeats are answered in between, and written many at a time.
Another thread may write them while this one answers heartbeats, so a slow disk does not delay heartbeats. Every write
is a compare-and-set, so the second thread is as safe as a second meta server. A group whose members change during the
write is stale again and is recomputed.
"""

from __future__ import annotations

from typing import NamedTuple

from plait.errors import GroupNotFound
from plait.meta.core import Core
from plait.meta.database.connection import ConcurrentChange
from plait.meta.database.mirror import GroupKey, Packed
from plait.meta.database.schema import AllocationRow
from plait.meta.database.store import Store, StoreChange
from plait.meta.members.allocation import allocate
from plait.meta.members.shares import Shares
from plait.wire.admin.cluster import AllocationReply


class _Computed(NamedTuple):
    """A computed allocation that is not written yet."""

    before: AllocationRow
    row: AllocationRow
    packed: Packed


class AllocationWrite:
    """Allocations that are written in one transaction."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.made: dict[GroupKey, _Computed] = {}
        self._change: StoreChange | None = None
        self._error: Exception | None = None

    def carry_out(self) -> None:
        """Write the allocations. Idempotent. Any thread may call this while no other thread uses the object."""
        if self._change is not None or self._error is not None:
            return
        try:
            with self._store.change() as change:
                change.replace(*((each.before, each.row) for each in self.made.values()))
        except Exception as error:  # noqa: BLE001 - raised by ``result``
            self._error = error
        else:
            self._change = change

    def result(self) -> StoreChange:
        """The committed change. Raises the error of a failed write."""
        if self._error is not None:
            raise self._error
        assert self._change is not None
        return self._change


class Allocator:
    """Computes allocations in slices and passes them on as ``writing``."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._made = AllocationWrite(core.store)
        #: The caller should carry this out before the next ``run``; otherwise ``run`` does it.
        self.writing: AllocationWrite | None = None

    def run(self) -> None:
        """Apply the written allocations to the mirror, then compute more for one slice of time."""
        if self.writing is not None:
            self._take_in(self.writing)
        core, mirror, made = self._core, self._core.mirror, self._made.made
        limits, begin = core.limits, core.clock.monotonic()
        for key in mirror.stale:
            if key in made:
                continue
            # Above every known change: the group's own epochs may come from an older copy of the database.
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

    def view(self, subject: str, name: str) -> AllocationReply:
        """The members of a group and their shares."""
        self._core.refresh()
        mirror, key = self._core.mirror, (subject, name)
        group = mirror.groups.get(key)
        if group is None or group.deleted:
            raise GroupNotFound(
                f"group {name!r} has never consumed subject {subject!r}; see 'plait group list'",
                subject=subject,
                group=name,
            )
        clients = sorted(mirror.members.get(key, ()))
        if not mirror.settings[key].ordered:
            return AllocationReply(subject, name, "shared", 0, {client: [] for client in clients})
        members = {client: mirror.shares(key).lps(client) for client in clients}
        return AllocationReply(subject, name, "exclusive", mirror.allocation(key).epoch, members)
