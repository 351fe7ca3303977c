"""Registers a broker with the meta servers and sends a heartbeat every second; the replies carry epochs (R15).

While no meta server is reachable the broker continues unchanged, except that it grants no locks before its first
registration.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from plait import tasks
from plait.broker.groups.ordered.ordered_group import OrderedGroup
from plait.broker.partitions.partition import Partition
from plait.broker.partitions.sealing import began, gone_below, passed
from plait.errors import InvalidArgument, PlaitError
from plait.limits import NUMBER_MAX
from plait.server.broker_host import BrokerHost
from plait.server.notices import Notices
from plait.wire.admin.cluster import (
    BROKER_HEARTBEAT,
    REGISTER_BROKER,
    REPORT_PROGRESS,
    PartitionProgress,
    RegisteredPartition,
)

log = logging.getLogger("plait.broker")

HEARTBEAT_SECONDS = 1.0
#: Attempts to register under a group name that is in use: long enough for meta servers to notice that the other broker
#: is lost.
CLAIMS = 7
#: Partitions in one registration request.
PAGE = 200
#: Partitions whose progress is checked with each heartbeat: a few milliseconds of work.
REPORTED_MAX = 50

NOT_TAKEN = "this broker is not registered with a meta server at present: {}"

#: Sends an operation with its arguments to a meta server and returns the result.
Ask = Callable[..., Awaitable[Any]]


class Registrar:
    """Registers a broker, sends its heartbeats and reports its progress."""

    def __init__(self, host: BrokerHost, name: str, ask: Ask) -> None:
        self._host = host
        self._name = name
        self._ask = ask
        self._task: asyncio.Task[None] | None = None
        self._registered = False
        #: Partition → its last report; and the index at which the next round of reports starts.
        self._reported: dict[str, PartitionProgress] = {}
        self._turn = 0
        #: One report at a time: an older one never replaces a newer one.
        self._reporting = asyncio.Lock()
        self._soon: set[asyncio.Task[None]] = set()
        self._notices = Notices(log)

    async def start(self) -> None:
        """Register. If no meta server is reachable, registration is retried in the background.

        Raises ``InvalidArgument`` if a live broker uses the same group name.
        """
        self._host.broker.turn.floors.awaited = True
        self._host.report = self._report_soon
        for left in reversed(range(CLAIMS)):
            try:
                await self._register()
                break
            except InvalidArgument as error:
                if not left:
                    raise
                # The other broker may have stopped a moment ago.
                log.warning("%s", error)
                await asyncio.sleep(HEARTBEAT_SECONDS)
            except PlaitError as error:
                self._notices.begin("meta server", NOT_TAKEN.format(error), error.code)
                break
        self._task = tasks.keep(self._run, "plait-registrar")

    async def stop(self) -> None:
        """Report the final progress and the state "NRW"."""
        await self.abandon()
        if self._registered:
            try:
                await self._report(self._sealed())
                await self._ask(BROKER_HEARTBEAT, **self._facts("NRW"))
            except PlaitError:
                # The meta servers notice the loss by themselves.
                pass

    async def abandon(self) -> None:
        """Stop without notifying the meta servers."""
        running = [*self._soon, *([] if self._task is None else [self._task])]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            try:
                if self._registered and (newest := await self._ask(BROKER_HEARTBEAT, **self._facts())):
                    self._host.broker.numbers.learn(newest)
                    sealed = self._sealed()
                    start = self._turn % len(sealed) if sealed else 0
                    self._turn = start + REPORTED_MAX
                    await self._report([*sealed[start:], *sealed[:start]][:REPORTED_MAX])
                else:
                    await self._register()
                self._notices.end("meta server", "this broker is registered with a meta server again")
            except PlaitError as error:
                self._notices.begin("meta server", NOT_TAKEN.format(error), error.code)

    # --- progress reports -----------------------------------------------------------------------

    def _sealed(self) -> list[Partition]:
        return [each for each in self._host.broker.subjects.values() if each.fences is not None]

    def _report_soon(self, partition: Partition, done: Callable[[], None]) -> None:
        """Send the progress of a partition if it changed, then call ``done``, even if no meta server is reachable."""

        async def report() -> None:
            try:
                if self._registered:
                    await self._report([partition])
            except PlaitError:
                # The next heartbeats report it.
                pass
            done()

        task = tasks.start(report(), "plait-report")
        self._soon.add(task)
        task.add_done_callback(self._soon.discard)

    async def _report(self, partitions: list[Partition]) -> None:
        """Send the progress of partitions whose report changed."""
        async with self._reporting:
            await self._report_changed(partitions)

    async def _report_changed(self, partitions: list[Partition]) -> None:
        known = self._host.broker.subjects
        self._reported = {name: report for name, report in self._reported.items() if name in known}
        news = []
        for each in partitions:
            row, below = each.row, gone_below(self._host.broker, each)
            report = PartitionProgress(row.name, row.subject, row.route, passed(each), below, began(each))
            if self._reported.get(row.name) != report:
                news.append((row.name, report))
        for at in range(0, len(news), REPORTED_MAX):
            some = news[at : at + REPORTED_MAX]
            reported = [report for _, report in some]
            group = self._host.config.group
            if await self._ask(REPORT_PROGRESS, group=group, broker=self._name, partitions=reported):
                self._reported.update(some)

    # --- registration ---------------------------------------------------------------------------

    def _facts(self, state: str = "") -> dict[str, Any]:
        """The broker and its state, by default what the broker allows now."""
        turn = self._host.broker.turn
        state = state or ("R" if turn.read_only or turn.low_space else "RW")
        return {"group": self._host.config.group, "broker": self._name, "state": state, "reason": turn.low_space}

    async def _register(self) -> None:
        host = self._host
        facts = {**self._facts(), "address": host.address, "epoch": host.broker.turn.epoch}
        partitions = [self._partition(name) for name in sorted(host.broker.subjects)]
        pages = [partitions[at : at + PAGE] for at in range(0, len(partitions), PAGE)] or [[]]
        # The meta database may be a new one without the earlier reports.
        self._reported = {}
        for page in pages:
            answer = await self._ask(REGISTER_BROKER, **facts, partitions=page)
            for name in answer.unrouted:
                log.warning("no route names partition %s: nothing is read from it", name)
        host.broker.numbers.learn(answer.newest)
        host.broker.leases.set_floors({(subject, group): runs for subject, group, runs in answer.floors})
        self._registered = True

    def _partition(self, name: str) -> RegisteredPartition:
        partition = self._host.broker.subjects[name]
        row = partition.row
        epochs = [group.locks.newest for group in partition.groups.values() if isinstance(group, OrderedGroup)]
        return RegisteredPartition(
            name,
            row.subject,
            row.settings,
            row.created,
            # A damaged log may contain any number: bound it, so that it does not prevent the start.
            min(max([row.route, *epochs]), NUMBER_MAX),
            min(row.route, NUMBER_MAX),
            row.lps,
            row.fences,
            row.reopened,
        )
