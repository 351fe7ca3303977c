"""Reading without a group: tail or browse a subject. Nothing is acked and nothing is remembered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

from plait.client.arguments import seconds_of
from plait.client.delivered import Delivered
from plait.client.node import Node
from plait.client.types import Message, PartitionName
from plait.errors import Closed, Timeout, Unavailable
from plait.frame.view import frames_in
from plait.limits import ClientLimits
from plait.wire import messages as m


class Reader:
    """A position in a subject that moves as it reads; a restart of the server is invisible to it."""

    def __init__(self, node: Node, limits: ClientLimits, subject: str, start: Any) -> None:
        self._node = node
        self._limits = limits
        self.subject = subject
        #: Where the next read starts: as given until the first answer, then a sequence.
        self.position: Any = start
        self._closed = False
        self._rest: list[Message] = []

    async def __aenter__(self) -> Self:
        # Fixes "latest" and times now, not at the first read.
        answer, _ = await self._read(0, 0.0)
        self.position = ["sequence", answer.next]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True

    async def fetch(self, count: int = 500, wait: float = 1.0) -> list[Message]:
        """Up to ``count`` messages: what is there, or the first that come within ``wait`` seconds."""
        if self._closed:
            raise Closed("the reader is closed")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds_of(wait)
        while not self._rest:
            remaining = max(deadline - loop.time(), 0.0)
            self._rest = await self._more(count, min(remaining, self._limits.pull_wait_seconds))
            if remaining <= 0:
                break
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken

    async def _more(self, count: int, wait: float) -> list[Message]:
        answer, payload = await self._read(count, wait)
        group = self._node.link.welcome.group if self._node.link and self._node.link.welcome else ""
        name = PartitionName(answer.name, group)
        messages: list[Message] = []
        for frame in frames_in(payload):
            frame.verify()
            delivered = Delivered(frame, self.subject, name, None, [(frame.base, frame.end, 1)])
            messages += delivered.messages(0, frame.count)
        self.position = ["sequence", answer.next]
        return messages

    async def _read(self, count: int, wait: float) -> tuple[m.ReadReply, memoryview]:
        while True:
            link = await self._node.ready(self._limits.send_seconds)
            request = m.Read(self.subject, self.position, count, self._limits.pull_bytes, wait)
            try:
                return await asyncio.wait_for(link.request_payload(request), wait + self._limits.request_seconds)
            except Unavailable:
                continue
            except TimeoutError:
                raise Timeout(f"no answer to a read of {self.subject!r}") from None

    async def __aiter__(self) -> AsyncIterator[Message]:
        while not self._closed:
            for message in await self.fetch(1000, 3600.0):
                yield message
