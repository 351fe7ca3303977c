"""Runs a meta server: decisions in a thread, broker orders over the network, notifications of waiting clients.

``MetaService`` makes the decisions and blocks on its database. One thread runs it, so decisions never run concurrently.
A second thread writes new allocations and leaves, so that heartbeats do not wait for these writes. A heartbeat that
repeats the last one needs neither thread. Broker orders (create a partition, seal LPs, drop a partition) are idempotent
and are computed again as long as they are pending, so a failed order is only delayed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from plait import chance, tasks
from plait.clock import Clock
from plait.errors import PlaitError, SubjectNotFound, Unavailable
from plait.limits import MetaLimits
from plait.meta.database.connection import Database, parse
from plait.meta.database.mirror import Changes
from plait.meta.database.store import Store
from plait.meta.members.allocator import AllocationWrite
from plait.meta.service import MetaService
from plait.meta.views import Drop, HeartbeatView, Make, Move, RouteView
from plait.server.cluster.broker_orders import BrokerOrders
from plait.server.meta.client_ids import ClientIds
from plait.server.notices import Notices

log = logging.getLogger("plait.meta")

#: Interval of ``MetaService.tick`` ...
TICK_SECONDS = 0.5
#: ... and its lower bound if a client is about to be lost, because other members wait for its LPs.
TICK_SECONDS_MIN = 0.02
#: The longest wait of a heartbeat for changes.
HEARTBEAT_WAIT_MAX = 30.0
#: How often a meta server that has just started checks whether all brokers are alive or lost.
SETTLE_SECONDS = 0.1
#: While allocations of many groups change, clients are notified this often.
NOTIFY_SECONDS = 0.05
#: Concurrent broker orders.
ORDERS_MAX = 64

_T = TypeVar("_T")


def make_private(url: str) -> None:
    """Create a missing SQLite database file without access for other users; SQLite gives its journals the same mode."""
    parsed = parse(url)
    if parsed.get_backend_name() == "sqlite" and parsed.database is not None:
        # If this fails, opening the database raises the error.
        with contextlib.suppress(OSError):
            os.close(os.open(parsed.database, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o640))


class WaitingHeartbeats:
    """Heartbeats of clients that wait for changes."""

    def __init__(self) -> None:
        #: By client, in order of arrival, so that a simulation is repeatable.
        self._futures: dict[str, list[asyncio.Future[None]]] = {}

    def add(self, client: str) -> asyncio.Future[None]:
        """A future that is done after the next ``notify`` of the client."""
        news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._futures.setdefault(client, []).append(news)
        return news

    def discard(self, client: str, news: asyncio.Future[None]) -> None:
        """The heartbeat waits no longer."""
        waiting = self._futures.get(client, [])
        if news in waiting:
            waiting.remove(news)
            if not waiting:
                del self._futures[client]

    def notify(self, clients: set[str]) -> None:
        """Something changed for these clients."""
        for client in [each for each in self._futures if each in clients]:
            for news in self._futures[client]:
                if not news.done():
                    news.set_result(None)


class MetaHost:
    """Runs a ``MetaService`` on an event loop."""

    def __init__(
        self,
        url: str,
        orders: BrokerOrders,
        clock: Clock,
        limits: MetaLimits | None = None,
        *,
        auto_create: bool = True,
        alone: bool | None = None,
    ) -> None:
        """``alone``: no other meta server uses the database. Default: True for SQLite."""
        self._url = url
        self._alone = alone
        self._orders = orders
        self._clock = clock
        self._limits = limits or MetaLimits()
        self._auto_create = auto_create
        self._thread = ThreadPoolExecutor(1, "plait-meta")
        self._writer = ThreadPoolExecutor(1, "plait-meta-writer")
        self._service: MetaService | None = None
        self._store: Store | None = None
        #: The addresses of all live meta servers, this one first.
        self.metas: list[str] = []
        self._waiting = WaitingHeartbeats()
        #: Clients with a leave in progress: their next heartbeats wait for it.
        self._leaves: dict[str, asyncio.Event] = {}
        #: Broker orders in progress.
        self._busy: set[tuple[Any, ...]] = set()
        self.client_ids = ClientIds(clock, self._limits)
        self._tasks: set[asyncio.Task[None]] = set()
        #: Failing broker orders: logged once, until they succeed.
        self._failing = Notices(log)
        self._looking: asyncio.Task[None] | None = None
        self._look_again = False

    async def start(self, address: str) -> None:
        """Open and migrate the database, and start the periodic work. ``address`` is the address for clients."""
        self._loop = asyncio.get_running_loop()
        self.metas = [address]
        await self._loop.run_in_executor(self._thread, self._open)
        self._spawn(tasks.keep(self._tick_loop, "plait-meta-tick"))

    def _open(self) -> None:
        make_private(self._url)
        # Ignored if the database has a cluster id already.
        self._store = Store(Database(self._url), cluster=chance.token(8), alone=self._alone)
        self._service = MetaService(self._store, self._clock, self._limits, address=self.metas[0])

    async def stop(self) -> None:
        """Stop making decisions. All decisions are in the database."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._orders.close()
        for thread in (self._thread, self._writer):
            await self._loop.run_in_executor(None, thread.shutdown)
        if self._store is not None:
            self._store.close()

    def _spawn(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def call(self, decide: Callable[[MetaService], _T]) -> _T:
        """Run a decision in the deciding thread."""
        return await self._loop.run_in_executor(self._thread, lambda: decide(self._opened()))

    def _opened(self) -> MetaService:
        assert self._service is not None
        return self._service

    async def change(self, decide: Callable[[MetaService], _T]) -> _T:
        """Run a decision that may lead to broker orders or notifications, and start them."""
        result = await self.call(decide)
        self.look_soon()
        return result

    async def choose(self, decide: Callable[[MetaService], _T]) -> _T:
        """Run a decision that chooses brokers, once every broker is known to be alive or lost.

        A subject stays where it is created, so a meta server that has just started must not choose the first brokers
        that send a heartbeat.
        """
        while not await self.call(lambda s: s.settled()):  # noqa: ASYNC110 (only time settles it)
            await asyncio.sleep(SETTLE_SECONDS)
        return await self.change(decide)

    # --- requests -------------------------------------------------------------------------------

    async def route(self, subject: str, *, create: bool) -> RouteView:
        """The route of a subject. The partitions of a new subject are created before the reply."""
        try:
            view, makes = await self.call(lambda s: (s.route(subject, create=False), s.routing.unmade(subject)))
        except SubjectNotFound:
            if not (create and self._auto_create):
                raise
            view, makes = await self.choose(lambda s: (s.route(subject), s.routing.unmade(subject)))
        if makes:
            await asyncio.gather(*(self._make(make) for make in makes))
            view = await self.call(lambda s: s.route(subject, create=False))
            self.look_soon()
        return view

    async def set_subject(self, subject: str, settings: dict[str, Any]) -> None:
        """Change settings of a subject. Reachable brokers have them before the reply."""
        await self.call(lambda s: s.set_subject(subject, settings))
        makes = await self.call(lambda s: s.routing.makes(subject))
        await asyncio.gather(*(self._make(make) for make in makes))
        self.look_soon()

    async def delete_subject(self, subject: str) -> None:
        """Delete a subject. Reachable brokers drop its partitions before the reply."""
        await self.call(lambda s: s.delete_subject(subject))
        drops = await self.call(lambda s: s.routing.drops())
        await asyncio.gather(*(self._drop(drop) for drop in drops if drop.subject == subject))
        self.look_soon()

    def heartbeat_at_once(
        self, client: str, members: list[tuple[str, str, bool]], seen: int, affinity: list[tuple[str, str]]
    ) -> HeartbeatView | None:
        """Answer a heartbeat that repeats the last one. Returns None if ``heartbeat`` must answer it."""
        if client in self._leaves:
            return None
        return self._opened().repeated_heartbeat(client, members, affinity, seen)

    async def heartbeat(
        self,
        client: str,
        members: list[tuple[str, str, bool]],
        seen: int,
        wait: float,
        *,
        leaving: bool,
        affinity: list[tuple[str, str]],
    ) -> HeartbeatView:
        """Answer a heartbeat of a client when there is a change for it, or after ``wait`` seconds.

        The memberships are applied once, when the heartbeat arrives: by the time of the reply the client may have sent
        another one.
        """
        while client in self._leaves:
            await self._leaves[client].wait()
        if leaving:
            return await self._leave(client)
        service, deadline = self._opened(), self._loop.time() + min(max(wait, 0.0), HEARTBEAT_WAIT_MAX)
        # Registered before the first reply is computed, so that no change is missed.
        news = self._waiting.add(client)
        try:
            view = service.repeated_heartbeat(client, members, affinity, seen) or await self._answer(
                lambda s: s.client_heartbeat(client, members, seen=seen, affinity=affinity)
            )
            while view.seen == seen and not view.refused:
                left = deadline - self._loop.time()
                if left <= 0 or not (await asyncio.wait([news], timeout=left))[0]:
                    break
                self._waiting.discard(client, news)
                news = self._waiting.add(client)
                view = service.client_news(client, seen) or await self._answer(lambda s: s.client(client, seen))
            return view
        finally:
            self._waiting.discard(client, news)

    async def _leave(self, client: str) -> HeartbeatView:
        """Remove a client from all groups. The writer thread writes it, so that other heartbeats do not wait."""
        over = self._leaves[client] = asyncio.Event()
        try:
            leave = await self.call(lambda s: s.leave_client(client))
            if not leave.done:
                await self._loop.run_in_executor(self._writer, self._opened().carry_out, leave)
            return await self._answer(lambda s: s.left_client(leave))
        finally:
            over.set()
            del self._leaves[client]

    async def _answer(self, decide: Callable[[MetaService], HeartbeatView]) -> HeartbeatView:
        """Run a decision in the deciding thread; start orders and notifications if it left any."""
        view, busy = await self.call(lambda s: (decide(s), s.busy))
        if busy:
            self.look_soon()
        return view

    # --- periodic work, notifications and orders ------------------------------------------------

    async def _tick_loop(self) -> None:
        while True:
            pause = TICK_SECONDS
            try:
                changes, self.metas, pause = await self.call(lambda s: (s.tick(), s.metas(), s.members.next_loss))
                self._waiting.notify(changes.clients)
                self.look_soon()
            except PlaitError as error:
                log.warning("%s", error)
            except Exception:
                # Catch everything: without this loop the server would still answer, but no longer watch the cluster.
                log.exception("a tick of the meta server failed; it is retried")
            await asyncio.sleep(min(max(pause, TICK_SECONDS_MIN), TICK_SECONDS))

    def look_soon(self) -> None:
        """Start the notifications and broker orders that follow from a change."""
        if self._looking is not None and not self._looking.done():
            self._look_again = True
            return
        self._looking = self._spawn(tasks.start(self._look(), "plait-meta-look"))

    async def _look(self) -> None:
        #: Clients to notify, collected since ``since``: a notified client asks at once, and more may have changed by
        #: then.
        changed: set[str] = set()
        since = self._loop.time()
        try:
            while True:
                self._look_again = False
                changes, writing, makes, moves, drops = await self.call(_work)
                changed |= changes.clients
                if not changes.more or self._loop.time() - since >= NOTIFY_SECONDS:
                    self._waiting.notify(changed)
                    changed, since = set(), self._loop.time()
                for make in makes:
                    self._order(("make", make.place, make.version), self._make(make))
                for move in moves:
                    self._order(("move", move.place, move.version), self._seal(move))
                for drop in drops:
                    self._order(("drop", drop.place), self._drop(drop))
                if writing is not None:
                    await self._loop.run_in_executor(self._writer, writing.carry_out)
                if not changes.more and not self._look_again:
                    return
        except PlaitError as error:
            log.warning("%s", error)
        except Exception:
            log.exception("notifications and broker orders failed; they are retried")
        finally:
            self._waiting.notify(changed)

    def _order(self, what: tuple[Any, ...], job: Any) -> None:
        """Start a broker order, unless it is in progress or too many are."""
        if what in self._busy or len(self._busy) >= ORDERS_MAX:
            job.close()
            return
        self._busy.add(what)
        self._spawn(tasks.start(job, f"plait-meta-{what[0]}")).add_done_callback(lambda _: self._busy.discard(what))

    async def _make(self, make: Make) -> None:
        async def order(address: str) -> None:
            await self._orders.make(address, make)
            await self.change(lambda s: s.routing.made(make))

        await self._at_broker(make.place.group, order, f"partition {make.place} could not be made")

    async def _seal(self, move: Move) -> None:
        async def order(address: str) -> None:
            fences = await self._orders.seal(address, move)
            await self.change(lambda s: s.routing.sealed(move, fences))

        await self._at_broker(move.place.group, order, f"partition {move.place} could not be sealed")

    async def _drop(self, drop: Drop) -> None:
        async def order(address: str) -> None:
            await self._orders.drop(address, drop)
            await self.change(lambda s: s.routing.dropped(drop))

        await self._at_broker(drop.place.group, order, f"partition {drop.place} could not be dropped")

    async def _at_broker(self, group: str, order: Callable[[str], Any], failed: str) -> None:
        """Send an order to the broker of a group. A failed order is repeated by a later ``look_soon``."""
        try:
            addresses = await self.call(lambda s: [each.address for each in s.brokers() if each.group == group])
            if not addresses:
                raise Unavailable(f"broker group {group} is not registered")
            await order(addresses[0])
        except PlaitError as error:
            # Retried twice a second, but logged only once.
            self._failing.begin(failed, f"{failed} yet: {error}", error.code)
        else:
            self._failing.end(failed)


def _work(service: MetaService) -> tuple[Changes, AllocationWrite | None, list[Make], list[Move], list[Drop]]:
    changes = service.step()
    return changes, service.writing, service.routing.makes(), service.routing.moves(), service.routing.drops()
