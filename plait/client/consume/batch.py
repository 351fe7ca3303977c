"""The results of ``fetch`` and ``fetch_arrow``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from plait.client.arguments import Duration, shown
from plait.client.consume.ack_collector import Piece, ack_pieces, flush_pieces, nack_pieces
from plait.client.consume.failure import FAILED, FailureOutcome, failed_of, rejected_of
from plait.client.types import Message, Why
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
        if len(self._pieces) == 1:
            delivered, start, stop = self._pieces[0]
            if delivered.collector is not None:
                await delivered.collector.ack(delivered, slice(start, stop))
            return
        self._ack_soon()
        await flush_pieces(self._pieces)

    async def nack(self, delay: Duration | None = None, reason: Why | None = None) -> None:
        """Nack all messages that are not acked: they are redelivered after ``delay``, or as the group's policy says."""
        self._nack_soon(failed_of(delay, reason))
        await flush_pieces(self._pieces)

    async def reject(self, reason: Why | None = None) -> None:
        """Make all messages that are not acked or nacked dead letters of the group at once."""
        self._nack_soon(rejected_of(reason))
        await flush_pieces(self._pieces)

    def _may_begin(self) -> bool:
        """The consumer still holds the right to handle every message of the batch."""
        return all(delivered.may_begin(slice(start, stop)) for delivered, start, stop in self._pieces)

    def _ack_soon(self) -> None:
        ack_pieces(self._pieces)

    def _nack_soon(self, failed: FailureOutcome = FAILED) -> None:
        nack_pieces(self._pieces, failed)

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
        ack_pieces(self._pieces)
        await flush_pieces(self._pieces)

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
        nack_pieces(pieces, failed)
        await flush_pieces(self._pieces)

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
