"""Writes the rows of one task of a batch to stages. They are invisible until the batch is committed (R23).

A task uses the route of its first write until it ends, so that all rows of a key are in one stage, in order. If the
route changes meanwhile, the commit moves the rows (``batch_commit``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from plait import chance
from plait.client.client import Client
from plait.client.net.router import SubjectRoute
from plait.client.send.due_time import Dues
from plait.client.send.producer import new_producer_id
from plait.client.send.regroup import Rows, groups_of, take_rows
from plait.client.staged.stage_sender import StageSender
from plait.errors import StaleRoute
from plait.frame.builder import FrameParts, build_frame
from plait.frame.columns import Column
from plait.frame.header import FLAG_UNSEQUENCED
from plait.frame.view import FrameView
from plait.limits import LOGICAL_PARTITIONS
from plait.model.logical_partitions import NO_KEY_HASH, Hashes

_LPS = np.uint64(LOGICAL_PARTITIONS - 1)
#: How often a stage is opened again because its broker does not have the partition yet.
ROUTE_ATTEMPTS = 10


class Staged(NamedTuple):
    """A complete stage."""

    group: str
    #: The name of its partition.
    name: str
    producer: int
    rows: int


class StagedRows(NamedTuple):
    """Rows that are to become frames, as columns; ``None`` if no row has a value."""

    bodies: pa.Array
    keys: pa.Array | None = None
    hashes: Hashes | None = None
    tags: pa.Array | None = None
    headers: pa.Array | None = None
    #: Due times; None: the rows are not delayed.
    dues: Dues | None = None

    def take(self, rows: npt.NDArray[np.int64]) -> StagedRows:
        """The rows with these numbers."""
        index = pa.array(rows)

        def some(column: pa.Array | None) -> pa.Array | None:
            return None if column is None else column.take(index)

        return StagedRows(
            self.bodies.take(index),
            some(self.keys),
            None if self.hashes is None else self.hashes[rows],
            some(self.tags),
            some(self.headers),
            self.dues if self.dues is None or isinstance(self.dues, int) else self.dues[rows],
        )

    def slice(self, start: int, stop: int) -> StagedRows:
        """The rows [start, stop), without a copy."""

        def some(column: pa.Array | None) -> pa.Array | None:
            return None if column is None else column.slice(start, stop - start)

        return StagedRows(
            self.bodies.slice(start, stop - start),
            some(self.keys),
            None if self.hashes is None else self.hashes[start:stop],
            some(self.tags),
            some(self.headers),
            self.dues if self.dues is None or isinstance(self.dues, int) else self.dues[start:stop],
        )

    def frames(self, size: int, count: int) -> Iterator[StagedRows]:
        """The rows in pieces of about ``size`` bytes and at most ``count`` rows."""
        columns = [each for each in (self.bodies, self.keys, self.tags, self.headers) if each is not None]
        if sum(each.nbytes for each in columns) <= size and len(self.bodies) <= count:
            yield self
            return
        ends = np.cumsum(np.sum([_lengths(each) for each in columns], axis=0))
        start = 0
        while start < len(ends):
            before = int(ends[start - 1]) if start else 0
            stop = min(max(start + 1, int(np.searchsorted(ends, before + size, "right"))), start + count)
            yield self.slice(start, stop)
            start = stop


class StageWriter:
    """Writes the rows of one attempt of a task to one subject."""

    def __init__(self, client: Client, subject: str, query: str, batch: int) -> None:
        self._client = client
        self._subject = subject
        self._query = query
        self._batch = batch
        self._route: SubjectRoute | None = None
        #: The index of the partition that takes all rows without keys.
        self._home = 0
        #: (index of the partition, delayed) → its stage.
        self._senders: dict[tuple[int, bool], StageSender] = {}

    async def write(self, rows: StagedRows) -> None:
        """Write rows in order; returns when they are sent."""
        if len(rows.bodies):
            limits, compression = self._client.limits, self._client._producer.compression
            now = self._client._producer.now()
            for target, chosen in await self._targets(rows.hashes):
                mine = rows if chosen is None else rows.take(chosen)
                sender = await self._sender(target, delayed=rows.dues is not None)
                for part in mine.frames(limits.many_frame_bytes, limits.many_frame_count):
                    await sender.push(_frame(part, sender, now, compression))

    async def copy(self, frame: FrameView) -> None:
        """Write the rows of a frame unchanged."""
        hashes = frame.fixed(Column.KEY_HASH) if frame.has(Column.KEY_HASH) else None
        for target, chosen in await self._targets(hashes):
            sender = await self._sender(target, delayed=frame.has(Column.DELIVER_AT))
            first, flags = sender.count + 1, FLAG_UNSEQUENCED
            parts = take_rows(frame, chosen, hashes, None, producer=sender.producer, first=first, flags=flags)
            await sender.push(parts)

    async def complete(self) -> list[Staged]:
        """Wait until all rows are durable; returns the stages, for the commit."""
        senders = [sender for sender in self._senders.values() if sender.count]
        await asyncio.gather(*(sender.complete() for sender in senders))
        return [Staged(sender.place.group, sender.place.name, sender.producer, sender.count) for sender in senders]

    async def drop(self) -> None:
        """Drop the stages: the attempt is not committed."""
        for sender in self._senders.values():
            await sender.drop()

    async def _targets(self, hashes: Hashes | None) -> list[tuple[int, Rows | None]]:
        """The partitions for rows with these key hashes, each with its row numbers; None: all rows."""
        route = self._route or await self._find_route()
        if hashes is None:
            return [(self._home, None)]
        targets = route.table[(hashes & _LPS).astype(np.int64)]
        keyless = hashes == NO_KEY_HASH
        if keyless.any():
            targets[keyless] = self._home
        return groups_of(targets)

    async def _find_route(self) -> SubjectRoute:
        self._route = await self._client._router.refresh(self._subject)
        slot = min(int(chance.uniform(0, LOGICAL_PARTITIONS)), LOGICAL_PARTITIONS - 1)
        self._home = int(self._route.table[slot])
        return self._route

    async def _sender(self, target: int, *, delayed: bool) -> StageSender:
        sender = self._senders.get((target, delayed))
        if sender is None:
            assert self._route is not None
            place = self._route.partitions[target]
            node = self._client._router.node(self._route, place.group)
            limits = self._client.limits
            sender = StageSender(node, place, new_producer_id(), self._query, self._batch, limits, delayed)
            await self._open(sender)
            self._senders[target, delayed] = sender
        return sender

    async def _open(self, sender: StageSender) -> None:
        for left in reversed(range(ROUTE_ATTEMPTS)):
            try:
                await sender.open()
                return
            except StaleRoute:
                # A broker makes its partitions a moment after the meta server has changed the route.
                if not left:
                    raise
                await asyncio.sleep(self._client.limits.send_retry_first_seconds)


def _frame(rows: StagedRows, sender: StageSender, now: int, compression: str | None) -> FrameParts:
    return build_frame(
        rows.bodies,
        producer=sender.producer,
        first=sender.count + 1,
        send_time=now,
        deliver_at=rows.dues,
        keys=rows.keys,
        key_hashes=rows.hashes,
        tags=rows.tags,
        headers=rows.headers,
        flags=FLAG_UNSEQUENCED,
        compression=compression,
    )


def _lengths(column: pa.Array) -> npt.NDArray[np.int64]:
    """The bytes of each row of a column."""
    offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
    lengths: npt.NDArray[np.int64] = np.diff(offsets).astype(np.int64)
    return lengths
