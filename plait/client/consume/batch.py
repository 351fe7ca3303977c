"""What ``fetch`` and ``fetch_arrow`` return."""

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

#: Rows of a table: their numbers, or a mask of all of them.
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
    """Messages in a consumer's hands, list-like. An empty batch means that nothing came in time."""

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
        """All that were not nacked are done; returns when the broker has it."""
        self._ack_soon()
        await flush_pieces(self._pieces)

    async def nack(self, delay: Duration | None = None, reason: Why | None = None) -> None:
        """All that were not acked failed: the group gets them again after ``delay``, or as it retries."""
        self._nack_soon(failed_of(delay, reason))
        await flush_pieces(self._pieces)

    async def reject(self, reason: Why | None = None) -> None:
        """All that were not acked or nacked go to the group's dead letters at once."""
        self._nack_soon(rejected_of(reason))
        await flush_pieces(self._pieces)

    def _may_begin(self) -> bool:
        """All of it is still the user's to handle."""
        return all(delivered.may_begin(slice(start, stop)) for delivered, start, stop in self._pieces)

    def _ack_soon(self) -> None:
        ack_pieces(self._pieces)

    def _nack_soon(self, failed: FailureOutcome = FAILED) -> None:
        nack_pieces(self._pieces, failed)

    def __repr__(self) -> str:
        return f"<Batch of {len(self)} messages>"


class ArrowBatch:
    """Messages as an Arrow table over the memory they were received in."""

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
        """All rows that were not nacked are done; returns when the broker has it."""
        ack_pieces(self._pieces)
        await flush_pieces(self._pieces)

    async def nack(self, rows: Rows | None = None, delay: Duration | None = None, reason: Why | None = None) -> None:
        """These rows (all: None) failed: the group gets them again after ``delay``, or as it retries.

        ``rows`` are their numbers in the table, or a mask of all its rows; also of NumPy or Arrow.
        """
        await self._fail(rows, failed_of(delay, reason))

    async def reject(self, rows: Rows | None = None, reason: Why | None = None) -> None:
        """These rows (all: None) go to the group's dead letters at once; ``rows`` as for ``nack``."""
        await self._fail(rows, rejected_of(reason))

    async def _fail(self, rows: Rows | None, failed: FailureOutcome) -> None:
        # All rows are looked at before anything is said of any.
        pieces = self._pieces if rows is None else self._pieces_of(row_mask(rows, len(self)))
        nack_pieces(pieces, failed)
        await flush_pieces(self._pieces)

    def _pieces_of(self, mask: npt.NDArray[np.bool_]) -> list[Piece]:
        """Where the marked rows are, neighbours together."""
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
    """Which of ``count`` rows are meant; refused as a whole where one of them cannot be."""
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
            raise InvalidArgument(f"a mask of {len(values)} rows does not fit a batch of {count}")
        return values
    outside = values[(values < 0) | (values >= count)]
    if len(outside):
        raise InvalidArgument(f"row {outside[0]} is outside a batch of {count}")
    mask = np.zeros(count, bool)
    mask[values] = True
    return mask


def _no_rows(rows: Any) -> InvalidArgument:
    return InvalidArgument(f"rows {shown(rows)} are not understood; use whole numbers, or a mask of all rows")
