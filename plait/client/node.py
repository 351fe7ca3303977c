"""A server as a client sees it: one link, made again whenever it is lost."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any

from plait.errors import Closed, PlaitError, ProtocolError, Timeout, Unavailable
from plait.limits import ClientLimits
from plait.wire import messages as m
from plait.wire.dial import Link, dial, parse_address

log = logging.getLogger("plait.client")


class Node:
    """Keeps a link to one of the addresses, with heartbeats; a restart of the server is only a pause."""

    def __init__(self, addresses: list[str], client: str, limits: ClientLimits) -> None:
        for address in addresses:
            parse_address(address)
        self._addresses = addresses
        self._client = client
        self._limits = limits
        self._link: Link | None = None
        self._up: asyncio.Future[Link] | None = None
        self._task: asyncio.Task[None] | None = None
        self._heartbeat: asyncio.TimerHandle | None = None
        self.closed = False
        self.last_error: PlaitError | None = None
        #: Called with every new link, before anybody else uses it.
        self.on_link: list[Callable[[Link], None]] = []
        #: When the server was last heard from (loop time).
        self.heard = 0.0

    @property
    def link(self) -> Link | None:
        """The link if it is up."""
        link = self._link
        return link if link is not None and not link.closed else None

    async def open(self) -> None:
        """Connect for the first time; raises when no address answers in time."""
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run(), name="plait-connect")
        await self.ready(self._limits.request_seconds)

    async def ready(self, seconds: float | None = None) -> Link:
        """A link that is up, waiting for it at most ``seconds`` (None: for ever)."""
        link = self.link
        if link is not None:
            return link
        if self.closed:
            raise Closed("the client is closed")
        if self._up is None:
            self._up = self._loop.create_future()
        try:
            return await asyncio.wait_for(asyncio.shield(self._up), seconds)
        except TimeoutError:
            raise self.last_error or Unavailable("no server could be reached") from None

    async def request(self, message: m.Message, seconds: float | None = None) -> Any:
        """One request with its answer, over whatever link is up; not repeated when the link is lost meanwhile."""
        limit = self._limits.request_seconds if seconds is None else seconds
        link = await self.ready(limit)
        try:
            return await asyncio.wait_for(link.request(message), limit)
        except TimeoutError:
            raise Timeout(f"no answer from the server within {limit:g} s") from None

    async def close(self) -> None:
        """Hang up."""
        self.closed = True
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._link is not None:
            self._link.close()
        if self._up is not None and not self._up.done():
            self._up.set_exception(Closed("the client is closed"))
            self._up.exception()

    async def _run(self) -> None:
        pause = self._limits.reconnect_first_seconds
        turn = 0
        while True:
            address = self._addresses[turn % len(self._addresses)]
            turn += 1
            try:
                link = await dial(address, self._client, self._limits.request_seconds)
            except (PlaitError, OSError) as error:
                self.last_error = error if isinstance(error, PlaitError) else Unavailable(str(error))
                if isinstance(error, ProtocolError) and self._up is not None and not self._up.done():
                    self._up.set_exception(error)
                    self._up.exception()
                    self._up = None
                if turn % len(self._addresses) == 0:
                    await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311
                    pause = min(pause * 2, self._limits.reconnect_max_seconds)
                continue
            pause = self._limits.reconnect_first_seconds
            lost: asyncio.Future[None] = self._loop.create_future()
            link.on_lost = lambda lost=lost: None if lost.done() else lost.set_result(None)
            self._link = link
            self.heard = self._loop.time()
            for call in self.on_link:
                call(link)
            if self._up is not None and not self._up.done():
                self._up.set_result(link)
            self._up = None
            self._beat(link)
            if not link.closed:
                await lost
            log.info("the connection to %s was lost; connecting again", address)

    def _beat(self, link: Link) -> None:
        """Heartbeats; a server that answers none for too long is gone."""
        if link.closed or self.closed:
            return
        if self._loop.time() - self.heard > self._lost_seconds(link):
            link.abort()
            return

        def answered(_: Any, __: memoryview, error: PlaitError | None) -> None:
            if error is None:
                self.heard = self._loop.time()

        link.call(m.Heartbeat(), answered)
        self._heartbeat = self._loop.call_later(self._limits.heartbeat_seconds, self._beat, link)

    @staticmethod
    def _lost_seconds(link: Link) -> float:
        return link.welcome.consumer_lost_seconds if link.welcome else 5.0
