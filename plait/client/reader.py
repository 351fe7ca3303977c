"""Reading without a group: tail or browse a subject. Nothing is acked and nothing is remembered."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType
from typing import Any, Self

from plait.client.arguments import Duration, seconds_of
from plait.client.delivered import Delivered
from plait.client.node import Node
from plait.client.types import Message, PartitionName
from plait.errors import Closed, InvalidArgument, Timeout, Unavailable
from plait.frame.view import frames_in
from plait.limits import ClientLimits
from plait.wire import messages as m

#: Messages that iteration asks for at a time.
ITERATION_COUNT = 1_000


class Reader:
    """A position in a subject that moves as it reads; a restart of the server is invisible to it."""

    def __init__(self, node: Node, limits: ClientLimits, subject: str, start: Any) -> None:
        self._node = node
        self._limits = limits
        self.subject = subject
        #: Where the next read starts: as given until the first answer, then a sequence.
        self.position: Any = start
        self._opened = False
        self._closed = False
        self._rest: deque[Message] = deque()

    async def __aenter__(self) -> Self:
        # Fixes "latest" and times now, not at the first read.
        answer, _ = await self._read(0, 0.0)
        self.position = ["sequence", answer.next]
        self._opened = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Read no more."""
        self._closed = True

    async def fetch(self, count: int = 500, wait: Duration = 1.0) -> list[Message]:
        """Up to ``count`` messages, or ``pull_bytes`` of them: what is there, or the first within ``wait`` seconds."""
        if count < 1:
            raise InvalidArgument(f"count must be 1 or more, not {count}")
        await self._fill(count, seconds_of(wait))
        rest = self._rest
        return [rest.popleft() for _ in range(min(count, len(rest)))]

    async def _fill(self, count: int, seconds: float) -> None:
        """Have messages at hand, waiting at most that long for the first of them."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while not self._rest:
            self._check_open()
            remaining = max(deadline - loop.time(), 0.0)
            self._rest.extend(await self._more(count, min(remaining, self._limits.pull_wait_seconds)))
            if remaining <= 0:
                break

    def _check_open(self) -> None:
        if self._node.closed is not None:
            raise self._node.closed
        if self._closed:
            raise Closed("the reader is closed")
        if not self._opened:
            raise Closed("the reader is not open; use 'async with client.reader(...)'")

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
                async with asyncio.timeout(wait + self._limits.request_seconds):
                    return await link.request_payload(request)
            except Unavailable:
                continue
            except TimeoutError:
                raise Timeout(f"no answer to a read of {self.subject!r}") from None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        """The next message, however long it takes."""
        while not self._rest:
            if self._closed:
                raise StopAsyncIteration
            await self._fill(ITERATION_COUNT, self._limits.pull_wait_seconds)
        return self._rest.popleft()
