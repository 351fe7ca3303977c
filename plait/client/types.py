"""The values that the client returns to users: ids, receipts, tickets and messages."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import msgspec

from plait.client.arguments import Duration, to_datetime
from plait.client.consume.failure import failed_of, rejected_of
from plait.errors import InvalidArgument
from plait.frame.columns import Column
from plait.frame.view import FrameView
from plait.model.reason import Reason

if TYPE_CHECKING:
    from plait.client.consume.delivered import DeliveredFrame
    from plait.client.send.resend_window import PendingBatch
else:
    # Their modules import this one. ``help`` and frameworks evaluate type hints, so the names must exist.
    DeliveredFrame = PendingBatch = Any

HeaderValue = str | int | float | bool
#: Why a message failed: what users may pass as a reason.
Why = BaseException | str | Reason


def priority_of(frame: FrameView, row: int) -> int:
    """The priority of a row."""
    return int(frame.fixed(Column.PRIORITY)[row]) if frame.has(Column.PRIORITY) else 0


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
    def to_group(self) -> str | None:
        """The only group that gets the message; None: every group gets it."""
        frame = self._delivered.frame
        if not frame.has(Column.TO_GROUP):
            return None
        return frame.rows(Column.TO_GROUP, self._row, self._row + 1)[0].decode() or None

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
        due = self._delivered.time(Column.DELIVER_AT, self._row)
        # A message of a transaction that was not delayed has the due time 0.
        return due if due is not None and due.timestamp() else None

    @property
    def priority(self) -> int:
        """0 to 9: messages with a higher priority are delivered first."""
        return priority_of(self._delivered.frame, self._row)

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

    def reply(
        self, body: Any = b"", *, headers: Mapping[str, HeaderValue] | None = None, failure: Why | None = None
    ) -> Coroutine[Any, Any, Receipt]:
        """``await message.reply(body)`` replies to a request, and waits until the reply is stored; ack afterwards.

        With ``failure`` the request raises ``RequestFailed``. Raises ``InvalidArgument`` if the message is no request.
        """
        deliveries = self._delivered.deliveries
        if deliveries is None or deliveries.reply is None:
            raise InvalidArgument("the message is not from a consumer; reply with client.reply(message, body)")
        if deliveries.any_thread:
            raise InvalidArgument(
                "message.reply is for async code: return the reply from a def handler, or call client.reply(message, "
                "body) of plait.sync"
            )
        return deliveries.reply(self, body, headers=headers, failure=failure)

    def __repr__(self) -> str:
        body = self.body if len(self.body) <= 40 else self.body[:37] + b"..."
        return f"<Message {self.subject}#{self.sequence} key={self.key!r} body={body!r}>"


#: Sends a reply to a message: (message, body, headers=, failure=).
SendReply = Callable[..., Coroutine[Any, Any, Receipt]]


class Acknowledgement:
    """Returned by ``ack``. The ack is already in the client's buffer: awaiting this is optional, and immediate."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, None]:
        return iter(())  # type: ignore[return-value]


ACKNOWLEDGED = Acknowledgement()
