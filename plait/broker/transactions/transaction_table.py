"""The transactions of a broker: the undecided ones with the places of their half messages, and the newest outcomes.

This is derived state. Half messages in the message log and events in the action log change it, and replay calls the
same methods. A checkpoint has all of it except transactions without rows.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from itertools import takewhile
from operator import itemgetter
from typing import Final, Literal, NamedTuple

import msgspec

#: ``HalfFrame.base``, in less time.
_base_of = itemgetter(1)

#: States of a transaction. A committed one is in the table until all of its rows are published.
OPEN: Final = "open"
PARKED: Final = "parked"
COMMITTED: Final = "committed"

State = Literal["open", "parked", "committed"]

#: The checkpoint shard of the transactions. The name is part of the checkpoint format.
TRANSACTIONS_SHARD: Final = "transactions"


class HalfFrame(NamedTuple):
    """A frame of half messages of one transaction."""

    #: The producer sequence of its first row.
    first: int
    #: The sequence of its first row in the half partition.
    base: int
    rows: int
    size: int

    @property
    def last(self) -> int:
        """The producer sequence of its last row."""
        return self.first + self.rows - 1


class HalfRows:
    """The half messages of a transaction in one half partition that are not published."""

    __slots__ = ("frames", "last", "partition")

    def __init__(self, partition: int, last: int = 0) -> None:
        self.partition = partition
        #: The producer sequence of the newest row that was stored here.
        self.last = last
        #: ``first`` → frame, ascending.
        self.frames: dict[int, HalfFrame] = {}

    def placed(self) -> Iterator[tuple[int, HalfFrame]]:
        """(half partition, frame), ascending."""
        for frame in self.frames.values():
            yield self.partition, frame


class StoredTransaction:
    """One transaction. ``id`` is also the producer of its rows; a client chooses it at random."""

    __slots__ = ("begun", "check_at", "checks", "id", "parts", "producer_group", "rows", "size", "state")

    def __init__(self, number: int, producer_group: str, begun: int) -> None:
        self.id = number
        self.producer_group = producer_group
        #: Wall time in microseconds.
        self.begun = begun
        self.state: State = OPEN
        #: How often a producer was asked for the outcome.
        self.checks = 0
        #: When a producer is asked next, on the monotonic clock; 0: not at all.
        self.check_at = 0.0
        #: How many rows were stored, and the bytes of their frames.
        self.rows = 0
        self.size = 0
        #: Half partition → the rows there that are not published.
        self.parts: dict[int, HalfRows] = {}

    def frames(self) -> Iterator[tuple[int, HalfFrame]]:
        """(half partition, frame) of all rows that are not published, in the order in which they were sent."""
        return heapq.merge(*(part.placed() for part in self.parts.values()), key=_first_of)


def _first_of(placed: tuple[int, HalfFrame]) -> int:
    return placed[1].first


class _TransactionState(msgspec.Struct, array_like=True):
    """A transaction in a checkpoint."""

    id: int
    producer_group: str
    begun: int
    state: State
    checks: int
    rows: int
    size: int
    #: (half partition, last row stored there, frames).
    parts: list[tuple[int, int, list[HalfFrame]]]


class _TableState(msgspec.Struct, array_like=True):
    """The table in a checkpoint."""

    transactions: list[_TransactionState]
    #: Outcomes, the oldest first.
    decided: list[tuple[int, bool]]


class TransactionTable:
    """All transactions that a broker knows."""

    def __init__(self, remembered: int) -> None:
        self._remembered = remembered
        self.live: dict[int, StoredTransaction] = {}
        #: Decided transaction → True: committed; False: rolled back. The oldest is forgotten first.
        self.decided: dict[int, bool] = {}
        #: How many rows of all live transactions are not published, and the bytes of their frames.
        self.rows = self.size = 0
        #: True if the table has changed since it was last copied for a checkpoint.
        self.dirty = False

    @property
    def parked_count(self) -> int:
        return sum(1 for each in self.live.values() if each.state == PARKED)

    def begin(self, number: int, producer_group: str, begun: int) -> StoredTransaction:
        transaction = self.live[number] = StoredTransaction(number, producer_group, begun)
        self.dirty = True
        return transaction

    def stored(self, transaction: StoredTransaction, partition: int, frame: HalfFrame) -> None:
        """Add a frame of half messages, or note the new place of a known frame that was moved in the log."""
        self.dirty = True
        part = transaction.parts.get(partition)
        if part is None:
            part = transaction.parts[partition] = HalfRows(partition)
        if frame.first in part.frames:
            part.frames[frame.first] = frame
            return
        part.frames[frame.first] = frame
        if frame.first < part.last:
            # Replay finds a frame that has moved behind later ones, and its first place is deleted.
            part.frames = dict(sorted(part.frames.items()))
        part.last = max(part.last, frame.last)
        transaction.rows += frame.rows
        transaction.size += frame.size
        self._count([frame], 1)

    def published(self, transaction: StoredTransaction, partition: int, last: int) -> None:
        """Remove the rows up to producer sequence ``last``: they are published."""
        part = transaction.parts.get(partition)
        if part is None:
            return
        self.dirty = True
        gone = list(takewhile(lambda frame: frame.last <= last, part.frames.values()))
        self._count(gone, -1)
        for frame in gone:
            del part.frames[frame.first]
        if not part.frames:
            del transaction.parts[partition]

    def drop_partition(self, partition: int) -> None:
        """Remove the rows of a half partition that is deleted."""
        for transaction in self.live.values():
            part = transaction.parts.pop(partition, None)
            if part is not None:
                self._count(part.frames.values(), -1)
                self.dirty = True

    def decide(self, number: int, *, committed: bool) -> None:
        """Remove a transaction, and remember its outcome."""
        self.forget(number)
        self.decided[number] = committed
        while len(self.decided) > self._remembered:
            del self.decided[next(iter(self.decided))]

    def forget(self, number: int) -> None:
        """Remove a transaction."""
        self.dirty = True
        transaction = self.live.pop(number, None)
        if transaction is not None:
            transaction.check_at = 0.0
            for part in transaction.parts.values():
                self._count(part.frames.values(), -1)

    def _count(self, frames: Iterable[HalfFrame], sign: int) -> None:
        for frame in frames:
            self.rows += sign * frame.rows
            self.size += sign * frame.size

    def first_rows(self) -> dict[int, int]:
        """Half partition → the first sequence that a transaction needs."""
        found: dict[int, int] = {}
        for transaction in self.live.values():
            for part in transaction.parts.values():
                first = min(map(_base_of, part.frames.values()))
                found[part.partition] = min(first, found.get(part.partition, first))
        return found

    def stored_before(self, partition: int, end: int) -> Iterator[tuple[StoredTransaction, HalfFrame]]:
        """The frames of a half partition whose sequences are below ``end``; those of a transaction are ascending.

        Frames may move to other places meanwhile.
        """
        for transaction in self.live.values():
            part = transaction.parts.get(partition)
            if part is not None:
                for frame in part.frames.values():
                    if frame.base < end:
                        yield transaction, frame

    # --- checkpoint -----------------------------------------------------------------------------

    def dump(self) -> bytes:
        transactions = [
            _TransactionState(
                each.id,
                each.producer_group,
                each.begun,
                each.state,
                each.checks,
                each.rows,
                each.size,
                [(part.partition, part.last, list(part.frames.values())) for part in each.parts.values()],
            )
            # A transaction without rows is forgotten by a restart.
            for each in self.live.values()
            if each.rows
        ]
        return msgspec.msgpack.encode(_TableState(transactions, list(self.decided.items())))

    def load(self, data: bytes) -> None:
        state = msgspec.msgpack.decode(data, type=_TableState)
        self.decided = dict(state.decided)
        for saved in state.transactions:
            transaction = self.live[saved.id] = StoredTransaction(saved.id, saved.producer_group, saved.begun)
            transaction.state, transaction.checks = saved.state, saved.checks
            transaction.rows, transaction.size = saved.rows, saved.size
            for partition, last, frames in saved.parts:
                part = transaction.parts[partition] = HalfRows(partition, last)
                part.frames = {frame.first: frame for frame in frames}
                self._count(frames, 1)
