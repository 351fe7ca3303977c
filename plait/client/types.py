"""The values that the client returns to users: ids, receipts, tickets and messages."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import msgspec

from plait.client.arguments import Duration, to_datetime
from plait.client.consume.failure import failed_of, rejected_of
from plait.errors import PlaitError
from plait.frame.columns import Column
from plait.model.reason import Reason

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from plait.client.consume.delivered import DeliveredFrame
else:
    # Its module imports this one. ``help`` and frameworks evaluate type hints, so the name must exist.
    DeliveredFrame = Any

HeaderValue = str | int | float | bool
#: Why a message failed: what users may pass as a reason.
Why = BaseException | str | Reason


class MessageId(NamedTuple):
    """Identifies a message permanently: the id of its producer, and its producer sequence."""

    producer: int
    sequence: int

    def __str__(self) -> str:
        return f"{self.producer:016x}-{self.sequence}"


class PartitionName(NamedTuple):
    """The partition that stores a message; prints as ``name@group``."""

    name: str
    group: str

    def __str__(self) -> str:
        return f"{self.name}@{self.group}"


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """The broker has stored the message. ``sequence`` is None if a resend was first stored too long ago to find it.

    It is also None for a delayed message, which gets its sequence when it is due. Until then ``schedule`` is its
    number, which together with ``deliver_at`` identifies it for ``cancel``.
    """

    message_id: MessageId
    partition: PartitionName
    sequence: int | None
    deliver_at: datetime | None = None
    schedule: int | None = None


class PendingBatch(msgspec.Struct, eq=False):
    """The shared result of the rows of one frame, and the callers that wait for it. No future unless one is awaited."""

    producer: int = 0
    first: int = 0
    count: int = 0
    partition: PartitionName | None = None
    sequence: int | None = None
    settled: bool = False
    #: Some rows were posted: their tickets may never be awaited, so ``flush`` raises the error.
    posted: bool = False
    error: PlaitError | None = None
    waiters: list[asyncio.Future[None]] = []
    #: If the rows were split: the new batches, and for each row its batch and its row in that batch.
    pieces: tuple[list[PendingBatch], npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None
    #: How many of those batches have no result yet.
    open: int = 0
    #: The batch that this one was split from.
    parent: PendingBatch | None = None

    def split(self, batches: list[PendingBatch], which: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> None:
        """Split the rows over these batches: this batch has a result when all of them have one."""
        self.pieces = (batches, which, rows)
        self.open = len(batches)
        for batch in batches:
            batch.parent, batch.posted = self, self.posted

    def receipt(self, row: int) -> Receipt:
        """The receipt of a row; raises the error of the send."""
        if self.pieces is not None:
            batches, which, rows = self.pieces
            return batches[int(which[row])].receipt(int(rows[row]))
        if self.error is not None:
            raise self.error
        assert self.partition is not None
        sequence = None if self.sequence is None else self.sequence + row
        # Skips the Python constructor of the NamedTuple: every awaited send makes one.
        message_id = tuple.__new__(MessageId, (self.producer, self.first + row))
        return Receipt(message_id, self.partition, sequence)

    def settle(self, sequence: int | None, error: PlaitError | None) -> None:
        """Set the result of all rows and wake the waiting callers."""
        self.sequence = sequence
        self.error = error
        # Last, because another thread may read it.
        self.settled = True
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        if self.parent is not None:
            self.parent._piece_settled()

    def _piece_settled(self) -> None:
        self.open -= 1
        if not self.open:
            assert self.pieces is not None
            self.settle(None, next((batch.error for batch in self.pieces[0] if batch.error is not None), None))

    async def wait(self) -> None:
        """Wait for the result of the rows. Cancelling one waiter does not affect the others."""
        if not self.settled:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.waiters.append(future)
            await future


class ScheduledBatch(PendingBatch, eq=False):
    """The result of delayed rows: the number that the broker returns is their number in the schedule."""

    #: Due times in microseconds since 1970: one for each row, or one for all.
    dues: Sequence[int] | npt.NDArray[np.int64] | int = 0

    def receipt(self, row: int) -> Receipt:
        """The receipt of a row; raises the error of the send."""
        stored = super().receipt(row)
        if self.pieces is not None:
            return stored
        due = self.dues if isinstance(self.dues, int) else int(self.dues[row])
        return Receipt(stored.message_id, stored.partition, None, to_datetime(due), stored.sequence)


class Ticket(msgspec.Struct, gc=False):
    """A posted message; ``await ticket`` gives its receipt."""

    _batch: PendingBatch
    _row: int

    def __await__(self) -> Generator[Any, None, Receipt]:
        if not self._batch.settled:
            yield from self._batch.wait().__await__()
        return self._batch.receipt(self._row)

    @property
    def done(self) -> bool:
        """True if the receipt or the error is known."""
        return self._batch.settled


class Receipts(Sequence[Receipt]):
    """The receipts of ``send_many``, each made when it is accessed."""

    def __init__(self, batches: list[PendingBatch]) -> None:
        self._batches = batches
        self._count = sum(batch.count for batch in batches)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Receipt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Receipt]: ...
    def __getitem__(self, index: int | slice) -> Receipt | list[Receipt]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        row = index + self._count if index < 0 else index
        for batch in self._batches:
            if 0 <= row < batch.count:
                return batch.receipt(row)
            row -= batch.count
        raise IndexError(f"receipt {index} of {self._count}")

    def __iter__(self) -> Iterator[Receipt]:
        for batch in self._batches:
            for row in range(batch.count):
                yield batch.receipt(row)

    def __repr__(self) -> str:
        return f"<{self._count} receipts>"


class Message(msgspec.Struct, gc=False):
    """A message that a consumer holds. Rarely used properties are read from its frame on access."""

    body: bytes
    key: str | None
    sequence: int
    _delivered: DeliveredFrame
    _row: int

    @property
    def subject(self) -> str:
        return self._delivered.subject

    @property
    def partition(self) -> PartitionName:
        return self._delivered.partition

    @property
    def tags(self) -> list[str]:
        return self._delivered.tags(self._row)

    @property
    def headers(self) -> dict[str, HeaderValue]:
        return self._delivered.headers(self._row)

    @property
    def message_id(self) -> MessageId:
        return self._delivered.message_id(self._row)

    @property
    def send_time(self) -> datetime | None:
        """When the producer sent it, by its clock."""
        return self._delivered.time(Column.SEND_TIME, self._row)

    @property
    def store_time(self) -> datetime:
        """When the broker stored it."""
        return to_datetime(self._delivered.frame.store_time)

    @property
    def deliver_at(self) -> datetime | None:
        """The due time that the sender asked for; None: the message was not delayed."""
        return self._delivered.time(Column.DELIVER_AT, self._row)

    @property
    def attempt(self) -> int:
        """1 at the first delivery to this group."""
        return self._delivered.attempt(self._row)

    @property
    def epoch(self) -> int:
        """For an ordered consumer the epoch of the lock of its LP, which never decreases for a key.

        Otherwise the data epoch in which the broker stored it.
        """
        return self._delivered.epoch_of(self._row)

    def ack(self) -> Acknowledgement:
        """Report that the message is done. Acks are sent in batches; ``await consumer.flush()`` waits for them."""
        return self._delivered.report_row(self._row, None)

    def nack(self, delay: Duration | None = None, reason: Why | None = None) -> Acknowledgement:
        """Report a failure: the group gets the message again after ``delay`` (0: at once; None: by the retry policy).

        ``reason`` is stored in the dead letter if this was the last attempt.
        """
        return self._delivered.report_row(self._row, failed_of(delay, reason))

    def reject(self, reason: Why | None = None) -> Acknowledgement:
        """Make the message a dead letter of the group at once, because no attempt can succeed."""
        return self._delivered.report_row(self._row, rejected_of(reason))

    def __repr__(self) -> str:
        body = self.body if len(self.body) <= 40 else self.body[:37] + b"..."
        return f"<Message {self.subject}#{self.sequence} key={self.key!r} body={body!r}>"


class Acknowledgement:
    """Returned by ``ack``. The ack is already in the client's buffer: awaiting this is optional, and immediate."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, None]:
        return iter(())  # type: ignore[return-value]


ACKNOWLEDGED = Acknowledgement()
