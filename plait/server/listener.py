"""The base of both servers: a port, its connections, and the limits on them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from plait.clock import Clock
from plait.errors import InvalidArgument
from plait.limits import ServerLimits
from plait.server.connection import Connection
from plait.wire.packets import SHARED_SIZE, Packet

if TYPE_CHECKING:
    from plait.broker.groups.shared_group import AttachedConsumer

#: How long clients may take to read their last replies when the server stops.
HANG_UP_SECONDS = 2.0
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Serving(Protocol):
    """Serves requests."""

    def handle(self, connection: Connection, packet: Packet) -> None:
        """Serve a request. A protocol error closes the connection; any other error is a reply."""


class Listener:
    """A port and its connections; ``handlers`` serves their requests."""

    handlers: Serving

    def __init__(self, host: str, port: int, clock: Clock, limits: ServerLimits) -> None:
        if host not in LOOPBACK:
            raise InvalidArgument(
                f"host {host!r} is not loopback; the server has no authentication, so use 127.0.0.1 or ::1"
            )
        self.host = host
        self.port = port
        self.clock = clock
        self.limits = limits
        self.shared_buffer = memoryview(bytearray(SHARED_SIZE))
        #: In order of arrival, so that work over all connections is repeatable.
        self.connections: dict[Connection, None] = {}
        #: Attached consumers by session; a meta server has none.
        self.sessions: Mapping[int, AttachedConsumer] = {}
        #: The connection and the session of each attached consumer.
        self.holders: dict[AttachedConsumer, tuple[Connection, int]] = {}
        #: Bytes of incomplete packets on all connections.
        self.partial_bytes = 0
        #: Bytes of unsent replies, on connections with many of them.
        self.outgoing_bytes = 0
        self.now = clock.monotonic()
        self._listening: asyncio.Server | None = None
        self._stopping = False
        self._emptied: asyncio.Future[None] | None = None

    @property
    def address(self) -> str:
        """The address for clients."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"plait://{host}:{self.port}"

    @property
    def ending(self) -> bool:
        """True if the server is stopping: new connections are refused."""
        return self._stopping

    async def bind(self) -> None:
        """Bind the port, without accepting connections; ``port`` is set afterwards."""
        self.loop = asyncio.get_running_loop()
        self._listening = await self.loop.create_server(
            lambda: Connection(self), self.host, self.port, backlog=1024, start_serving=False
        )
        self.port = self._listening.sockets[0].getsockname()[1]

    async def listen(self) -> None:
        """Accept connections."""
        assert self._listening is not None
        await self._listening.start_serving()

    def end_listening(self) -> None:
        """Stop accepting connections."""
        if self._listening is not None:
            # asyncio never closes a connection that it accepted just before its server closes. So stop accepting
            # first, and close the server one loop turn later, when the accepted connections have started.
            for accepting in self._listening.sockets:
                self.loop.remove_reader(accepting.fileno())
            self.loop.call_soon(self._listening.close)

    async def hang_up(self) -> None:
        """Close all connections; unsent replies get ``HANG_UP_SECONDS`` to leave."""
        self._emptied = self.loop.create_future()
        for connection in list(self.connections):
            connection.close()
        if self.connections:
            await asyncio.wait([self._emptied], timeout=HANG_UP_SECONDS)
        self.abort_all()
        await asyncio.sleep(0)

    def abort_all(self) -> None:
        """Close all connections at once."""
        for connection in list(self.connections):
            connection.abort()

    def hung_up(self, connection: Connection) -> None:
        """Called by a connection when it is closed."""
        self.connections.pop(connection, None)
        if self._emptied is not None and not self.connections and not self._emptied.done():
            self._emptied.set_result(None)

    def lost(self, consumer: AttachedConsumer, session: int) -> None:
        """Called when the connection of a consumer is closed."""

    def abort_overdue(self) -> None:
        """Close connections that were silent for too long. Call this every second."""
        self.now = self.clock.monotonic()
        for connection in list(self.connections):
            if connection.overdue(self.now):
                connection.abort()

    def give_up_partial(self) -> None:
        """Close the connections with the oldest incomplete packets until the rest is within the limit."""
        incomplete = [connection for connection in self.connections if connection.partial]
        for connection in sorted(incomplete, key=lambda c: c.partial_since):
            if self.partial_bytes <= self.limits.partial_bytes_total:
                break
            connection.give_up_partial()

    def give_up_outgoing(self) -> None:
        """Close the connections with the most unsent replies until the rest is within the limit."""
        waiting = [connection for connection in self.connections if connection.outgoing]
        for connection in waiting:
            # Some may have been sent since the last count.
            connection.count_outgoing()
        for connection in sorted(waiting, key=lambda c: -c.outgoing):
            if self.outgoing_bytes <= self.limits.outgoing_bytes_total:
                break
            connection.give_up_outgoing()
