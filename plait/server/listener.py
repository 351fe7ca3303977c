"""What every server is: a port, its connections, and the limits on them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from plait.clock import Clock
from plait.errors import InvalidArgument, StaleSession
from plait.limits import ServerLimits
from plait.server.connection import Connection
from plait.wire.packets import SHARED_SIZE, Packet

if TYPE_CHECKING:
    from plait.broker.groups.shared_group import AttachedConsumer

#: How long connections may take to fetch their last answers when the server stops.
HANG_UP_SECONDS = 2.0
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Serving(Protocol):
    """Who carries requests out."""

    def handle(self, connection: Connection, packet: Packet) -> None:
        """Serve a request. A broken protocol closes the connection, anything else is answered."""


class Listener:
    """A port and its connections; ``handlers`` serves what they ask."""

    handlers: Serving

    def __init__(self, host: str, port: int, clock: Clock, limits: ServerLimits) -> None:
        if host not in LOOPBACK:
            raise InvalidArgument(
                f"host {host!r} is not loopback; without authentication the server binds 127.0.0.1 or ::1 only"
            )
        self.host = host
        self.port = port
        self.clock = clock
        self.limits = limits
        self.shared_buffer = memoryview(bytearray(SHARED_SIZE))
        #: In the order they came, so that whatever is done to all of them has one order too.
        self.connections: dict[Connection, None] = {}
        #: Where each attached consumer is: its connection and its session there.
        self.holders: dict[AttachedConsumer, tuple[Connection, int]] = {}
        #: Bytes of unfinished packets on all connections.
        self.partial_bytes = 0
        #: Bytes of answers that are not taken, on connections that have many.
        self.outgoing_bytes = 0
        self.now = clock.monotonic()
        self._listening: asyncio.Server | None = None
        self._stopping = False
        self._emptied: asyncio.Future[None] | None = None

    @property
    def address(self) -> str:
        """The address clients connect to."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"plait://{host}:{self.port}"

    @property
    def ending(self) -> bool:
        """It stops: nobody is let in any more."""
        return self._stopping

    async def bind(self) -> None:
        """Take the port, which is known afterwards; nobody is let in yet."""
        self.loop = asyncio.get_running_loop()
        self._listening = await self.loop.create_server(
            lambda: Connection(self), self.host, self.port, backlog=1024, start_serving=False
        )
        self.port = self._listening.sockets[0].getsockname()[1]

    async def listen(self) -> None:
        """Let clients in."""
        assert self._listening is not None
        await self._listening.start_serving()

    def end_listening(self) -> None:
        """Let nobody in any more."""
        if self._listening is not None:
            # asyncio leaves a connection open for good that it accepted just before its server closes: so accepting
            # ends first, and the server closes when those that were accepted have begun.
            for accepting in self._listening.sockets:
                self.loop.remove_reader(accepting.fileno())
            self.loop.call_soon(self._listening.close)

    async def hang_up(self) -> None:
        """Close all connections; answers that are still on their way have a moment to leave."""
        self._emptied = self.loop.create_future()
        for connection in list(self.connections):
            connection.close()
        if self.connections:
            await asyncio.wait([self._emptied], timeout=HANG_UP_SECONDS)
        self.abort_all()
        await asyncio.sleep(0)

    def abort_all(self) -> None:
        """Close all connections without waiting for anybody."""
        for connection in list(self.connections):
            connection.abort()

    def hung_up(self, connection: Connection) -> None:
        """A connection is gone."""
        self.connections.pop(connection, None)
        if self._emptied is not None and not self.connections and not self._emptied.done():
            self._emptied.set_result(None)

    def session(self, number: int) -> AttachedConsumer:
        """The consumer of a session, heard from just now."""
        raise StaleSession("there are no consumers here; attach to a broker")

    def lost(self, consumer: AttachedConsumer, session: int) -> None:
        """The connection of a consumer is gone."""

    def abort_overdue(self) -> None:
        """Close connections from which nothing was heard for too long. Call it every second."""
        self.now = self.clock.monotonic()
        for connection in list(self.connections):
            if connection.overdue(self.now):
                connection.abort()

    def give_up_partial(self) -> None:
        """Too many bytes of unfinished packets: close the connections whose packets have gone on longest."""
        unfinished = [connection for connection in self.connections if connection.partial]
        for connection in sorted(unfinished, key=lambda c: c.partial_since):
            if self.partial_bytes <= self.limits.partial_bytes_total:
                break
            connection.give_up_partial()

    def give_up_outgoing(self) -> None:
        """Too many bytes of answers are not taken: close the connections that have the most."""
        waiting = [connection for connection in self.connections if connection.outgoing]
        for connection in waiting:
            # Some may have been taken since they were counted.
            connection.count_outgoing()
        for connection in sorted(waiting, key=lambda c: -c.outgoing):
            if self.outgoing_bytes <= self.limits.outgoing_bytes_total:
                break
            connection.give_up_outgoing()
