"""A broker's cluster role: alone, with a meta server in its process, or registered with other meta servers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from plait.errors import InvalidArgument, PlaitError, Timeout, Unavailable
from plait.limits import MetaLimits
from plait.meta.database.connection import DATABASE, file_url
from plait.server.broker_host import BrokerHost
from plait.server.cluster.links import BrokerOrders, Links
from plait.server.cluster.registrar import Registrar
from plait.server.connection import Connection
from plait.server.meta.meta_host import MetaHost
from plait.server.meta.meta_requests import MetaHandlers
from plait.storage.marks import identity
from plait.wire import messages as m
from plait.wire.admin.operation import Operation
from plait.wire.admin.subjects import CREATE_SUBJECT, DELETE_SUBJECT

R = TypeVar("R")

#: Operations that a broker serves only if there is no meta server.
_OF_META_SERVERS = (CREATE_SUBJECT.name, DELETE_SUBJECT.name)
#: Timeout of a request to a meta server; then another one is asked.
ASK_SECONDS = 3.0


def database_in(directory: Path) -> str:
    """The URL of the meta database of a node that has everything in one directory."""
    return file_url(str(directory.resolve() / DATABASE))


class ClusterRole:
    """Starts what the role needs, and serves or forwards requests to meta servers."""

    def __init__(self, broker_host: BrokerHost, url: str | None, addresses: Sequence[str]) -> None:
        if url is not None and addresses:
            raise InvalidArgument(
                "a broker has a meta server in its process or uses others, not both; give one of `meta` and `metas`"
            )
        self._broker_host = broker_host
        self._url = url
        self._addresses = list(addresses)
        self._host: MetaHost | None = None
        self._handlers: MetaHandlers | None = None
        self._registrar: Registrar | None = None
        #: Connections to the meta servers.
        self._links: Links | None = None
        #: Index of the meta server for the next request.
        self._turn = 0

    @property
    def alone(self) -> bool:
        return self._url is None and not self._addresses

    async def start(self) -> None:
        """Register with a meta server. If none is reachable, registration is retried in the background."""
        host = self._broker_host
        if self._url is not None:
            limits = MetaLimits.of_lease(host.config.limits.lease_seconds)
            self._host = MetaHost(
                self._url, BrokerOrders(host), host.clock, limits, auto_create=host.config.auto_create
            )
            await self._host.start(host.address)
            self._handlers = MetaHandlers(self._host)
            self._registrar = Registrar(host, host.config.group, self._ask)
        elif self._addresses:
            # The operator may give two brokers the same group name; the directory's identity tells them apart.
            name = await asyncio.get_running_loop().run_in_executor(host.threads, identity, host.disk)
            self._links = Links(f"%broker-{name}", ASK_SECONDS)
            self._registrar = Registrar(host, name, self._ask)
        if self._registrar is not None:
            await self._registrar.start()
        if self._host is not None:
            self._host.look_soon()

    async def stop(self) -> None:
        if self._registrar is not None:
            await self._registrar.stop()
        await self.abandon()

    async def abandon(self) -> None:
        """Stop without notifying the meta servers."""
        if self._registrar is not None:
            await self._registrar.abandon()
        if self._handlers is not None:
            await self._handlers.stop()
        if self._host is not None:
            await self._host.stop()
        # The handlers stay: until the last connection is closed they refuse requests with ``Unavailable``.
        self._host = self._registrar = None
        if self._links is not None:
            self._links.close()

    def take(self, connection: Connection, correlation: int, message: m.PacketHead) -> bool:
        """Serve a request to a meta server. Returns False if it is not one, or if there is no meta server here."""
        if self._handlers is not None:
            if self._handlers.takes(message):
                self._handlers.handle(connection, correlation, message)
                return True
        elif self._addresses and (
            isinstance(message, m.RouteRequest | m.MemberHeartbeatRequest)
            or (isinstance(message, m.AdminRequest) and message.operation in _OF_META_SERVERS)
        ):
            raise InvalidArgument(f"this is a broker; send this request to a meta server: {', '.join(self._addresses)}")
        return False

    def wake(self) -> None:
        """Let a meta server in this process look for due recurrences: its clock has moved."""
        if self._host is not None:
            self._host.firing.wake()

    async def route(self, subject: str) -> m.RouteReply:
        found = await self._request(m.RouteRequest(subject, create=False))
        assert isinstance(found, m.RouteReply)
        return found

    async def _ask(self, operation: Operation[R], **arguments: Any) -> R:
        answer = await self._request(operation.packet(**arguments))
        assert isinstance(answer, m.AdminReply)
        return operation.result(answer)

    async def _request(self, request: m.PacketHead) -> m.PacketHead:
        """Send a request to the meta server here, or to one meta server after another until one answers."""
        if self._handlers is not None:
            return await self._handlers.serve(request)
        assert self._links is not None
        last: PlaitError = Unavailable("no meta server is reachable")
        for _ in self._addresses:
            turn = self._turn
            try:
                answer: m.PacketHead = await self._links.request(self._addresses[turn % len(self._addresses)], request)
            except (Timeout, Unavailable) as error:
                last = error
                # A concurrent request may have advanced it already.
                self._turn = max(self._turn, turn + 1)
            else:
                return answer
        raise last
