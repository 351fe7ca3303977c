"""Compares the messages that a group handled with those that were acknowledged to the producers."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from examples.demo.orders import HANDLED, STEPS


class GroupResult(msgspec.Struct, frozen=True):
    """The result of a group. Order is checked for every pair of a producer and a consumer of its messages."""

    group: str
    handled: int
    distinct: int
    redelivered: int
    twice: int
    lost: int
    order_checked: int
    order_kept: int

    @property
    def right(self) -> bool:
        return self.lost == 0 and self.order_kept == self.order_checked


class Ledger:
    """The messages that one group has handled."""

    def __init__(self, group: str, producers: int, orders: int) -> None:
        self.group = group
        self.expected = producers * orders * len(STEPS)
        self._producers = producers
        self._times: npt.NDArray[np.uint16] = np.zeros((producers, orders * len(STEPS)), np.uint16)
        self._handled: dict[str, list[npt.NDArray[Any]]] = {}
        self.handled = 0
        self.distinct = 0
        self.redelivered = 0

    def add(self, consumer: str, data: bytes) -> None:
        """Add whole records of a consumer."""
        records = np.frombuffer(data, HANDLED)
        self._handled.setdefault(consumer, []).append(records)
        np.add.at(self._times, (records["producer"], records["number"]), 1)
        self.handled += len(records)
        self.distinct = int(np.count_nonzero(self._times))
        self.redelivered += int((records["attempt"] > 1).sum())

    def of(self, consumer: str) -> int:
        """The number of messages that a consumer handled."""
        return sum(map(len, self._handled.get(consumer, [])))

    @property
    def complete(self) -> bool:
        """True if every message was handled at least once."""
        return self.distinct == self.expected

    def result(self) -> GroupResult:
        checked, kept = self._order()
        return GroupResult(
            group=self.group,
            handled=self.handled,
            distinct=self.distinct,
            redelivered=self.redelivered,
            twice=int((self._times > 1).sum()),
            lost=self.expected - self.distinct,
            order_checked=checked,
            order_kept=kept,
        )

    def _order(self) -> tuple[int, int]:
        """Check that each producer's messages are in order in the log, and in each consumer's first attempts.

        Returns how many orders were checked and how many were right.
        """
        checked = kept = 0
        books = {name: np.concatenate(records) for name, records in self._handled.items()}
        everything = np.concatenate(list(books.values())) if books else np.empty(0, HANDLED)
        in_log = everything[np.unique(everything["sequence"], return_index=True)[1]]
        for records in (*books.values(), in_log):
            # Redeliveries are out of order by nature.
            first = records if records is in_log else records[records["attempt"] == 1]
            for producer in range(self._producers):
                numbers = first["number"][first["producer"] == producer].astype(np.int64)
                if len(numbers):
                    checked += 1
                    kept += bool((np.diff(numbers) > 0).all())
        return checked, kept
