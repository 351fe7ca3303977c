"""A server's connections to other servers: one per address, opened when needed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from plait.errors import PlaitError, Timeout
from plait.frame.view import FrameView
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
        return await self._ask(address, await self._link(address), message, payload, size)

    async def store(self, address: str, name: str, frame: bytes, *, delayed: bool, late: Callable[[], bool]) -> None:
        """Store a frame in a partition, or in its schedule. Raises ``Timeout`` if it is ``late`` before it is sent.

        One connection has both requests: the number of a partition is valid in one data epoch of its broker.
        """
        link = await self._link(address)
        found: m.PartitionNumberReply = await self._ask(address, link, m.PartitionNumberRequest(name, delayed))
        if late():
            raise Timeout(f"{address} was reached too late for a frame; it is read again and retried")
        await self._ask(address, link, m.SendRequest(found.partition), [frame], len(frame))

    async def _link(self, address: str) -> Link:
        async with self._dialling.setdefault(address, asyncio.Lock()):
            link = self._links.get(address)
            if link is None or link.closed:
                link = self._links[address] = await dial(address, self._client, self._seconds)
            return link

    async def _ask(
        self, address: str, link: Link, message: m.PacketHead, payload: Sequence[Buffer] = (), size: int = 0
    ) -> Any:
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
        return await _durable(done, operation.name)

    async def store_delayed(self, address: str, name: str, frame: bytes, late: Callable[[], bool]) -> None:
        """Store a frame of delayed rows in the schedule of a partition."""
        if self._host is None or address != self._host.address:
            await self._links.store(address, name, frame, delayed=True, late=late)
            return
        if late():
            raise Timeout("a frame was read too long ago; it is read again and retried")
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def reply(_: int | None, error: PlaitError | None) -> None:
            if done.done():
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        broker = self._host.broker
        broker.partition_of(name)
        broker.submit(broker.schedules.partition_of(name), FrameView(frame), reply)
        await _durable(done, f"a frame for partition {name}")


async def _durable(done: asyncio.Future[R], what: str) -> R:
    try:
        async with asyncio.timeout(ORDER_SECONDS):
            return await done
    except TimeoutError:
        raise Timeout(f"{what} was not durable within {ORDER_SECONDS:g} s; it is retried") from None
