"""A place in one partition that moves as it is read."""

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
    """See the module; a restart of the broker is invisible to it."""

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
        #: Where the next read starts: as given until the first answer, then a sequence.
        self.position: Any = start
        #: Where messages go in the same step in which the position moves past them: a reader that is cancelled while it
        #: waits for other partitions finds them there.
        self._rows: deque[Message] = deque() if rows is None else rows
        #: A read that nobody waits for at present.
        self.reading: asyncio.Task[None] | None = None

    async def fix(self) -> None:
        """ "latest" and times mean what they mean now, not at the first read."""
        answer, _ = await self._ask(0, 0.0)
        self.position = ["sequence", answer.next]

    async def read(self, count: int, wait: float) -> None:
        """Up to ``count`` messages, waiting that long for the first; none where another read was faster."""
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
        """Up to ``count`` messages as the frames that hold them, verified."""
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
                raise Timeout(f"no answer to a read of {self._subject!r}") from None
