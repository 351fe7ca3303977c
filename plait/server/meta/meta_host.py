"""A meta server's doing: its decisions run in a thread of their own, its orders go to brokers, who waits is told.

Decisions are ``MetaService``, which blocks on its database; one thread runs it, so nothing there happens at the same
time. Another one writes new allocations and leaves, so that heartbeats do not wait for that; those that say nothing new
are answered without either. What brokers are ordered to do (make a partition, seal logical partitions, drop) is
idempotent and is found again by whoever looks next, so an order that fails is only late.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

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
from plait.server.meta.client_ids import ClientIds
from plait.server.notices import Notices
from plait.storage.catalog import Fence

log = logging.getLogger("plait.meta")

#: How often is looked who lives...
TICK_SECONDS = 0.5
#: ...and sooner when a client is about to be lost, as others wait for what it had.
TICK_SECONDS_MIN = 0.02
#: How long a client may wait for news.
BEAT_WAIT_MAX = 30.0
#: How often a meta server that has just started looks whether it has heard of all brokers.
SETTLE_SECONDS = 0.1
#: While allocations of many groups change, members hear of theirs this often.
TELL_SECONDS = 0.05
#: Orders that are carried out at a time.
ORDERS_MAX = 64

_T = TypeVar("_T")


def make_private(url: str) -> None:
    """A SQLite database that is not there yet is made closed to other users; its journals are as it is."""
    parsed = parse(url)
    if parsed.get_backend_name() == "sqlite" and parsed.database is not None:
        # Where it cannot be made, opening it says why.
        with contextlib.suppress(OSError):
            os.close(os.open(parsed.database, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o640))


class Orders(Protocol):
    """The way to the brokers."""

    async def make(self, address: str, make: Make) -> None:
        """A partition takes logical partitions, and is made if it is not there."""

    async def seal(self, address: str, move: Move) -> list[Fence]:
        """A partition takes logical partitions no more; where their rows end, once that is durable."""

    async def drop(self, address: str, drop: Drop) -> None:
        """A partition goes, with all that is in it."""

    async def close(self) -> None:
        """No more orders."""


class MetaHost:
    """See the module."""

    def __init__(
        self,
        url: str,
        orders: Orders,
        clock: Clock,
        limits: MetaLimits | None = None,
        *,
        auto_create: bool = True,
        alone: bool | None = None,
    ) -> None:
        """``alone``: no other meta server uses the database; None: that is so if it is a SQLite file."""
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
        #: The addresses of all meta servers that live, this one's first.
        self.metas: list[str] = []
        #: Client → who waits for news of it.
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        #: Clients that leave: what they say before that is through waits for it.
        self._leaves: dict[str, asyncio.Event] = {}
        #: Orders under way, by what they are about.
        self._busy: set[tuple[Any, ...]] = set()
        self.speakers = ClientIds(clock, self._limits)
        self._tasks: set[asyncio.Task[None]] = set()
        #: Orders that fail, until they do not.
        self._failing = Notices(log)
        self._looking: asyncio.Task[None] | None = None
        self._look_again = False

    async def start(self, address: str) -> None:
        """Open the database, bring it up to date, and begin to look after the cluster; reached at ``address``."""
        self._loop = asyncio.get_running_loop()
        self.metas = [address]
        await self._loop.run_in_executor(self._thread, self._open)
        self._spawn(tasks.keep(self._tick_loop, "plait-meta-tick"))

    def _open(self) -> None:
        make_private(self._url)
        # Kept if the database has one already.
        self._store = Store(Database(self._url), cluster=chance.token(8), alone=self._alone)
        self._service = MetaService(self._store, self._clock, self._limits, address=self.metas[0])

    async def stop(self) -> None:
        """Decide nothing more; what was decided is in the database."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._orders.close()
        for thread in (self._thread, self._writer):
            await self._loop.run_in_executor(None, thread.shutdown)
        if self._store is not None:
            self._store.close()

    def _spawn(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def call(self, decide: Callable[[MetaService], _T]) -> _T:
        """Run a decision in the thread; what follows from it is seen to afterwards."""
        return await self._loop.run_in_executor(self._thread, lambda: decide(self._opened()))

    def _opened(self) -> MetaService:
        assert self._service is not None
        return self._service

    async def change(self, decide: Callable[[MetaService], _T]) -> _T:
        """The same, for what changes something that others wait for."""
        result = await self.call(decide)
        self.look_soon()
        return result

    async def choose(self, decide: Callable[[MetaService], _T]) -> _T:
        """The same, for what chooses among brokers: not before each has been heard of, or is lost.

        A subject stays where it is put, so a meta server that has just started does not take the first that speaks.
        """
        while not await self.call(lambda s: s.settled()):  # noqa: ASYNC110 (it is time that settles it)
            await asyncio.sleep(SETTLE_SECONDS)
        return await self.change(decide)

    # --- requests -------------------------------------------------------------------------------

    async def route(self, subject: str, *, create: bool) -> RouteView:
        """The subject's route; a new subject's partitions are made before it is told."""
        try:
            view, makes = await self.call(lambda s: (s.route(subject, create=False), s.unmade(subject)))
        except SubjectNotFound:
            if not (create and self._auto_create):
                raise
            view, makes = await self.choose(lambda s: (s.route(subject), s.unmade(subject)))
        if makes:
            await asyncio.gather(*(self._make(make) for make in makes))
            view = await self.call(lambda s: s.route(subject, create=False))
            self.look_soon()
        return view

    async def set_subject(self, subject: str, settings: dict[str, Any]) -> None:
        """Change some settings of a subject; its brokers have them before that is told, where they can be reached."""
        await self.call(lambda s: s.set_subject(subject, settings))
        makes = await self.call(lambda s: s.pending_makes(subject))
        await asyncio.gather(*(self._make(make) for make in makes))
        self.look_soon()

    async def delete_subject(self, subject: str) -> None:
        """The subject is gone; its partitions go before that is told, where their brokers can be reached."""
        await self.call(lambda s: s.delete_subject(subject))
        drops = await self.call(lambda s: s.pending_drops())
        await asyncio.gather(*(self._drop(drop) for drop in drops if drop.subject == subject))
        self.look_soon()

    def beat_at_once(
        self, client: str, members: list[tuple[str, str, bool]], seen: int, affinity: list[tuple[str, str]]
    ) -> HeartbeatView | None:
        """The answer to a heartbeat that waits for nothing and says nothing new; None: ``beat``."""
        if client in self._leaves:
            return None
        return self._opened().repeat_client(client, members, affinity, seen)

    async def beat(
        self,
        client: str,
        members: list[tuple[str, str, bool]],
        seen: int,
        wait: float,
        *,
        leaving: bool,
        affinity: list[tuple[str, str]],
    ) -> HeartbeatView:
        """A client lives; answered when there is something new for it, or when it has waited long enough.

        What it says counts once, when it comes: by the time it is answered the client may have said something else.
        """
        while client in self._leaves:
            await self._leaves[client].wait()
        if leaving:
            return await self._leave(client)
        service, deadline = self._opened(), self._loop.time() + min(max(wait, 0.0), BEAT_WAIT_MAX)
        # Before the look: what changes meanwhile is not missed.
        news = self._wait_for(client)
        try:
            beaten = service.repeat_client(client, members, affinity, seen) or await self._answer(
                lambda s: s.beat_client(client, members, seen=seen, affinity=affinity)
            )
            while beaten.seen == seen and not beaten.refused:
                left = deadline - self._loop.time()
                if left <= 0 or not await self._is_told(news, left):
                    break
                self._wait_no_more(client, news)
                news = self._wait_for(client)
                beaten = service.client_news(client, seen) or await self._answer(lambda s: s.client(client, seen))
            return beaten
        finally:
            self._wait_no_more(client, news)

    async def _leave(self, client: str) -> HeartbeatView:
        """It is out when that is answered. Written beside the thread, so that others' heartbeats do not wait."""
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
        """What follows from it is seen to if there is anything."""
        beaten, busy = await self.call(lambda s: (decide(s), s.busy))
        if busy:
            self.look_soon()
        return beaten

    async def _is_told(self, news: asyncio.Future[None], seconds: float) -> bool:
        """There is news by then."""
        await asyncio.wait([news], timeout=seconds)
        return news.done()

    def _wait_for(self, client: str) -> asyncio.Future[None]:
        news: asyncio.Future[None] = self._loop.create_future()
        self._waiting.setdefault(client, []).append(news)
        return news

    def _wait_no_more(self, client: str, news: asyncio.Future[None]) -> None:
        waiting = self._waiting.get(client, [])
        if news in waiting:
            waiting.remove(news)
            if not waiting:
                del self._waiting[client]

    # --- what follows ---------------------------------------------------------------------------

    async def _tick_loop(self) -> None:
        while True:
            pause = TICK_SECONDS
            try:
                changes, self.metas, pause = await self.call(lambda s: (s.tick(), s.metas(), s.next_loss()))
                self._tell(changes.clients)
                self.look_soon()
            except PlaitError as error:
                log.warning("%s", error)
            except Exception:
                # Whatever it is: a server that looked after nobody any more would go on answering.
                log.exception("looking after the cluster failed; it is tried again")
            await asyncio.sleep(min(max(pause, TICK_SECONDS_MIN), TICK_SECONDS))

    def look_soon(self) -> None:
        """Something has changed: see to what follows."""
        if self._looking is not None and not self._looking.done():
            self._look_again = True
            return
        self._looking = self._spawn(tasks.start(self._look(), "plait-meta-look"))

    async def _look(self) -> None:
        #: Who has news, and since when: a client that is told asks at once, and there may be more for it by then.
        told: set[str] = set()
        since = self._loop.time()
        try:
            while True:
                self._look_again = False
                changes, writing, makes, moves, drops = await self.call(_work)
                told |= changes.clients
                if not changes.more or self._loop.time() - since >= TELL_SECONDS:
                    self._tell(told)
                    told, since = set(), self._loop.time()
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
            log.exception("what follows from a change failed; it is tried again")
        finally:
            self._tell(told)

    def _tell(self, clients: set[str]) -> None:
        # In the order in which they came, so that it is the same whenever it is done again.
        for client in [each for each in self._waiting if each in clients]:
            for news in self._waiting[client]:
                if not news.done():
                    news.set_result(None)

    def _order(self, what: tuple[Any, ...], job: Any) -> None:
        """Carry an order out, unless that is under way."""
        if what in self._busy or len(self._busy) >= ORDERS_MAX:
            job.close()
            return
        self._busy.add(what)
        self._spawn(tasks.start(job, f"plait-meta-{what[0]}")).add_done_callback(lambda _: self._busy.discard(what))

    async def _make(self, make: Make) -> None:
        async def order(address: str) -> None:
            await self._orders.make(address, make)
            await self.change(lambda s: s.made(make))

        await self._at_broker(make.place.group, order, f"partition {make.place} could not be made")

    async def _seal(self, move: Move) -> None:
        async def order(address: str) -> None:
            fences = await self._orders.seal(address, move)
            await self.change(lambda s: s.sealed(move, fences))

        await self._at_broker(move.place.group, order, f"partition {move.place} could not be sealed")

    async def _drop(self, drop: Drop) -> None:
        async def order(address: str) -> None:
            await self._orders.drop(address, drop)
            await self.change(lambda s: s.dropped(drop))

        await self._at_broker(drop.place.group, order, f"partition {drop.place} could not be dropped")

    async def _at_broker(self, group: str, order: Callable[[str], Any], failed: str) -> None:
        """An order to the broker of a group; one that fails is found again with the next look."""
        try:
            addresses = await self.call(lambda s: [each.address for each in s.brokers() if each.group == group])
            if not addresses:
                raise Unavailable(f"broker group {group} is not known")
            await order(addresses[0])
        except PlaitError as error:
            # It is tried twice a second: that it fails is logged once.
            self._failing.begin(failed, f"{failed} yet: {error}", error.code)
        else:
            self._failing.end(failed)


def _work(service: MetaService) -> tuple[Changes, AllocationWrite | None, list[Make], list[Move], list[Drop]]:
    changes = service.step()
    return changes, service.writing, service.pending_makes(), service.pending_moves(), service.pending_drops()
