"""Sends a meta server's broker orders, over the wire or to the broker in the same process."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from plait.errors import Timeout
from plait.meta.views import Drop, Make, Move
from plait.server.cluster.links import Links
from plait.server.operations import partitions as admin_partition
from plait.storage.catalog import Fence
from plait.wire import messages as m

if TYPE_CHECKING:
    from plait.server.broker_server import Server

#: Timeout of an order, which is then repeated later.
ORDER_SECONDS = 5.0
CLIENT = "%meta"

_fences = msgspec.msgpack.Decoder(list[Fence])


def _opening(make: Make) -> dict[str, Any]:
    settings = msgspec.to_builtins(make.settings)
    return {
        "subject": make.subject,
        "name": make.place.name,
        "lps": make.lps,
        "version": make.version,
        "settings": settings,
    }


def _sealing(move: Move) -> dict[str, Any]:
    return {"name": move.place.name, "lps": move.lps, "version": move.version}


def _dropping(drop: Drop) -> dict[str, Any]:
    return {"subject": drop.subject, "name": drop.place.name, "version": drop.version}


class RemoteOrders:
    """Sends orders to brokers in other processes, over one link to each."""

    def __init__(self) -> None:
        self._links = Links(CLIENT, ORDER_SECONDS)

    async def make(self, address: str, make: Make) -> None:
        await self._ask(address, admin_partition.OPEN, _opening(make))

    async def seal(self, address: str, move: Move) -> list[Fence]:
        return _fences.decode(await self._ask(address, admin_partition.SEAL, _sealing(move)))

    async def drop(self, address: str, drop: Drop) -> None:
        await self._ask(address, admin_partition.DROP, _dropping(drop))

    async def close(self) -> None:
        self._links.close()

    async def _ask(self, address: str, operation: str, arguments: dict[str, Any]) -> msgspec.Raw:
        answer: m.AdminReply = await self._links.request(address, m.AdminRequest(operation, arguments))
        return answer.result


class LocalOrders:
    """Gives orders to the broker in this process, and sends them to other brokers."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._remote = RemoteOrders()

    async def make(self, address: str, make: Make) -> None:
        if address != self._server.address:
            await self._remote.make(address, make)
        else:
            await self._ask(admin_partition.OPEN, _opening(make))

    async def seal(self, address: str, move: Move) -> list[Fence]:
        if address != self._server.address:
            return await self._remote.seal(address, move)
        fences: list[Fence] = await self._ask(admin_partition.SEAL, _sealing(move))
        return fences

    async def drop(self, address: str, drop: Drop) -> None:
        if address != self._server.address:
            await self._remote.drop(address, drop)
        else:
            await self._ask(admin_partition.DROP, _dropping(drop))

    async def close(self) -> None:
        await self._remote.close()

    async def _ask(self, operation: str, arguments: dict[str, Any]) -> Any:
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def reply(result: Any) -> None:
            if not done.done():
                done.set_result(result)

        admin_partition.order(self._server, operation, arguments, reply)
        try:
            async with asyncio.timeout(ORDER_SECONDS):
                return await done
        except TimeoutError:
            raise Timeout(f"{operation} was not durable within {ORDER_SECONDS:g} s; it is retried") from None
