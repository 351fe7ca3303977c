"""Suspended reads of partitions, and the turns of the loop in which filters examine rows.

All filters share one ``ScanBudget``: they delay other requests by at most ``FILTER_SCAN_SECONDS`` in a turn, however
many readers there are. What does not fit waits for the next turn, the longest waiting first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from plait.broker.groups.waking import Waiter
from plait.broker.partitions.partition import Partition, ReadBatch
from plait.filter.message_filter import Filter
from plait.filter.scan_budget import ScanBudget

log = logging.getLogger("plait.broker")


#: Reads from (sequence, row count, size), where count and size are limits.
Read = Callable[[int, int, int], ReadBatch]


class Scans:
    """The budget of the filters of a broker, and the work that waits for a turn with room."""

    def __init__(self, monotonic: Callable[[], float], wait_seconds_max: float) -> None:
        self._monotonic = monotonic
        self._wait_seconds_max = wait_seconds_max
        #: The server sets ``on_begin``, so that the next turn of the loop calls ``next_turn``.
        self.budget = ScanBudget(monotonic)
        self._waiting: dict[object, Callable[[], None]] = {}

    # --- turns ----------------------------------------------------------------------------------

    def later(self, owner: object, work: Callable[[], None]) -> None:
        """Call ``work`` in a turn in which the budget has room; it replaces earlier work of the owner."""
        self._waiting[owner] = work

    def next_turn(self) -> None:
        """Begin a turn of the loop: do waiting work until the budget is used up."""
        self.budget.renew()
        while self._waiting and self.budget.has_room():
            # Work that is not finished adds itself again, behind the others.
            self._waiting.pop(next(iter(self._waiting)))()

    def clear(self) -> None:
        """Forget the work that waits."""
        self._waiting.clear()

    # --- reads ----------------------------------------------------------------------------------

    def read(
        self,
        partition: Partition,
        sequence: int,
        count: int,
        size: int,
        wait: float,
        reply: Callable[[ReadBatch], None],
        read: Read,
        wanted: Filter | None,
    ) -> Waiter | None:
        """Read now, or return a suspended read.

        A filter examines rows at least once before the reply, and continues in following turns until it finds some.
        """

        def answer(found: ReadBatch | None) -> None:
            reply(ReadBatch(waiter.sequence) if found is None else found)

        deferred = wanted is not None and not self.budget.has_room()
        if deferred:
            self._wake_later(partition)
        else:
            batch = read(sequence, count, size)
            if batch.count or wait <= 0 or (batch.full and wanted is None):
                reply(batch)
                return None
            sequence = max(sequence, batch.end)
            if batch.full:
                self._wake_later(partition)
        wait = self._wait_seconds_max if deferred else min(wait, self._wait_seconds_max)
        deadline = self._monotonic() + wait
        waiter = Waiter(partition.readers, None, count, size, answer, deadline, sequence, read, wanted, deferred)
        partition.readers[waiter] = None
        return waiter

    def wake_readers(self, partition: Partition) -> None:
        """Answer suspended reads of a partition for which there are rows."""
        # Readers with the same filter and position get the same rows.
        found: dict[tuple[Filter, int, int, int], ReadBatch] = {}
        for waiter in list(partition.readers):
            if waiter.deadline and (waiter.sequence < partition.visible or waiter.deferred):
                try:
                    self._wake(partition, waiter, found)
                except Exception:
                    log.exception("cannot answer a suspended read of %s", partition.row.name)
                    waiter.time_out()

    def _wake(self, partition: Partition, waiter: Waiter, found: dict[tuple[Filter, int, int, int], ReadBatch]) -> None:
        assert waiter.read is not None
        if waiter.wanted is None:
            batch = waiter.read(waiter.sequence, waiter.count, waiter.size)
        else:
            place = (waiter.wanted, waiter.sequence, waiter.count, waiter.size)
            same = found.get(place)
            if same is None and not self.budget.has_room():
                self._wake_later(partition)
                return
            batch = found[place] = same or waiter.read(waiter.sequence, waiter.count, waiter.size)
            # In the next turn it comes after the others.
            partition.readers[waiter] = partition.readers.pop(waiter)
        waiter.sequence = batch.end
        if batch.count or waiter.deferred:
            if waiter.leave():
                waiter.reply(batch)
        elif batch.full:
            self._wake_later(partition)

    def _wake_later(self, partition: Partition) -> None:
        self.later(partition, partial(self.wake_readers, partition))
