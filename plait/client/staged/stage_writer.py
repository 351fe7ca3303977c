"""What a task of a batch writes: rows that nobody sees before the batch is committed (R23).

The rows go by the route that is found when the task begins, to the end: all of one key are in one stage, in order. A
route that changes meanwhile is the commit's business (``committing.py``).
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
#: How often a route is asked for whose partitions are not there yet.
ROUTE_ATTEMPTS = 10


class Staged(NamedTuple):
    """A stage that is whole."""

    group: str
    #: The partition that it is for.
    name: str
    producer: int
    rows: int


class StagedRows(NamedTuple):
    """Rows on their way into frames, column by column; ``None``: no row has it."""

    bodies: pa.Array
    keys: pa.Array | None = None
    hashes: Hashes | None = None
    tags: pa.Array | None = None
    headers: pa.Array | None = None
    #: When they are to be delivered; None: at once.
    dues: Dues | None = None

    def take(self, rows: npt.NDArray[np.int64]) -> StagedRows:
        """Some of them."""
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
        """Those from ``start`` to ``stop``, where they lie."""

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
        """The same in pieces that make frames of about so many bytes and at most so many rows."""
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
    """All that one attempt of a task writes to one subject."""

    def __init__(self, client: Client, subject: str, query: str, batch: int) -> None:
        self._client = client
        self._subject = subject
        self._query = query
        self._batch = batch
        self._route: SubjectRoute | None = None
        #: Where rows without keys go, all of them: which of the route's partitions.
        self._home = 0
        #: By the partition, and whether its rows are delayed.
        self._lanes: dict[tuple[int, bool], StageSender] = {}

    async def write(self, rows: StagedRows) -> None:
        """Stage rows, in order; returns when they are on their way."""
        if len(rows.bodies):
            limits, compression = self._client.limits, self._client._producer.compression
            now = self._client._producer.now()
            for target, chosen in await self._targets(rows.hashes):
                mine = rows if chosen is None else rows.take(chosen)
                lane = await self._lane(target, delayed=rows.dues is not None)
                for part in mine.frames(limits.many_frame_bytes, limits.many_frame_count):
                    await lane.push(_frame(part, lane, now, compression))

    async def copy(self, frame: FrameView) -> None:
        """Stage the rows of a frame, as they are."""
        hashes = frame.fixed(Column.KEY_HASH) if frame.has(Column.KEY_HASH) else None
        for target, chosen in await self._targets(hashes):
            lane = await self._lane(target, delayed=frame.has(Column.DELIVER_AT))
            first, flags = lane.count + 1, FLAG_UNSEQUENCED
            parts = take_rows(frame, chosen, hashes, None, producer=lane.producer, first=first, flags=flags)
            await lane.push(parts)

    async def complete(self) -> list[Staged]:
        """Everything is on the disks of its brokers; the stages, for the commit."""
        lanes = [lane for lane in self._lanes.values() if lane.count]
        await asyncio.gather(*(lane.complete() for lane in lanes))
        return [Staged(lane.place.group, lane.place.name, lane.producer, lane.count) for lane in lanes]

    async def drop(self) -> None:
        """Nobody will commit this."""
        for lane in self._lanes.values():
            await lane.drop()

    async def _targets(self, hashes: Hashes | None) -> list[tuple[int, Rows | None]]:
        """The partitions that rows with these key hashes go to, and which rows each gets; None: all."""
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

    async def _lane(self, target: int, *, delayed: bool) -> StageSender:
        lane = self._lanes.get((target, delayed))
        if lane is None:
            assert self._route is not None
            place = self._route.partitions[target]
            node = self._client._router.node(self._route, place.group)
            limits = self._client.limits
            lane = StageSender(node, place, new_producer_id(), self._query, self._batch, limits, delayed)
            await self._open(lane)
            self._lanes[target, delayed] = lane
        return lane

    async def _open(self, lane: StageSender) -> None:
        for left in reversed(range(ROUTE_ATTEMPTS)):
            try:
                await lane.open()
                return
            except StaleRoute:
                # A broker hears of its partitions a moment after the route was made.
                if not left:
                    raise
                await asyncio.sleep(self._client.limits.send_retry_first_seconds)


def _frame(rows: StagedRows, lane: StageSender, now: int, compression: str | None) -> FrameParts:
    return build_frame(
        rows.bodies,
        producer=lane.producer,
        first=lane.count + 1,
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
    """The bytes of each row."""
    offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
    lengths: npt.NDArray[np.int64] = np.diff(offsets).astype(np.int64)
    return lengths
