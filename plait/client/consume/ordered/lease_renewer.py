"""Leases of ordered consumers, renewed from a thread of the client's own (R14).

A handler that blocks the user's loop does not cost the locks that its message stands under, nor the membership: the
keeper has an event loop and links of its own. It stops for a consumer whose oldest message has been in the user's hands
for too long.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, Protocol

from plait import tasks
from plait.client.blocking.loop_thread import LoopThread
from plait.client.consume.ordered.ordered_pull import RENEW_AT
from plait.client.net.node import Node
from plait.clock import Clock
from plait.errors import PlaitError, StaleSession
from plait.limits import ClientLimits
from plait.wire import messages as m

#: How long the end of a client waits for the thread.
STOP_SECONDS = 2.0

#: Sockets are closed a few turns of the loop after they were told to.
CLOSING_TURNS = 10

#: The keepers of parent processes: never touched, not even by the garbage collector.
_inherited: list[LeaseRenewer] = []


class RenewedLease(NamedTuple):
    """A session whose locks are to stay."""

    addresses: tuple[str, ...]
    session: int
    token: int
    seconds: float


class Holder(Protocol):
    """Who has a lease. All of it is called from the keeper's thread."""

    def lease(self) -> RenewedLease | None:
        """What is to be renewed; None: nothing at present."""

    def renewed(self, session: int, sent: float) -> None:
        """It goes on from when the request was sent."""


class RenewalPulse(Protocol):
    """Heartbeats that have to leave although the user's loop is busy. Called from the keeper's thread."""

    def late(self) -> list[m.MemberHeartbeatRequest]:
        """Those that are overdue."""

    @property
    def addresses(self) -> list[str]:
        """Where they go."""


class Background(Protocol):
    """A loop beside the user's."""

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run this there."""

    def stop(self) -> None:
        """Cancel what runs there and end."""


class BackgroundThread:
    """A loop in a daemon thread."""

    def __init__(self) -> None:
        self._thread = LoopThread("plait-keeper")

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._thread.loop)

    def stop(self) -> None:
        self._thread.stop(STOP_SECONDS)


class LeaseRenewer:
    """See the module. The thread starts with the first holder and ends with ``close``."""

    def __init__(
        self,
        client: str,
        limits: ClientLimits,
        clock: Clock,
        pulse: RenewalPulse,
        background: Callable[[], Background] = BackgroundThread,
    ) -> None:
        self._client = client
        self._pulse = pulse
        self._limits = limits
        self._clock = clock
        self._new_background = background
        self._background: Background | None = None
        self._holders: dict[Holder, None] = {}
        #: Of the keeper's loop.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news: asyncio.Event | None = None
        self._nodes: dict[tuple[str, ...], Node] = {}

    # --- from the user's loop -------------------------------------------------------------------

    def add(self, holder: Holder) -> None:
        """Renew this one's lease."""
        self._holders[holder] = None
        if self._background is None:
            self._background = self._new_background()
            self._background.start(tasks.restarting(self._run, "plait-keeper"))

    def look(self) -> None:
        """There is a lease that was not there before."""
        if self._background is not None and self._loop is not None and self._news is not None:
            self._loop.call_soon_threadsafe(self._news.set)

    def remove(self, holder: Holder) -> None:
        """Do so no longer."""
        self._holders.pop(holder, None)

    async def close(self) -> None:
        """End the thread."""
        background, self._background = self._background, None
        self._holders.clear()
        if background is not None:
            await asyncio.get_running_loop().run_in_executor(None, background.stop)

    def abandon(self) -> None:
        """In a forked child the thread is not there."""
        _inherited.append(self)

    # --- on the keeper's loop -------------------------------------------------------------------

    async def _run(self) -> None:
        self._loop, self._news = asyncio.get_running_loop(), asyncio.Event()
        try:
            while True:
                self._news.clear()
                seconds = await self._renew_all()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await self._news.wait()
        finally:
            for node in self._nodes.values():
                await node.close()
            self._nodes.clear()
            for _ in range(CLOSING_TURNS):
                await asyncio.sleep(0)

    async def _renew_all(self) -> float:
        """Renew what is to be renewed; when to do so again."""
        leases: dict[tuple[str, ...], list[tuple[Holder, RenewedLease]]] = {}
        shortest = 3.0 * self._limits.heartbeat_seconds
        for holder in list(self._holders):
            lease = holder.lease()
            if lease is not None:
                leases.setdefault(lease.addresses, []).append((holder, lease))
                shortest = min(shortest, lease.seconds)
        beats = self._pulse.late()
        meta = tuple(self._pulse.addresses)
        await self._part_with({*leases, *([meta] if beats else [])})
        await asyncio.gather(
            *(self._renew(where, some, shortest) for where, some in leases.items()),
            *(self._beat(meta, beat, shortest) for beat in beats),
        )
        return shortest * RENEW_AT

    async def _beat(self, addresses: tuple[str, ...], beat: m.MemberHeartbeatRequest, seconds: float) -> None:
        with contextlib.suppress(PlaitError):
            await self._node(addresses).request(beat, seconds)

    async def _part_with(self, wanted: set[tuple[str, ...]]) -> None:
        """Links that nobody needs any more are closed."""
        for addresses in [addresses for addresses in self._nodes if addresses not in wanted]:
            # It is known until it is closed: the end of the thread may come between.
            await self._nodes[addresses].close()
            del self._nodes[addresses]

    def _node(self, addresses: tuple[str, ...]) -> Node:
        node = self._nodes.get(addresses)
        if node is None:
            node = self._nodes[addresses] = Node(list(addresses), self._client, self._limits)
            node.start()
        return node

    async def _renew(self, addresses: tuple[str, ...], some: list[tuple[Holder, RenewedLease]], seconds: float) -> None:
        node = self._node(addresses)
        try:
            await self._ask(node, some, seconds)
        except StaleSession:
            if len(some) > 1:
                # One of them is over; the others are not.
                for one in some:
                    with contextlib.suppress(PlaitError):
                        await self._ask(node, [one], seconds)
        except PlaitError:
            # The next time; or the lease ends, which is what leases are for.
            pass

    async def _ask(self, node: Node, some: list[tuple[Holder, RenewedLease]], seconds: float) -> None:
        sent = self._clock.monotonic()
        await node.request(m.RenewRequest([(lease.session, lease.token) for _, lease in some]), seconds)
        for holder, lease in some:
            holder.renewed(lease.session, sent)
