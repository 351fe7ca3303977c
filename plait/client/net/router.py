"""Where a subject's messages are: its partitions, and the nodes that have them.

Routes come from a meta server and are kept until somebody finds that they lead nowhere (``refresh``), or until the next
look at them, every ``route_seconds``. The node of a broker group is dialled when it is first needed. A server that is
meta server and broker at once is one node.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from plait import tasks
from plait.client.net.node import Node
from plait.client.types import PartitionName
from plait.errors import Closed, InvalidArgument, PlaitError, SubjectNotFound
from plait.limits import LOGICAL_PARTITIONS, ClientLimits
from plait.wire import messages as m

log = logging.getLogger("plait.client")

#: Time between the looks at two routes, at least.
ROUTE_GAP_SECONDS: Final = 0.01


class RouteSpan(NamedTuple):
    """Where rows of some logical partitions were, or are."""

    #: Which of the route's partitions.
    partition: int
    #: The partition's rows of them end here; None: it is where they are sent now.
    fence: int | None


class SubjectRoute:
    """One version of a subject's route."""

    __slots__ = ("brokers", "histories", "order", "partitions", "passed", "subject", "table", "version")

    def __init__(self, found: m.RouteReply) -> None:
        self.subject = found.subject
        self.version = found.version
        #: "best_tried" or "strict".
        self.order = found.order
        # Those that rows are, were or may be in; others are to come, and their brokers may not have them yet.
        used = sorted({partition for _, _, spans in found.histories for partition, _ in spans})
        index = {partition: number for number, partition in enumerate(used)}
        self.partitions = [PartitionName(*found.partitions[partition]) for partition in used]
        #: Logical partitions [first, end) and their spans, the oldest first.
        self.histories = [
            (first, end, [RouteSpan(index[partition], fence) for partition, fence in spans])
            for first, end, spans in found.histories
        ]
        #: Group → (index of the partition, first, end, fence): what it has finished where rows were before.
        self.passed = {
            group: [(index[partition], *run) for partition, *run in runs if partition in index]
            for group, runs in found.passed.items()
        }
        #: Broker group → its addresses and its state ("RW", "R", "W", "NRW").
        self.brokers = found.brokers
        #: Logical partition → the index of the partition that takes its rows.
        self.table: npt.NDArray[np.int64] = np.zeros(LOGICAL_PARTITIONS, np.int64)
        for first, end, spans in self.histories:
            self.table[first:end] = spans[-1].partition

    def open(self) -> list[int]:
        """The partitions that rows are sent to."""
        return sorted(set(self.table.tolist()))


class Router:
    """Routes and nodes of one client."""

    def __init__(self, meta: Node, client: str, limits: ClientLimits) -> None:
        self.meta = meta
        self._client = client
        self._limits = limits
        self._routes: dict[str, SubjectRoute] = {}
        self._asking: dict[tuple[str, bool], asyncio.Task[SubjectRoute]] = {}
        self._looking: asyncio.Task[None] | None = None
        #: Looks at broker groups that are away.
        self._watched: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._nodes: dict[str, Node] = {}
        #: Called with every route that is newer than what was known, or has news of the brokers.
        self.on_route: list[Callable[[SubjectRoute], None]] = []
        #: Called with every subject that was found to be deleted.
        self.on_deleted: list[Callable[[str], None]] = []
        #: Asked whether a subject's route is still in use.
        self.users: list[Callable[[str], bool]] = []

    def known(self, subject: str) -> SubjectRoute | None:
        """The subject's route, if it was asked for before."""
        return self._routes.get(subject)

    async def route(self, subject: str, *, create: bool = True) -> SubjectRoute:
        """The subject's route; asked for if it is not known."""
        return self._routes.get(subject) or await self.refresh(subject, create=create)

    async def refresh(self, subject: str, *, create: bool = True) -> SubjectRoute:
        """Ask for the subject's route, whatever is known; several who ask at a time share the answer."""
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
                # ``close`` cancelled the question, not the caller.
                raise Closed("the client is closed") from None
            raise

    async def find(self, subject: str, create: bool) -> m.RouteReply:
        """Ask a meta server."""
        found: m.RouteReply = await self.meta.request(m.RouteRequest(subject, create))
        return found

    async def _ask(self, subject: str, create: bool) -> SubjectRoute:
        found = await self.find(subject, create)
        self.learn(found.metas)
        known = self._routes.get(subject)
        if known is not None and known.version > found.version:
            # A meta server that lags behind the one asked before.
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
        """These are all meta servers. A link that leads to one server for all purposes stays with it."""
        if len(metas) > 1 and self.meta not in self._nodes.values():
            self.meta.learn(metas)

    async def _look_again(self) -> None:
        """Now and then look at all routes, whether they are still the same, and still in use."""
        while self._routes:
            subjects = list(self._routes)
            for subject in subjects:
                # One after another: a client of very many subjects takes longer, and leaves the meta server alone.
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
            log.info("the route of %s cannot be looked at: %s", subject, error)

    def node(self, route: SubjectRoute, group: str) -> Node:
        """The node of a broker group that the route leads to; connecting, or connected."""
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
        """The broker group is at these addresses, be it that it was given up and is there again."""
        node.move(addresses)
        if node.resting:
            node.resume()
            self._watch(group)

    def _watch(self, group: str) -> None:
        """A broker that stays away may be found at another address: the meta server is asked until it is back."""
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
        """One whose route leads to the broker group."""
        return next((subject for subject, route in self._routes.items() if group in route.brokers), None)

    async def _look_for(self, group: str) -> None:
        """Ask whether a broker group that no route leads to is still there; one that was given up rests."""
        try:
            found = await self.find_brokers()
        except PlaitError as error:
            log.info("broker group %s is away, and no meta server knows where it is: %s", group, error)
            return
        node = self._nodes[group]
        if group not in found and self._subject_at(group) is None and node.link is None:
            log.info("broker group %s was given up; it is dialled no more", group)
            node.rest()
            if (timer := self._watched.pop(group, None)) is not None:
                timer.cancel()

    async def find_brokers(self) -> dict[str, tuple[list[str], str]]:
        """Ask a meta server for all broker groups: their addresses and their states."""
        reply: m.AdminReply = await self.meta.request(m.AdminRequest("broker.list"))
        return msgspec.msgpack.decode(reply.result, type=dict[str, tuple[list[str], str]])

    async def all_nodes(self) -> list[Node]:
        """A node for every broker group that there is, by its name."""
        found = await self.find_brokers()
        return [self._node(group, addresses) for group, (addresses, _) in sorted(found.items())]

    async def group_node(self, group: str) -> Node:
        """The node of a broker group, whether a route led there before or not."""
        if group not in self._nodes or self._nodes[group].resting:
            found = await self.find_brokers()
            if group not in found:
                raise InvalidArgument(f"there is no broker group {group!r}; there are {', '.join(sorted(found))}")
            self._node(group, found[group][0])
        return self._nodes[group]

    def nodes(self) -> list[Node]:
        """All that were needed so far, the meta server's among them."""
        return list(dict.fromkeys([self.meta, *self._nodes.values()]))

    async def close(self) -> None:
        """Hang up on everybody but the meta server."""
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
        """Nothing works any more."""
        for node in self._nodes.values():
            node.closed = error
