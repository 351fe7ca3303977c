"""The fetcher of a consumer: has a pull client for each partition of its subject, which fill one buffer.

Rows of all partitions are buffered in the order of their arrival. A partition whose broker is unreachable does not
delay the others. When the route changes, the fetcher adds a pull client for each new partition; it leaves a partition
that is no longer in the route once the user holds no row of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from plait import tasks
from plait.client.blocking.row_handover import RowHandover
from plait.client.closing import all_of
from plait.client.consume.ack_spool import AckSpool
from plait.client.consume.attaching import attach_some, first_route
from plait.client.consume.delivered import Piece
from plait.client.consume.failure import UNBEGUN
from plait.client.consume.group_start import find_start_version
from plait.client.consume.ordered.ordered_buffer import OrderedBuffer
from plait.client.consume.prefetch import Prefetch, RowBuffer
from plait.client.consume.pull_client import PullClient
from plait.client.consume.terms import PauseNotices, Terms
from plait.client.net.router import Router, SubjectRoute
from plait.client.types import PartitionName, SendReply
from plait.errors import PlaitError, StaleRoute, SubjectNotFound
from plait.limits import ClientLimits
from plait.model.logical_partitions import LpSet
from plait.wire import messages as m

log = logging.getLogger("plait.client")

#: Makes the spool of a partition.
Spools = Callable[[PartitionName], AckSpool | None]


class Arrivals:
    """Callers that wait for rows of a consumer."""

    def __init__(self) -> None:
        #: The result of each is True when something changed, False at its timeout.
        self.waiting: list[asyncio.Future[bool]] = []

    async def arrival(self, seconds: float | None) -> bool:
        """Wait until something changes, for at most ``seconds``; returns False at the timeout."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bool] = loop.create_future()
        self.waiting.append(future)
        timer = None if seconds is None else loop.call_later(seconds, _time_out, future)
        try:
            return await future
        finally:
            if timer is not None:
                timer.cancel()
            if future in self.waiting:
                self.waiting.remove(future)

    def wake(self) -> None:
        waiting = list(self.waiting)
        self.waiting.clear()
        for future in waiting:
            if not future.done():
                future.set_result(True)


class CommonState(NamedTuple):
    """What the fetchers of one consumer of several subjects have in common."""

    waiting: list[asyncio.Future[bool]]
    prefetch: Prefetch[PullClient]
    handed_over: RowHandover
    #: Called when one of the fetchers cannot continue.
    failed: Callable[[Fetcher, PlaitError], None]


class Fetcher(Arrivals):
    """The partitions of one subject, and the rows that they have delivered to one consumer."""

    def __init__(
        self,
        router: Router,
        limits: ClientLimits,
        terms: Terms,
        *,
        any_thread: bool = False,
        spools: Spools = lambda _: None,
        common: CommonState | None = None,
    ) -> None:
        super().__init__()
        self.subject = terms.subject
        self.router = router
        self.limits = limits
        self.terms = terms
        self.any_thread = any_thread
        self._spools = spools
        #: Sends replies to requests among the messages.
        self.reply: SendReply | None = None
        self.tracks = terms.tracks
        self.loop: asyncio.AbstractEventLoop | None = None
        self.clients: deque[PullClient] = deque()
        #: Rows taken from the buffer for a blocking caller, before its next call asks for them.
        self.handed_over = RowHandover() if common is None else common.handed_over
        #: True if a row without an outcome limits how far past it the consumer pulls.
        self.spans = True
        self.prefetch: Prefetch[PullClient] = Prefetch(limits) if common is None else common.prefetch
        self.buffer: RowBuffer | OrderedBuffer = RowBuffer(self.prefetch.note_ranked)
        if common is not None:
            self.waiting = common.waiting
        self._common = common
        #: The longest wait for more rows when some are available and the brokers have more; None: no limit.
        self.gather_seconds: float | None = None
        #: True if the consumer is open and applies newer routes.
        self.following = False
        #: True if some partition is no longer in the route.
        self.retiring = False
        #: Tasks that leave partitions which are no longer in the route.
        self.leaving: set[asyncio.Task[None]] = set()
        #: Attached partitions whose broker has more rows.
        self.more: dict[PullClient, None] = {}
        #: The number of rows that a caller waits for.
        self.demand = 0
        #: True if ``_relieve`` is scheduled for the end of this turn of the loop.
        self._relieving = False
        self._warned = False
        #: True while ``suspend`` pauses pulling.
        self.suspended = False
        #: True if nothing is pulled and handed out any more.
        self.stopping = False
        self.pauses = PauseNotices()
        #: Why the consumer cannot continue.
        self.error: PlaitError | None = None

    # --- partitions -----------------------------------------------------------------------------

    async def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Attach to the partitions of the route; succeeds with at least one."""
        self.loop = loop
        self.router.on_route.append(self._routed)
        self.router.users.append(self._uses)
        deadline = loop.time() + self.limits.request_seconds
        while True:
            route = await first_route(self.router, self.subject, self.terms.creates, deadline)
            try:
                version = await find_start_version(self.router, route, self.terms, self.limits, deadline)
                self.terms = self.terms._replace(began=version)
                self._add_clients(route, self.terms)
                self._retire_others(route)
                return await attach_some(self.clients, self.limits, deadline)
            except StaleRoute:
                # The cached route was old, and a partition has left it. Retry if there is a newer route.
                if self.router.known(self.subject) is route:
                    raise

    def start(self) -> None:
        """Stay attached, and follow the route from now on."""
        for client in self.clients:
            client.start()
        self.following = True
        self._agree_on_filter()
        for client in self.clients:
            client.pull()
        # The route may have changed while the consumer opened.
        self.follow(self.router.known(self.subject))

    def learn_filter(self, attached: m.AttachReply) -> bool:
        """Note the filter of the group in a partition. Returns False if the partition must not pull yet."""
        self.terms = self.terms.learned(attached)
        if self.following:
            self._agree_on_filter()
        # While the consumer opens, another partition may yet have a newer filter.
        return self.following or len(self.clients) == 1

    def _agree_on_filter(self) -> None:
        """Attach again to the partitions where the group has an older filter; they adopt the newest one."""
        for client in self.clients:
            if client.session is not None and client.session.reply.filter_version < self.terms.filter_version:
                if not client._token:
                    client.session.end()
                client.lost()

    def _uses(self, subject: str) -> bool:
        return subject == self.subject

    def _routed(self, route: SubjectRoute) -> None:
        """Apply a newer route of the router."""
        if route.subject == self.subject and self.following:
            self.follow(route)

    def follow(self, route: SubjectRoute | None) -> None:
        """Apply a route: add pull clients for its new partitions, and retire those of partitions it does not name."""
        if route is None or self.stopping:
            return
        # Every message of a new partition was sent after the group began.
        for client in self._add_clients(route, self.terms._replace(start="earliest")):
            client.start()
        self._retire_others(route)

    def _add_clients(self, route: SubjectRoute, terms: Terms) -> list[PullClient]:
        """Add a pull client for each partition of the route that has none."""
        known = {client.partition for client in self.clients}
        added = [self._new_client(route, each, terms) for each in route.partitions if each not in known]
        for client in added:
            client.deliveries.reply = self.reply
            self.clients.append(client)
            self.prefetch.add(client)
        return added

    def _new_client(self, route: SubjectRoute, partition: PartitionName, terms: Terms) -> PullClient:
        return PullClient(self, self.router.node(route, partition.group), terms, partition, self._spools(partition))

    def _retire_others(self, route: SubjectRoute) -> None:
        """Retire the pull clients of partitions that the route does not name."""
        named = set(route.partitions)
        for client in self.clients:
            retiring = client.partition not in named
            if client.retiring != retiring:
                client.retiring = retiring
                client.pull()
        self.retiring = any(client.retiring for client in self.clients)
        self.leave_retired()

    def leave_retired(self) -> None:
        """Leave the retired partitions of which the user holds no row."""
        for client in [c for c in self.clients if c.retiring and not c.deliveries.open]:
            self.clients.remove(client)
            self.prefetch.remove(client)
            self.more.pop(client, None)
            self.relieve_soon()
            task = tasks.start(self._leave(client), f"plait-leave-{client.partition.name}")
            self.leaving.add(task)
            task.add_done_callback(self.leaving.discard)

    async def _leave(self, client: PullClient) -> None:
        await client.collector.close()
        await client.leave()

    async def refresh_route(self) -> None:
        """Refresh the route: a broker lacks a partition that the route names. Fails if the subject is deleted."""
        try:
            await self.router.refresh(self.subject, create=self.terms.creates)
        except SubjectNotFound as error:
            self.fail(error)
        except PlaitError:
            # The next attach attempt refreshes the route again.
            pass

    async def send_outcomes(self) -> None:
        """Follow no more routes, send the pending outcomes, and take no further ones."""
        if self._routed in self.router.on_route:
            self.router.on_route.remove(self._routed)
            self.router.users.remove(self._uses)
        # A consumer that was never open has no acks to send.
        await all_of([client.collector.close(flush=self.following) for client in self.clients])

    def keep_locks(self) -> None:
        """Let ``leave`` keep the locks, as a handler still runs that cannot be stopped."""

    async def leave(self) -> None:
        """Return the rows that no handler has begun, and leave the group."""
        await all_of([*(client.leave() for client in self.clients), *self.leaving])

    # --- pulling --------------------------------------------------------------------------------

    def has_more(self, client: PullClient) -> None:
        """Update ``more`` after ``client.session`` or ``client.more`` has changed."""
        if client.more and client.session is not None:
            self.more[client] = None
        else:
            self.more.pop(client, None)

    def pull_on_demand(self) -> None:
        """Pull rows that the user waits for. Consumers with at_most_once pull only here; other consumers prefetch."""
        if self.stopping or self.suspended:
            return
        if not self.tracks:
            self._pull_all()
        elif self.demand > self.buffer.count:
            if not self.buffer.count:
                # The user waits: pull even where the limits allow only a few rows.
                for client in self.prefetch.patient():
                    client.pull(patient=False)
            self._warn_of_unacked()

    def more_comes(self) -> bool:
        """Returns True if some partition with more rows at its broker is pulling them, or starts to."""
        for client in list(self.more):
            if not client.pulls:
                client.pull(patient=False)
            if client.pulls:
                return True
        return False

    def enlarge(self, ahead: int) -> None:
        if self.prefetch.enlarge(ahead):
            self.enlarged()

    def enlarged(self) -> None:
        """Pull more rows after the prefetch limit has grown."""
        if not (self.stopping or self.suspended):
            self._pull_all()

    def _pull_all(self) -> None:
        if len(self.clients) > 1:
            # Another partition pulls first each time, so that all get their turn.
            self.clients.rotate()
        for client in self.clients:
            client.pull()

    def relieve_soon(self) -> None:
        """Let partitions that wait for the prefetch limits pull, the longest waiting first, while there is room."""
        if not self._relieving:
            assert self.loop is not None
            self._relieving = True
            self.loop.call_soon(self._relieve)

    def _relieve(self) -> None:
        self._relieving = False
        while (client := self.prefetch.relieved()) is not None:
            client.pull()

    def _warn_of_unacked(self) -> None:
        """Warn once if nothing can be pulled because too many messages are unacked."""
        if self._warned or not any(client.session is not None for client in self.clients):
            return
        if any(client.pulls or client.collector.under_way or client.wanted(patient=False) for client in self.clients):
            return
        self._warned = True
        log.warning(
            "%s: %d messages are not acked, which is the prefetch limit; ack or nack some to get more",
            self.subject,
            sum(client.deliveries.held for client in self.clients),
        )

    def suspend(self) -> None:
        """Pull nothing until ``resume``; return the rows that no handler has begun."""
        self.suspended = True
        self.hand_back()

    def resume(self) -> None:
        self.suspended = False
        self._pull_all()

    # --- rows -----------------------------------------------------------------------------------

    def hand_back(self) -> None:
        """Return to their brokers the rows of all partitions that no handler has begun."""
        if self.tracks and not any(client.deliveries.closed for client in self.clients):
            handed_over = [piece for client in self.clients for piece in self.handed_over.take_back(client.partition)]
            for delivered, start, stop in [*handed_over, *self.buffer.take_back()]:
                delivered.report_rows(slice(start, stop), UNBEGUN)

    def take_back(self, client: PullClient, lps: LpSet | None = None) -> list[Piece]:
        """Remove and return a partition's rows (of ``lps``; None: all) that no handler has begun."""
        return [*self.handed_over.take_back(client.partition), *self.buffer.take_back(client.partition)]

    def put_back_handed_over(self) -> None:
        """Do nothing: rows taken for a blocking caller stay its own, as no lock on them can be lost."""

    def halt(self) -> None:
        """Pull and hand out nothing from now on."""
        self.stopping = True
        if self._common is None:
            self.handed_over.stop()

    def fail(self, error: PlaitError) -> None:
        self.error = error
        if self._common is not None:
            self._common.failed(self, error)
        self.wake()


def _time_out(future: asyncio.Future[bool]) -> None:
    if not future.done():
        future.set_result(False)
