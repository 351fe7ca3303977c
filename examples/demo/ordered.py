"""Ordered consumers that join, leave, are killed, and are stopped past their lease, while partitions are added and
removed. The events of every order must still be handled in order.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Awaitable, Callable

import plait
from examples.demo.desk import Desk, OrderedResult
from examples.demo.processes import Child, Children, DemoFailed
from examples.demo.screen import Screen

SUBJECT = "order.flow"
GROUP = "warehouse"
CONSUMERS = 4
PARTITIONS = 2
#: Short, so that other consumers take over soon.
LEASE_SECONDS = 2.0
#: How long a consumer is stopped: other consumers take over long before it continues.
STOPPED_SECONDS = 1.75 * LEASE_SECONDS
#: How long the producer sends; the script needs most of this time.
SECONDS = 9.0
PATIENCE_SECONDS = 30.0
POLL_SECONDS = 0.05


class Ordered:
    """One run."""

    def __init__(self, address: str, orders: int, children: Children, screen: Screen) -> None:
        self._address = address
        self._orders = orders
        self._children = children
        self._screen = screen
        self._desk = Desk(orders)
        self._consumers: list[Child] = []
        #: Consumers that have received their shares.
        self._ready: set[str] = set()
        self._gone: set[str] = set()
        self._readers: list[asyncio.Task[None]] = []
        self._last_progress = time.monotonic()

    async def run(self) -> OrderedResult:
        """Run the script and return the result."""
        try:
            async with plait.connect(self._address) as client:
                await self._play(client)
        finally:
            for task in self._readers:
                task.cancel()
            await asyncio.gather(*self._readers, return_exceptions=True)
        return self._desk.result()

    async def _play(self, client: plait.Client) -> None:
        await client.admin.create_subject(SUBJECT, order="strict", partitions=PARTITIONS)
        for _ in range(CONSUMERS):
            await self._join()
        await self._until(lambda: len(self._ready) == CONSUMERS, "the consumers to join")
        arguments = (self._address, SUBJECT, "0", str(self._orders), f"{SECONDS:g}")
        producer = await self._children.start("ordered-producer", "examples.demo.producer", *arguments)
        self._start_reader(self._read_producer(producer))
        self._screen.event(
            f"{self._orders:,} orders on {PARTITIONS} partitions, each with its events in order: {CONSUMERS} consumers"
        )
        begun = time.monotonic()
        for at, act in self._script(client):
            await asyncio.sleep(max(begun + at - time.monotonic(), 0.0))
            self._check()
            await act()
        await self._until(lambda: self._desk.complete, "the ordered events")
        for child in self._consumers:
            if child.name not in self._gone:
                await self._leave(child)

    def _script(self, client: plait.Client) -> list[tuple[float, Callable[[], Awaitable[None]]]]:
        """The steps, each with its start in seconds."""
        return [
            (0.8, lambda: self._expand(client, 4)),
            (1.6, lambda: self._join_late()),
            (2.4, lambda: self._kill(self._consumers[0])),
            (3.2, lambda: self._stop(self._consumers[1])),
            (4.0, lambda: self._expand(client, 7)),
            (5.0, lambda: self._leave(self._consumers[2], announced=True)),
            (6.0, lambda: self._expand(client, 3)),
            (3.2 + STOPPED_SECONDS, lambda: self._continue(self._consumers[1])),
        ]

    # --- the steps ------------------------------------------------------------------------------

    async def _expand(self, client: plait.Client, partitions: int) -> None:
        await client.admin.expand_subject(SUBJECT, partitions)
        self._screen.event(f"ordered: {partitions} partitions from now on")

    async def _join(self) -> Child:
        name = f"{GROUP}-{len(self._consumers)}"
        arguments = (self._address, SUBJECT, GROUP, name)
        child = await self._children.start(name, "examples.demo.ordered_consumer", *arguments)
        self._consumers.append(child)
        self._start_reader(self._read_consumer(child))
        return child

    async def _join_late(self) -> None:
        child = await self._join()
        self._screen.event(f"ordered: {child.name} joins")

    async def _kill(self, child: Child) -> None:
        self._gone.add(child.name)
        await child.end(signal.SIGKILL)
        other = await self._join()
        self._screen.event(f"ordered: killed {child.name} (SIGKILL); {other.name} joins")

    async def _stop(self, child: Child) -> None:
        child.send_signal(signal.SIGSTOP)
        self._screen.event(f"ordered: stopped {child.name} (SIGSTOP) for longer than its lease of {LEASE_SECONDS:g} s")

    async def _continue(self, child: Child) -> None:
        child.send_signal(signal.SIGCONT)
        self._screen.event(f"ordered: {child.name} continues (SIGCONT)")

    async def _leave(self, child: Child, *, announced: bool = False) -> None:
        self._gone.add(child.name)
        code = await child.end()
        if code != 0:
            raise DemoFailed(f"{child.name} ended with code {code}: {child.stderr_tail()}")
        if announced:
            self._screen.event(f"ordered: {child.name} leaves")

    # --- reading the pipes ----------------------------------------------------------------------

    def _start_reader(self, work: Awaitable[None]) -> None:
        self._readers.append(asyncio.ensure_future(work))

    async def _read_producer(self, child: Child) -> None:
        async for _ in child.lines():
            self._last_progress = time.monotonic()
        await child.succeed()

    async def _read_consumer(self, child: Child) -> None:
        async for line in child.lines():
            self._ready.add(child.name)
            self._last_progress = time.monotonic()
            counts = [self._desk.take(child.name, *event) for event in json.loads(line)]
            child.write_line(json.dumps(counts))
            self._screen.count("in order", self._desk.handled, self._desk.expected)

    async def _until(self, done: Callable[[], bool], what: str) -> None:
        while not done():
            self._check()
            if time.monotonic() - self._last_progress > PATIENCE_SECONDS:
                raise DemoFailed(
                    f"no progress for {PATIENCE_SECONDS:g} s while waiting for {what}: {self._desk.result()}"
                )
            await asyncio.sleep(POLL_SECONDS)

    def _check(self) -> None:
        """Raise the error of a part that failed, or that ended without being stopped."""
        for task in self._readers:
            if task.done():
                task.result()
        for child in self._consumers:
            if not child.running and child.name not in self._gone:
                raise DemoFailed(f"{child.name} ended too early: {child.stderr_tail()}")
