"""Suspended pulls and reads: they wait until rows come or their time is up.

A commit answers suspended requests, so an error while one group or reader is served must not fail the turn. Groups and
partitions are typed ``Any`` here, because their modules import this one.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import msgspec

log = logging.getLogger("plait.broker")

#: A heap is cleaned when it has this many entries more than twice those that the last cleaning left.
STALE_MAX = 64

Item = TypeVar("Item")


class Waiter(msgspec.Struct, eq=False):
    """A pull or read that found no rows. It is in its queue until its deadline, or until it is answered."""

    queue: dict[Waiter, None]
    consumer: Any
    count: int
    size: int
    reply: Callable[..., None]
    #: On the monotonic clock; 0: the waiter has left its queue.
    deadline: float
    sequence: int = 0
    #: For a read: reads from (sequence, row count, size), where count and size are limits.
    read: Callable[[int, int, int], Any] | None = None
    #: For a read: its filter.
    wanted: Any = None
    #: For a read with a filter: the budget was used up when the read arrived; its first examination answers it.
    deferred: bool = False

    def leave(self) -> bool:
        """Leave the queue; False if it has left already. Only the caller that gets True may answer it."""
        if not self.deadline:
            return False
        self.deadline = 0.0
        del self.queue[self]
        return True

    def time_out(self) -> None:
        """Answer with no rows, unless it was answered."""
        if self.leave():
            self.reply(None)


class DueHeap(Generic[Item]):
    """Items by due time. An entry is outdated when its item has another due time now."""

    def __init__(self, due_of: Callable[[Item], float]) -> None:
        self._due_of = due_of
        self._heap: list[tuple[float, int, Item]] = []
        self._number = 0
        self._clean_at = STALE_MAX

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, due: float, item: Item) -> None:
        self._number += 1
        heapq.heappush(self._heap, (due, self._number, item))
        if len(self._heap) > self._clean_at:
            # Drop outdated entries before they outnumber the others.
            live = {entry[2]: entry for entry in self._heap if entry[0] == self._due_of(entry[2])}
            self._heap = list(live.values())
            heapq.heapify(self._heap)
            self._clean_at = 2 * len(self._heap) + STALE_MAX

    @property
    def next(self) -> float | None:
        """The earliest due time."""
        while self._heap and self._heap[0][0] != self._due_of(self._heap[0][2]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take(self, now: float) -> Iterator[Item]:
        """Remove and yield the items that are due."""
        while self._heap and self._heap[0][0] <= now:
            due, _, item = heapq.heappop(self._heap)
            if due == self._due_of(item):
                yield item


def wake(partition: Any, newest: Any, scans: Any) -> None:
    """Answer the suspended pulls and reads of a partition, after new rows became visible.

    ``newest``: the last small frame that the commit appended, which they get from memory; None: there is none.
    """
    partition.newest = newest
    for group in list(partition.waiting):
        wake_group(group)
    if partition.readers:
        scans.wake_readers(partition)
    partition.newest = None


def wake_group(group: Any) -> None:
    """Answer a group's suspended pulls for which there are rows; while it is paused, none."""
    if group.waiters and not group.paused:
        try:
            group.serve()
        except Exception:  # noqa: BLE001 (end_pulls logs it)
            end_pulls(group)
    if not group.waiters:
        group.partition.waiting.pop(group, None)


def pause_changed(group: Any) -> None:
    """End the suspended pulls of a group that was paused, so that its consumers know; serve those of a resumed one."""
    if group.paused:
        for waiter in list(group.waiters):
            waiter.time_out()
    wake_group(group)


def end_pulls(group: Any) -> None:
    """After an error while a group was served: log the current exception and end the group's suspended pulls.

    To be called in the ``except`` clause. The clients pull again, and get the error as the reply.
    """
    log.exception("cannot serve group %s of %s", group.name, group.partition.row.name)
    for waiter in list(group.waiters):
        waiter.time_out()
