"""A client for tests that sends any bytes, valid or not, and returns each packet of the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec

from plait.errors import PlaitError
from plait.frame.builder import build_frame
from plait.server.listener import Listener
from plait.wire import codec
from plait.wire import messages as m
from plait.wire.link import HEADER, HEADER_SIZE, pack

#: A wait of this length fails the test.
PATIENCE_SECONDS = 20.0


async def until(condition: Callable[[], object]) -> None:
    """Run the loop until the condition holds."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - the server sends no event for its internal state
            await asyncio.sleep(0)


class Answer(NamedTuple):
    """One packet from the server."""

    correlation: int
    message: Any
    payload: bytes


class Raw:
    """One connection. ``async with Raw(server) as raw`` connects; with a ``client`` it says hello, too."""

    def __init__(self, server: Listener, client: str | None = None) -> None:
        self._server = server
        self._client = client
        self._next = 0

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_connection(self._server.host, self._server.port)
        if self._client is not None:
            await self.hello(self._client)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.writer.transport.abort()
        # Close the transport before the loop.
        await asyncio.sleep(0)

    def write(self, data: bytes) -> None:
        """Send bytes."""
        self.writer.write(data)

    def request(self, message: m.PacketHead, payload: bytes = b"") -> int:
        """Send a request. Returns its correlation."""
        self._next += 1
        self.write(pack(message.KIND, self._next, codec.encode(message), len(payload)) + payload)
        return self._next

    async def next(self) -> Answer:
        """The next packet; ``IncompleteReadError`` or ``ConnectionError`` if the connection is closed."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            size, kind, _, correlation, head_size = HEADER.unpack(await self.reader.readexactly(HEADER_SIZE))
            body = await self.reader.readexactly(size - HEADER_SIZE)
        message = codec.decode(kind, memoryview(body)[:head_size])
        return Answer(correlation, message, body[head_size + (-head_size & 7) :])

    async def answer(self, correlation: int) -> Answer:
        """The reply to a request, which must be the next packet; raises the error if the reply is one."""
        answer = await self.next()
        if isinstance(answer.message, m.ErrorReply):
            raise codec.error_of(answer.message)
        assert answer.correlation == correlation
        return answer

    async def ask(self, message: m.PacketHead, payload: bytes = b"") -> Any:
        """Send a request and return its reply."""
        return (await self.answer(self.request(message, payload))).message

    async def admin(self, operation: str, **arguments: Any) -> Any:
        """Send an admin request and return its decoded result."""
        reply: m.AdminReply = await self.ask(m.AdminRequest(operation, arguments))
        return msgspec.msgpack.decode(reply.result)

    async def hello(self, client: str = "raw") -> m.Welcome:
        welcome: m.Welcome = await self.ask(m.Hello(m.PROTOCOL_VERSION, m.PROTOCOL_VERSION, client))
        return welcome

    async def ending(self) -> PlaitError | None:
        """Read until the connection is closed. Returns the last error that the server sent, if any."""
        last: PlaitError | None = None
        try:
            while True:
                answer = await self.next()
                if answer.correlation == 0 and isinstance(answer.message, m.ErrorReply):
                    last = codec.error_of(answer.message)
        except (asyncio.IncompleteReadError, ConnectionError):
            return last

    async def attach(self, subject: str, group: str | None = "g", client: str = "raw", **settings: Any) -> int:
        """Attach a consumer. Returns its session."""
        attached: m.AttachReply = await self.ask(m.AttachRequest(subject, group, client, **settings))
        return attached.session

    async def route(self, subject: str) -> int:
        """Get the number of a subject's partition."""
        routed: m.PartitionNumberReply = await self.ask(m.PartitionNumberRequest(subject))
        return routed.partition

    async def store(self, subject: str, *bodies: bytes, producer: int = 7, first: int = 1, previous: int = 0) -> int:
        """Store a frame. Returns its first sequence."""
        frame = build_frame(bodies, producer=producer, first=first, previous=previous)
        sent: m.SendReply = await self.ask(m.SendRequest(await self.route(subject)), frame.tobytes())
        assert sent.sequence is not None
        return sent.sequence
