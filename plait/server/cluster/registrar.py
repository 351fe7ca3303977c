"""A broker's standing with the meta servers: registered, heard from every second, and told of epochs (R15).

While no meta server can be reached everything goes on as it is; only locks are not granted before the first word.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from plait import tasks
from plait.broker.groups.ordered_group import OrderedGroup
from plait.broker.partitions.finished import began, gone_below, passed
from plait.broker.partitions.partition import Partition
from plait.errors import InvalidArgument, PlaitError
from plait.limits import NUMBER_MAX
from plait.server.notices import Notice

if TYPE_CHECKING:
    from plait.server.broker_server import Server

log = logging.getLogger("plait.broker")

BEAT_SECONDS = 1.0
#: How often a broker asks for the name of its group: for longer than meta servers take to notice that another is gone.
CLAIMS = 7
#: Partitions that one request tells of.
PAGE = 200
#: Partitions whose progress is looked at with each heartbeat: a few milliseconds of work.
REPORTED_MAX = 50

NOT_TAKEN = "no meta server takes this broker at present: {}"

#: Asks a meta server: an operation and its arguments.
Ask = Callable[[str, dict[str, Any]], Awaitable[Any]]


class Registrar:
    """See the module."""

    def __init__(self, server: Server, name: str, ask: Ask) -> None:
        self._server = server
        self._name = name
        self._ask = ask
        self._task: asyncio.Task[None] | None = None
        self._registered = False
        #: Partition → what was reported of it; and how far round the last report came.
        self._reported: dict[str, dict[str, Any]] = {}
        self._turn = 0
        self._refusal = Notice("a meta server takes this broker again", log)

    async def start(self) -> None:
        """Register; where no meta server can be reached, go on trying.

        ``InvalidArgument``: another broker has the group's name, and lives.
        """
        self._server.broker.leases.waits_for_floors = True
        for left in reversed(range(CLAIMS)):
            try:
                await self._register()
                break
            except InvalidArgument as error:
                if not left:
                    raise
                # The other one may have ended a moment ago.
                log.warning("%s", error)
                await asyncio.sleep(BEAT_SECONDS)
            except PlaitError as error:
                self._refusal.begin(NOT_TAKEN.format(error), error.code)
                break
        self._task = tasks.keep(self._run, "plait-registrar")

    async def stop(self) -> None:
        """Say that nothing can be sent here any more, and what is finished here."""
        await self.abandon()
        if self._registered:
            try:
                await self._report(self._sealed())
                await self._ask("broker.beat", self._facts("NRW"))
            except PlaitError:
                # They notice by themselves.
                pass

    async def abandon(self) -> None:
        """Without a word."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            await self._step()

    async def _step(self) -> None:
        try:
            if self._registered and (newest := await self._ask("broker.beat", self._facts(self._state()))):
                self._server.broker.numbers.learn(newest)
                await self._report(self._next_sealed())
            else:
                await self._register()
            self._refusal.end()
        except PlaitError as error:
            self._refusal.begin(NOT_TAKEN.format(error), error.code)

    # --- what is finished -----------------------------------------------------------------------

    def _sealed(self) -> list[Partition]:
        """Partitions that take fewer logical partitions than they did once."""
        return [each for each in self._server.broker.subjects.values() if each.fences is not None]

    def _next_sealed(self) -> list[Partition]:
        """Some of them each time, all of them in turn."""
        sealed = self._sealed()
        start = self._turn % len(sealed) if sealed else 0
        self._turn = start + REPORTED_MAX
        return [*sealed[start:], *sealed[:start]][:REPORTED_MAX]

    async def _report(self, partitions: list[Partition]) -> None:
        """Tell the meta servers what is finished, where that has changed."""
        known = self._server.broker.subjects
        self._reported = {name: report for name, report in self._reported.items() if name in known}
        reports = {each.row.name: self._progress(each) for each in partitions}
        news = [(name, report) for name, report in reports.items() if self._reported.get(name) != report]
        for at in range(0, len(news), REPORTED_MAX):
            some = news[at : at + REPORTED_MAX]
            facts = {"group": self._server.config.group, "broker": self._name}
            if await self._ask("broker.progress", {**facts, "partitions": [report for _, report in some]}):
                self._reported.update(some)

    def _progress(self, partition: Partition) -> dict[str, Any]:
        return {
            "name": partition.row.name,
            "subject": partition.row.subject,
            "route": partition.row.route,
            "passed": passed(partition),
            "gone_below": gone_below(self._server.broker, partition),
            "began": began(partition),
        }

    # --- who this is ----------------------------------------------------------------------------

    def _state(self) -> str:
        broker = self._server.broker
        return "R" if broker.read_only or broker.low_space else "RW"

    def _facts(self, state: str) -> dict[str, Any]:
        reason = self._server.broker.low_space
        return {"group": self._server.config.group, "broker": self._name, "state": state, "reason": reason}

    async def _register(self) -> None:
        server = self._server
        facts = {**self._facts(self._state()), "address": server.address, "epoch": server.broker.epoch}
        partitions = [self._partition(name) for name in sorted(server.broker.subjects)]
        pages = [partitions[at : at + PAGE] for at in range(0, len(partitions), PAGE)] or [[]]
        # A meta server whose database is another one knows nothing of earlier reports.
        self._reported = {}
        for page in pages:
            answer = await self._ask("broker.register", {**facts, "partitions": page})
            for name in answer["unrouted"]:
                log.warning("no route leads to partition %s: nothing is read from it", name)
        server.broker.numbers.learn(answer["newest"])
        server.broker.leases.set_floors({(subject, group): runs for subject, group, runs in answer["floors"]})
        self._registered = True

    def _partition(self, name: str) -> dict[str, Any]:
        partition = self._server.broker.subjects[name]
        row = partition.row
        epochs = [group.locks.newest for group in partition.groups.values() if isinstance(group, OrderedGroup)]
        settings = {
            "retention_seconds": row.settings.retention_seconds,
            "retention_bytes": row.settings.retention_bytes,
            "order": row.settings.order,
        }
        return {
            "name": name,
            "subject": row.subject,
            "settings": {key: value for key, value in settings.items() if value is not None},
            "created": row.created,
            # A damaged log may say anything: what cannot be is not believed, and prevents no start.
            "newest": min(max([row.route, *epochs]), NUMBER_MAX),
            "route": min(row.route, NUMBER_MAX),
            "lps": row.lps,
            "fences": row.fences,
            "reopened": row.reopened,
        }
