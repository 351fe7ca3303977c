"""A server's connections to other servers: one per address, opened when needed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from plait.errors import Timeout
from plait.wire import messages as m
from plait.wire.link import Buffer, Link, dial


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
        link = await self._link(address)
        try:
            async with asyncio.timeout(self._seconds):
                return await link.request(message, payload, size)
        except TimeoutError:
            link.abort()
            raise Timeout(f"{address} did not answer within {self._seconds:g} s") from None

    async def _link(self, address: str) -> Link:
        async with self._dialling.setdefault(address, asyncio.Lock()):
            link = self._links.get(address)
            if link is None or link.closed:
                link = self._links[address] = await dial(address, self._client, self._seconds)
            return link

    def close(self) -> None:
        """Close all connections."""
        for link in self._links.values():
            link.close()
