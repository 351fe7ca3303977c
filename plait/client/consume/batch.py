"""The buffer of delivered rows, and the results of ``fetch`` and ``fetch_arrow``."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from plait.client.arguments import Duration, shown
from plait.client.closing import all_of
from plait.client.consume.delivered import DeliveredFrame, Deliveries, Piece
from plait.client.consume.failure import FailureOutcome, failed_of, rejected_of
from plait.client.types import Message, PartitionName, Why
from plait.errors import InvalidArgument
from plait.frame.arrow import MESSAGE_ID, SAME_TEXT, SCHEMA, arrays, attempts, message_ids, same_text

#: Rows of a table: row numbers, or a mask over all rows.
Rows: TypeAlias = Iterable[int] | Iterable[bool] | npt.NDArray[Any] | pa.Array | pa.ChunkedArray

TABLE_SCHEMA = pa.schema(
    [
        *SCHEMA,
        pa.field("attempt", pa.int32(), nullable=False),
        pa.field("message_id", MESSAGE_ID, nullable=False),
        pa.field("partition", SAME_TEXT, nullable=False),
    ]
)

#: Rows that iteration converts to messages at a time, and pulls at a time where nothing is prefetched.
ITERATION_COUNT = 100


class RowBuffer:
    """The buffer of a shared consumer: rows of all its partitions. Any row may be handed out at any time."""

    __slots__ = ("_frames", "_ready", "count")

    def __init__(self) -> None:
        #: Frames with rows that are not handed out yet.
        self._frames: deque[DeliveredFrame] = deque()
        #: Messages of the first frame that iteration has converted already, in reverse order.
        self._ready: list[Message] = []
        #: The number of rows in the buffer.
        self.count = 0

    def append(self, delivered: DeliveredFrame) -> None:
        """Add a delivered frame."""
        self._frames.append(delivered)
        self.count += delivered.count

    def available(self) -> int:
        """The number of rows that can be handed out now."""
        return self.count

    def take(self, count: int, *, apart: bool = False) -> list[Piece]:
        """Hand up to ``count`` rows to the user."""
        pieces: list[Piece] = []
        self._ready = []
        while count > 0 and self._frames:
            delivered = self._frames[0]
            start = delivered.taken
            stop = min(delivered.count, start + count)
            delivered.taken = stop
            pieces.append((delivered, start, stop))
            count -= stop - start
            self.count -= stop - start
            if stop == delivered.count:
                self._frames.popleft()
        return pieces

    def next(self) -> Message | None:
        """Hand one row to the user, as a message; None: there is none."""
        if not self._frames:
            return None
        delivered = self._frames[0]
        if not self._ready:
            self._ready = delivered.messages(delivered.taken, min(delivered.count, delivered.taken + ITERATION_COUNT))
            self._ready.reverse()
        message = self._ready.pop()
        delivered.taken += 1
        self.count -= 1
        if delivered.taken == delivered.count:
            self._frames.popleft()
        return message

    def take_back(self, partition: PartitionName | None = None) -> list[Piece]:
        """Remove and return all rows of a partition (None: of all partitions)."""
        chosen = [d for d in self._frames if partition is None or d.partition == partition]
        pieces = [(d, d.taken, d.count) for d in chosen]
        for delivered in chosen:
            self.count -= delivered.count - delivered.taken
            delivered.taken = delivered.count
        if partition is None:
            self._frames.clear()
        else:
            self._frames = deque(d for d in self._frames if d.partition != partition)
        self._ready = []
        return pieces


class Batch(Sequence[Message]):
    """A list-like batch of messages held by a consumer. It is empty when no message arrived in time."""

    def __init__(self, pieces: list[Piece]) -> None:
        self._pieces = pieces

    @cached_property
    def _messages(self) -> list[Message]:
        messages: list[Message] = []
        for delivered, start, stop in self._pieces:
            messages += delivered.messages(start, stop)
        return messages

    def __len__(self) -> int:
        return sum(stop - start for _, start, stop in self._pieces)

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> list[Message]: ...
    def __getitem__(self, index: int | slice) -> Message | list[Message]:
        return self._messages[index]

    def __iter__(self) -> Iterator[Message]:
        return iter(self._messages)

    async def ack(self) -> None:
        """Ack all messages that are not nacked; returns when the broker has stored the acks."""
        await flush_all(report(self._pieces, None, soon=False))

    async def nack(self, delay: Duration | None = None, reason: Why | None = None) -> None:
        """Nack all messages that are not acked: they are redelivered after ``delay``, or as the group's policy says."""
        await flush_all(report(self._pieces, failed_of(delay, reason), soon=False))

    async def reject(self, reason: Why | None = None) -> None:
        """Make all messages that are not acked or nacked dead letters of the group at once."""
        await flush_all(report(self._pieces, rejected_of(reason), soon=False))

    def _may_begin(self) -> bool:
        """True if the consumer still has the right to handle every message of the batch."""
        return all(delivered.may_begin(slice(start, stop)) for delivered, start, stop in self._pieces)

    def _report(self, failed: FailureOutcome | None) -> None:
        """Report how the messages without an outcome failed; None: they are acked."""
        report(self._pieces, failed)

    def __repr__(self) -> str:
        return f"<Batch of {len(self)} messages>"


class ArrowBatch:
    """Messages as an Arrow table, over the memory they were received in."""

    def __init__(self, pieces: list[Piece]) -> None:
        self._pieces = pieces

    def __len__(self) -> int:
        return sum(stop - start for _, start, stop in self._pieces)

    @cached_property
    def table(self) -> pa.Table:
        """Columns sequence, key, body, tags, headers, send_time, store_time, producer, producer_sequence, attempt,
        message_id and partition; docs/consuming.md has their types.
        """
        batches = []
        for delivered, start, stop in self._pieces:
            columns = arrays(delivered.frame)
            columns += [
                attempts(delivered.attempt(0), delivered.count),
                message_ids(*columns[-2:]),
                same_text(str(delivered.partition), delivered.count),
            ]
            rows = pa.RecordBatch.from_arrays(columns, schema=TABLE_SCHEMA)
            batches.append(rows if stop - start == delivered.count else rows.slice(start, stop - start))
        return pa.Table.from_batches(batches, schema=TABLE_SCHEMA)

    async def ack(self) -> None:
        """Ack all rows that are not nacked; returns when the broker has stored the acks."""
        await flush_all(report(self._pieces, None, soon=False))

    async def nack(self, rows: Rows | None = None, delay: Duration | None = None, reason: Why | None = None) -> None:
        """Nack these rows (None: all): they are redelivered after ``delay``, or as the group's policy says.

        ``rows`` are row numbers of the table, or a mask over all its rows; a NumPy or Arrow array works too.
        """
        await self._fail(rows, failed_of(delay, reason))

    async def reject(self, rows: Rows | None = None, reason: Why | None = None) -> None:
        """Make these rows (None: all) dead letters of the group at once; ``rows`` as for ``nack``."""
        await self._fail(rows, rejected_of(reason))

    async def _fail(self, rows: Rows | None, failed: FailureOutcome) -> None:
        # All of ``rows`` is validated before any row is nacked.
        pieces = self._pieces if rows is None else self._pieces_of(row_mask(rows, len(self)))
        report(pieces, failed, soon=False)
        await flush_all(partitions_of(self._pieces))

    def _pieces_of(self, mask: npt.NDArray[np.bool_]) -> list[Piece]:
        """The marked rows as pieces; adjacent rows of a frame are one piece."""
        found: list[Piece] = []
        before = 0
        for delivered, start, stop in self._pieces:
            part = mask[before : before + stop - start]
            edges = np.flatnonzero(np.diff(part, prepend=False, append=False)) + start
            found += [(delivered, first, last) for first, last in edges.reshape(-1, 2).tolist()]
            before += stop - start
        return found

    def __repr__(self) -> str:
        return f"<ArrowBatch of {len(self)} messages>"


def report(pieces: list[Piece], failed: FailureOutcome | None, *, soon: bool = True) -> list[Deliveries]:
    """Report how the rows of the pieces that have no outcome failed; None: they are acked. Returns their partitions.

    The outcomes are sent at the end of this turn of the loop; not ``soon``: when the caller flushes.
    """
    partitions = partitions_of(pieces)
    for deliveries in partitions:
        if deliveries.inbox:
            # Outcomes that other threads reported earlier take effect first.
            deliveries.absorb()
    for delivered, start, stop in pieces:
        if delivered.deliveries is not None:
            delivered.deliveries.collect_soon(delivered, soon=soon)
            delivered.note(slice(start, stop), failed)
    return partitions


def partitions_of(pieces: list[Piece]) -> list[Deliveries]:
    """The partitions of the rows that need outcomes."""
    if len(pieces) == 1 and (only := pieces[0][0].deliveries) is not None:
        return [only]
    return list(dict.fromkeys(d.deliveries for d, _, _ in pieces if d.deliveries is not None))


def flush_all(partitions: list[Deliveries]) -> Awaitable[None]:
    """Wait until the brokers have every outcome reported so far. An unreachable broker does not delay the others."""
    return partitions[0].flush() if len(partitions) == 1 else all_of([each.flush() for each in partitions])


def row_mask(rows: Any, count: int) -> npt.NDArray[np.bool_]:
    """``rows`` as a mask over ``count`` rows. ``InvalidArgument`` if any row is out of range."""
    if isinstance(rows, pa.Array | pa.ChunkedArray):
        values = np.asarray(rows.to_numpy(zero_copy_only=False))
    elif isinstance(rows, np.ndarray):
        values = rows
    elif isinstance(rows, Iterable) and not isinstance(rows, str | bytes):
        try:
            values = np.array(list(rows))
        except ValueError:
            raise _no_rows(rows) from None
    else:
        raise _no_rows(rows)
    if values.ndim == 1 and not len(values):
        return np.zeros(count, bool)
    if values.ndim != 1 or values.dtype.kind not in "biu":
        raise _no_rows(rows)
    if values.dtype.kind == "b":
        if len(values) != count:
            raise InvalidArgument(f"the row mask has {len(values)} values, the batch has {count} rows; use one per row")
        return values
    outside = values[(values < 0) | (values >= count)]
    if len(outside):
        raise InvalidArgument(f"row {outside[0]} is out of range for a batch of {count} rows")
    mask = np.zeros(count, bool)
    mask[values] = True
    return mask


def _no_rows(rows: Any) -> InvalidArgument:
    return InvalidArgument(f"rows {shown(rows)} are not valid; use row numbers (int), or a mask over all rows (bool)")
