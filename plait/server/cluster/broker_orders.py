"""A meta server's broker orders, over the wire or to the broker in the same process."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from plait.errors import Timeout
from plait.meta.views import Drop, Make, Move
from plait.server.broker_host import BrokerHost
from plait.server.cluster.links import Links
from plait.server.operations import partitions as admin_partition
from plait.storage.catalog import Fence
from plait.wire import messages as m

#: Timeout of an order, which is then repeated later.
ORDER_SECONDS = 5.0
CLIENT = "%meta"


class BrokerOrders:
    """Sends orders over one link to each broker, except to the broker in this process."""

    def __init__(self, host: BrokerHost | None = None) -> None:
        """``host`` runs the broker in this process, if there is one."""
        self._host = host
        self._links = Links(CLIENT, ORDER_SECONDS)

    async def make(self, address: str, make: Make) -> None:
        """Create the partition if it does not exist, and open it for LPs."""
        opening = {
            "subject": make.subject,
            "name": make.place.name,
            "lps": make.lps,
            "version": make.version,
            "settings": msgspec.to_builtins(make.settings),
        }
        await self._ask(address, admin_partition.OPEN, opening)

    async def seal(self, address: str, move: Move) -> list[Fence]:
        """Seal LPs of a partition. Returns their fences once the seal is durable."""
        sealing = {"name": move.place.name, "lps": move.lps, "version": move.version}
        return msgspec.convert(await self._ask(address, admin_partition.SEAL, sealing), list[Fence])

    async def drop(self, address: str, drop: Drop) -> None:
        """Drop a partition with all its messages."""
        dropping = {"subject": drop.subject, "name": drop.place.name, "version": drop.version}
        await self._ask(address, admin_partition.DROP, dropping)

    def close(self) -> None:
        """Close the connections."""
        self._links.close()

    async def _ask(self, address: str, operation: str, arguments: dict[str, Any]) -> Any:
        if self._host is None or address != self._host.address:
            answer: m.AdminReply = await self._links.request(address, m.AdminRequest(operation, arguments))
            return msgspec.msgpack.decode(answer.result)
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def reply(result: Any) -> None:
            if not done.done():
                done.set_result(result)

        admin_partition.order(self._host, operation, arguments, reply)
        try:
            async with asyncio.timeout(ORDER_SECONDS):
                return await done
        except TimeoutError:
            raise Timeout(f"{operation} was not durable within {ORDER_SECONDS:g} s; it is retried") from None
