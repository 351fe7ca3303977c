"""Writes the rows of one task of a batch to stages. They are invisible until the batch is committed (R23).

A task uses the route of its first write until it ends, so that all rows of a key are in one stage, in order. If the
route changes meanwhile, the commit moves the rows (``batch_commit``).
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import numpy as np

from plait import chance
from plait.client.client import Client
from plait.client.net.router import SubjectRoute
from plait.client.send.producer import new_producer_id
from plait.client.send.row_columns import RowColumns, Rows, groups_of
from plait.client.staged.stage_sender import StageSender
from plait.errors import StaleRoute
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


class StageWriter:
    """Writes the rows of one attempt of a task to one subject."""

    def __init__(self, client: Client, subject: str, query: str, batch: int) -> None:
        self._client = client
        self._subject = subject
        self._query = query
        self._batch = batch
        self._route: SubjectRoute | None = None
        #: The index of the partition that gets all rows without keys.
        self._home = 0
        #: (index of the partition, delayed) → its stage.
        self._senders: dict[tuple[int, bool], StageSender] = {}

    async def write(self, rows: RowColumns) -> None:
        """Write rows in order; returns when they are sent."""
        if len(rows.bodies):
            limits, compression = self._client.limits, self._client._producer.compression
            now = self._client._producer.now()
            for target, chosen in await self._targets(rows.hashes):
                sender = await self._sender(target, delayed=rows.dues is not None)
                for part in rows.take(chosen).frames(limits.many_frame_bytes, limits.many_frame_count):
                    await sender.push(part, now, compression)

    async def copy(self, frame: FrameView) -> None:
        """Write the rows of a frame unchanged."""
        rows = RowColumns.of(frame)
        for target, chosen in await self._targets(rows.hashes):
            sender = await self._sender(target, delayed=rows.dues is not None)
            await sender.push(rows.take(chosen), None, None)

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
