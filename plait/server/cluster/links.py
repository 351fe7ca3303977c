"""A server's connections to other servers: one per address, opened when needed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

from plait.errors import PlaitError, Timeout
from plait.server.broker_host import BrokerHost
from plait.server.operations.table import run
from plait.wire import messages as m
from plait.wire.admin.operation import Operation
from plait.wire.link import Buffer, Link, dial

R = TypeVar("R")

#: Timeout of a broker order, which is then repeated later.
ORDER_SECONDS = 5.0


class Links:
    """The connections of one part of a server."""

    def __init__(self, client: str, seconds: float) -> None:
        """``client`` is the client id sent to the other servers; ``seconds`` is the timeout of a request."""
        self._client = client
        self._seconds = seconds
        self._links: dict[str, Link] = {}
        #: Held while a connection is opened, so that concurrent requests to one address share it.
        self._dialling: dict[str, asyncio.Lock] = {}

    async def request(self, address: str, message: m.PacketHead, payload: Sequence[Buffer] = (), size: int = 0) -> Any:
        """Send a request and return the reply. Raises ``Unavailable``, ``Timeout``, or the error of the reply."""
        async with self._dialling.setdefault(address, asyncio.Lock()):
            link = self._links.get(address)
            if link is None or link.closed:
                link = self._links[address] = await dial(address, self._client, self._seconds)
        try:
            async with asyncio.timeout(self._seconds):
                return await link.request(message, payload, size)
        except TimeoutError:
            link.abort()
            raise Timeout(f"{address} did not answer within {self._seconds:g} s") from None

    def close(self) -> None:
        for link in self._links.values():
            link.close()


class BrokerOrders:
    """Sends a meta server's orders over one link to each broker, except to the broker in this process."""

    def __init__(self, host: BrokerHost | None = None) -> None:
        """``host`` runs the broker in this process, if there is one."""
        self._host = host
        self._links = Links("%meta", ORDER_SECONDS)
        self.close = self._links.close

    async def request(self, address: str, operation: Operation[R], **arguments: Any) -> R:
        """Send an order. Returns the result once it is durable at the broker."""
        packet = operation.packet(**arguments)
        if self._host is None or address != self._host.address:
            return operation.result(await self._links.request(address, packet))
        done: asyncio.Future[R] = asyncio.get_running_loop().create_future()

        def reply(result: Any, _: PlaitError | None) -> None:
            if not done.done():
                done.set_result(result)

        run(self._host, packet, reply)
        try:
            async with asyncio.timeout(ORDER_SECONDS):
                return await done
        except TimeoutError:
            raise Timeout(f"{operation.name} was not durable within {ORDER_SECONDS:g} s; it is retried") from None
