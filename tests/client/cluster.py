"""Several brokers, and a client whose routes lead to partitions on all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

import plait
from plait.limits import LOGICAL_PARTITIONS
from plait.testing import EmbeddedBroker
from plait.testing.embedded import TEST_CONFIG
from plait.wire import messages as m
from tests.client.support import numbers

#: Reconnects at once, so that tests do not wait for pauses.
EAGER = plait.ClientLimits(reconnect_first_seconds=0.001, reconnect_max_seconds=0.01, attach_seconds=0.05)


class Cluster:
    """Brokers g1, g2, ... and the routes that clients are told."""

    def __init__(self, brokers: dict[str, EmbeddedBroker]) -> None:
        self.brokers = brokers
        self.version = 1
        #: (name, broker group) of each partition, and histories if they are not an even share of each.
        self.partitions: list[tuple[str, str]] = [("s", group) for group in brokers]
        self.histories: list[m.LpHistory] | None = None

    def route(self, subject: str) -> m.RouteFound:
        """What a meta server answers."""
        count = len(self.partitions)
        shares = [
            (i * LOGICAL_PARTITIONS // count, (i + 1) * LOGICAL_PARTITIONS // count, [(i, None)]) for i in range(count)
        ]
        addresses = {group: ([broker.address], "RW") for group, broker in self.brokers.items()}
        histories: list[m.LpHistory] = shares if self.histories is None else self.histories  # type: ignore[assignment]
        return m.RouteFound(subject, self.version, "best_tried", self.partitions, histories, addresses)

    def connect(self, *, client_id: str | None = None, limits: plait.ClientLimits = EAGER, **more: Any) -> plait.Client:
        """A client that takes its routes from here."""
        client = plait.connect(self.brokers["g1"].address, client_id=client_id, limits=limits, **more)
        ask = client._node.request

        async def request(message: m.Message, seconds: float | None = None) -> Any:
            if isinstance(message, m.FindRoute):
                return self.route(message.subject)
            return await ask(message, seconds)

        client._node.request = request  # type: ignore[method-assign]
        return client

    async def change(self, client: plait.Client, *partitions: tuple[str, str]) -> None:
        """Other partitions, which the client hears of at once."""
        self.version += 1
        self.partitions = list(partitions)
        await client._router.refresh("s")

    async def send(self, group: str, count: int, subject: str = "s", first: int = 0) -> None:
        """Messages whose bodies are numbers, straight to a broker."""
        async with self.brokers[group].connect() as direct:
            await direct.send_many(subject, [b"%d" % n for n in range(first, first + count)])

    async def lag(self, group: str, subject: str = "s", name: str = "g") -> int:
        """What a broker has left for a consumer group."""
        async with self.brokers[group].connect() as direct:
            return (await direct.admin.group(subject, name)).lag


@asynccontextmanager
async def cluster_of(path: Path, count: int = 2) -> AsyncIterator[Cluster]:
    """So many brokers on the running loop."""
    async with AsyncExitStack() as stack:
        brokers = {}
        for number in range(1, count + 1):
            config = msgspec.structs.replace(TEST_CONFIG, group=f"g{number}")
            broker = EmbeddedBroker(path / f"g{number}", config=config)
            brokers[f"g{number}"] = await stack.enter_async_context(broker)
        yield Cluster(brokers)


def by_partition(messages: list[plait.Message]) -> dict[str, list[int]]:
    """The numbers in the bodies, by where they are stored."""
    found: dict[str, list[plait.Message]] = {}
    for message in messages:
        found.setdefault(str(message.partition), []).append(message)
    return {place: numbers(several) for place, several in found.items()}
