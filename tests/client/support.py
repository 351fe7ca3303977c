"""Helpers of the client's tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import msgspec
import numpy as np

import plait
from plait.broker import BrokerConfig
from plait.client.net.node import Node
from plait.frame.columns import Column
from plait.frame.view import FrameView, frames_in
from plait.limits import LOGICAL_PARTITIONS
from plait.model.logical_partitions import lp_of_key, runs_with
from plait.testing import EmbeddedBroker
from plait.testing.embedded_broker import TEST_CONFIG
from plait.wire import messages as m

#: Longer than any step of a test takes; only a failing test waits this long.
PATIENCE_SECONDS = 60.0
#: Short pauses and small frames.
EAGER = plait.ClientLimits(
    reconnect_first_seconds=0.001,
    reconnect_max_seconds=0.01,
    send_retry_first_seconds=0.001,
    send_retry_max_seconds=0.01,
    frame_count=20,
    linger_seconds=0.0,
    in_flight_frames=4,
)


async def until(condition: Callable[[], object]) -> None:
    """Yield to the loop until the condition holds."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - the condition is of any kind
            await asyncio.sleep(0)


def wait_until(condition: Callable[[], object]) -> None:
    """Block until the condition, which asks a server, holds."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline


@contextmanager
def impatient(client: plait.Client) -> Iterator[None]:
    """Sends in this block time out after 50 ms; other sends keep their limit."""
    producer = client._producer
    patient, producer.limits = producer.limits, msgspec.structs.replace(producer.limits, send_seconds=0.05)
    for sender in [each for subject in client._senders._all() for each in subject.senders()]:
        # The timer is set for the time limit of an earlier send.
        if sender._timer is not None:
            sender._timer.cancel()
            sender._timer = None
    try:
        yield
    finally:
        producer.limits = patient


async def lose(client: plait.Client) -> None:
    """End a client as a crash of its process does: the connection breaks without a goodbye."""
    node = client._node
    assert node._task is not None
    node._task.cancel()
    await asyncio.gather(node._task, return_exceptions=True)
    link = node._link
    assert link is not None
    link.abort()
    await until(lambda: link.closed)


async def fetch_all(consumer: plait.Consumer, count: int) -> list[plait.Message]:
    """Fetch exactly ``count`` messages, in order of delivery."""
    messages: list[plait.Message] = []
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(messages) < count:
            messages += await consumer.fetch(count - len(messages), wait=PATIENCE_SECONDS)
    return messages


async def send(client: plait.Client, count: int, subject: str = "s", first: int = 0) -> None:
    """Send ``count`` messages; the bodies are numbers from ``first``."""
    await client.send_many(subject, [b"%d" % n for n in range(first, first + count)])


def numbers(messages: Iterable[plait.Message]) -> list[int]:
    """The numbers in the bodies of messages from ``send``."""
    return [int(message.body) for message in messages]


def config_of(group: str, **settings: object) -> BrokerConfig:
    """The config of a test broker in this broker group."""
    return msgspec.structs.replace(TEST_CONFIG, group=group, **settings)


class PlayedMeta:
    """Stands in for a meta server for one subject: opens and seals its partitions, and gives clients the routes.

    Partition n is on broker n modulo the number of brokers. ``change`` changes the route; a client that asks for the
    route receives the newest one.
    """

    def __init__(self, brokers: list[EmbeddedBroker], subject: str = "s", order: str = "best_tried") -> None:
        self.brokers = brokers
        self.subject = subject
        self.order = order
        self.version = 0
        #: The states of the broker groups that are not "RW".
        self.states: dict[str, str] = {}
        #: The spans of each logical partition: (partition, first sequence, fence).
        self.spans: list[list[tuple[int, int, int | None]]] = [[] for _ in range(LOGICAL_PARTITIONS)]
        self.asked = 0
        #: If set, clients receive this route instead of the newest one.
        self.frozen: m.RouteReply | None = None
        self._nodes: list[Node] = []

    def name(self, partition: int) -> str:
        return self.subject if partition == 0 else f"{self.subject}#{partition}"

    def group(self, partition: int) -> str:
        return self.broker(partition).config.group

    def broker(self, partition: int) -> EmbeddedBroker:
        return self.brokers[partition % len(self.brokers)]

    async def open(self, partitions: int) -> None:
        """Connect to the brokers and open this many partitions."""
        for broker in self.brokers:
            node = Node([broker.address], "meta", plait.ClientLimits())
            await node.open()
            self._nodes.append(node)
        await self.change(partitions)

    async def close(self) -> None:
        for node in self._nodes:
            await node.close()

    async def _order(self, partition: int, operation: str, **arguments: object) -> object:
        node = self._nodes[partition % len(self.brokers)]
        reply = await node.request(m.AdminRequest(operation, {"name": self.name(partition), **arguments}))
        return msgspec.msgpack.decode(reply.result)

    async def change(self, partitions: int) -> None:
        """Route the subject to this many partitions, with equal shares."""
        target = np.arange(LOGICAL_PARTITIONS) * partitions // LOGICAL_PARTITIONS
        current = np.array([spans[-1][0] if spans else -1 for spans in self.spans])
        moving = target != current
        version = self.version + 1
        for partition in sorted(set(current[moving].tolist()) - {-1}):
            runs = [run[:2] for run in runs_with(current, moving & (current == partition))]
            fences = await self._order(partition, "partition.seal", lps=runs, version=version)
            for first, end, fence in fences:  # type: ignore[attr-defined]
                for lp in range(first, end):
                    self.spans[lp][-1] = (*self.spans[lp][-1][:2], fence)
        for partition in sorted(set(target[moving].tolist())):
            chosen = moving & (target == partition)
            runs = [run[:2] for run in runs_with(target, chosen)]
            settings = {"order": self.order}
            await self._order(
                partition,
                "partition.open",
                subject=self.subject,
                lps=runs,
                version=version,
                settings=settings,
            )
            for lp in np.flatnonzero(chosen).tolist():
                before = [end for where, _, end in self.spans[lp] if where == partition]
                self.spans[lp].append((partition, before[-1] or 0 if before else 0, None))
        self.version = version

    def route(self) -> m.RouteReply:
        """The newest route."""
        current = np.array([spans[-1][0] for spans in self.spans])
        used = range(max(max(span[0] for span in spans) for spans in self.spans) + 1)
        everything = np.ones(LOGICAL_PARTITIONS, bool)
        return m.RouteReply(
            self.subject,
            self.version,
            self.order,
            [(self.name(n), self.group(n)) for n in used],
            [(first, end, [(where, None)]) for first, end, where in runs_with(current, everything)],
            self._brokers(),
        )

    def _brokers(self) -> dict[str, tuple[list[str], str]]:
        return {b.config.group: ([b.address], self.states.get(b.config.group, "RW")) for b in self.brokers}

    async def find_brokers(self) -> dict[str, tuple[list[str], str]]:
        return self._brokers()

    async def find(self, subject: str, create: bool) -> m.RouteReply:
        assert subject == self.subject
        self.asked += 1
        return self.frozen or self.route()

    def client(self, **arguments: object) -> plait.Client:
        """A client that receives its routes from this object."""
        client = plait.connect(self.brokers[0].address, **arguments)  # type: ignore[arg-type]
        client._router.find = self.find  # type: ignore[method-assign]
        client._router.find_brokers = self.find_brokers  # type: ignore[method-assign]
        return client

    async def frames(self, partition: int) -> list[FrameView]:
        """The stored frames of a partition."""
        link = await self._nodes[partition % len(self.brokers)].ready()
        found: list[FrameView] = []
        position = 0
        while True:
            request = m.ReadRequest(self.name(partition), ("sequence", position), 100_000, 16 << 20, 0.0)
            answer, payload = await link.request_payload(request)
            found += frames_in(bytes(payload))
            if answer.next == position:
                return found
            position = answer.next

    async def rows(self, partition: int) -> list[tuple[int, str, int, bytes]]:
        """(sequence, key, logical partition as stamped, body) of each stored row of a partition."""
        rows: list[tuple[int, str, int, bytes]] = []
        for frame in await self.frames(partition):
            texts = frame.binary(Column.KEY).to_pylist() if frame.has(Column.KEY) else [b""] * frame.count
            hashes = frame.fixed(Column.KEY_HASH).tolist() if frame.has(Column.KEY_HASH) else [0] * frame.count
            bodies = frame.binary(Column.BODY).to_pylist()
            rows += [
                (frame.base + n, texts[n].decode(), hashes[n] % LOGICAL_PARTITIONS, bodies[n])
                for n in range(frame.count)
            ]
        return rows

    async def by_key(self) -> dict[str, list[bytes]]:
        """The stored bodies of each key, in the order of the spans of its LP."""
        used = max(max(span[0] for span in spans) for spans in self.spans) + 1
        stored = [await self.rows(n) for n in range(used)]
        found: dict[str, list[bytes]] = {}
        for key in {row[1] for rows in stored for row in rows}:
            found[key] = [
                body
                for where, start, end in self.spans[lp_of_key(key)]
                for sequence, text, _, body in stored[where]
                if text == key and start <= sequence and (end is None or sequence < end)
            ]
        return found
