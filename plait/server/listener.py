"""The base of both servers: a port and its connections."""

from __future__ import annotations

import asyncio

from plait.clock import Clock
from plait.errors import InvalidArgument
from plait.limits import ServerLimits
from plait.server.connection import Connection, Connections

LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Listener:
    """A port. A server sets ``connections.handle``, which serves requests, before it listens."""

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
        """The address for clients."""
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
        """Accept connections."""
        assert self._listening is not None
        await self._listening.start_serving()

    def end_listening(self) -> None:
        """Stop accepting connections."""
        self.connections.ending = True
        if self._listening is not None:
            # asyncio never closes a connection that it accepted just before its server closes. So stop accepting
            # first, and close the server one loop turn later, when the accepted connections have started.
            for accepting in self._listening.sockets:
                self.loop.remove_reader(accepting.fileno())
            self.loop.call_soon(self._listening.close)
