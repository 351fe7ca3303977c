"""Consuming: a consumer has a pull client for each partition of its subject, and hands out what they bring.

The rows of all partitions are handed out in the order of their arrival. A partition whose broker is away keeps nobody
from the others'. When the route changes, new partitions get a pull client; those that are not in the route any more
are left once nothing of them is in the user's hands.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from plait import tasks
from plait.client.arguments import Duration, seconds_of
from plait.client.blocking.row_handover import RowHandover
from plait.client.closing import Closing, all_of
from plait.client.consume.ack_collector import Piece, flush_all, nack_pieces
from plait.client.consume.ack_spool import AckSpool
from plait.client.consume.batch import ArrowBatch, Batch
from plait.client.consume.buffer import ITERATION_COUNT, BufferedRows, RowBuffer
from plait.client.consume.delivered import DeliveredFrame, SharedDeliveredFrame
from plait.client.consume.failure import UNBEGUN
from plait.client.consume.group_start import began
from plait.client.consume.prefetch import Prefetch
from plait.client.consume.pull_client import PullClient, Terms
from plait.client.net.router import Router, SubjectRoute
from plait.client.types import Message, PartitionName
from plait.errors import Closed, InvalidArgument, PlaitError, StaleRoute, SubjectNotFound, Unavailable
from plait.limits import ClientLimits
from plait.model.logical_partitions import LpSet

log = logging.getLogger("plait.client")

#: More than any fetch can mean.
FETCH_COUNT_MAX = 1 << 20

#: Makes the spool of a partition.
Spools = Callable[[PartitionName], AckSpool | None]


class Consumer:
    """A member of a group. Use it with ``async with``; leaving gives back what is not acked."""

    def __init__(
        self,
        router: Router,
        limits: ClientLimits,
        terms: Terms,
        *,
        any_thread: bool = False,
        spools: Spools = lambda _: None,
        buffer: BufferedRows | None = None,
    ) -> None:
        self.subject = terms.subject
        self.group = terms.group
        self.client_id = terms.client
        self._router = router
        self._limits = limits
        self._terms = terms
        self._any_thread = any_thread
        self._spools = spools
        #: Nothing is pulled for the time being.
        self._suspended = False
        self._tracks = terms.tracks
        self._loop: asyncio.AbstractEventLoop | None = None
        self._clients: deque[PullClient] = deque()
        #: Newer routes count.
        self._following = False
        #: Of partitions that are not in the route any more.
        self._leaving: set[asyncio.Task[None]] = set()
        self._buffer: BufferedRows = RowBuffer() if buffer is None else buffer
        #: Rows that were taken for a blocking caller who has not asked for them yet.
        self._handed_over = RowHandover()
        self._prefetch: Prefetch[PullClient] = Prefetch(limits)
        #: Partitions that wait for room are looked at at the end of this turn.
        self._relieving = False
        #: Partitions that are attached and have more rows at their brokers.
        self._more: dict[PullClient, None] = {}
        #: Some partition is not in the route any more.
        self._retiring = False
        self._demand = 0
        #: Who waits for rows: told True when there is news, False when its time is up.
        self._waiting: list[asyncio.Future[bool]] = []
        self._warned = False
        self._error: PlaitError | None = None
        self._stopping = False
        self._closed = False
        #: Consumers with the same member id that are closing: they end before this one attaches.
        self._after: Sequence[Consumer] = ()
        self._opening: asyncio.Task[None] | None = None
        self._closing = Closing(self.subject, self._close)

    # --- opening and closing --------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._closing.begun or self._loop is not None:
            raise Closed("a consumer is opened once; ask the client for another one")
        loop = self._loop = asyncio.get_running_loop()
        self._router.on_route.append(self._routed)
        self._router.users.append(self._uses)
        self._opening = tasks.child(self._open(loop), f"plait-open-{self.subject}")
        try:
            await self._opening
            if self._closing.begun:
                raise self._closed_while_opening()
        except BaseException as error:
            closed = self._closing.begun
            # Some partitions may be attached, and have rows.
            await self.close()
            task = asyncio.current_task()
            if closed and isinstance(error, asyncio.CancelledError) and not (task is not None and task.cancelling()):
                raise self._closed_while_opening() from None
            raise
        for client in self._clients:
            client.start()
        self._following = True
        # It may have changed meanwhile.
        self._follow(self._router.known(self.subject))
        return self

    def _closed_while_opening(self) -> Closed:
        return Closed(f"the consumer of {self.subject!r} was closed while it was opened")

    async def _open(self, loop: asyncio.AbstractEventLoop) -> None:
        for consumer in self._after:
            await consumer._closing.wait()
        self._after = ()
        deadline = loop.time() + self._limits.request_seconds
        while True:
            route = await self._first_route(loop, deadline)
            try:
                version = await began(self._router, route, self._terms, self._limits, deadline)
                self._terms = self._terms._replace(began=version)
                self._add_clients(route, self._terms)
                self._retire_others(route)
                return await self._attach_first(loop, deadline)
            except StaleRoute:
                # The route was known for a while, and a partition has left it meanwhile.
                if self._router.known(self.subject) is route:
                    raise

    async def _first_route(self, loop: asyncio.AbstractEventLoop, deadline: float) -> SubjectRoute:
        while True:
            try:
                return await self._router.route(self.subject)
            except Unavailable:
                if loop.time() >= deadline:
                    raise

    async def _attach_first(self, loop: asyncio.AbstractEventLoop, deadline: float) -> None:
        """Attach to all partitions; to one at least, the others may follow later."""
        clients = [client for client in self._clients if not client.attached]
        if len(self._clients) == len(clients) == 1:
            await clients[0].attach_first(deadline - loop.time())
            return
        if len(clients) < len(self._clients):
            # Some were attached before a partition left the route.
            deadline = min(deadline, loop.time() + self._limits.attach_seconds)
        attaching = {tasks.child(client.attach_first(deadline - loop.time()), "plait-attach") for client in clients}
        errors: list[BaseException] = []
        try:
            pending = attaching
            while pending and (loop.time() < deadline or len(errors) + len(pending) == len(self._clients)):
                # Once there is one of them, the others are not looked at one by one.
                some = len(errors) + len(pending) < len(self._clients)
                done, pending = await asyncio.wait(
                    pending,
                    timeout=max(deadline - loop.time(), 0),
                    return_when=asyncio.FIRST_EXCEPTION if some else asyncio.FIRST_COMPLETED,
                )
                errors += [error for task in done if (error := task.exception()) is not None]
                for error in errors:
                    if not isinstance(error, Unavailable):
                        raise error
                if done and len(errors) + len(pending) < len(self._clients):
                    deadline = min(deadline, loop.time() + self._limits.attach_seconds)
            if len(errors) == len(self._clients):
                raise errors[0]
        finally:
            for task in attaching:
                task.cancel()
            await asyncio.gather(*attaching, return_exceptions=True)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Send the acks that are left, give back the rest, and leave the group.

        A caller that is cancelled meanwhile waits for the end of it all the same: closing is never interrupted.
        """
        await self._closing()

    async def _close(self) -> None:
        self._halt()
        if self._opening is not None and not self._opening.done():
            self._opening.cancel()
            await asyncio.wait([self._opening])
        if self._routed in self._router.on_route:
            self._router.on_route.remove(self._routed)
            self._router.users.remove(self._uses)
        # A consumer that was never opened has no acks to send.
        await all_of([client.settling.close(tell=self._following) for client in self._clients])
        self._closed = True
        await all_of([*(client.leave() for client in self._clients), *self._leaving])
        self._wake()

    def _halt(self) -> None:
        """Whoever comes from now on gets nothing."""
        self._stopping = True
        self._handed_over.stop()

    def _stop(self) -> None:
        """Pull no more and hand out no more; who waits for rows gets none."""
        self._halt()
        self._wake()

    def _suspend(self) -> None:
        """Pull nothing until ``_resume``; what was pulled and not begun is for others."""
        self._suspended = True
        self._hand_back()

    def _resume(self) -> None:
        self._suspended = False
        self._pull_all()

    def _hand_back(self) -> None:
        if self._tracks and not any(client.settling.closed for client in self._clients):
            nack_pieces([*self._handed_over.take_back(), *self._buffer.take_back()], UNBEGUN)

    def _take_back(self, client: PullClient, _: LpSet | None) -> list[Piece]:
        """A partition's rows that nobody began with."""
        return [*self._handed_over.take_back(client.partition), *self._buffer.take_back(client.partition)]

    def _fail(self, error: PlaitError) -> None:
        self._error = error
        self._wake()

    # --- partitions -----------------------------------------------------------------------------

    def _add_client(self, route: SubjectRoute, partition: PartitionName, terms: Terms) -> PullClient:
        assert self._loop is not None
        client = self._new_client(route, partition, terms)
        client.prepare(self._loop)
        self._clients.append(client)
        self._prefetch.add(client)
        return client

    def _new_client(self, route: SubjectRoute, partition: PartitionName, terms: Terms) -> PullClient:
        node = self._router.node(route, partition.group)
        kind = SharedDeliveredFrame if self._any_thread else DeliveredFrame
        return PullClient(Feeding(self), node, self._limits, terms, partition, kind, self._spools(partition))

    def _uses(self, subject: str) -> bool:
        return subject == self.subject

    def _routed(self, route: SubjectRoute) -> None:
        """There is a newer route."""
        if route.subject == self.subject and self._following:
            self._follow(route)

    def _follow(self, route: SubjectRoute | None) -> None:
        """A pull client for each partition of the route, and for those that are left until nothing of them is here."""
        if route is None or self._stopping:
            return
        # All of what is new came after the group began.
        for client in self._add_clients(route, self._terms._replace(start="earliest")):
            client.start()
        self._retire_others(route)

    def _add_clients(self, route: SubjectRoute, terms: Terms) -> list[PullClient]:
        """A pull client for each partition that has none."""
        known = {client.partition for client in self._clients}
        return [self._add_client(route, each, terms) for each in route.partitions if each not in known]

    def _retire_others(self, route: SubjectRoute) -> None:
        """Leave partitions that the route does not name."""
        named = set(route.partitions)
        for client in self._clients:
            retiring = client.partition not in named
            if client.retiring != retiring:
                client.retiring = retiring
                client.pull()
        self._retiring = any(client.retiring for client in self._clients)
        self._leave_retired()

    def _leave_retired(self) -> None:
        for client in [c for c in self._clients if c.retiring and not c.open]:
            self._clients.remove(client)
            self._prefetch.remove(client)
            self._more.pop(client, None)
            self._relieve_soon()
            task = tasks.start(self._left(client), f"plait-leave-{client.partition.name}")
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def _left(self, client: PullClient) -> None:
        await client.settling.close()
        await client.leave()

    async def _astray(self) -> None:
        """A partition is not where the route says: ask again. A subject that is gone for good ends the consumer."""
        try:
            await self._router.refresh(self.subject)
        except SubjectNotFound as error:
            self._fail(error)
        except PlaitError:
            # It is asked again with the next attempt.
            pass

    # --- pulling --------------------------------------------------------------------------------

    def _wanted(self, client: PullClient, *, patient: bool = True) -> int:
        """How many rows the next pull of a partition asks for; 0: none now."""
        if self._tracks:
            return self._prefetch.wanted(client, patient=patient)
        return self._prefetch.wanted_now(self._demand - self._buffer.count, client)

    def _pull_on_demand(self) -> None:
        """Rows are asked for that are not here. At most once nothing else pulls; others pull ahead by themselves."""
        if self._stopping or self._suspended:
            return
        if not self._tracks:
            self._pull_all()
        elif self._demand > self._buffer.count:
            if not self._buffer.count:
                # The user waits: few rows are better than none.
                for client in self._prefetch.patient():
                    client.pull(patient=False)
            self._warn_of_unacked()

    def _more_comes(self) -> bool:
        """A partition that has more rows pulls them: the limits allow it."""
        for client in list(self._more):
            if not client.pulls:
                client.pull(patient=False)
            if client.pulls:
                return True
        return False

    def _pull_all(self) -> None:
        if len(self._clients) > 1:
            # What is for all of them goes to another one first each time.
            self._clients.rotate()
        for client in self._clients:
            client.pull()

    def _relieve_soon(self) -> None:
        if self._prefetch.starved and not self._relieving:
            assert self._loop is not None
            self._relieving = True
            self._loop.call_soon(self._relieve)

    def _relieve(self) -> None:
        """Partitions that waited for room pull, the one that has waited longest first, until there is none left."""
        self._relieving = False
        while (client := self._prefetch.relieved()) is not None:
            client.pull()

    def _warn_of_unacked(self) -> None:
        """Once, when nothing comes because nothing is acked."""
        if self._warned or not any(client.attached for client in self._clients):
            return
        if any(
            client.pulls or client.settling.under_way or self._wanted(client, patient=False) for client in self._clients
        ):
            return
        self._warned = True
        log.warning(
            "%s has %d messages that are not acked, which is its limit: ack or nack some to get more",
            self.subject,
            sum(client.held() for client in self._clients),
        )

    # --- handing out ----------------------------------------------------------------------------

    async def fetch(self, count: int = 500, wait: Duration = 1.0) -> Batch:
        """Up to ``count`` messages: all that are there, or the first that come within ``wait`` seconds."""
        return Batch(await self._fetch(count, wait))

    async def fetch_arrow(self, count: int = 50_000, wait: Duration = 1.0) -> ArrowBatch:
        """Like ``fetch``, as an Arrow table that is not copied."""
        return ArrowBatch(await self._fetch(count, wait))

    async def flush(self) -> None:
        """Until the broker has every ack and nack so far."""
        await flush_all(client.settling for client in self._clients if not client.settling.quiet)

    async def _fetch(self, count: int, wait: Duration, *, apart: bool = False) -> list[Piece]:
        """What ``fetch`` gives; ``apart``: each row may be handled by itself."""
        if count < 1:
            raise InvalidArgument(f"count must be 1 or more, not {count}")
        seconds = seconds_of(wait)
        loop = self._opened()
        if count > self._limits.prefetch_count:
            # Who asks for so many gets them: one batch in the user's hands, the next one on its way.
            self._enlarge(2 * min(count, FETCH_COUNT_MAX))
        deadline = loop.time() + seconds
        try:
            while (available := self._buffer.available()) < count and not self._stopping:
                self._opened()
                if available and not self._more:
                    break
                remaining = deadline - loop.time()
                self._demand = count
                self._pull_on_demand()
                if available and not self._more_comes():
                    # The limits allow no more until some are acked: what is here has to do.
                    break
                longest = self._gathering(available)
                if longest is not None:
                    remaining = min(remaining, longest)
                if remaining <= 0 or self._handed_over or not await self._arrival(remaining):
                    break
        finally:
            self._demand = 0
        return [] if self._stopping else self._take(count, apart)

    def _enlarge(self, ahead: int) -> None:
        if self._prefetch.enlarge(ahead) and not (self._stopping or self._suspended):
            self._pull_all()

    def _gathering(self, _: int) -> float | None:
        """How long to wait for more when there is something, and more at the brokers; None: as long as it takes."""
        return None

    def _take(self, count: int, _: bool) -> list[Piece]:
        return self._buffer.take(count)

    def _unhand(self) -> None:
        """What was taken for blocking callers and not asked for is theirs all the same."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        """The next message, however long it takes. Several tasks may iterate over one consumer."""
        while not self._stopping:
            message = self._buffer.next()
            if message is not None:
                return message
            self._opened()
            self._demand = 1 if self._tracks else min(ITERATION_COUNT, self._limits.prefetch_count)
            try:
                self._pull_on_demand()
                await self._arrival(None)
            finally:
                self._demand = 0
        if self._closed:
            self._opened()
        raise StopAsyncIteration

    async def _arrival(self, seconds: float | None) -> bool:
        """Until there is news, at most so long; whether there is."""
        loop = self._opened()
        future: asyncio.Future[bool] = loop.create_future()
        self._waiting.append(future)
        timer = None if seconds is None else loop.call_later(seconds, _time_out, future)
        try:
            return await future
        finally:
            if timer is not None:
                timer.cancel()
            if future in self._waiting:
                self._waiting.remove(future)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(True)

    def _opened(self) -> asyncio.AbstractEventLoop:
        if self._error is not None:
            raise self._error
        if self._router.meta.closed is not None:
            raise self._router.meta.closed
        if self._closed:
            raise Closed("the consumer is closed")
        if self._loop is None:
            how = "with" if self._router.meta.blocking else "async with"
            raise Closed(f"the consumer is not open; use '{how} client.consumer(...)'")
        return self._loop


def _time_out(future: asyncio.Future[bool]) -> None:
    if not future.done():
        future.set_result(False)


class Feeding:
    """What pull clients tell their consumer and ask it, kept off the consumer's public face."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer

    @property
    def pulling(self) -> bool:
        return not (self._consumer._stopping or self._consumer._suspended)

    @property
    def several(self) -> bool:
        return len(self._consumer._clients) > 1

    @property
    def suspended(self) -> bool:
        return self._consumer._suspended

    def wanted(self, client: PullClient, *, patient: bool) -> int:
        return self._consumer._wanted(client, patient=patient)

    def large(self) -> bool:
        return self._consumer._prefetch.large

    def arrived(self, delivered: DeliveredFrame) -> None:
        self._consumer._buffer.append(delivered)

    def take_back(self, client: PullClient, lps: LpSet | None = None) -> list[Piece]:
        return self._consumer._take_back(client, lps)

    def hand_back(self) -> None:
        self._consumer._hand_back()

    def news(self) -> None:
        self._consumer._wake()

    def pulled(self) -> None:
        self._consumer._relieve_soon()

    def has_more(self, client: PullClient) -> None:
        if client.more and client.attached:
            self._consumer._more[client] = None
        else:
            self._consumer._more.pop(client, None)

    def room(self, client: PullClient) -> None:
        consumer = self._consumer
        if consumer._retiring:
            consumer._leave_retired()
        consumer._prefetch.report(client)
        client.pull()
        consumer._relieve_soon()

    def failed(self, error: PlaitError) -> None:
        self._consumer._fail(error)

    def named(self, client: PullClient) -> bool:
        route = self._consumer._router.known(self._consumer.subject)
        return route is None or client.partition in route.partitions

    async def astray(self) -> None:
        await self._consumer._astray()
