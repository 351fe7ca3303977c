"""``SeveralFetcher``: the fetchers of a consumer of several subjects, one for each.

The fetchers share the prefetch limits and the callers that wait for rows, but no rows: keys of different subjects have
nothing to do with each other. The subjects take turns when rows are handed out. A subject that a prefix covers is added
when it is created, and removed when it is deleted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from plait import tasks
from plait.client.blocking.row_handover import RowHandover
from plait.client.closing import all_of
from plait.client.consume.delivered import Piece
from plait.client.consume.fetcher import Arrivals, CommonState, Fetcher
from plait.client.consume.ordered.ordered_buffer import OrderedBuffer
from plait.client.consume.ordered.ordered_fetcher import may_go
from plait.client.consume.prefetch import Prefetch, RowBuffer
from plait.client.consume.pull_client import PullClient
from plait.client.consume.several.subject_watch import SubjectWatch
from plait.client.consume.terms import Terms
from plait.client.net.router import Router
from plait.client.types import Message
from plait.errors import GroupBusy, PlaitError, SubjectNotFound
from plait.limits import ClientLimits
from plait.model.subject_patterns import SubjectPatterns

log = logging.getLogger("plait.client")

#: Subjects that are attached at the same time.
ATTACHING_MAX = 16

#: Makes the fetcher of one subject.
MakeFetcher = Callable[[Terms, CommonState], Fetcher]


class SeveralBuffer:
    """The buffers of all subjects. Each call begins with another one, so that a busy subject does not starve others."""

    def __init__(self) -> None:
        self.parts: deque[RowBuffer | OrderedBuffer] = deque()

    @property
    def count(self) -> int:
        return sum(part.count for part in self.parts)

    def available(self) -> int:
        return sum(part.available() for part in self.parts if part.count)

    def take(self, count: int, *, apart: bool = False) -> list[Piece]:
        """Hand up to ``count`` rows to the user."""
        pieces: list[Piece] = []
        self.parts.rotate(-1)
        for part in self.parts:
            if count > 0 and part.count:
                some = part.take(count, apart=apart)
                count -= sum(stop - start for _, start, stop in some)
                pieces += some
        return pieces

    def next(self) -> Message | None:
        """Hand one row to the user, as a message; None: there is none."""
        for _ in range(len(self.parts)):
            self.parts.rotate(-1)
            message = self.parts[0].next() if self.parts[0].count else None
            if message is not None:
                return message
        return None


class SeveralFetcher(Arrivals):
    """Has what ``Consumer`` needs of a fetcher, for any number of subjects."""

    def __init__(
        self, router: Router, limits: ClientLimits, terms: Terms, patterns: SubjectPatterns, make: MakeFetcher
    ) -> None:
        """``terms`` name the patterns as the subject."""
        super().__init__()
        self.router = router
        self.limits = limits
        self.terms = terms
        self.tracks = terms.tracks
        self.loop: asyncio.AbstractEventLoop | None = None
        self.buffer = SeveralBuffer()
        self.handed_over = RowHandover(may_go if terms.mode.locks else None)
        self.prefetch: Prefetch[PullClient] = Prefetch(limits)
        self.stopping = False
        #: Why the consumer cannot continue.
        self.error: PlaitError | None = None
        self._patterns = patterns
        self._make = make
        self._watch = SubjectWatch(router, limits, patterns)
        self._parts: dict[str, Fetcher] = {}
        #: Subjects that are being attached or left.
        self._changing: dict[str, asyncio.Task[None]] = {}
        self._attaching = asyncio.Semaphore(ATTACHING_MAX)
        self._watching: asyncio.Task[None] | None = None
        self._suspended = False

    @property
    def subjects(self) -> list[str]:
        """The subjects that are consumed now."""
        return sorted(self._parts)

    # --- subjects -------------------------------------------------------------------------------

    async def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Attach to all listed subjects, and to those that exist and that a prefix covers."""
        self.loop = loop
        deadline = loop.time() + self.limits.request_seconds
        found = await self._watch.first(deadline) if self._patterns.prefixes else []
        await all_of([self._add(name, self.terms) for name in dict.fromkeys([*self._patterns.names, *found])])

    def start(self) -> None:
        """Stay attached, and follow the subjects from now on."""
        for part in self._parts.values():
            part.start()
        if self._patterns.prefixes:
            self._watching = tasks.keep(lambda: self._watch.follow(self._matched), f"plait-match-{self._patterns}")

    async def _add(self, name: str, terms: Terms) -> None:
        """Attach to a subject, unless a prefix covers it and it does not exist any more."""
        listed = name in self._patterns.names
        common = CommonState(self.waiting, self.prefetch, self.handed_over, self._failed)
        part = self._make(terms._replace(subject=name, creates=listed), common)
        part.suspended = self._suspended
        assert self.loop is not None
        try:
            async with self._attaching:
                self._parts[name] = part
                await part.attach(self.loop)
        except SubjectNotFound:
            self._parts.pop(name, None)
            await part.leave()
            if listed:
                raise
            return
        self.buffer.parts.append(part.buffer)

    def _matched(self, names: list[str]) -> None:
        """Apply the list of the subjects that match: join new ones, and leave those that are gone."""
        if self.stopping:
            return
        for name in names:
            if name not in self._parts and name not in self._changing:
                self._change(name, self._join(name), "join")
        covered = {*names, *self._patterns.names}
        for name in [name for name in self._parts if name not in covered and name not in self._changing]:
            self._change(name, self._leave(name), "leave")

    def _change(self, name: str, job: Coroutine[Any, Any, None], what: str) -> None:
        task = self._changing[name] = tasks.start(
            job, f"plait-{what}-{name}", failed=lambda error: self.fail(tasks.error_of(error))
        )
        task.add_done_callback(lambda _: self._changing.pop(name, None))

    async def _join(self, name: str) -> None:
        # Every message of a new subject was sent after the consumer was opened.
        pause = self.limits.reconnect_first_seconds
        while True:
            try:
                await self._add(name, self.terms._replace(start="earliest"))
                break
            except PlaitError as error:
                part = self._parts.pop(name, None)
                if part is not None:
                    await part.leave()
                if isinstance(error, GroupBusy):
                    # As after a lost connection: an earlier session with the client id may still have to end.
                    log.warning("%s", error)
                elif not error.retryable:
                    raise
                log.info("cannot consume %s yet: %s", name, error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, self.limits.reconnect_max_seconds)
        if name in self._parts:
            log.info("consuming %s too, which matches %s", name, self._patterns)
            self._parts[name].start()

    async def _leave(self, name: str) -> None:
        part = self._parts.pop(name)
        part.halt()
        self.buffer.parts.remove(part.buffer)
        for client in part.clients:
            # A handler that still has messages of the subject cannot know that it was deleted.
            client.deliveries.gone = True
        await part.send_outcomes()
        await part.leave()
        for client in part.clients:
            self.prefetch.remove(client)

    def _failed(self, part: Fetcher, error: PlaitError) -> None:
        """One fetcher cannot continue: its subject was deleted, or the consumer has an error."""
        name = part.subject
        if part.buffer not in self.buffer.parts:
            # It is being attached, which fails with this error.
            return
        if isinstance(error, SubjectNotFound) and name not in self._patterns.names:
            if name in self._parts and name not in self._changing:
                self._change(name, self._leave(name), "leave")
        else:
            self.fail(error)

    def fail(self, error: PlaitError) -> None:
        self.error = error
        self.wake()

    async def send_outcomes(self) -> None:
        """Follow no more subjects, send the pending outcomes, and take no further ones."""
        running = [task for task in (self._watching, *self._changing.values()) if task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await all_of([part.send_outcomes() for part in self._parts.values()])

    def keep_locks(self) -> None:
        """Let ``leave`` keep the locks, as a handler still runs that cannot be stopped."""
        for part in self._parts.values():
            part.keep_locks()

    async def leave(self) -> None:
        """Return the rows that no handler has begun, and leave the group on all subjects."""
        await all_of([part.leave() for part in self._parts.values()])

    # --- pulling and rows -----------------------------------------------------------------------

    @property
    def clients(self) -> list[PullClient]:
        """The pull clients of all partitions of all subjects."""
        return [client for part in self._parts.values() for client in part.clients]

    @property
    def more(self) -> bool:
        """True if a broker has more rows."""
        return any(part.more for part in self._parts.values())

    @property
    def gather_seconds(self) -> float | None:
        """As of one fetcher: all are of the same kind."""
        return next((part.gather_seconds for part in self._parts.values()), None)

    @property
    def demand(self) -> int:
        """The number of rows that a caller waits for."""
        return sum(part.demand for part in self._parts.values())

    @demand.setter
    def demand(self, count: int) -> None:
        # With at_most_once the subjects share the demand, because pulled rows count as done.
        each = count if self.tracks else -(-count // max(len(self._parts), 1))
        for part in self._parts.values():
            part.demand = each

    def pull_on_demand(self) -> None:
        for part in self._parts.values():
            part.pull_on_demand()

    def more_comes(self) -> bool:
        """True if some partition with more rows at its broker is pulling them, or starts to."""
        return any(part.more_comes() for part in self._parts.values())

    def enlarge(self, ahead: int) -> None:
        if self.prefetch.enlarge(ahead):
            for part in self._parts.values():
                part.enlarged()

    def suspend(self) -> None:
        """Pull nothing until ``resume``; return the rows that no handler has begun."""
        self._suspended = True
        for part in self._parts.values():
            part.suspend()

    def resume(self) -> None:
        self._suspended = False
        for part in self._parts.values():
            part.resume()

    def put_back_handed_over(self) -> None:
        """Put rows taken for blocking callers back where their locks may be lost before the callers ask."""
        for part in self._parts.values():
            part.put_back_handed_over()

    def halt(self) -> None:
        """Pull and hand out nothing from now on."""
        self.stopping = True
        self.handed_over.stop()
        for part in self._parts.values():
            part.halt()
