"""The consumer: has a pull client for each partition of its subject, and hands their rows to the user.

Rows of all partitions are handed out in the order of their arrival. A partition whose broker is unreachable does not
delay the others. When the route changes, the consumer adds a pull client for each new partition; it leaves a partition
that is no longer in the route once the user holds no row of it.
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
from plait.client.consume.ack_spool import AckSpool
from plait.client.consume.batch import ITERATION_COUNT, ArrowBatch, Batch, RowBuffer, flush_all, report
from plait.client.consume.delivered import Piece
from plait.client.consume.failure import UNBEGUN
from plait.client.consume.group_start import Terms, find_start_version
from plait.client.consume.ordered.ordered_buffer import OrderedBuffer
from plait.client.consume.prefetch import Prefetch
from plait.client.consume.pull_client import PullClient, attach_some
from plait.client.net.router import Router, SubjectRoute
from plait.client.types import Message, PartitionName
from plait.errors import Closed, InvalidArgument, PlaitError, StaleRoute, SubjectNotFound, Unavailable
from plait.limits import ClientLimits
from plait.model.logical_partitions import LpSet

log = logging.getLogger("plait.client")

#: A bound on the prefetch that one ``fetch`` call can request.
FETCH_COUNT_MAX = 1 << 20

#: Makes the spool of a partition.
Spools = Callable[[PartitionName], AckSpool | None]


class Consumer:
    """A member of a group. Use it with ``async with``; leaving the block returns messages that are not acked."""

    def __init__(
        self,
        router: Router,
        limits: ClientLimits,
        terms: Terms,
        *,
        any_thread: bool = False,
        spools: Spools = lambda _: None,
    ) -> None:
        self.subject = terms.subject
        self.group = terms.group
        self.client_id = terms.client
        self._router = router
        self._limits = limits
        self._terms = terms
        self._any_thread = any_thread
        self._spools = spools
        #: Pulling is paused by ``_suspend``.
        self._suspended = False
        self._tracks = terms.tracks
        #: The longest wait for more rows when some are available and the brokers have more; None: no limit.
        self._gather_seconds: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._clients: deque[PullClient] = deque()
        #: The consumer is open and applies newer routes.
        self._following = False
        #: Tasks that leave partitions which are no longer in the route.
        self._leaving: set[asyncio.Task[None]] = set()
        self._buffer: RowBuffer | OrderedBuffer = RowBuffer()
        #: Rows taken from the buffer for a blocking caller, before its next call asks for them.
        self._handed_over = RowHandover()
        self._prefetch: Prefetch[PullClient] = Prefetch(limits)
        #: ``_relieve`` is scheduled for the end of this turn of the loop.
        self._relieving = False
        #: Attached partitions whose broker has more rows.
        self._more: dict[PullClient, None] = {}
        #: Some partition is no longer in the route.
        self._retiring = False
        self._demand = 0
        #: Callers that wait for rows: the result is True when something changed, False at their timeout.
        self._waiting: list[asyncio.Future[bool]] = []
        self._warned = False
        self._error: PlaitError | None = None
        self._stopping = False
        self._closed = False
        #: Consumers with the same client id that are closing: this one attaches after they are closed.
        self._after: Sequence[Consumer] = ()
        self._opening: asyncio.Task[None] | None = None
        self._closing = Closing(self.subject, self._close)

    # --- opening and closing --------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._closing.begun or self._loop is not None:
            raise Closed(f"the consumer of {self.subject!r} was opened before; create another one with client.consumer")
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
            # Some partitions may be attached and hold rows.
            await self.close()
            task = asyncio.current_task()
            if closed and isinstance(error, asyncio.CancelledError) and not (task is not None and task.cancelling()):
                raise self._closed_while_opening() from None
            raise
        for client in self._clients:
            client.start()
        self._following = True
        # The route may have changed while the consumer opened.
        self._follow(self._router.known(self.subject))
        return self

    def _closed_while_opening(self) -> Closed:
        return Closed(f"the consumer of {self.subject!r} was closed before it was open")

    async def _open(self, loop: asyncio.AbstractEventLoop) -> None:
        for consumer in self._after:
            await consumer._closing.wait()
        self._after = ()
        deadline = loop.time() + self._limits.request_seconds
        while True:
            route = await self._first_route(loop, deadline)
            try:
                version = await find_start_version(self._router, route, self._terms, self._limits, deadline)
                self._terms = self._terms._replace(began=version)
                self._add_clients(route, self._terms)
                self._retire_others(route)
                return await attach_some(self._clients, self._limits, deadline)
            except StaleRoute:
                # The cached route was old, and a partition has left it. Retry if there is a newer route.
                if self._router.known(self.subject) is route:
                    raise

    async def _first_route(self, loop: asyncio.AbstractEventLoop, deadline: float) -> SubjectRoute:
        while True:
            try:
                return await self._router.route(self.subject)
            except Unavailable:
                if loop.time() >= deadline:
                    raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Send the pending acks, return all other messages, and leave the group.

        Closing is never interrupted: a caller that is cancelled still waits until the consumer is closed.
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
        # A consumer that was never open has no acks to send.
        await all_of([client.collector.close(flush=self._following) for client in self._clients])
        self._closed = True
        await all_of([*(client.leave() for client in self._clients), *self._leaving])
        self._wake()

    def _halt(self) -> None:
        """Hand out nothing from now on."""
        self._stopping = True
        self._handed_over.stop()

    def _stop(self) -> None:
        """Stop pulling and handing out; callers that wait for rows get none."""
        self._halt()
        self._wake()

    def _suspend(self) -> None:
        """Pull nothing until ``_resume``; return the rows that no handler has begun."""
        self._suspended = True
        self._hand_back()

    def _resume(self) -> None:
        self._suspended = False
        self._pull_all()

    def _hand_back(self) -> None:
        if self._tracks and not any(client.collector.closed for client in self._clients):
            report([*self._handed_over.take_back(), *self._buffer.take_back()], UNBEGUN)

    def _take_back(self, client: PullClient, lps: LpSet | None = None) -> list[Piece]:
        """Remove and return a partition's rows that no handler has begun."""
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
        spool = self._spools(partition)
        return PullClient(self, node, self._limits, terms, partition, spool, any_thread=self._any_thread)

    def _uses(self, subject: str) -> bool:
        return subject == self.subject

    def _routed(self, route: SubjectRoute) -> None:
        """The router has a newer route."""
        if route.subject == self.subject and self._following:
            self._follow(route)

    def _follow(self, route: SubjectRoute | None) -> None:
        """Apply a route: add pull clients for its new partitions, and retire those of partitions it does not name."""
        if route is None or self._stopping:
            return
        # Every message of a new partition was sent after the group began.
        for client in self._add_clients(route, self._terms._replace(start="earliest")):
            client.start()
        self._retire_others(route)

    def _add_clients(self, route: SubjectRoute, terms: Terms) -> list[PullClient]:
        """Add a pull client for each partition of the route that has none."""
        known = {client.partition for client in self._clients}
        return [self._add_client(route, each, terms) for each in route.partitions if each not in known]

    def _retire_others(self, route: SubjectRoute) -> None:
        """Retire the pull clients of partitions that the route does not name."""
        named = set(route.partitions)
        for client in self._clients:
            retiring = client.partition not in named
            if client.retiring != retiring:
                client.retiring = retiring
                client.pull()
        self._retiring = any(client.retiring for client in self._clients)
        self._leave_retired()

    def _leave_retired(self) -> None:
        for client in [c for c in self._clients if c.retiring and not c.deliveries.open]:
            self._clients.remove(client)
            self._prefetch.remove(client)
            self._more.pop(client, None)
            self._relieve_soon()
            task = tasks.start(self._left(client), f"plait-leave-{client.partition.name}")
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def _left(self, client: PullClient) -> None:
        await client.collector.close()
        await client.leave()

    def _named(self, client: PullClient) -> bool:
        """The newest known route names the client's partition."""
        route = self._router.known(self.subject)
        return route is None or client.partition in route.partitions

    async def _refresh_route(self) -> None:
        """Refresh the route, as a broker does not have a partition that it names. Fails if the subject is deleted."""
        try:
            await self._router.refresh(self.subject)
        except SubjectNotFound as error:
            self._fail(error)
        except PlaitError:
            # The next attach attempt refreshes the route again.
            pass

    # --- pulling --------------------------------------------------------------------------------

    def _wanted(self, client: PullClient, *, patient: bool = True) -> int:
        """The number of rows that the next pull of a partition requests; 0: do not pull now."""
        if self._stopping or self._suspended:
            return 0
        if self._tracks:
            return self._prefetch.wanted(client, patient=patient)
        return self._prefetch.wanted_now(self._demand - self._buffer.count, client)

    def _has_more(self, client: PullClient) -> None:
        """``client.attached`` or ``client.more`` has changed."""
        if client.more and client.attached:
            self._more[client] = None
        else:
            self._more.pop(client, None)

    def _pull_on_demand(self) -> None:
        """The user requests more rows than are buffered. Only this pulls for at_most_once; other consumers prefetch."""
        if self._stopping or self._suspended:
            return
        if not self._tracks:
            self._pull_all()
        elif self._demand > self._buffer.count:
            if not self._buffer.count:
                # The user waits: pull even where the limits allow only a few rows.
                for client in self._prefetch.patient():
                    client.pull(patient=False)
            self._warn_of_unacked()

    def _more_comes(self) -> bool:
        """Returns True if some partition with more rows at its broker is pulling them, or starts to."""
        for client in list(self._more):
            if not client.pulls:
                client.pull(patient=False)
            if client.pulls:
                return True
        return False

    def _pull_all(self) -> None:
        if len(self._clients) > 1:
            # A different partition pulls first each time, so that all get their turn.
            self._clients.rotate()
        for client in self._clients:
            client.pull()

    def _relieve_soon(self) -> None:
        if not self._relieving:
            assert self._loop is not None
            self._relieving = True
            self._loop.call_soon(self._relieve)

    def _relieve(self) -> None:
        """Let starved partitions pull, longest wait first, until the limits are reached."""
        self._relieving = False
        while (client := self._prefetch.relieved()) is not None:
            client.pull()

    def _warn_of_unacked(self) -> None:
        """Warn once if nothing can be pulled because too many messages are unacked."""
        if self._warned or not any(client.attached for client in self._clients):
            return
        if any(
            client.pulls or client.collector.under_way or self._wanted(client, patient=False)
            for client in self._clients
        ):
            return
        self._warned = True
        log.warning(
            "%s: %d messages are not acked, which is the prefetch limit; ack or nack some to get more",
            self.subject,
            sum(client.deliveries.held for client in self._clients),
        )

    # --- handing out ----------------------------------------------------------------------------

    async def fetch(self, count: int = 500, wait: Duration = 1.0) -> Batch:
        """Up to ``count`` messages: those available now, or else the first that arrive within ``wait`` seconds."""
        return Batch(await self._fetch(count, wait))

    async def fetch_arrow(self, count: int = 50_000, wait: Duration = 1.0) -> ArrowBatch:
        """Like ``fetch``, as an Arrow table over the received memory, without a copy."""
        return ArrowBatch(await self._fetch(count, wait))

    async def flush(self) -> None:
        """Wait until the brokers have every ack and nack reported so far."""
        await flush_all([client.deliveries for client in self._clients if not client.collector.quiet])

    async def _fetch(self, count: int, wait: Duration, *, apart: bool = False) -> list[Piece]:
        """The rows for ``fetch``; ``apart``: no two rows of one key, so that each row may be handled by itself."""
        if count < 1:
            raise InvalidArgument(f"count must be 1 or more, not {count}")
        seconds = seconds_of(wait)
        loop = self._opened()
        if count > self._limits.prefetch_count:
            # Prefetch two such batches: the user handles one while the next one is pulled.
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
                    # The limits allow no further pull until some rows are acked: return what is available.
                    break
                if available and self._gather_seconds is not None:
                    remaining = min(remaining, self._gather_seconds)
                if remaining <= 0 or self._handed_over or not await self._arrival(remaining):
                    break
        finally:
            self._demand = 0
        return [] if self._stopping else self._buffer.take(count, apart=apart)

    def _enlarge(self, ahead: int) -> None:
        if self._prefetch.enlarge(ahead) and not (self._stopping or self._suspended):
            self._pull_all()

    def _put_back_handed_over(self) -> None:
        """Rows taken for blocking callers stay reserved for them, although they have not asked for them."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        """Wait for the next message, without a timeout. Several tasks may iterate over one consumer."""
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
        """Wait until something changes, for at most ``seconds``; returns False at the timeout."""
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
            raise Closed(f"the consumer of {self.subject!r} is closed; create another one with client.consumer")
        if self._loop is None:
            how = "with" if self._router.meta.blocking else "async with"
            raise Closed(f"the consumer is not open; use '{how} client.consumer(...)'")
        return self._loop


def _time_out(future: asyncio.Future[bool]) -> None:
    if not future.done():
        future.set_result(False)
