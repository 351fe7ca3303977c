"""A meta server's broker orders, over the wire or to the broker in the same process."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from plait.errors import PlaitError, Timeout
from plait.meta.views import Drop, Make, Move
from plait.model.logical_partitions import NumberedRun
from plait.server.broker_host import BrokerHost
from plait.server.cluster.links import Links
from plait.server.operations.table import run
from plait.wire.admin.operation import Operation
from plait.wire.admin.partitions import DROP_PARTITION, OPEN_PARTITION, SEAL_PARTITION

R = TypeVar("R")

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
        await self._ask(
            address,
            OPEN_PARTITION,
            subject=make.subject,
            name=make.place.name,
            lps=make.lps,
            version=make.version,
            settings=make.settings,
        )

    async def seal(self, address: str, move: Move) -> list[NumberedRun]:
        """Seal LPs of a partition. Returns their fences once the seal is durable."""
        return await self._ask(address, SEAL_PARTITION, name=move.place.name, lps=move.lps, version=move.version)

    async def drop(self, address: str, drop: Drop) -> None:
        """Drop a partition with all its messages."""
        await self._ask(address, DROP_PARTITION, subject=drop.subject, name=drop.place.name, version=drop.version)

    def close(self) -> None:
        """Close the connections."""
        self._links.close()

    async def _ask(self, address: str, operation: Operation[R], **arguments: Any) -> R:
        request = operation.packet(**arguments)
        if self._host is None or address != self._host.address:
            return operation.result(await self._links.request(address, request))
        done: asyncio.Future[R] = asyncio.get_running_loop().create_future()

        def reply(result: Any, _: PlaitError | None) -> None:
            if not done.done():
                done.set_result(result)

        run(self._host, request, reply)
        try:
            async with asyncio.timeout(ORDER_SECONDS):
                return await done
        except TimeoutError:
            raise Timeout(f"{operation.name} was not durable within {ORDER_SECONDS:g} s; it is retried") from None
