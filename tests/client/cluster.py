"""Several brokers, and clients whose routes lead to partitions on all of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

import plait
from plait.limits import LOGICAL_PARTITIONS
from plait.testing import EmbeddedBroker
from plait.testing.embedded_broker import TEST_CONFIG
from plait.wire import messages as m
from tests.client.support import numbers

#: Reconnects at once, so that tests do not wait for pauses.
EAGER = plait.ClientLimits(reconnect_first_seconds=0.001, reconnect_max_seconds=0.01, attach_seconds=0.05)


class MetaDouble:
    """A meta server that allocates evenly to the clients that send heartbeats.

    Every change of members starts a new epoch, and may move any LP.
    """

    def __init__(self) -> None:
        self.members: list[str] = []
        self.epoch = 0
        self.strategy = "exclusive"
        self.error: plait.PlaitError | None = None
        #: The share of each client; None: an even share.
        self.fixed: dict[str, list[m.LpGrant]] | None = None
        self.routes: dict[str, int] = {}
        #: (subject, group, code, text) of memberships that it refuses.
        self.refused: list[tuple[str, str, str, str]] = []
        self._changed = asyncio.Event()
        self.heartbeats: list[m.MemberHeartbeatRequest] = []

    async def heartbeat(self, request: m.MemberHeartbeatRequest) -> m.MemberHeartbeatReply:
        self.heartbeats.append(request)
        if self.error is not None:
            raise self.error
        if request.leaving != (request.client not in self.members):
            if request.leaving:
                self.members.remove(request.client)
            else:
                self.members.append(request.client)
            self.change()
        if request.seen == self.epoch:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(request.wait):
                    await self._changed.wait()
        members = [
            (subject, group, self.strategy, self.grants(request.client)) for subject, group, _ in request.members
        ]
        # Only the refusals of members that this heartbeat names.
        refused = [each for each in self.refused if (*each[:2], True) in request.members]
        return m.MemberHeartbeatReply(
            self.epoch, members if self.epoch > request.seen else [], routes=self.routes, refused=refused
        )

    def grants(self, client: str) -> list[m.LpGrant]:
        """The share of a client."""
        if self.fixed is not None:
            return self.fixed.get(client, [])
        if client not in self.members:
            return []
        at, count = self.members.index(client), len(self.members)
        return [(at * LOGICAL_PARTITIONS // count, (at + 1) * LOGICAL_PARTITIONS // count, self.epoch)]

    def change(self) -> None:
        """Start a new epoch and answer all waiting heartbeats."""
        self.epoch += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class Cluster:
    """Brokers g1, g2, ... and the routes that clients receive."""

    def __init__(self, brokers: dict[str, EmbeddedBroker]) -> None:
        self.brokers = brokers
        self.version = 1
        #: (name, broker group) of each partition, and histories; None: each partition has an even share.
        self.partitions: list[tuple[str, str]] = [("s", group) for group in brokers]
        self.histories: list[m.LpHistory] | None = None
        self.order = "best_tried"
        self.meta = MetaDouble()

    def route(self, subject: str) -> m.RouteReply:
        """The reply of a meta server to a route request."""
        count = len(self.partitions)
        shares = [
            (i * LOGICAL_PARTITIONS // count, (i + 1) * LOGICAL_PARTITIONS // count, [(i, None)]) for i in range(count)
        ]
        addresses = {group: ([broker.address], "RW") for group, broker in self.brokers.items()}
        histories: list[m.LpHistory] = shares if self.histories is None else self.histories  # type: ignore[assignment]
        return m.RouteReply(subject, self.version, self.order, self.partitions, histories, addresses)

    def connect(self, *, client_id: str | None = None, limits: plait.ClientLimits = EAGER, **more: Any) -> plait.Client:
        """A client that receives its routes and allocations from this cluster."""
        client = plait.connect(self.brokers["g1"].address, client_id=client_id, limits=limits, **more)
        ask = client._node.request

        async def request(message: m.PacketHead, seconds: float | None = None) -> Any:
            if isinstance(message, m.RouteRequest):
                return self.route(message.subject)
            if isinstance(message, m.MemberHeartbeatRequest):
                return await self.meta.heartbeat(message)
            return await ask(message, seconds)

        client._node.request = request  # type: ignore[method-assign]
        return client

    async def change(self, client: plait.Client, *partitions: tuple[str, str]) -> None:
        """Change the route to these partitions and refresh it in the client."""
        self.version += 1
        self.partitions = list(partitions)
        await client._router.refresh("s")

    async def send(self, group: str, count: int, subject: str = "s", first: int = 0) -> None:
        """Send messages with numbers as bodies, directly to a broker."""
        async with self.brokers[group].connect() as direct:
            await direct.send_many(subject, [b"%d" % n for n in range(first, first + count)])

    async def open(
        self, group: str, *, name: str = "s", lps: m.LpRun = (0, LOGICAL_PARTITIONS), version: int = 1
    ) -> None:
        """Open a partition for these logical partitions, with the cluster's order strategy."""
        request = {"subject": "s", "name": name, "lps": [lps], "version": version, "settings": {"order": self.order}}
        async with self.brokers[group].connect() as direct:
            await direct._node.request(m.AdminRequest("partition.open", request))

    async def seal(self, group: str, *, name: str = "s", lps: m.LpRun = (0, LOGICAL_PARTITIONS), version: int) -> None:
        """Seal these logical partitions of a partition."""
        async with self.brokers[group].connect() as direct:
            await direct._node.request(
                m.AdminRequest("partition.seal", {"name": name, "lps": [lps], "version": version})
            )

    async def send_keyed(self, group: str, rows: list[tuple[str, int]], subject: str = "s") -> None:
        """Send messages with keys and numbers as bodies, directly to a broker."""
        async with self.brokers[group].connect() as direct:
            await direct.send_many(subject, [b"%d" % n for _, n in rows], keys=[key for key, _ in rows])

    async def lag(self, group: str, subject: str = "s", name: str = "g") -> int:
        """The lag of a consumer group on one broker."""
        async with self.brokers[group].connect() as direct:
            return (await direct.admin.group(subject, name)).lag


@asynccontextmanager
async def cluster_of(path: Path, count: int = 2) -> AsyncIterator[Cluster]:
    """A cluster of ``count`` brokers on the running loop."""
    async with AsyncExitStack() as stack:
        brokers = {}
        for number in range(1, count + 1):
            config = msgspec.structs.replace(TEST_CONFIG, group=f"g{number}")
            broker = EmbeddedBroker(path / f"g{number}", config=config, metas=())
            brokers[f"g{number}"] = await stack.enter_async_context(broker)
        yield Cluster(brokers)


def by_partition(messages: list[plait.Message]) -> dict[str, list[int]]:
    """The numbers in the bodies, by partition."""
    found: dict[str, list[plait.Message]] = {}
    for message in messages:
        found.setdefault(str(message.partition), []).append(message)
    return {place: numbers(several) for place, several in found.items()}
