"""A client in a test's hands: says exactly what it is told to, well-formed or not, and shows what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Self

from plait.errors import PlaitError
from plait.frame.builder import build_frame
from plait.server.listener import Listener
from plait.wire import messages as m
from plait.wire.packets import HEADER, HEADER_SIZE, pack

#: Nothing that a test waits for takes this long.
PATIENCE_SECONDS = 20.0


async def until(condition: Callable[[], object]) -> None:
    """Let the loop run until something is so."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 (what is waited for is inside the server, which tells nobody)
            await asyncio.sleep(0)


class Answer(NamedTuple):
    """One packet from the server."""

    correlation: int
    message: Any
    payload: bytes


class Raw:
    """One connection. ``async with Raw(server) as raw`` connects; ``hello`` introduces it."""

    def __init__(self, server: Listener) -> None:
        self._server = server
        self._next = 0

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_connection(self._server.host, self._server.port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.writer.transport.abort()
        # The transport is gone before the loop is.
        await asyncio.sleep(0)

    def write(self, data: bytes) -> None:
        """Bytes as they are."""
        self.writer.write(data)

    def request(self, message: m.PacketHead, payload: bytes = b"") -> int:
        """Send a request; its correlation."""
        self._next += 1
        self.write(pack(message.KIND, self._next, m.encode(message), len(payload)) + payload)
        return self._next

    async def next(self) -> Answer:
        """The next packet; ``IncompleteReadError`` or ``ConnectionError`` when there is none any more."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            size, kind, _, correlation, head_size = HEADER.unpack(await self.reader.readexactly(HEADER_SIZE))
            body = await self.reader.readexactly(size - HEADER_SIZE)
        message = m.decode(kind, memoryview(body)[:head_size])
        return Answer(correlation, message, body[head_size + (-head_size & 7) :])

    async def answer(self, correlation: int) -> Answer:
        """The answer to a request, which has to be the next packet; raises what the server answered."""
        answer = await self.next()
        if isinstance(answer.message, m.ErrorReply):
            raise m.error_of(answer.message)
        assert answer.correlation == correlation
        return answer

    async def ask(self, message: m.PacketHead, payload: bytes = b"") -> Any:
        """A request and its answer."""
        return (await self.answer(self.request(message, payload))).message

    async def hello(self, client: str = "raw") -> m.Welcome:
        welcome: m.Welcome = await self.ask(m.Hello(m.PROTOCOL_VERSION, m.PROTOCOL_VERSION, client))
        return welcome

    async def ending(self) -> PlaitError | None:
        """Everything up to the end of the connection; the error it ended with, if the server said one."""
        last: PlaitError | None = None
        try:
            while True:
                answer = await self.next()
                if answer.correlation == 0 and isinstance(answer.message, m.ErrorReply):
                    last = m.error_of(answer.message)
        except (asyncio.IncompleteReadError, ConnectionError):
            return last

    async def attach(self, subject: str, group: str | None = "g", client: str = "raw", **settings: Any) -> int:
        """A session."""
        attached: m.AttachReply = await self.ask(m.AttachRequest(subject, group, client, **settings))
        return attached.session

    async def route(self, subject: str) -> int:
        """A partition."""
        routed: m.PartitionNumberReply = await self.ask(m.PartitionNumberRequest(subject))
        return routed.partition

    async def store(self, subject: str, *bodies: bytes, producer: int = 7, first: int = 1, previous: int = 0) -> int:
        """Store a frame; the first sequence."""
        frame = build_frame(bodies, producer=producer, first=first, previous=previous)
        sent: m.SendReply = await self.ask(m.SendRequest(await self.route(subject)), frame.tobytes())
        assert sent.sequence is not None
        return sent.sequence
