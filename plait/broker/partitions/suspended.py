"""Suspended requests, which wait for rows until a deadline.

Every send runs ``WaiterWaking``, so an error there fails one group or one reader and never the turn.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plait.broker.groups.group import Group
    from plait.broker.partitions.partition import Delivery, Partition
    from plait.storage.logs.log import Log

log = logging.getLogger("plait.broker")


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
            # Otherwise answered waiters would stay behind one with a late deadline.
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
        """Call everything that is due."""
        while self._heap and self._heap[0][0] <= now:
            _, _, waiter, call = heapq.heappop(self._heap)
            if not waiter.done:
                call(waiter)


class WaiterWaking:
    """Answers the suspended requests of a broker."""

    def __init__(self, log: Log, answer_when_durable: Callable[[Callable[[], None]], None]) -> None:
        self._message_log = log
        self._answer_when_durable = answer_when_durable

    def wake(self, partition: Partition) -> None:
        """Answer requests that wait for rows of a partition."""
        for group in list(partition.waiting):
            self.wake_group(group)
        for waiter in list(partition.readers):
            try:
                batch = partition.read(self._message_log, waiter.sequence, partition.visible, waiter.count, waiter.size)
                if batch.count and waiter.leave():
                    waiter.reply(batch)
            except Exception:
                log.exception("cannot answer a suspended read of %s", partition.row.name)
                waiter.time_out()

    def wake_group(self, group: Group) -> None:
        """Answer a group's suspended pulls for which there are rows."""
        if group.waiters:
            try:
                group.serve(lambda waiter, delivery: self.deliver(group, delivery, waiter.reply))
            except Exception:  # noqa: BLE001 (it is logged there)
                self.failed(group)
        if not group.waiters:
            group.partition.waiting.pop(group, None)

    def deliver(self, group: Group, delivery: Delivery, reply: Callable[[Delivery | None], None]) -> None:
        """Answer a pull, for an at-most-once group after its event is durable."""
        if group.definition.delivery == "at_most_once":
            # R12: the event is durable before the rows are sent, whatever the flush mode.
            self._answer_when_durable(lambda: reply(delivery))
        else:
            reply(delivery)

    def failed(self, group: Group) -> None:
        """Log the error that work for a group raised; call it in the ``except`` clause. The work is left undone.

        The group's suspended pulls end. Their clients pull again, and get the error as the reply.
        """
        log.exception("cannot serve group %s of %s", group.name, group.partition.row.name)
        for waiter in list(group.waiters):
            waiter.time_out()
