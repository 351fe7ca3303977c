"""The client's connection to one server, which reconnects whenever a link is lost, and the sessions of consumers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from plait import chance, tasks
from plait.errors import Closed, PlaitError, ProtocolError, Timeout, Unavailable
from plait.limits import ClientLimits
from plait.wire import messages as m
from plait.wire.link import Link, dial, parse_address

log = logging.getLogger("plait.client")


class Node:
    """Keeps a link to one of the addresses and sends heartbeats. A restart of the server only delays requests."""

    def __init__(self, addresses: list[str], client: str, limits: ClientLimits) -> None:
        for address in addresses:
            parse_address(address)
        self._given = self._addresses = list(addresses)
        self._client = client
        self._limits = limits
        self._loop: asyncio.AbstractEventLoop | None = None
        self._link: Link | None = None
        self._up: asyncio.Future[Link] | None = None
        self._task: asyncio.Task[None] | None = None
        self._heartbeat: asyncio.TimerHandle | None = None
        #: The error of every request after the node is closed.
        self.closed: PlaitError | None = None
        self.last_error: PlaitError | None = None
        #: True while ``open`` waits for the first connection.
        self._opening = False
        #: The connection errors that were logged since the last connection.
        self._reported: set[str] = set()
        #: Called with every new link, before it is used.
        self.on_link: list[Callable[[Link], None]] = []
        #: Called when the link is lost.
        self.on_lost: list[Callable[[], None]] = []
        #: When the last packet of the server arrived (loop time).
        self.last_contact = 0.0
        #: When the link was lost (loop time); undefined while there is a link.
        self.down_since = 0.0
        #: The broker group of the last link.
        self.group = ""
        #: True if the node serves blocking code: errors name ``plait.sync``, and any thread may ack messages.
        self.blocking = False

    @property
    def link(self) -> Link | None:
        """The link if it is up."""
        link = self._link
        return link if link is not None and not link.closed else None

    @property
    def addresses(self) -> list[str]:
        """The addresses that are tried in turn."""
        return self._addresses

    @property
    def alone(self) -> bool:
        """True if there is only one address, so that every link leads to the same server."""
        return len(self._addresses) == 1

    def start(self) -> None:
        """Start to connect in the background."""
        self._loop = asyncio.get_running_loop()
        self.down_since = self._loop.time()
        self._task = tasks.keep(self._run, "plait-connect")

    async def open(self) -> None:
        """Connect for the first time; raises if no address answers in time. May be called again after that."""
        if self.closed is not None:
            raise self.closed
        self.start()
        self._opening = True
        try:
            await self.ready(self._limits.request_seconds)
        except BaseException:
            await self._hang_up()
            raise
        finally:
            self._opening = False

    def move(self, addresses: list[str]) -> None:
        """Use these addresses for the next link."""
        if addresses:
            self._addresses = list(addresses)

    def learn(self, addresses: list[str]) -> None:
        """Use these addresses in addition to the original ones. They replace the addresses of an earlier call."""
        self._addresses = list(dict.fromkeys([*self._given, *addresses]))

    @property
    def resting(self) -> bool:
        """True if the node was started and does not connect now."""
        return self._loop is not None and self._task is None

    def rest(self) -> None:
        """Stop connecting until ``resume``. Call it only while there is no link."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def resume(self) -> None:
        """Connect again, after ``rest``."""
        if self.resting and self.closed is None:
            self.start()

    async def ready(self, seconds: float | None = None) -> Link:
        """The link when it is up; waits at most ``seconds`` (None: without limit)."""
        if self.closed is not None:
            raise self.closed
        link = self.link
        if link is not None:
            return link
        if self._loop is None:
            raise self.not_open()
        if self._up is None:
            self._up = self._loop.create_future()
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(self._up)
        except TimeoutError:
            if self.last_error is not None:
                raise type(self.last_error)(self.last_error.message, **self.last_error.details) from None
            raise Unavailable(
                f"no server could be reached at {', '.join(self._addresses)}", addresses=list(self._addresses)
            ) from None

    def not_open(self) -> Closed:
        """The error for a client that is used before it was opened."""
        how = "with plait.sync.connect(...)" if self.blocking else "async with plait.connect(...)"
        return Closed(f"the client is not connected; use '{how}', or open() and close()")

    async def request(self, message: m.PacketHead, seconds: float | None = None) -> Any:
        """Send one request and return its reply. The request is not repeated if the link is lost."""
        limit = self._limits.request_seconds if seconds is None else seconds
        link = await self.ready(limit)
        try:
            async with asyncio.timeout(limit):
                return await link.request(message)
        except TimeoutError:
            where = ", ".join(self._addresses)
            raise Timeout(f"no answer from {where} within {limit:g} s; try again", seconds=limit) from None

    async def close(self) -> None:
        """Disconnect permanently."""
        if self.closed is None:
            self.closed = Closed("the client is closed; connect again")
        await self._hang_up()
        self._fail_waiting(self.closed)

    async def _hang_up(self) -> None:
        """Close the link and stop connecting."""
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._link is not None:
            self._link.close()

    def _fail_waiting(self, error: PlaitError) -> None:
        up, self._up = self._up, None
        if up is not None and not up.done():
            up.set_exception(error)
            # Mark the exception as retrieved, in case no caller waits.
            up.exception()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        first, longest = self._limits.reconnect_first_seconds, self._limits.reconnect_max_seconds
        pause = first
        turn = 0
        refused_since: float | None = None
        while True:
            address = self._addresses[turn % len(self._addresses)]
            turn += 1
            try:
                link = await dial(address, self._client, self._limits.request_seconds)
            except (PlaitError, OSError) as error:
                self.last_error = error if isinstance(error, PlaitError) else Unavailable(str(error))
                if self.last_error.message not in self._reported:
                    self._reported.add(self.last_error.message)
                    log.warning("%s; trying again", self.last_error.message)
                if not self.last_error.details.get("refused"):
                    refused_since = None
                elif refused_since is None:
                    refused_since = loop.time()
                elif self._opening and loop.time() - refused_since >= self._limits.refused_seconds:
                    self._fail_waiting(self.last_error)
                if isinstance(error, ProtocolError):
                    self._fail_waiting(error)
            else:
                refused_since = None
                if self._reported:
                    self._reported.clear()
                    log.info("connected to %s", address)
                born = loop.time()
                try:
                    await self._serve(link, loop)
                except Exception:
                    # A callback of this client failed: start again with a new link.
                    link.abort()
                    raise
                log.info("the connection to %s was lost; connecting again", address)
                if loop.time() - born >= self._limits.reconnect_steady_seconds:
                    pause = first
                    continue
            # A server that drops connections at once is treated like one that refuses them.
            if turn % len(self._addresses) == 0:
                await asyncio.sleep(pause * chance.uniform(0.5, 1.0))
                pause = min(pause * 2, longest)

    async def _serve(self, link: Link, loop: asyncio.AbstractEventLoop) -> None:
        """Use a new link; returns when it is lost."""
        lost: asyncio.Future[None] = loop.create_future()

        def on_lost() -> None:
            if not lost.done():
                lost.set_result(None)

        link.on_lost = on_lost
        self._link = link
        self.last_error = None
        self.last_contact = loop.time()
        self.group = link.welcome.group if link.welcome is not None else ""
        for new_link in list(self.on_link):
            new_link(link)
        up, self._up = self._up, None
        if up is not None and not up.done():
            up.set_result(link)
        self._send_heartbeat(link, link.received_bytes, loop)
        if not link.closed:
            await lost
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        self.down_since = loop.time()
        for call in list(self.on_lost):
            call()

    def _send_heartbeat(self, link: Link, received: int, loop: asyncio.AbstractEventLoop) -> None:
        """Send a heartbeat and schedule the next one; close the link of a server that was silent for too long."""
        if link.closed or self.closed is not None:
            return
        now = loop.time()
        if link.received_bytes != received:
            self.last_contact = now
        elif now - self.last_contact > (link.welcome.consumer_lost_seconds if link.welcome else 5.0):
            link.abort()
            return
        link.call(m.HeartbeatRequest(), _ignore)
        seconds = self._limits.heartbeat_seconds
        due = now + seconds

        def again() -> None:
            if loop.time() - due > seconds:
                # This process was late, not the server: its packets may still wait in the socket.
                self.last_contact = loop.time()
            self._send_heartbeat(link, link_received, loop)

        link_received = link.received_bytes
        self._heartbeat = loop.call_at(due, again)


def _ignore(_: Any, __: memoryview, ___: PlaitError | None) -> None:
    """The reply to a heartbeat or a detach has no content."""


class ConsumerSession:
    """Lasts until its link closes or the broker ends it. Every request of the consumer has its number."""

    __slots__ = ("link", "number", "reply")

    def __init__(self, link: Link, reply: m.AttachReply) -> None:
        self.link = link
        self.number = reply.session
        self.reply = reply

    @classmethod
    def start(cls, link: Link, attach: m.AttachRequest) -> asyncio.Future[ConsumerSession]:
        """Start a session. A caller that is cancelled must end it later, as it blocks the consumer's next attach."""
        future: asyncio.Future[ConsumerSession] = asyncio.get_running_loop().create_future()

        def answered(answer: Any, _: memoryview, error: PlaitError | None) -> None:
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(cls(link, answer))

        link.call(attach, answered)
        return future

    def end(self) -> None:
        """Request the end of the session. Requests are processed in order: the next one need not wait for the reply."""
        if not self.link.closed:
            self.link.call(m.DetachRequest(self.number), _ignore)
