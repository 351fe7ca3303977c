"""Renews the leases of ordered consumers from the client's own thread (R14).

The lease renewer has its own event loop and connections, so a handler that blocks the user's loop loses neither the
locks of its messages nor its membership. It stops renewing for a consumer whose user has held a message for too long.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol

from plait import tasks
from plait.client.blocking.loop_thread import LoopThread
from plait.client.consume.ordered.member_heartbeats import MemberHeartbeats
from plait.client.consume.ordered.ordered_delivered import RENEW_AT, RenewedLease
from plait.client.net.node import Node
from plait.clock import Clock
from plait.errors import PlaitError, StaleSession
from plait.limits import ClientLimits
from plait.wire import messages as m

if TYPE_CHECKING:
    from plait.client.consume.ordered.ordered_pull import OrderedPullClient

#: How long closing a client waits for the thread to end.
STOP_SECONDS = 2.0

#: Turns of the loop to wait for sockets to close: asyncio closes them a few turns after the call.
CLOSING_TURNS = 10

#: Lease renewers inherited from a parent process by fork. The reference keeps the garbage collector from touching them.
_inherited: list[LeaseRenewer] = []


class Background(Protocol):
    """An event loop besides the user's."""

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine on the loop."""

    def stop(self) -> None:
        """Cancel what runs on the loop, and end it."""


class BackgroundThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._thread = LoopThread("plait-lease-renewer")

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._thread.loop)

    def stop(self) -> None:
        self._thread.stop(STOP_SECONDS)


class LeaseRenewer:
    """The lease renewer of one client. Its thread starts with the first holder and ends with ``close``."""

    def __init__(
        self,
        client: str,
        limits: ClientLimits,
        clock: Clock,
        heartbeats: MemberHeartbeats,
        background: Callable[[], Background] = BackgroundThread,
    ) -> None:
        self._client = client
        self._heartbeats = heartbeats
        self._limits = limits
        self._clock = clock
        self._new_background = background
        self._background: Background | None = None
        #: The partitions that have locks.
        self._holders: dict[OrderedPullClient, None] = {}
        #: The lease renewer's own loop, its wake-up event, and its connections by address.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken: asyncio.Event | None = None
        self._nodes: dict[tuple[str, ...], Node] = {}

    # --- from the user's loop -------------------------------------------------------------------

    def add(self, holder: OrderedPullClient) -> None:
        self._holders[holder] = None
        if self._background is None:
            self._background = self._new_background()
            self._background.start(tasks.restarting(self._run, "plait-lease-renewer"))

    def wake(self) -> None:
        """Look for new leases now."""
        if self._background is not None and self._loop is not None and self._woken is not None:
            self._loop.call_soon_threadsafe(self._woken.set)

    def remove(self, holder: OrderedPullClient) -> None:
        self._holders.pop(holder, None)

    async def close(self) -> None:
        background, self._background = self._background, None
        self._holders.clear()
        if background is not None:
            await asyncio.get_running_loop().run_in_executor(None, background.stop)

    def abandon(self) -> None:
        """Called in a forked child, where the thread does not exist."""
        _inherited.append(self)

    # --- on the lease renewer's loop ------------------------------------------------------------

    async def _run(self) -> None:
        self._loop, self._woken = asyncio.get_running_loop(), asyncio.Event()
        try:
            while True:
                self._woken.clear()
                seconds = await self._renew_all()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await self._woken.wait()
        finally:
            for node in self._nodes.values():
                await node.close()
            self._nodes.clear()
            for _ in range(CLOSING_TURNS):
                await asyncio.sleep(0)

    async def _renew_all(self) -> float:
        """Renew all leases and send overdue heartbeats; returns the seconds until the next time."""
        leases: dict[tuple[str, ...], list[tuple[OrderedPullClient, RenewedLease]]] = {}
        shortest = 3.0 * self._limits.heartbeat_seconds
        for holder in list(self._holders):
            lease = holder.lease()
            if lease is not None:
                leases.setdefault(lease.addresses, []).append((holder, lease))
                shortest = min(shortest, lease.seconds)
        heartbeats = self._heartbeats.late()
        meta = tuple(self._heartbeats.addresses)
        await self._close_unused({*leases, *([meta] if heartbeats else [])})
        await asyncio.gather(
            *(self._renew(where, some, shortest) for where, some in leases.items()),
            *(self._send_heartbeat(meta, heartbeat, shortest) for heartbeat in heartbeats),
        )
        return shortest * RENEW_AT

    async def _send_heartbeat(
        self, addresses: tuple[str, ...], heartbeat: m.MemberHeartbeatRequest, seconds: float
    ) -> None:
        with contextlib.suppress(PlaitError):
            await self._node(addresses).request(heartbeat, seconds)

    async def _close_unused(self, wanted: set[tuple[str, ...]]) -> None:
        """Close the connections to addresses that are not in ``wanted``."""
        for addresses in [addresses for addresses in self._nodes if addresses not in wanted]:
            # Removed only after it is closed: if the thread ends in between, ``_run`` closes it.
            await self._nodes[addresses].close()
            del self._nodes[addresses]

    def _node(self, addresses: tuple[str, ...]) -> Node:
        node = self._nodes.get(addresses)
        if node is None:
            node = self._nodes[addresses] = Node(list(addresses), self._client, self._limits)
            node.start()
        return node

    async def _renew(
        self, addresses: tuple[str, ...], some: list[tuple[OrderedPullClient, RenewedLease]], seconds: float
    ) -> None:
        node = self._node(addresses)
        try:
            await self._ask(node, some, seconds)
        except StaleSession:
            if len(some) > 1:
                # One of the sessions has ended: renew the others one by one.
                for one in some:
                    with contextlib.suppress(PlaitError):
                        await self._ask(node, [one], seconds)
        except PlaitError:
            # Retried the next time. If that fails too, the lease expires.
            pass

    async def _ask(self, node: Node, some: list[tuple[OrderedPullClient, RenewedLease]], seconds: float) -> None:
        sent = self._clock.monotonic()
        await node.request(m.RenewRequest([(lease.session, lease.token) for _, lease in some]), seconds)
        for holder, lease in some:
            holder.rights.renewed(lease.session, sent)
