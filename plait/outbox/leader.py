"""Sends the rows of one database while this process has the lease.

Each turn is one transaction: it renews the lease, deletes the rows that were stored since the last turn and assigns
the next ones. Assigned frames are sent after the commit, for each partition one after another. Whatever stops the
process, a row is therefore in one of three states: not assigned (no broker has it), assigned (a broker may have it, and
recognizes a resend), or deleted (a broker has stored it).

An error of the database leaves it open whether a turn was committed. The leader then forgets its frames, reads from the
database which frames are assigned, and sends them again. A new leader begins in the same way.

The lease counts from the end of the transaction that renews it, so a slow database delays frames and ends no term: no
other relay can take the lease while the transaction has its row locked, or sees the renewal before the commit.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from typing import TypeVar

import sqlalchemy as sa

from plait import tasks
from plait.client.net.router import SubjectRoute
from plait.client.send.numbered_sender import NumberedSender, SendTarget
from plait.clock import Clock
from plait.errors import (
    OutOfSequence,
    PlaitError,
    ProducerConflict,
    StaleRoute,
    SubjectNotFound,
    UnknownProducer,
)
from plait.model.names import counted
from plait.outbox.frame_queues import FrameQueues, OutboxFrame, RouteTable
from plait.outbox.outbox_limits import OUTBOX_PAUSE_SECONDS
from plait.outbox.relay_store import LeaseLost, RelayStore, new_producer
from plait.outbox.transactions import RelayTransactions

log = logging.getLogger("plait.outbox")

T = TypeVar("T")

#: The first pause after an error, and the first pause after a turn that found nothing; each doubles.
FIRST_PAUSE_SECONDS = 0.002


class Leader:
    """One term of a relay on one database."""

    def __init__(
        self,
        sender: NumberedSender,
        database: RelayTransactions,
        store: RelayStore,
        clock: Clock,
        epoch: int,
        taken: float,
        seconds: float,
        poll: float,
    ) -> None:
        self._sender = sender
        self._database = database
        self._store = store
        self._clock = clock
        self._epoch = epoch
        self._seconds = seconds
        self._poll = poll
        self._renewed = taken
        self._queues = FrameQueues()
        self._routes: dict[str, RouteTable] = {}
        #: Ids of rows that are stored and not yet deleted.
        self._stored: list[int] = []
        self._producer: int | None = None
        self._sending: dict[SendTarget, asyncio.Task[None]] = {}
        #: Subjects whose route is asked for: the task, and the version that a broker has named.
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._wanted: dict[str, int] = {}
        #: Subject → how often its rows were refused since the last ones were stored.
        self._refused: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._idle = FIRST_PAUSE_SECONDS
        #: The error of a task that must not fail.
        self._defect: Exception | None = None
        #: True once a turn has succeeded.
        self.worked = False
        #: Subject or partition → the error because of which its rows wait.
        self.errors: dict[str, PlaitError] = {}

    def _fail(self, error: Exception) -> None:
        self._defect = error
        self._changed.set()

    def wake(self) -> None:
        """Look for rows now: a transaction was committed in this process, or is about to be."""
        self._idle = FIRST_PAUSE_SECONDS
        self._changed.set()

    async def lead(self) -> None:
        """Send until the lease is lost (``LeaseLost``) or the database fails."""
        try:
            await self._recover()
            while True:
                self._changed.clear()
                found = await self._turn()
                self.worked = True
                if not found:
                    await self._wait()
        finally:
            for task in (*self._sending.values(), *self._asking.values()):
                task.cancel()
            await asyncio.gather(*self._sending.values(), *self._asking.values(), return_exceptions=True)

    async def _recover(self) -> None:
        frames = await self._renew(functools.partial(self._store.assigned, epoch=self._epoch))
        if frames:
            rows = sum(len(frame.waiting) for frame in frames)
            log.info("%s: sending %s again that were assigned before", self._database.name, counted(rows, "row"))
        self._send(frames)

    async def _wait(self) -> None:
        """Wait for a commit of this process, a stored frame, or the next look at the database."""
        try:
            async with asyncio.timeout(self._idle):
                await self._changed.wait()
        except TimeoutError:
            self._idle = min(2 * self._idle, self._poll)

    # --- turns ----------------------------------------------------------------------------------

    async def _turn(self) -> bool:
        """One transaction, if there is a reason for one. Returns whether rows were assigned."""
        self._check()
        excluded = self._queues.exclusions(self._routes)
        asking = set(self._asking)
        rows = await self._database.run(functools.partial(self._store.waiting, excluded=excluded, subjects=asking))
        for subject in dict.fromkeys(row.subject for row in rows):
            if subject not in self._asking:
                self._find_route(subject)
        # No await between the plan and the transaction that carries it out.
        planned = self._queues.plan(rows, self._routes)
        stored, withdrawn, producer = list(self._stored), self._queues.take_withdrawn(), self._producer
        due = self._clock.monotonic() - self._renewed >= self._seconds / 5
        if not (planned or stored or withdrawn or due):
            return False
        work = functools.partial(
            self._store.turn,
            epoch=self._epoch,
            stored=stored,
            withdrawn=withdrawn,
            planned=planned,
            producer=producer,
        )
        frames = await self._renew(work)
        del self._stored[: len(stored)]
        if producer is not None:
            self._producer = None
        if frames:
            self._idle = FIRST_PAUSE_SECONDS
        self._send(frames)
        return bool(frames)

    async def _renew(self, work: Callable[[sa.Connection], T]) -> T:
        """Run a transaction that renews the lease."""

        def timed(connection: sa.Connection) -> tuple[T, float]:
            return work(connection), self._clock.monotonic()

        result, self._renewed = await self._database.run(timed)
        return result

    def _check(self) -> None:
        """Raise ``LeaseLost`` for a lease that was not renewed in time: it may belong to another relay."""
        if self._defect is not None:
            raise self._defect
        now = self._clock.monotonic()
        if now - self._renewed >= self._seconds:
            raise LeaseLost(f"epoch {self._epoch}: not renewed for {now - self._renewed:.1f} s")

    # --- routes ---------------------------------------------------------------------------------

    def _find_route(self, subject: str) -> None:
        """Use the newest known route of a subject; ask for it in the background if none is known."""
        route = self._sender.known(subject)
        if route is not None:
            self._routes[subject] = route
        else:
            self._ask(subject)

    def _ask(self, subject: str, version: int = 0) -> None:
        """Ask for a route of at least this version, in the background; the rows of the subject wait."""
        self._routes.pop(subject, None)
        self._wanted[subject] = max(version, self._wanted.get(subject, 0))
        if subject not in self._asking:
            self._asking[subject] = tasks.start(self._look(subject), f"plait-outbox-{subject}", failed=self._fail)

    async def _look(self, subject: str) -> None:
        """Ask for the route of a subject until there is one that is new enough."""
        pause = FIRST_PAUSE_SECONDS
        if self._refused.get(subject, 0) > 1:
            # The route of the last request was wrong as well.
            await asyncio.sleep(min(pause * 2 ** self._refused[subject], OUTBOX_PAUSE_SECONDS))
        while True:
            try:
                route: SubjectRoute = await self._sender.route(subject)
            except PlaitError as error:
                pause = await self._failed(subject, error, pause)
                continue
            if route.version >= self._wanted[subject]:
                break
            await asyncio.sleep(pause)
            pause = min(2 * pause, OUTBOX_PAUSE_SECONDS)
        self._recovered(subject)
        self._routes[subject] = route
        del self._asking[subject]
        self._changed.set()

    async def _failed(self, what: str, error: PlaitError, pause: float) -> float:
        """Record why rows wait, and wait before the next attempt. Returns the pause after that."""
        known = self.errors.get(what)
        if known is None or known.code != error.code:
            log.warning("%s: rows of %s wait in the outbox: %s", self._database.name, what, error)
        self.errors[what] = error
        await asyncio.sleep(pause)
        return min(2 * pause, OUTBOX_PAUSE_SECONDS)

    def _recovered(self, what: str) -> None:
        if self.errors.pop(what, None) is not None:
            log.info("%s: rows of %s are sent again", self._database.name, what)

    # --- sending --------------------------------------------------------------------------------

    def _send(self, frames: list[OutboxFrame]) -> None:
        """Queue frames. Partitions that have frames are sent to, also those that have waited for the lease."""
        self._queues.add(frames)
        for target in self._queues.targets():
            if target not in self._sending:
                sending = self._send_all(target)
                self._sending[target] = tasks.start(sending, f"plait-outbox-{target[0]}", failed=self._fail)

    async def _send_all(self, target: SendTarget) -> None:
        """Send the frames of a partition one after another."""
        pause = FIRST_PAUSE_SECONDS
        while (frame := self._queues.head(target)) is not None:
            try:
                await self._sender.store(target, frame.parts, self._check)
            except LeaseLost:
                # The next turn renews the lease and sends the frame, or raises the error, too.
                break
            except (StaleRoute, SubjectNotFound) as error:
                log.info("%s takes no more rows of %s: %s", target[0], frame.subject, error)
                self._withdraw(target, frame, int(error.details.get("version") or 0))
                break
            except (UnknownProducer, ProducerConflict, OutOfSequence) as error:
                if frame.doubt:
                    log.warning("rows of %s may be stored twice: %s", frame.subject, error)
                self._producer = self._producer or new_producer()
                self._withdraw(target, frame, 0)
                break
            except PlaitError as error:
                frame.doubt = True
                self._queues.failing.add(target)
                pause = await self._failed(str(target[0]), error, pause)
            else:
                pause = FIRST_PAUSE_SECONDS
                self._stored.extend(row.id for row in self._queues.stored(target).waiting)
                self._refused.pop(frame.subject, None)
                self._recovered(str(target[0]))
                self._changed.set()
        self._sending.pop(target, None)
        self._changed.set()

    def _withdraw(self, target: SendTarget, frame: OutboxFrame, version: int) -> None:
        """Assign the rows of a partition again, to the partitions of a newer route or under another producer id."""
        self._queues.withdraw(target)
        self._refused[frame.subject] = min(self._refused.get(frame.subject, 0) + 1, 32)
        self._ask(frame.subject, version)
