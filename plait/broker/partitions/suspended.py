"""Suspended requests: who waits for rows, until when."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Waiter:
    """A pull or read that found nothing and stays in its queue until rows come or its time is up."""

    __slots__ = ("_queue", "consumer", "count", "done", "reply", "sequence", "size")

    def __init__(
        self,
        queue: dict[Waiter, None],
        consumer: Any,
        count: int,
        size: int,
        reply: Callable[..., None],
        sequence: int = 0,
    ) -> None:
        self._queue = queue
        self.consumer = consumer
        self.count = count
        self.size = size
        self.reply = reply
        self.sequence = sequence
        self.done = False
        queue[self] = None

    def leave(self) -> bool:
        """Wait no longer; False if that was so already. Only who made it leave may answer it."""
        if self.done:
            return False
        self.done = True
        del self._queue[self]
        return True

    def time_out(self) -> None:
        """Answer that there was nothing, unless it was answered."""
        if self.leave():
            self.reply(None)


#: Calls of waiters that are done which may stand among the others.
DONE_MAX = 1024


class Deadlines:
    """Calls due at a time; a call whose waiter is done is dropped when its turn comes, or when there are too many."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Waiter, Callable[[Waiter], None]]] = []
        self._number = 0
        self._clean_at = DONE_MAX

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, when: float, waiter: Waiter, call: Callable[[Waiter], None]) -> None:
        self._number += 1
        heapq.heappush(self._heap, (when, self._number, waiter, call))
        if len(self._heap) > self._clean_at:
            # One that waits long would keep all that were answered meanwhile.
            self._heap = [entry for entry in self._heap if not entry[2].done]
            heapq.heapify(self._heap)
            self._clean_at = 2 * len(self._heap) + DONE_MAX

    @property
    def next(self) -> float | None:
        """When the earliest live deadline is."""
        while self._heap and self._heap[0][2].done:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def run(self, now: float) -> None:
        """Call everything that is due."""
        while self._heap and self._heap[0][0] <= now:
            _, _, waiter, call = heapq.heappop(self._heap)
            if not waiter.done:
                call(waiter)
