"""The base of both servers: a port, its connections, and the limits that the connections share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from plait.broker.groups.group import AttachedConsumer
from plait.clock import Clock
from plait.errors import InvalidArgument, LimitExceeded, VersionMismatch
from plait.limits import ServerLimits
from plait.model import names
from plait.server.connection import Connection
from plait.version import VERSION
from plait.wire import messages as m
from plait.wire.link import SHARED_SIZE

log = logging.getLogger("plait.server")

Handler = Callable[[Connection, int, Any, memoryview], None]

#: How long clients may take to read their last replies when the server stops.
HANG_UP_SECONDS = 2.0
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Connections(dict[Connection, None]):
    """The open connections of a server, in order of arrival, and the limits that they share."""

    def __init__(self, clock: Clock, limits: ServerLimits) -> None:
        self.clock = clock
        self.limits = limits
        #: Packet kind → the function that serves these requests.
        self.handlers: dict[int, Handler] = {}
        #: Called after a request was refused.
        self.on_refusal: Callable[[], object] = lambda: None
        #: Called with a consumer and its session when their connection is closed.
        self.on_lost: Callable[[AttachedConsumer, int], object] = lambda consumer, session: None
        #: The connection and the session of each attached consumer.
        self.held: dict[AttachedConsumer, tuple[Connection, int]] = {}
        self.shared_buffer = memoryview(bytearray(SHARED_SIZE))
        #: Bytes of incomplete packets on all connections.
        self.partial_bytes = 0
        #: Bytes of unsent replies, on connections with many of them.
        self.outgoing_bytes = 0
        self.now = clock.monotonic()
        #: True if the server is stopping or has failed: new connections are refused.
        self.ending = False
        self._emptied: asyncio.Future[None] | None = None

    async def hang_up(self) -> None:
        """Close all connections, after at most ``HANG_UP_SECONDS`` in which clients can read unsent replies."""
        self._emptied = asyncio.get_running_loop().create_future()
        for connection in list(self):
            connection.close()
        if self:
            await asyncio.wait([self._emptied], timeout=HANG_UP_SECONDS)
        self.abort_all()
        await asyncio.sleep(0)

    def abort_all(self) -> None:
        for connection in list(self):
            connection.abort()

    def remove(self, connection: Connection) -> None:
        self.pop(connection, None)
        if self._emptied is not None and not self and not self._emptied.done():
            self._emptied.set_result(None)

    def abort_overdue(self) -> None:
        """Close connections that were silent for too long. Call this every second."""
        self.now = self.clock.monotonic()
        for connection in list(self):
            if connection.overdue(self.now):
                connection.abort()

    def give_up_partial(self) -> None:
        """Close the connections with the oldest incomplete packets until the rest is within the limit."""
        limit = self.limits.partial_bytes_total
        for connection in sorted([each for each in self if each.partial], key=lambda each: each.partial_since):
            if self.partial_bytes <= limit:
                break
            text = f"incomplete packets on this server exceed {limit} bytes; send faster, or try again later"
            connection.fail(0, LimitExceeded(text, limit="partial_bytes_total", value=limit))
            connection.count_partial(0)
            connection.end_packet()
            connection.close()

    def give_up_outgoing(self) -> None:
        """Close the connections with the most unsent replies until the rest is within the limit."""
        waiting = [connection for connection in self if connection.outgoing]
        for connection in waiting:
            # Some may have been sent since the last count.
            connection.count_outgoing()
        for connection in sorted(waiting, key=lambda each: -each.outgoing):
            if self.outgoing_bytes <= self.limits.outgoing_bytes_total:
                break
            log.warning(
                "client %s is disconnected: it has not read %d bytes of replies; all connections have %d unsent bytes "
                "(limit outgoing_bytes_total)",
                connection.client or "without a name",
                connection.outgoing,
                self.outgoing_bytes,
            )
            connection.count_outgoing(0)
            connection.counts_outgoing = False
            connection.abort()

    def end_session(self, consumer: AttachedConsumer) -> None:
        """End the session of a consumer, if a connection has one."""
        held = self.held.get(consumer)
        if held is not None:
            held[0].end_session(held[1])

    def greet(self, connection: Connection, correlation: int, hello: m.Hello, group: str = "", epoch: int = 0) -> None:
        """Answer the first request of a client. ``group`` and ``epoch`` are those of a broker."""
        if not hello.version_min <= m.PROTOCOL_VERSION <= hello.version_max:
            raise VersionMismatch(
                f"this server supports protocol {m.PROTOCOL_VERSION}, the client {hello.version_min} to "
                f"{hello.version_max}; use matching versions of Plait"
            )
        connection.client = names.check("client", hello.client)
        lost, window = self.limits.consumer_lost_seconds, self.limits.producer_window_frames
        connection.answer(correlation, m.Welcome(m.PROTOCOL_VERSION, VERSION, group, epoch, lost, window))


class Listener:
    """A port. A server sets ``connections.handlers`` before it listens."""

    def __init__(self, host: str, port: int, clock: Clock, limits: ServerLimits) -> None:
        if host not in LOOPBACK:
            raise InvalidArgument(
                f"host {host!r} is not loopback; the server has no authentication, so use 127.0.0.1 or ::1"
            )
        self.host = host
        self.port = port
        self.clock = clock
        self.limits = limits
        self.connections = Connections(clock, limits)
        self._listening: asyncio.Server | None = None

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"plait://{host}:{self.port}"

    async def bind(self) -> None:
        """Bind the port, without accepting connections; ``port`` is set afterwards."""
        self.loop = asyncio.get_running_loop()
        self._listening = await self.loop.create_server(
            lambda: Connection(self.connections), self.host, self.port, backlog=1024, start_serving=False
        )
        self.port = self._listening.sockets[0].getsockname()[1]

    async def listen(self) -> None:
        assert self._listening is not None
        await self._listening.start_serving()

    def end_listening(self) -> None:
        self.connections.ending = True
        if self._listening is not None:
            # asyncio never closes a connection that it accepted just before its server closes. So stop accepting
            # first, and close the server one loop turn later, when the accepted connections have started.
            for accepting in self._listening.sockets:
                self.loop.remove_reader(accepting.fileno())
            self.loop.call_soon(self._listening.close)
