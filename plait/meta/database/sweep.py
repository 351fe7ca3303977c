"""Removes rows that were deleted long enough ago for every meta server to have seen the deletion."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from plait.meta.core import Core
from plait.meta.database.connection import ConcurrentChange
from plait.meta.database.schema import TableRow

#: Rows per transaction.
ROWS_MAX = 1_000


class Sweep:
    """Runs every ``clean_seconds``, in small transactions until nothing is left to remove."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._waited = 0.0
        #: The change that the mirror had reached when the previous sweep became due. Changes up to it are at least
        #: ``clean_seconds`` old: this sweep removes their rows. -1: none.
        self._old = -1
        #: The change that the mirror had reached when the present sweep became due: the next sweep's ``_old``.
        self._next = -1
        #: True if there may be more rows to remove.
        self._due = False

    def run(self, seconds: float) -> None:
        """Called every tick, with the time since the last call."""
        self._waited += seconds
        if self._waited >= self._core.limits.clean_seconds:
            self._waited = 0.0
            self._due = True
            self._old, self._next = self._next, self._core.mirror.seen
        if not self._due:
            return
        rows = list(islice(self._removable(), ROWS_MAX))
        if rows:
            try:
                with self._core.change() as change:
                    change.remove(*rows)
            except ConcurrentChange:
                self._core.refresh()
                return
        self._due = len(rows) == ROWS_MAX

    def _removable(self) -> Iterator[TableRow]:
        mirror, old = self._core.mirror, self._old
        for member in list(mirror.left.values()):
            allocation = mirror.allocations.get((member.subject, member.name))
            # The allocation must include the member's leave: once this row is removed, a meta server that restarts
            # learns of the leave only from the allocation.
            if member.changed <= old and (allocation is None or allocation.seen >= member.changed):
                yield member
        yield from [row for row in mirror.partitions.values() if row.state == "gone" and row.changed <= old]
        # A subject stays while partitions or members refer to it.
        in_use = {row.subject for row in mirror.partitions.values()} | {row.subject for row in mirror.left.values()}
        for name, subject in mirror.subjects.items():
            if subject.deleted and subject.changed <= old and name not in in_use:
                keys = [(name, group) for group in mirror.groups_of.get(name, ())]
                yield from [mirror.allocations[key] for key in keys if key in mirror.allocations]
                yield from [mirror.groups[key] for key in keys]
                yield from [mirror.routes[name]] if name in mirror.routes else []
                yield subject
