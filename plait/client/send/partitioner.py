"""Chooses the partition of a row, where a subject has several.

A row with a key goes to the partition of its LP in the route. A row without a key may go to any partition: one is
chosen at random, weighted by its number of LPs, among those whose broker is healthy. Later rows without keys go to the
same partition until its frame is sealed, because one frame of many rows costs less than many frames of one row.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import Final

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from plait import chance
from plait.client.net.router import SubjectRoute
from plait.client.send.encoding import encode_key
from plait.client.send.open_rows import SHORT_KEY_MAX, OpenRows
from plait.client.send.partition_sender import PartitionSender
from plait.client.send.producer import Producer
from plait.client.send.row_columns import Rows, groups_of
from plait.limits import LOGICAL_PARTITIONS
from plait.model.logical_partitions import NO_KEY_HASH, Hashes

#: Partition senders, each with the numbers of its rows; None: all rows.
Pieces = list[tuple[PartitionSender, Rows | None]]

_MASK: Final = LOGICAL_PARTITIONS - 1
_LPS: Final = np.uint64(_MASK)


class Partitioner:
    """Chooses among the partition senders of one version of a route."""

    def __init__(
        self, producer: Producer, route: SubjectRoute, senders: list[PartitionSender], owners: npt.NDArray[np.int64]
    ) -> None:
        self._producer = producer
        #: The broker states of the route may change.
        self.route = route
        #: One sender for each partition that accepts rows.
        self.senders = senders
        #: LP → the index of its sender; ``_table`` has the sender's open rows.
        self._owners = owners
        self._table: list[OpenRows] = [senders[owner].rows for owner in owners.tolist()]
        self._healthy: list[PartitionSender] = []
        self._weights: list[int] = []
        self._changes = -1
        self._until = 0.0
        self._keyless = self.pick().rows

    def choose(self, key: str | int | None) -> OpenRows:
        """The open rows to which a row with this key is added."""
        if key is None:
            if not self._keyless.bodies:
                self._keyless = self.pick().rows
            return self._keyless
        if type(key) is not str or not 0 < len(key) < SHORT_KEY_MAX or not key.isascii():
            key = encode_key(key)
        return self._table[xxh3_64_intdigest(key.encode()) & _MASK]

    def pick(self, *, but: PartitionSender | None = None) -> PartitionSender:
        """A random sender, except ``but``, for rows that may go to any partition."""
        if self._changes != self._producer.health.changes or self._producer.loop.time() >= self._until:
            self._choose_healthy()
        if but is not None:
            others = [sender for sender in self._healthy if sender is not but]
            others = others or [sender for sender in self.senders if sender is not but]
            return others[min(int(chance.uniform(0, len(others))), len(others) - 1)]
        last = len(self._healthy) - 1
        return self._healthy[min(bisect_right(self._weights, chance.uniform(0, self._weights[-1])), last)]

    def _choose_healthy(self) -> None:
        """Choose the healthy senders: connected, writable, and not recently slow or failing.

        If there are none, the conditions are dropped one by one, so that at least one sender is chosen.
        """
        health, senders = self._producer.health, self.senders
        now = self._producer.loop.time()
        ends = [health.avoided_until(sender.target.group) for sender in senders]
        writable = [n for n, sender in enumerate(senders) if self.route.writable(sender.target.group)]
        connected = [n for n in writable if senders[n].target.connected]
        chosen = [n for n in connected if ends[n] <= now] or connected or writable or range(len(senders))
        shares = np.bincount(self._owners, minlength=len(senders)).tolist()
        self._healthy = [senders[n] for n in chosen]
        self._weights = list(accumulate(shares[n] for n in chosen))
        self._changes = health.changes
        self._until = min((end for end in ends if end > now), default=float("inf"))

    def spread(self, hashes: Hashes | None, home: PartitionSender | None = None) -> Pieces:
        """The senders for rows with these key hashes, each with its row numbers; None: all rows.

        Rows without keys go to the sender of the first row with a key. If no row has a key, they go to ``home`` if it
        is still one of the senders, otherwise to a random one.
        """
        keyless = None if hashes is None else hashes == NO_KEY_HASH
        if hashes is None or keyless is None or keyless.all():
            return [(home if home is not None and home in self.senders else self.pick(), None)]
        targets = self._owners[(hashes & _LPS).astype(np.int64)]
        if keyless.any():
            targets[keyless] = targets[int(np.argmin(keyless))]
        return [(self.senders[target], rows) for target, rows in groups_of(targets)]

    def lps_of(self, sender: PartitionSender) -> npt.NDArray[np.uint64]:
        """The LPs whose rows go to this sender."""
        return np.flatnonzero(self._owners == self.senders.index(sender)).astype(np.uint64)
