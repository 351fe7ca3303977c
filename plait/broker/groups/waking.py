"""Finds groups with failed messages that are due, and answers suspended requests when rows come.

Every send runs ``WaiterWaking``, so an error there fails one group or one reader and never the turn.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterator

from plait.broker.groups.group import Group
from plait.broker.partitions.partition import Delivery, Partition
from plait.storage.logs.log import Log

log = logging.getLogger("plait.broker")

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
