"""A stage's frames on their way to the broker: in order, several at a time, and again after a lost connection."""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from typing import Any, Final

import msgspec

from plait.client.net.node import Node
from plait.client.types import PartitionName
from plait.errors import (
    DiskFull,
    FlowControl,
    OutOfSequence,
    PlaitError,
    ReadOnly,
    Timeout,
    Unavailable,
)
from plait.frame.builder import FrameParts
from plait.limits import ClientLimits
from plait.wire import messages as m
from plait.wire.link import Link

#: What passes. A frame that comes after one that was refused is out of sequence, and follows it when it is sent again.
_PASSING: Final = (Unavailable, Timeout, FlowControl, DiskFull, ReadOnly, OutOfSequence)


async def ask(node: Node, operation: str, kind: Any = None, **arguments: Any) -> Any:
    """A management request to one broker, or to the meta server."""
    reply: m.AdminReply = await node.request(m.AdminRequest(operation, arguments))
    return msgspec.msgpack.decode(reply.result, type=kind)


class StageSender:
    """One stage as its writer sees it. A broker that is away for longer than ``send_seconds`` ends it."""

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
        #: Rows so far.
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
        #: The stage's number at its broker, and the link on which it counts: behind the next one there may be a broker
        #: that lost its last moments, and has given the number to another partition since.
        self._partition = 0
        self._link: Link | None = None
        #: Frames that are not answered, the oldest first.
        self._frames: deque[FrameParts] = deque()
        #: Answers to frames that were sent before the last time that all were sent again do not count.
        self._turn = 0
        self._error: PlaitError | None = None
        self._news = asyncio.Event()

    async def open(self) -> None:
        """Make the stage. ``StaleRoute``: its partition is not there."""
        link = await self._node.ready(self._limits.request_seconds)
        self._partition = await ask(self._node, "stage.open", int, **self._arguments)
        self._link = link

    async def push(self, parts: FrameParts) -> None:
        """Send a frame; waits while too many are under way. Raises what ended the stage."""
        self.count += parts.count
        self._frames.append(parts)
        self._send(parts)
        await self._wait_until(self._limits.in_flight_frames - 1)

    async def complete(self) -> None:
        """Everything is stored, on the broker's disk."""
        await self._wait_until(0)
        patience = asyncio.get_running_loop().time() + self._limits.send_seconds
        while True:
            try:
                await ask(self._node, "stage.complete", stages=[(self.producer, self.count)])
                return
            except _PASSING:
                if asyncio.get_running_loop().time() > patience:
                    raise
                await asyncio.sleep(self._limits.send_retry_first_seconds)

    async def drop(self) -> None:
        """The stage goes, with what is in it."""
        self._turn += 1
        self._frames.clear()
        await ask(self._node, "stage.drop", int, producers=[self.producer])

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
            # The broker answers in the order in which frames were sent; behind an error nothing is certain.
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
                raise Timeout(f"{self.place} did not answer within {limit:g} s") from None

    async def _again(self) -> None:
        """Send everything that is not answered once more."""
        self._turn += 1
        try:
            await self.open()
        except _PASSING as error:
            self._error = error
            return
        self._error = None
        for parts in list(self._frames):
            self._send(parts)
