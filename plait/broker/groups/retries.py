"""When failed messages are due again, over all groups."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.broker.groups.shared_group import Group


#: Entries that count no more which may stand among the others, at least.
STALE_MAX = 64


class Retries:
    """Knows for each group with waiting rows the moment to look at it; nothing else is looked at."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Group]] = []
        self._number = 0
        self._clean_at = STALE_MAX

    @property
    def next(self) -> int | None:
        """The earliest moment, in microseconds of wall time."""
        return self._heap[0][0] if self._heap else None

    def expect(self, group: Group) -> None:
        """The group has rows that wait, or has other ones than before."""
        due = group.next_due
        if due is not None and (group.expected == 0 or due < group.expected):
            group.expected = due
            self._number += 1
            heapq.heappush(self._heap, (due, self._number, group))
            if len(self._heap) > self._clean_at:
                self._clean()

    def _clean(self) -> None:
        """Drop what counts no more, before it outgrows what does."""
        live = {entry[2]: entry for entry in self._heap if entry[0] == entry[2].expected}
        self._heap = list(live.values())
        heapq.heapify(self._heap)
        self._clean_at = 2 * len(self._heap) + STALE_MAX

    def due(self, now: int, failed: Callable[[Group], None]) -> Iterator[Group]:
        """The groups that have something to hand out now that they had not before; ``failed``: one raised an error."""
        while self._heap and self._heap[0][0] <= now:
            due, _, group = heapq.heappop(self._heap)
            if due != group.expected:
                # An earlier moment was put in since, and has been seen to.
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
