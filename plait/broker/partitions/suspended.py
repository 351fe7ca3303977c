"""Suspended requests, which wait for rows until a deadline."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Waiter:
    """A pull or read that found no rows. It stays in its queue until rows come or its time is up."""

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
        """Leave the queue; False if it has left already. Only the caller that gets True may answer it."""
        if self.done:
            return False
        self.done = True
        del self._queue[self]
        return True

    def time_out(self) -> None:
        """Answer with no rows, unless it was answered."""
        if self.leave():
            self.reply(None)


#: Calls of answered waiters that the heap may hold, at least.
DONE_MAX = 1024


class Deadlines:
    """Calls at deadlines. A call whose waiter is done is dropped when it is due, or when there are too many of them."""

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
            # Otherwise answered waiters would stay in the heap until their deadlines.
            self._heap = [entry for entry in self._heap if not entry[2].done]
            heapq.heapify(self._heap)
            self._clean_at = 2 * len(self._heap) + DONE_MAX

    @property
    def next(self) -> float | None:
        """The earliest deadline of a waiter that is not done."""
        while self._heap and self._heap[0][2].done:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def run(self, now: float) -> None:
        while self._heap and self._heap[0][0] <= now:
            _, _, waiter, call = heapq.heappop(self._heap)
            if not waiter.done:
                call(waiter)
