"""Caches the routes of subjects, and the nodes of broker groups.

Routes come from a meta server. A cached route is replaced when a caller finds that it is wrong (``refresh``), and
checked every ``route_seconds``. ``RouteLookup`` asks until a route is the one that a sender needs. The router connects
to a broker group when it is first needed. A server that is meta server and broker at once is one node.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from plait import chance, tasks
from plait.client.net.node import Node
from plait.client.types import PartitionName
from plait.errors import (
    Closed,
    DiskFull,
    FlowControl,
    InvalidArgument,
    LimitExceeded,
    PlaitError,
    ReadOnly,
    SubjectNotFound,
)
from plait.limits import LOGICAL_PARTITIONS, ClientLimits
from plait.wire import messages as m
from plait.wire.admin.cluster import LIST_BROKERS

log = logging.getLogger("plait.client")

#: The minimum time between the checks of two routes.
ROUTE_GAP_SECONDS: Final = 0.01


class RouteSpan(NamedTuple):
    """Rows of some LPs in one partition, up to a fence."""

    #: The index of the partition in the route.
    partition: int
    #: The sequence at which these rows end; None: the partition accepts new rows.
    fence: int | None


class SubjectRoute:
    """One version of a subject's route."""

    def __init__(self, found: m.RouteReply) -> None:
        self.subject = found.subject
        self.version = found.version
        #: "best_tried" or "strict".
        self.order = found.order
        # Only partitions with a span. Others are planned, and their brokers may not have made them yet.
        used = sorted({partition for _, _, spans in found.histories for partition, _ in spans})
        index = {partition: number for number, partition in enumerate(used)}
        self.partitions = [PartitionName(*found.partitions[partition]) for partition in used]
        #: LPs [first, end) and their spans, the oldest first.
        self.histories = [
            (first, end, [RouteSpan(index[partition], fence) for partition, fence in spans])
            for first, end, spans in found.histories
        ]
        #: Group → (index of the partition, first, end, fence): the earlier spans that the group has finished.
        self.passed = {
            group: [(index[partition], *run) for partition, *run in runs if partition in index]
            for group, runs in found.passed.items()
        }
        #: Broker group → its addresses and its state ("RW", "R", "W", "NRW").
        self.brokers = found.brokers
        #: LP → the index of the partition that accepts its rows.
        self.table: npt.NDArray[np.int64] = np.zeros(LOGICAL_PARTITIONS, np.int64)
        for first, end, spans in self.histories:
            self.table[first:end] = spans[-1].partition

    def open(self) -> list[int]:
        """The indexes of the partitions that accept new rows."""
        return sorted(set(self.table.tolist()))

    def writable(self, group: str) -> bool:
        """Whether a broker group accepts sends."""
        _, state = self.brokers.get(group, ([], "NRW"))
        return "W" in state and state != "NRW"


class Router:
    """The routes and nodes of one client."""

    def __init__(self, meta: Node, client: str, limits: ClientLimits) -> None:
        self.meta = meta
        self._client = client
        self._limits = limits
        self._routes: dict[str, SubjectRoute] = {}
        self._asking: dict[tuple[str, bool], asyncio.Task[SubjectRoute]] = {}
        self._looking: asyncio.Task[None] | None = None
        #: Timers of broker groups that are disconnected.
        self._watched: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._nodes: dict[str, Node] = {}
        #: Called with every route that is newer than the cached one, or has changed broker states.
        self.on_route: list[Callable[[SubjectRoute], None]] = []
        #: Called with every subject that turns out to be deleted.
        self.on_deleted: list[Callable[[str], None]] = []
        #: Functions that return whether they still need the route of a subject.
        self.users: list[Callable[[str], bool]] = []

    def known(self, subject: str) -> SubjectRoute | None:
        """The cached route of a subject, if there is one."""
        return self._routes.get(subject)

    async def route(self, subject: str, *, create: bool = True) -> SubjectRoute:
        """The route of a subject, from the cache or a meta server."""
        return self._routes.get(subject) or await self.refresh(subject, create=create)

    async def refresh(self, subject: str, *, create: bool = True) -> SubjectRoute:
        """Ask a meta server for the route of a subject. Concurrent callers share one request."""
        asking = self._asking.get((subject, create))
        if asking is None:
            asking = tasks.child(self._ask(subject, create), f"plait-ask-{subject}")
            self._asking[subject, create] = asking
            asking.add_done_callback(lambda _: self._asking.pop((subject, create), None))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if asking.cancelled() and not (task is not None and task.cancelling()):
                # ``close`` cancelled the request, not the caller.
                raise Closed("the client is closed; connect again") from None
            raise

    async def find(self, subject: str, create: bool) -> m.RouteReply:
        """Ask a meta server for a route, without caching it."""
        found: m.RouteReply = await self.meta.request(m.RouteRequest(subject, create))
        return found

    async def _ask(self, subject: str, create: bool) -> SubjectRoute:
        found = await self.find(subject, create)
        self.learn(found.metas)
        known = self._routes.get(subject)
        if known is not None and known.version > found.version:
            # This meta server lags behind the one that answered before.
            return known
        route = SubjectRoute(found)
        self._routes[subject] = route
        if self._looking is None or self._looking.done():
            self._looking = tasks.keep(self._look_again, "plait-routes")
        for group, node in self._nodes.items():
            if group in route.brokers and node is not self.meta:
                self._dial(group, node, route.brokers[group][0])
        if known is None or (known.version, known.brokers, known.passed) != (
            route.version,
            route.brokers,
            route.passed,
        ):
            for call in list(self.on_route):
                call(route)
        return route

    def learn(self, metas: list[str]) -> None:
        """Use all meta servers of the cluster, unless the meta server is also a broker of this client."""
        if len(metas) > 1 and self.meta not in self._nodes.values():
            self.meta.learn(metas)

    async def _look_again(self) -> None:
        """Check periodically whether routes have changed, and drop those that are not used."""
        while self._routes:
            subjects = list(self._routes)
            for subject in subjects:
                # One at a time: with very many subjects a round takes longer, and the meta server is not flooded.
                await asyncio.sleep(max(self._limits.route_seconds / len(subjects), ROUTE_GAP_SECONDS))
                if any(uses(subject) for uses in self.users):
                    await self._look_at(subject)
                else:
                    self._routes.pop(subject, None)

    async def _look_at(self, subject: str) -> None:
        try:
            await self.refresh(subject, create=False)
        except SubjectNotFound:
            # The next send or consumer creates it again.
            self._routes.pop(subject, None)
            for call in list(self.on_deleted):
                call(subject)
        except PlaitError as error:
            log.info("cannot check the route of %s: %s", subject, error)

    def node(self, route: SubjectRoute, group: str) -> Node:
        """The node of a broker group in the route; connected or connecting."""
        return self._node(group, route.brokers[group][0])

    def _node(self, group: str, addresses: list[str]) -> Node:
        node = self._nodes.get(group)
        if node is None:
            if self.meta.alone and self.meta.group == group:
                node = self.meta
            else:
                node = Node(addresses, self._client, self._limits)
                node.on_lost.append(lambda: self._watch(group))
                node.start()
                self._watch(group)
            self._nodes[group] = node
        elif node.resting:
            self._dial(group, node, addresses)
        return node

    def _dial(self, group: str, node: Node, addresses: list[str]) -> None:
        """Use these addresses for a broker group, and connect again if its node rests."""
        node.move(addresses)
        if node.resting:
            node.resume()
            self._watch(group)

    def _watch(self, group: str) -> None:
        """Ask the meta server for new addresses of a disconnected broker group until it is connected."""
        if group not in self._watched:
            loop = asyncio.get_running_loop()
            self._watched[group] = loop.call_later(self._limits.unreached_seconds, self._still_away, group)

    def _still_away(self, group: str) -> None:
        del self._watched[group]
        if self._nodes[group].link is not None:
            return
        subject = self._subject_at(group)
        look = self._look_for(group) if subject is None else self._look_at(subject)
        task = tasks.start(look, f"plait-away-{group}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._watch(group)

    def _subject_at(self, group: str) -> str | None:
        """A subject whose route has the broker group."""
        return next((subject for subject, route in self._routes.items() if group in route.brokers), None)

    async def _look_for(self, group: str) -> None:
        """Check whether a broker group that is in no route still exists. Stop connecting to a removed group."""
        try:
            found = await self.find_brokers()
        except PlaitError as error:
            log.info("broker group %s is disconnected, and no meta server has its address: %s", group, error)
            return
        node = self._nodes[group]
        if group not in found and self._subject_at(group) is None and node.link is None:
            log.info("broker group %s was removed from the cluster; not connecting to it again", group)
            node.rest()
            if (timer := self._watched.pop(group, None)) is not None:
                timer.cancel()

    async def find_brokers(self) -> dict[str, tuple[list[str], str]]:
        """Ask a meta server for all broker groups: their addresses and their states."""
        return LIST_BROKERS.result(await self.meta.request(LIST_BROKERS.packet()))

    async def all_nodes(self) -> list[Node]:
        """The nodes of all broker groups, in the order of their names."""
        found = await self.find_brokers()
        return [self._node(group, addresses) for group, (addresses, _) in sorted(found.items())]

    async def group_node(self, group: str) -> Node:
        """The node of a broker group, even if no route has it."""
        if group not in self._nodes or self._nodes[group].resting:
            found = await self.find_brokers()
            if group not in found:
                raise InvalidArgument(f"broker group {group!r} does not exist; use one of {', '.join(sorted(found))}")
            self._node(group, found[group][0])
        return self._nodes[group]

    async def close(self) -> None:
        """Disconnect from all nodes except the meta server."""
        for timer in self._watched.values():
            timer.cancel()
        running = [*self._asking.values(), *self._tasks, *([self._looking] if self._looking is not None else [])]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for node in self._nodes.values():
            if node is not self.meta:
                await node.close()

    def abandon(self, error: PlaitError) -> None:
        """Make all requests of all nodes raise ``error``."""
        for node in self._nodes.values():
            node.closed = error


#: Errors of a meta server that cannot create the subject now. The request fails without another attempt.
_FINAL: Final = (ReadOnly, DiskFull, FlowControl, LimitExceeded)


class RouteLookup:
    """The request for the route of one subject; at most one runs."""

    def __init__(
        self,
        router: Router,
        limits: ClientLimits,
        subject: str,
        found: Callable[[SubjectRoute], None],
        failed: Callable[[PlaitError], None],
    ) -> None:
        self._router = router
        self._limits = limits
        self._subject = subject
        self._found = found
        self._failed = failed
        #: True while no route is known: a cached route is good enough then.
        self.first = True
        #: The newest route version that a broker has reported.
        self._wanted = 0
        #: The pause before the next request. It grows until a route proves right and the owner sets the pause to 0.
        self.backoff = 0.0
        #: Why the last request failed.
        self.error: PlaitError | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def running(self) -> bool:
        """A request runs."""
        return self._task is not None

    def start(self, version: int = 0) -> None:
        """Start a request for a route of at least this version, unless one runs."""
        self._wanted = max(self._wanted, version)
        if self._task is None and not self._closed:
            # After a defect of the task the owner fails its rows; the next send asks again.
            self._task = tasks.start(
                self._look(),
                f"plait-route-{self._subject}",
                failed=lambda error: self._failed(tasks.error_of(error)),
            )

    def close(self) -> None:
        """Stop the request, and start no other."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()

    async def _look(self) -> None:
        router, limits = self._router, self._limits
        pause = limits.send_retry_first_seconds
        try:
            if self.backoff:
                # The route of the last request was wrong as well.
                await _sleep_about(self.backoff)
            if not self.first:
                self.backoff = min(2 * (self.backoff or pause), limits.send_retry_max_seconds)
            while True:
                try:
                    found = await (router.route if self.first else router.refresh)(self._subject)
                except PlaitError as error:
                    if isinstance(error, _FINAL) or not error.retryable:
                        self._failed(error)
                        return
                    self.error = error
                else:
                    self.error = None
                    if found.version >= self._wanted:
                        break
                await _sleep_about(pause)
                pause = min(pause * 2, limits.send_retry_max_seconds)
        finally:
            self._task = None
        self._found(found)


async def _sleep_about(seconds: float) -> None:
    await asyncio.sleep(seconds * chance.uniform(0.5, 1.0))
