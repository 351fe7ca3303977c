"""The position of a reader in one partition, which advances as it reads."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from plait.client.consume.delivered import DeliveredFrame
from plait.client.net.node import Node
from plait.client.types import Message, PartitionName
from plait.errors import Timeout, Unavailable
from plait.frame.view import FrameView, frames_in
from plait.limits import ClientLimits
from plait.wire import messages as m


class ReadPosition:
    """Reads one partition from a position. Resumes after a restart of the broker."""

    def __init__(
        self,
        node: Node,
        limits: ClientLimits,
        subject: str,
        name: PartitionName,
        start: Any,
        rows: deque[Message] | None = None,
    ) -> None:
        self._node = node
        self._limits = limits
        self._subject = subject
        self.name = name
        #: Where the next read starts: the given start until the first reply, then a sequence.
        self.position: Any = start
        #: Receives the messages in the same step in which the position advances: a reader that is cancelled while it
        #: waits for other partitions does not lose them.
        self._rows: deque[Message] = deque() if rows is None else rows
        #: A read that runs in the background.
        self.reading: asyncio.Task[None] | None = None

    async def fix(self) -> None:
        """Resolve "latest" and times to a sequence now, not at the first read."""
        answer, _ = await self._ask(0, 0.0)
        self.position = ["sequence", answer.next]

    async def read(self, count: int, wait: float) -> None:
        """Read up to ``count`` messages, waiting ``wait`` seconds for the first.

        Adds nothing if a concurrent read has advanced the position.
        """
        begun = self.position
        answer, payload = await self._ask(count, wait)
        if self.position is not begun:
            return
        messages: list[Message] = []
        for frame in frames_in(payload):
            frame.verify()
            delivered = DeliveredFrame(frame, self._subject, self.name, None, [(frame.base, frame.end, 1)])
            messages += delivered.messages(0, frame.count)
        self._rows.extend(messages)
        self.position = ["sequence", answer.next]

    async def read_frames(self, count: int, wait: float) -> list[FrameView]:
        """Read up to ``count`` messages, as verified frames."""
        answer, payload = await self._ask(count, wait)
        frames = [frame.verify() for frame in frames_in(payload)]
        self.position = ["sequence", answer.next]
        return frames

    async def _ask(self, count: int, wait: float) -> tuple[m.ReadReply, memoryview]:
        while True:
            link = await self._node.ready(self._limits.send_seconds)
            request = m.ReadRequest(self.name.name, self.position, count, self._limits.pull_bytes, wait)
            try:
                async with asyncio.timeout(wait + self._limits.request_seconds):
                    return await link.request_payload(request)
            except Unavailable:
                continue
            except TimeoutError:
                raise Timeout(f"no answer to a read of {self._subject!r} in {self.name}; read again") from None
