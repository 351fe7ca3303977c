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
from functools import partial
from typing import Any, TypeVar

from plait import chance, tasks
from plait.clock import Clock
from plait.errors import PlaitError, SubjectNotFound, Unavailable
from plait.limits import MetaLimits
from plait.meta.database.connection import Database, parse
from plait.meta.database.mirror import Changes
from plait.meta.database.store import Store
from plait.meta.members.allocator import AllocationWrite
from plait.meta.members.shares import HeartbeatView
from plait.meta.route_changes import Drop, Make, Move, RouteView
from plait.meta.service import MetaService
from plait.model.subject_patterns import SubjectPatterns
from plait.server.cluster.links import BrokerOrders
from plait.server.meta.firing_loop import FiringLoop
from plait.server.notices import Notices
from plait.wire import messages as m
from plait.wire.admin import partitions as p
from plait.wire.admin.subjects import MatchedSubjects, MatchSubjects

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

_VERBS = {Make: "made", Move: "sealed", Drop: "dropped"}

_T = TypeVar("_T")


def make_private(url: str) -> None:
    """Create a missing SQLite database file without access for other users; SQLite gives its journals the same mode."""
    parsed = parse(url)
    if parsed.get_backend_name() == "sqlite" and parsed.database is not None:
        # If this fails, opening the database raises the error.
        with contextlib.suppress(OSError):
            os.close(os.open(parsed.database, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o640))


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
        self.clock = clock
        self.limits = limits or MetaLimits()
        self._auto_create = auto_create
        self._thread = ThreadPoolExecutor(1, "plait-meta")
        self._writer = ThreadPoolExecutor(1, "plait-meta-writer")
        #: Set by ``start``. Only the deciding thread uses it, except for the methods that any thread may call.
        self.service: MetaService
        self._store: Store | None = None
        #: The addresses of all live meta servers, this one first.
        self.metas: list[str] = []
        #: Heartbeats that wait for changes → their clients, in order of arrival, so that a simulation is repeatable.
        self._waiting: dict[asyncio.Future[None], str] = {}
        #: Requests for subjects that wait for a change of any subject.
        self._matching: set[asyncio.Future[None]] = set()
        #: Clients with a leave in progress: their next heartbeats wait for it.
        self._leaves: dict[str, asyncio.Event] = {}
        #: Broker orders in progress.
        self._busy: set[tuple[Any, ...]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        #: Failing broker orders: logged once, until they succeed.
        self._failing = Notices(log)
        #: Set by ``start``.
        self.firing: FiringLoop
        self._looking: asyncio.Task[None] | None = None
        self._look_again = False

    async def start(self, address: str) -> None:
        """Open and migrate the database, and start the periodic work. ``address`` is the address for clients."""
        self._loop = asyncio.get_running_loop()
        self.metas = [address]
        await self._loop.run_in_executor(self._thread, self._open)
        self.spawn(tasks.keep(self._tick_loop, "plait-meta-tick"))
        assert self._store is not None
        self.firing = FiringLoop(self, self._orders, alone=self._store.alone)
        self.spawn(tasks.keep(self.firing.run, "plait-meta-firing"))

    def _open(self) -> None:
        make_private(self._url)
        # Ignored if the database has a cluster id already.
        self._store = Store(Database(self._url), cluster=chance.token(8), alone=self._alone)
        self.service = MetaService(self._store, self.clock, self.limits, address=self.metas[0])

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

    def spawn(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        """Cancel a task when the server stops."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def call(self, decide: Callable[[MetaService], _T]) -> _T:
        """Run a decision in the deciding thread."""
        return await self._loop.run_in_executor(self._thread, lambda: decide(self.service))

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
        while not await self.call(lambda s: s.brokers.settled()):  # noqa: ASYNC110 (only time settles it)
            await asyncio.sleep(SETTLE_SECONDS)
        return await self.change(decide)

    # --- requests -------------------------------------------------------------------------------

    async def route(self, subject: str, *, create: bool) -> RouteView:
        """The route of a subject. The partitions of a new subject are created before the reply."""
        try:
            view, makes = await self.call(lambda s: (s.routing.view(subject, create=False), s.routing.unmade(subject)))
        except SubjectNotFound:
            if not (create and self._auto_create):
                raise
            view, makes = await self.choose(lambda s: (s.routing.view(subject), s.routing.unmade(subject)))
        if makes:
            await asyncio.gather(*map(self._carry_out, makes))
            view = await self.call(lambda s: s.routing.view(subject, create=False))
            self.look_soon()
        return view

    async def set_subject(self, subject: str, decide: Callable[[MetaService], _T]) -> _T:
        """Change settings of a subject. Reachable brokers have them before the reply, the others when they can."""
        result = await self.call(decide)
        makes = await self.call(lambda s: s.routing.makes(subject))
        await asyncio.gather(*map(self._carry_out, makes))
        self.look_soon()
        return result

    async def delete_subject(self, subject: str) -> None:
        """Delete a subject. Reachable brokers drop its partitions before the reply."""
        await self.call(lambda s: s.subjects.delete(subject))
        drops = await self.call(lambda s: s.routing.drops())
        await asyncio.gather(*(self._carry_out(drop) for drop in drops if drop.subject == subject))
        self.look_soon()

    async def match_subjects(self, request: MatchSubjects) -> MatchedSubjects:
        """List matching subjects when a change newer than ``seen`` may have altered the list, or after the wait."""
        patterns = SubjectPatterns.of(request.patterns)
        deadline = self._loop.time() + min(max(request.wait, 0.0), HEARTBEAT_WAIT_MAX)
        while True:
            # Registered before the list is made, so that no change is missed.
            change = self._loop.create_future()
            self._matching.add(change)
            try:
                found = await self.call(lambda s: s.subjects.matching(patterns, refresh=request.seen < 0))
                left = deadline - self._loop.time()
                if found.seen != request.seen or left <= 0 or not (await asyncio.wait([change], timeout=left))[0]:
                    return found
            finally:
                self._matching.discard(change)

    def heartbeat_at_once(self, heartbeat: m.MemberHeartbeatRequest) -> HeartbeatView | None:
        """Answer a heartbeat that repeats the last one. Returns None if ``heartbeat`` must answer it."""
        if heartbeat.leaving or heartbeat.client in self._leaves:
            return None
        return self.service.members.repeat(heartbeat.client, heartbeat.members, heartbeat.affinity, heartbeat.seen)

    async def heartbeat(self, heartbeat: m.MemberHeartbeatRequest) -> HeartbeatView:
        """Answer a heartbeat of a client when there is a change for it, or after its wait.

        The memberships are applied once, when the heartbeat arrives: by the time of the reply the client may have sent
        another one.
        """
        client, seen = heartbeat.client, heartbeat.seen
        while client in self._leaves:
            await self._leaves[client].wait()
        if heartbeat.leaving:
            return await self._leave(client)
        deadline = self._loop.time() + min(max(heartbeat.wait, 0.0), HEARTBEAT_WAIT_MAX)
        # Registered before the first reply is computed, so that no change is missed.
        news = self._loop.create_future()
        self._waiting[news] = client
        try:
            view = self.heartbeat_at_once(heartbeat) or await self._answer(
                lambda s: s.members.heartbeat(client, heartbeat.members, seen=seen, affinity=heartbeat.affinity)
            )
            while view.seen == seen and not view.refused:
                left = deadline - self._loop.time()
                if left <= 0 or not (await asyncio.wait([news], timeout=left))[0]:
                    break
                del self._waiting[news]
                news = self._loop.create_future()
                self._waiting[news] = client
                view = self.service.members.news(client, seen) or await self._answer(
                    lambda s: s.members.known(client, seen)
                )
            return view
        finally:
            del self._waiting[news]

    def _notify(self, clients: set[str], *, subjects: bool) -> None:
        for news, client in self._waiting.items():
            if client in clients and not news.done():
                news.set_result(None)
        for change in self._matching if subjects else ():
            if not change.done():
                change.set_result(None)

    async def _leave(self, client: str) -> HeartbeatView:
        """Remove a client from all groups. The writer thread writes it, so that other heartbeats do not wait."""
        over = self._leaves[client] = asyncio.Event()
        try:
            leave = await self.call(lambda s: s.members.leave(client))
            if not leave.done:
                await self._loop.run_in_executor(self._writer, self.service.members.leaving.carry_out, leave)
            return await self._answer(lambda s: s.members.left(leave))
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
                changes, self.metas, pause = await self.call(
                    lambda s: (s.tick(), s.peers.addresses(), s.members.next_loss)
                )
                self._notify(changes.clients, subjects=changes.subjects)
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
        self._looking = self.spawn(tasks.start(self._look(), "plait-meta-look"))

    async def _look(self) -> None:
        #: Clients to notify, collected since ``since``: a notified client asks at once, and more may have changed by
        #: then.
        changed: set[str] = set()
        subjects, since = False, self._loop.time()
        try:
            while True:
                self._look_again = False
                changes, writing, orders = await self.call(_work)
                changed |= changes.clients
                subjects = subjects or changes.subjects
                if not changes.more or self._loop.time() - since >= NOTIFY_SECONDS:
                    self._notify(changed, subjects=subjects)
                    changed, subjects, since = set(), False, self._loop.time()
                for order in orders:
                    self._begin(order)
                if writing is not None:
                    await self._loop.run_in_executor(self._writer, writing.carry_out)
                if not changes.more and not self._look_again:
                    return
        except PlaitError as error:
            log.warning("%s", error)
        except Exception:
            log.exception("notifications and broker orders failed; they are retried")
        finally:
            self._notify(changed, subjects=subjects)

    def _begin(self, order: Make | Move | Drop) -> None:
        """Start a broker order, unless it is in progress or too many are."""
        what = (type(order), order.place, order.version)
        if what not in self._busy and len(self._busy) < ORDERS_MAX:
            self._busy.add(what)
            task = self.spawn(tasks.start(self._carry_out(order), "plait-meta-order"))
            task.add_done_callback(lambda _: self._busy.discard(what))

    async def _carry_out(self, order: Make | Move | Drop) -> None:
        """Send an order to the broker of the partition. A failed order is repeated by a later ``look_soon``."""
        failed = f"partition {order.place} could not be {_VERBS[type(order)]}"
        try:
            await self._send(order)
        except PlaitError as error:
            # Retried twice a second, but logged only once.
            self._failing.begin(failed, f"{failed} yet: {error}", error.code)
        else:
            self._failing.end(failed)

    async def _send(self, order: Make | Move | Drop) -> None:
        place, version = order.place, order.version
        addresses = await self.call(lambda s: s.brokers.addresses(place.group))
        if not addresses:
            raise Unavailable(f"broker group {place.group} is not registered")
        ask = partial(self._orders.request, addresses[0])
        match order:
            case Make(subject, _, _, lps, settings):
                await ask(
                    p.OPEN_PARTITION, subject=subject, name=place.name, lps=lps, version=version, settings=settings
                )
                await self.change(lambda s: s.routing.made(order))
            case Move():
                fences = await ask(p.SEAL_PARTITION, name=place.name, lps=order.lps, version=version)
                await self.change(lambda s: s.routing.sealed(order, fences))
            case Drop():
                await ask(p.DROP_PARTITION, subject=order.subject, name=place.name, version=version)
                await self.change(lambda s: s.routing.dropped(order))


def _work(service: MetaService) -> tuple[Changes, AllocationWrite | None, list[Make | Move | Drop]]:
    changes, routing = service.step(), service.routing
    return changes, service.allocator.writing, [*routing.makes(), *routing.moves(), *routing.drops()]
