"""How long the meta server takes to give a thousand groups new shares, and how long heartbeats wait meanwhile.

The server is a real process. Heartbeats are sent at a fixed rate, whether earlier ones were answered or not. One member
of every group leaves; another member of each group waits for news, as users' clients do. The wait of a heartbeat counts
from when it was sent. The details have three more figures: the wait from when the heartbeat was due, which includes the
pauses of the measuring process (it shares two cores with the server); how late it was sent; and the wait of heartbeats
while no shares change. All heartbeats use one connection, and none of them waits for news.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import uvloop

from benchmarks.plait_server import PlaitServer
from benchmarks.result import Result
from plait.errors import PlaitError
from plait.wire import messages as m
from plait.wire.link import Link, dial

#: Other clients leave in each round; the median counts.
ROUNDS = 5
#: Time between two heartbeats; the clients take turns.
EVERY_SECONDS = 0.003
#: Time between two rounds.
CALM_SECONDS = 1.0
#: The longest time that a change may take.
WAIT_SECONDS = 30.0


class Size(NamedTuple):
    """``subjects`` groups of ``members`` each; a client is a member of ``subjects`` / ``classes`` of the groups."""

    subjects: int
    members: int
    classes: int


def allocation(smoke: bool) -> Iterator[Result]:
    """One member of every group leaves at the same moment."""
    size = Size(20, 8, 2) if smoke else Size(1_000, 100, 10)
    with PlaitServer(options=("--lease", "60s")) as server:
        taken, clients = uvloop.run(_measure(server.address, size))
    waits = np.array(clients.waits)
    details = {"subjects": size.subjects, "members": size.members, "taken": taken, "heartbeats": len(waits)}
    yield Result("new shares for every group", float(np.median(taken)), 1.0, "s", at_most=True, details=details)
    details = {
        "heartbeats": len(waits),
        "p50_ms": float(np.median(waits)) * 1e3,
        "worst_ms": float(waits.max()) * 1e3,
        "calm_p50_ms": float(np.median(clients.calm)) * 1e3,
        "calm_p99_ms": _p99_ms(clients.calm),
        "every_ms": EVERY_SECONDS * 1e3,
        "since_due_p99_ms": _p99_ms(waits + np.array(clients.late)),
        "measuring_late_p99_ms": _p99_ms(clients.late),
    }
    yield Result("heartbeats meanwhile, p99", _p99_ms(waits), 5.0, "ms", at_most=True, details=details)


def _p99_ms(seconds: Sequence[float] | np.ndarray) -> float:
    return float(np.percentile(seconds, 99)) * 1e3


async def _measure(address: str, size: Size) -> tuple[list[float], _Clients]:
    """Seconds until members of all groups received their new shares, and the clients with their measurements."""
    link = await dial(address, "heartbeats", WAIT_SECONDS)
    for number in range(size.subjects):
        await link.request(m.AdminRequest("subject.create", {"subject": f"s{number}", "partitions": 1}))
    clients = _Clients(link, size)
    for number in range(size.members * size.classes):
        clients.note_reply(number, await link.request(clients.heartbeat_of(number)))
    observing = await dial(address, "observing", WAIT_SECONDS)
    observers = [_Observer(observing, clients, number) for number in range(size.classes)]
    # A garbage collection of this process would count as a wait for the server.
    gc.collect()
    gc.freeze()
    sending = asyncio.create_task(clients.run())
    try:
        taken = []
        for number in range(ROUNDS):
            await asyncio.sleep(CALM_SECONDS)
            taken.append(await _leave(clients, observers, number + 1))
    finally:
        for task in (sending, *(observer.task for observer in observers)):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        link.close()
        observing.close()
    return taken, clients


async def _leave(clients: _Clients, observers: list[_Observer], which: int) -> float:
    """One client of each class leaves; seconds until a member of every group has its new shares."""
    classes = clients.size.classes
    for observer in observers:
        observer.begin()
    begin = time.perf_counter()
    leaving = range(which * classes, (which + 1) * classes)
    clients.measuring = True
    await asyncio.gather(*(clients.leave(number) for number in leaving))
    async with asyncio.timeout(WAIT_SECONDS):
        await asyncio.gather(*(observer.done.wait() for observer in observers))
    taken = time.perf_counter() - begin
    clients.measuring = False
    # The slowest heartbeats are those that are not answered yet.
    async with asyncio.timeout(WAIT_SECONDS):
        while clients.under_way and clients.failed is None:  # noqa: ASYNC110 (no event is set for a heartbeat)
            await asyncio.sleep(EVERY_SECONDS)
    if clients.failed is not None:
        raise clients.failed
    return taken


class _Clients:
    """All clients; the first of each class observe, the others send heartbeats."""

    def __init__(self, link: Link, size: Size) -> None:
        self._link = link
        self.size = size
        self.measuring = False
        self.failed: PlaitError | None = None
        #: The wait of each heartbeat while shares changed, and before.
        self.waits: list[float] = []
        self.calm: list[float] = []
        #: How long after its due time each heartbeat of ``waits`` was sent.
        self.late: list[float] = []
        #: How many heartbeats of ``waits`` are not answered yet.
        self.under_way = 0
        self._seen = [0] * (size.members * size.classes)
        self._online = list(range(size.classes, len(self._seen)))
        self.classes = [
            [(f"s{number}", "g", True) for number in range(which, size.subjects, size.classes)]
            for which in range(size.classes)
        ]

    def heartbeat_of(self, number: int, seen: int = 0, wait: float = 0.0) -> m.MemberHeartbeatRequest:
        return m.MemberHeartbeatRequest(f"c{number}", self.classes[number % self.size.classes], seen, wait)

    def note_reply(self, number: int, answer: m.MemberHeartbeatReply) -> None:
        """The client's next heartbeat asks for changes after this reply."""
        self._seen[number] = answer.seen

    async def leave(self, number: int) -> None:
        self._online.remove(number)
        await self._link.request(m.MemberHeartbeatRequest(f"c{number}", [], leaving=True))

    async def run(self) -> None:
        """Send one heartbeat after another, without waiting for replies."""
        due, at = time.perf_counter(), 0
        while True:
            while due <= time.perf_counter():
                self.under_way += self.measuring
                at = (at + 1) % len(self._online)
                number = self._online[at]
                self._link.call(
                    self.heartbeat_of(number, self._seen[number]),
                    functools.partial(self._answered, number, due, time.perf_counter(), self.measuring),
                )
                due += EVERY_SECONDS
            await asyncio.sleep(due - time.perf_counter())

    def _answered(
        self,
        number: int,
        due: float,
        sent: float,
        measured: bool,
        answer: Any,
        _: memoryview,
        error: PlaitError | None,
    ) -> None:
        if error is not None:
            # A lost heartbeat has no wait, so the whole measurement fails. At the end the link is closed under some.
            self.failed = self.failed or error
            return
        self.note_reply(number, answer)
        wait = time.perf_counter() - sent
        if measured:
            self.under_way -= 1
            self.waits.append(wait)
            self.late.append(sent - due)
        else:
            self.calm.append(wait)


class _Observer:
    """A client that waits for news, as users' clients do."""

    def __init__(self, link: Link, clients: _Clients, number: int) -> None:
        self._link = link
        self._clients = clients
        self._number = number
        self._missing: set[str] = set()
        self.done = asyncio.Event()
        self.task = asyncio.create_task(self._run())

    def begin(self) -> None:
        """From now on, wait for news of all groups of the client."""
        self._missing = {subject for subject, _, _ in self._clients.classes[self._number]}
        self.done.clear()

    async def _run(self) -> None:
        seen = 0
        while True:
            answer = await self._link.request(self._clients.heartbeat_of(self._number, seen, wait=1.0))
            seen = answer.seen
            self._missing.difference_update(subject for subject, *_ in answer.members)
            if not self._missing:
                self.done.set()
