"""Writes the rows of one task of a batch to stages. They are invisible until the batch is committed (R23).

A task uses the route of its first write until it ends, so that all rows of a key are in one stage, in order. If the
route changes meanwhile, the commit moves the rows (``batch_commit``). The frames of a stage are sent in order, several
at a time, and again after a lost connection.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from plait import chance
from plait.client.client import Client
from plait.client.net.node import Node
from plait.client.net.router import SubjectRoute
from plait.client.send.partition_sender import pause_of
from plait.client.send.producer import new_producer_id
from plait.client.send.row_columns import RowColumns, Rows, groups_of
from plait.client.types import PartitionName
from plait.errors import (
    DiskFull,
    FlowControl,
    OutOfSequence,
    PlaitError,
    RateLimited,
    ReadOnly,
    StaleRoute,
    Timeout,
    Unavailable,
)
from plait.frame.builder import FrameParts
from plait.frame.header import FLAG_UNSEQUENCED
from plait.frame.view import FrameView
from plait.limits import LOGICAL_PARTITIONS, ClientLimits
from plait.model.logical_partitions import NO_KEY_HASH, Hashes
from plait.wire import messages as m
from plait.wire.admin.operation import Operation
from plait.wire.admin.partitions import COMPLETE_STAGES, DROP_STAGES, OPEN_STAGE
from plait.wire.link import Link

R = TypeVar("R")

#: Temporary errors. ``OutOfSequence``: the frame before was refused; resending both in order succeeds.
_PASSING: Final = (Unavailable, Timeout, FlowControl, DiskFull, ReadOnly, OutOfSequence)


async def ask(node: Node, operation: Operation[R], **arguments: Any) -> R:
    """Send an admin request to one broker, or to the meta server."""
    return operation.result(await node.request(operation.packet(**arguments)))


class StageSender:
    """Writes one stage. Fails if the broker is down for longer than ``send_seconds``."""

    def __init__(
        self,
        node: Node,
        place: PartitionName,
        producer: int,
        query: str,
        batch: int,
        limits: ClientLimits,
        delayed: bool,
    ) -> None:
        self.place = place
        self.producer = producer
        #: Rows that were pushed.
        self.count = 0
        self._node = node
        self._limits = limits
        self._arguments = {
            "name": place.name,
            "producer": producer,
            "query": query,
            "batch": batch,
            "delayed": delayed,
        }
        #: The stage's number at its broker, and the link on which it is valid. After a reconnect the broker may have
        #: lost the tail of its log and given the number to another partition.
        self._partition = 0
        self._link: Link | None = None
        #: Frames without a reply, the oldest first.
        self._frames: deque[FrameParts] = deque()
        #: The number of resends so far. Replies to frames that were sent before the last resend are ignored.
        self._turn = 0
        self._error: PlaitError | None = None
        self._news = asyncio.Event()

    async def open(self) -> None:
        """Create the stage. Raises ``StaleRoute`` if the broker does not have its partition."""
        link = await self._node.ready(self._limits.request_seconds)
        self._partition = await ask(self._node, OPEN_STAGE, **self._arguments)
        self._link = link

    async def push(self, rows: RowColumns, now: int | None, compression: str | None) -> None:
        """Send a frame; waits while the window is full. Raises the error that ended the stage."""
        parts = rows.build(self.producer, self.count + 1, now=now, flags=FLAG_UNSEQUENCED, compression=compression)
        self.count += parts.count
        self._frames.append(parts)
        self._send(parts)
        await self._wait_until(self._limits.in_flight_frames - 1)

    async def complete(self) -> None:
        """Wait until all rows are durable at the broker."""
        await self._wait_until(0)
        patience = asyncio.get_running_loop().time() + self._limits.send_seconds
        while True:
            try:
                await ask(self._node, COMPLETE_STAGES, stages=[(self.producer, self.count)])
                return
            except _PASSING:
                if asyncio.get_running_loop().time() > patience:
                    raise
                await asyncio.sleep(self._limits.send_retry_first_seconds)

    async def drop(self) -> None:
        """Delete the stage and its rows."""
        self._turn += 1
        self._frames.clear()
        await ask(self._node, DROP_STAGES, producers=[self.producer])

    def _send(self, parts: FrameParts) -> None:
        if self._error is None:
            link = self._node.link
            if link is None or link is not self._link:
                self._fail(Unavailable("the connection to the server was lost"))
                return
            answered = functools.partial(self._answered, self._turn)
            link.call(m.SendRequest(self._partition), answered, parts.parts, parts.size)

    def _answered(self, turn: int, _: Any, __: memoryview, error: PlaitError | None) -> None:
        if turn != self._turn:
            return
        if error is not None:
            self._fail(error)
        elif self._error is None:
            # The broker replies in the order of the frames. After an error, later replies are ignored.
            self._frames.popleft()
            self._news.set()

    def _fail(self, error: PlaitError) -> None:
        self._error = self._error or error
        self._news.set()

    async def _wait_until(self, left: int) -> None:
        loop = asyncio.get_running_loop()
        limit = self._limits.send_seconds
        patience, before = loop.time() + limit, len(self._frames)
        pause = self._limits.send_retry_first_seconds
        while len(self._frames) > left:
            if len(self._frames) < before:
                patience, before = loop.time() + limit, len(self._frames)
                pause = self._limits.send_retry_first_seconds
            if isinstance(self._error, RateLimited):
                # The subject is at its rate: the stage waits, as other sends do.
                patience = loop.time() + limit
                await asyncio.sleep(pause_of(self._error, self._limits))
                await self._again()
                continue
            if self._error is not None:
                if not isinstance(self._error, _PASSING) or loop.time() > patience:
                    raise self._error
                await asyncio.sleep(pause)
                pause = min(2 * pause, self._limits.send_retry_max_seconds)
                await self._again()
                continue
            self._news.clear()
            try:
                async with asyncio.timeout_at(patience):
                    await self._news.wait()
            except TimeoutError:
                raise Timeout(f"{self.place} did not answer within {limit:g} s; write the stage again") from None

    async def _again(self) -> None:
        """Resend every frame without a reply."""
        self._turn += 1
        try:
            await self.open()
        except _PASSING as error:
            self._error = error
            return
        self._error = None
        for parts in list(self._frames):
            self._send(parts)


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
