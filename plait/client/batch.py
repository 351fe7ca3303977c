"""What ``fetch`` and ``fetch_arrow`` return."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import overload

import numpy as np
import pyarrow as pa

from plait.client.arguments import Duration
from plait.client.settling import Piece, Settling
from plait.client.types import Message, Why
from plait.client.words import FAILED, Failed, failed_of, rejected_of
from plait.errors import InvalidArgument
from plait.frame.arrow import SCHEMA, arrays, attempts

TABLE_SCHEMA = SCHEMA.append(pa.field("attempt", pa.int32(), nullable=False))


class Batch(Sequence[Message]):
    """Messages in a consumer's hands, list-like. An empty batch means that nothing came in time."""

    def __init__(self, settling: Settling, pieces: list[Piece]) -> None:
        self._settling = settling
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
        await self._settling.flush()

    async def nack(self, delay: Duration | None = None, reason: Why | None = None) -> None:
        """All that were not acked failed: the group gets them again after ``delay``, or as it retries."""
        self._nack_soon(failed_of(delay, reason))
        await self._settling.flush()

    async def reject(self, reason: Why | None = None) -> None:
        """All that were not acked or nacked go to the group's dead letters at once."""
        self._nack_soon(rejected_of(reason))
        await self._settling.flush()

    def _ack_soon(self) -> None:
        self._settling.ack_pieces(self._pieces)

    def _nack_soon(self, failed: Failed = FAILED) -> None:
        self._settling.nack_pieces(self._pieces, failed)

    def __repr__(self) -> str:
        return f"<Batch of {len(self)} messages>"


class ArrowBatch:
    """Messages as an Arrow table over the memory they were received in."""

    def __init__(self, settling: Settling, pieces: list[Piece]) -> None:
        self._settling = settling
        self._pieces = pieces

    def __len__(self) -> int:
        return sum(stop - start for _, start, stop in self._pieces)

    @cached_property
    def table(self) -> pa.Table:
        """Columns sequence, key, body, tags, headers, send_time, store_time, producer, producer_sequence, attempt."""
        batches = []
        for delivered, start, stop in self._pieces:
            columns = [*arrays(delivered.frame), attempts(delivered.attempt(0), delivered.count)]
            rows = pa.RecordBatch.from_arrays(columns, schema=TABLE_SCHEMA)
            batches.append(rows if stop - start == delivered.count else rows.slice(start, stop - start))
        return pa.Table.from_batches(batches, schema=TABLE_SCHEMA)

    async def ack(self) -> None:
        """All rows that were not nacked are done; returns when the broker has it."""
        self._settling.ack_pieces(self._pieces)
        await self._settling.flush()

    async def nack(
        self, rows: Iterable[int] | None = None, delay: Duration | None = None, reason: Why | None = None
    ) -> None:
        """These rows (all: None) failed: the group gets them again after ``delay``, or as it retries."""
        await self._fail(rows, failed_of(delay, reason))

    async def reject(self, rows: Iterable[int] | None = None, reason: Why | None = None) -> None:
        """These rows (all: None) go to the group's dead letters at once."""
        await self._fail(rows, rejected_of(reason))

    async def _fail(self, rows: Iterable[int] | None, failed: Failed) -> None:
        if rows is None:
            self._settling.nack_pieces(self._pieces, failed)
        else:
            ends = np.cumsum([stop - start for _, start, stop in self._pieces])
            for row in rows:
                if not 0 <= row < len(self):
                    raise InvalidArgument(f"row {row} is outside a batch of {len(self)}")
                at = int(np.searchsorted(ends, row, "right"))
                delivered, start, stop = self._pieces[at]
                delivered.nack_row(start + row - (int(ends[at]) - (stop - start)), failed)
        await self._settling.flush()

    def __repr__(self) -> str:
        return f"<ArrowBatch of {len(self)} messages>"
