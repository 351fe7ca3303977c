"""``MetaServer`` runs a meta server that listens on a socket, without a broker. Several may share one database."""

from __future__ import annotations

import asyncio

from plait import tasks
from plait.clock import Clock, SystemClock
from plait.errors import InvalidArgument
from plait.limits import MetaLimits, ServerLimits
from plait.server.cluster.links import BrokerOrders
from plait.server.connection import Connection
from plait.server.listener import Listener
from plait.server.meta.meta_host import MetaHost
from plait.server.meta.meta_requests import MetaHandlers
from plait.wire import codec
from plait.wire import messages as m

TICK_SECONDS = 1.0


class MetaServer(Listener):
    """Listens for clients and brokers, and runs a ``MetaHost``."""

    def __init__(
        self,
        url: str,
        *,
        host: str = "127.0.0.1",
        port: int = 7460,
        clock: Clock | None = None,
        limits: ServerLimits | None = None,
        meta_limits: MetaLimits | None = None,
        auto_create: bool = True,
        alone: bool | None = None,
    ) -> None:
        """``alone``: no other meta server uses the database. Default: True for SQLite."""
        super().__init__(host, port, clock or SystemClock(), limits or ServerLimits())
        self.meta = MetaHost(url, BrokerOrders(), self.clock, meta_limits, auto_create=auto_create, alone=alone)
        self._meta_handlers = MetaHandlers(self.meta)
        self.connections.handlers = dict.fromkeys(codec.ANSWERS, self._serve) | {
            m.Hello.KIND: lambda connection, correlation, hello, _: self.connections.greet(
                connection, correlation, hello
            ),
            m.HeartbeatRequest.KIND: lambda connection, correlation, *_: connection.answer(correlation, m.DoneReply()),
        }
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open the database and serve; ``port`` is set afterwards."""
        await self.bind()
        try:
            await self.meta.start(self.address)
        except BaseException:
            self.end_listening()
            raise
        await self.listen()
        self._task = tasks.keep(self._tick_loop, "plait-meta-tick")

    async def stop(self) -> None:
        """Stop serving and close the database."""
        if self._stopping:
            return
        self._stopping = True
        self.end_listening()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._meta_handlers.stop()
        await self.meta.stop()
        await self.connections.hang_up()

    async def _tick_loop(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.connections.abort_overdue()

    def _serve(self, connection: Connection, correlation: int, message: m.PacketHead, _: memoryview) -> None:
        if not self._meta_handlers.takes(message):
            raise InvalidArgument("this is a meta server, which stores no messages; send this request to a broker")
        self._meta_handlers.handle(connection, correlation, message)
