"""Finds the groups that have failed messages due for a retry."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.broker.groups.group import Group


#: Outdated entries that the heap may hold, at least.
STALE_MAX = 64


class Retries:
    """Has for each group with waiting rows the time of its next retry, so that other groups cost nothing."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Group]] = []
        self._number = 0
        self._clean_at = STALE_MAX

    @property
    def next(self) -> int | None:
        """The time of the earliest retry, in microseconds of wall time."""
        return self._heap[0][0] if self._heap else None

    def expect(self, group: Group) -> None:
        """Note the time of the group's next retry, after its waiting rows changed."""
        due = group.next_due
        if due is not None and (group.expected == 0 or due < group.expected):
            group.expected = due
            self._number += 1
            heapq.heappush(self._heap, (due, self._number, group))
            if len(self._heap) > self._clean_at:
                self._clean()

    def _clean(self) -> None:
        """Drop outdated entries before they outnumber the others."""
        live = {entry[2]: entry for entry in self._heap if entry[0] == entry[2].expected}
        self._heap = list(live.values())
        heapq.heapify(self._heap)
        self._clean_at = 2 * len(self._heap) + STALE_MAX

    def due(self, now: int, failed: Callable[[Group], None]) -> Iterator[Group]:
        """The groups with rows that have become due. ``failed`` is called with a group that raises an error."""
        while self._heap and self._heap[0][0] <= now:
            due, _, group = heapq.heappop(self._heap)
            if due != group.expected:
                # Outdated: an earlier time was added later, and is done.
                continue
            group.expected = 0
            try:
                ready = group.return_due(now)
            except Exception:  # noqa: BLE001 (it is logged there)
                failed(group)
                continue
            if ready:
                yield group
            self.expect(group)
