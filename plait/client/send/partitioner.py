"""Chooses the partition of a row, where a subject has several.

A row with a key goes to the partition of its LP in the route. A row without a key may go to any partition: one is
chosen at random, weighted by its number of LPs, among those whose broker is healthy. Later rows without keys go to the
same partition until its frame is sealed, because one frame of many rows costs less than many frames of one row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from plait import chance
from plait.client.send.delayed_queue import DelayedQueue
from plait.client.send.encoding import encode_key
from plait.client.send.open_rows import SHORT_KEY_MAX
from plait.client.send.partition_queue import PartitionQueue
from plait.client.send.regroup import Rows, groups_of
from plait.client.types import PendingBatch, Receipt, Ticket
from plait.limits import LOGICAL_PARTITIONS
from plait.model.logical_partitions import NO_KEY_HASH, Hashes

if TYPE_CHECKING:
    from plait.client.send.partition_sender import PartitionSender
    from plait.client.send.subject_sender import SubjectSender

Queue = TypeVar("Queue", bound=PartitionQueue)

_MASK: Final = LOGICAL_PARTITIONS - 1
_LPS: Final = np.uint64(_MASK)


class Partitioner(Generic[Queue]):
    """Chooses among the queues of one version of a route."""

    __slots__ = (
        "_changes",
        "_healthy",
        "_keyless",
        "_owners",
        "_subject_sender",
        "_table",
        "_until",
        "_weights",
        "queues",
    )

    def __init__(self, subject_sender: SubjectSender, queues: list[Queue], owners: npt.NDArray[np.int64]) -> None:
        self._subject_sender = subject_sender
        #: One for each partition that takes rows.
        self.queues = queues
        #: LP → the index of its queue; ``_table`` has the queue itself.
        self._owners = owners
        self._table: list[Queue] = [queues[owner] for owner in owners.tolist()]
        self._healthy: list[Queue] = []
        self._weights: list[int] = []
        self._changes = -1
        self._until = 0.0
        self._keyless = self.pick()

    # --- rows in --------------------------------------------------------------------------------

    def _queue(self, key: str | int | None) -> Queue:
        if key is None:
            queue = self._keyless
            if queue.no_open_rows:
                queue = self._keyless = self.pick()
            return queue
        if type(key) is not str or not 0 < len(key) < SHORT_KEY_MAX or not key.isascii():
            key = encode_key(key)
        lp: int = xxh3_64_intdigest(key.encode()) & _MASK
        return self._table[lp]

    def post(
        self, body: Any, key: str | int | None, tags: Iterable[str] | None, headers: Mapping[str, Any] | None
    ) -> Ticket:
        """Add a row. It is sent when its frame is full, or after ``linger_seconds``."""
        # The fast path for most rows.
        if type(key) is str and key.isascii() and 0 < len(key) < SHORT_KEY_MAX:
            return self._table[xxh3_64_intdigest(key.encode()) & _MASK].post(body, key, tags, headers)
        queue = self._keyless if key is None and self._keyless._rows.bodies else self._queue(key)
        return queue.post(body, key, tags, headers)

    def send(
        self, body: Any, key: str | int | None, tags: Iterable[str] | None, headers: Mapping[str, Any] | None
    ) -> tuple[PendingBatch, int]:
        """Add a row that is sent at the end of this loop turn; returns its batch and its row number there."""
        return self._queue(key).send(body, key, tags, headers)

    async def send_oneway(
        self, body: Any, key: str | int | None, tags: Iterable[str] | None, headers: Mapping[str, Any] | None
    ) -> Receipt:
        """Add a row that is sent once, at the end of this loop turn, and gets no reply."""
        queue = self.pick() if key is None else self._queue(key)
        return await queue.send_oneway(body, key, tags, headers)

    # --- choosing -------------------------------------------------------------------------------

    def pick(self, *, but: PartitionSender | None = None) -> Queue:
        """A random queue for rows that may go to any partition, other than ``but``."""
        sender = self._subject_sender
        health = sender.producer.health
        if self._changes != health.changes or sender.producer.loop.time() >= self._until:
            self._choose_healthy()
        if but is not None:
            others = [queue for queue in self._healthy if queue is not but]
            others = others or [queue for queue in self.queues if queue is not but]
            return others[min(int(chance.uniform(0, len(others))), len(others) - 1)]
        last = len(self._healthy) - 1
        return self._healthy[min(bisect_right(self._weights, chance.uniform(0, self._weights[-1])), last)]

    def _choose_healthy(self) -> None:
        """Choose the healthy queues: connected, writable, and not recently slow or failing.

        If there are none, the conditions are dropped one by one, so that at least one queue is chosen.
        """
        sender = self._subject_sender
        producer = sender.producer
        now = producer.loop.time()
        ends = [producer.health.avoided_until(sender.group_of(queue)) for queue in self.queues]
        writable = [n for n, queue in enumerate(self.queues) if sender.writable(queue)]
        connected = [n for n in writable if self.queues[n].connected]
        chosen = [n for n in connected if ends[n] <= now] or connected or writable or range(len(self.queues))
        shares = np.bincount(self._owners, minlength=len(self.queues)).tolist()
        self._healthy = [self.queues[n] for n in chosen]
        self._weights = list(accumulate(shares[n] for n in chosen))
        self._changes = producer.health.changes
        self._until = min((end for end in ends if end > now), default=float("inf"))

    # --- many rows ------------------------------------------------------------------------------

    def spread(self, hashes: Hashes | None, home: PartitionQueue | None = None) -> list[tuple[Queue, Rows | None]]:
        """The queues for rows with these key hashes, each with its row numbers; None: all rows.

        Rows without keys go to the queue of the first row with a key. If no row has a key, they go to ``home`` if it is
        still one of the queues, otherwise to a random queue.
        """
        if hashes is None:
            return [(self._home(home), None)]
        targets = self._owners[(hashes & _LPS).astype(np.int64)]
        keyless = hashes == NO_KEY_HASH
        if keyless.any():
            if keyless.all():
                return [(self._home(home), None)]
            targets[keyless] = targets[int(np.argmin(keyless))]
        return [(self.queues[target], rows) for target, rows in groups_of(targets)]

    def _home(self, home: PartitionQueue | None) -> Queue:
        for queue in self.queues:
            if queue is home:
                return queue
        return self.pick()

    def lps_of(self, queue: PartitionQueue) -> npt.NDArray[np.uint64]:
        """The LPs whose rows go to this queue."""
        return np.flatnonzero(self._owners == self.queues.index(queue)).astype(np.uint64)  # type: ignore[arg-type]


class DelayedPartitioner(Partitioner[DelayedQueue]):
    """Chooses the partition of delayed rows."""

    __slots__ = ()

    def post_at(
        self, due: int, body: Any, key: str | int | None, tags: Iterable[str] | None, headers: Mapping[str, Any] | None
    ) -> Ticket:
        """``post`` a row with its due time."""
        return self._queue(key).post_at(due, body, key, tags, headers)

    def send_at(
        self, due: int, body: Any, key: str | int | None, tags: Iterable[str] | None, headers: Mapping[str, Any] | None
    ) -> tuple[PendingBatch, int]:
        """``send`` a row with its due time."""
        return self._queue(key).send_at(due, body, key, tags, headers)
