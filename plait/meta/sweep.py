"""Removes from the database what was deleted a while ago, and that nobody has to hear of any more."""

from __future__ import annotations

from plait.meta.core import Core
from plait.meta.database import Lost
from plait.meta.schema import Row

#: Rows that are removed in one transaction.
ROWS_MAX = 1_000


class Sweep:
    """Now and then, in small pieces."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._waited = 0.0
        #: Everything up to this change has been in the database for the whole of the last pause.
        self._old = -1

    def run(self, seconds: float) -> None:
        """Time has passed."""
        self._waited += seconds
        if self._waited < self._core.limits.clean_seconds:
            return
        self._waited = 0.0
        rows = self._removable()[:ROWS_MAX]
        self._old = self._core.mirror.seen
        if rows:
            try:
                with self._core.change() as change:
                    change.remove(*rows)
            except Lost:
                self._core.refresh()

    def _removable(self) -> list[Row]:
        mirror, old = self._core.mirror, self._old
        rows: list[Row] = []
        for member in mirror.left.values():
            allocation = mirror.allocations.get((member.subject, member.name))
            # Its leaving must be in the allocation: who starts anew learns of it from there only.
            if member.changed <= old and (allocation is None or allocation.seen >= member.changed):
                rows.append(member)
        rows += [row for row in mirror.partitions.values() if row.state == "gone" and row.changed <= old]
        # What others still refer to stays.
        in_use = {row.subject for row in mirror.partitions.values()} | {row.subject for row in mirror.left.values()}
        for name, subject in mirror.subjects.items():
            if subject.deleted and subject.changed <= old and name not in in_use:
                keys = [(name, group) for group in mirror.groups_of.get(name, ())]
                rows += [mirror.allocations[key] for key in keys if key in mirror.allocations]
                rows += [mirror.groups[key] for key in keys]
                rows += [mirror.routes[name]] if name in mirror.routes else []
                rows.append(subject)
        return rows
