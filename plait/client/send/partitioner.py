"""Which partition a row goes to, where a subject has several.

A row with a key goes where the route leads its logical partition. One without goes anywhere: to a partition at random,
by its share of the logical partitions, among those whose broker is well. Rows that follow it go along until that
frame leaves, as one frame of many rows costs less than many of one.
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
    """The queues of one version of a route."""

    __slots__ = ("_changes", "_loose", "_outlet", "_owners", "_table", "_until", "_weights", "_well", "queues")

    def __init__(self, outlet: SubjectSender, queues: list[Queue], owners: npt.NDArray[np.int64]) -> None:
        self._outlet = outlet
        #: Those that rows are sent to.
        self.queues = queues
        #: Logical partition → the index of its queue, and the queue.
        self._owners = owners
        self._table: list[Queue] = [queues[owner] for owner in owners.tolist()]
        self._well: list[Queue] = []
        self._weights: list[int] = []
        self._changes = -1
        self._until = 0.0
        self._loose = self.pick()

    # --- rows in --------------------------------------------------------------------------------

    def _queue(self, key: str | int | None) -> Queue:
        if key is None:
            queue = self._loose
            if queue.fresh:
                queue = self._loose = self.pick()
            return queue
        if type(key) is not str or not 0 < len(key) < SHORT_KEY_MAX or not key.isascii():
            key = encode_key(key)
        lp: int = xxh3_64_intdigest(key.encode()) & _MASK
        return self._table[lp]

    def post(
        self, body: Any, key: str | int | None, tags: Iterable[str] | None, headers: Mapping[str, Any] | None
    ) -> Ticket:
        """Add a row that leaves when its frame is full or has lingered."""
        # What most rows are, in as few steps as possible.
        if type(key) is str and key.isascii() and 0 < len(key) < SHORT_KEY_MAX:
            return self._table[xxh3_64_intdigest(key.encode()) & _MASK].post(body, key, tags, headers)
        queue = self._loose if key is None and self._loose._rows.bodies else self._queue(key)
        return queue.post(body, key, tags, headers)

    def send(
        self, body: Any, key: str | int | None, tags: Iterable[str] | None, headers: Mapping[str, Any] | None
    ) -> tuple[PendingBatch, int]:
        """Add a row that leaves at the end of this loop turn; where its fate shows."""
        return self._queue(key).send(body, key, tags, headers)

    async def send_oneway(
        self, body: Any, key: str | int | None, tags: Iterable[str] | None, headers: Mapping[str, Any] | None
    ) -> Receipt:
        """Add a row that leaves at the end of this turn, once, without an answer."""
        queue = self.pick() if key is None else self._queue(key)
        return await queue.send_oneway(body, key, tags, headers)

    # --- choosing -------------------------------------------------------------------------------

    def pick(self, *, but: PartitionSender | None = None) -> Queue:
        """A queue for rows that may go anywhere; not ``but``."""
        outlet = self._outlet
        health = outlet.producer.health
        if self._changes != health.changes or outlet.producer.loop.time() >= self._until:
            self._look()
        if but is not None:
            others = [queue for queue in self._well if queue is not but]
            others = others or [queue for queue in self.queues if queue is not but]
            return others[min(int(chance.uniform(0, len(others))), len(others) - 1)]
        last = len(self._well) - 1
        return self._well[min(bisect_right(self._weights, chance.uniform(0, self._weights[-1])), last)]

    def _look(self) -> None:
        """Who is well: connected, taking sends, and not slow or failing of late. Never nobody."""
        outlet = self._outlet
        producer = outlet.producer
        now = producer.loop.time()
        ends = [producer.health.avoided_until(outlet.group_of(queue)) for queue in self.queues]
        writable = [n for n, queue in enumerate(self.queues) if outlet.writable(queue)]
        connected = [n for n in writable if self.queues[n].connected]
        chosen = [n for n in connected if ends[n] <= now] or connected or writable or range(len(self.queues))
        shares = np.bincount(self._owners, minlength=len(self.queues)).tolist()
        self._well = [self.queues[n] for n in chosen]
        self._weights = list(accumulate(shares[n] for n in chosen))
        self._changes = producer.health.changes
        self._until = min((end for end in ends if end > now), default=float("inf"))

    # --- many rows ------------------------------------------------------------------------------

    def spread(self, hashes: Hashes | None, home: PartitionQueue | None = None) -> list[tuple[Queue, Rows | None]]:
        """The queues of rows with these key hashes, and which rows each gets; None: all.

        Rows without keys go along with others, or where they are at ``home``, or anywhere.
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
        """The logical partitions that the route leads to a queue."""
        return np.flatnonzero(self._owners == self.queues.index(queue)).astype(np.uint64)  # type: ignore[arg-type]


class DelayedPartitioner(Partitioner[DelayedQueue]):
    """The same for rows that are delivered at a time of their own."""

    __slots__ = ()

    def post_at(
        self, due: int, body: Any, key: str | int | None, tags: Iterable[str] | None, headers: Mapping[str, Any] | None
    ) -> Ticket:
        """``post`` such a row."""
        return self._queue(key).post_at(due, body, key, tags, headers)

    def send_at(
        self, due: int, body: Any, key: str | int | None, tags: Iterable[str] | None, headers: Mapping[str, Any] | None
    ) -> tuple[PendingBatch, int]:
        """``send`` such a row."""
        return self._queue(key).send_at(due, body, key, tags, headers)
