"""Reading without a group: tail or browse a subject. Nothing is acked and nothing is remembered.

The rows of each partition come in its order; those of several partitions as they arrive.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from types import TracebackType
from typing import Any, Self

from plait import tasks
from plait.client.arguments import Duration, seconds_of
from plait.client.net.router import Router, SubjectRoute
from plait.client.read.read_position import ReadPosition
from plait.client.types import Message, PartitionName
from plait.errors import Closed, InvalidArgument, StaleRoute, Timeout, Unavailable
from plait.limits import ClientLimits

log = logging.getLogger("plait.client")

#: Messages that iteration asks for at a time.
ITERATION_COUNT = 1_000


class Reader:
    """A position in a subject that moves as it reads; a restart of the server is invisible to it."""

    def __init__(self, router: Router, limits: ClientLimits, subject: str, start: Any) -> None:
        self._router = router
        self._limits = limits
        self.subject = subject
        self._start = start
        self._route: SubjectRoute | None = None
        self._cursors: dict[PartitionName, ReadPosition] = {}
        self._opened = False
        self._closed = False
        self._rest: deque[Message] = deque()

    @property
    def position(self) -> Any:
        """Where the next read starts; with several partitions, where it starts in each by the partition's name."""
        if not self._cursors:
            return self._start
        # What was read and not fetched yet is read again by a reader that starts there.
        first = {message.partition: message.sequence for message in reversed(self._rest)}
        positions = {
            str(name): ["sequence", first[name]] if name in first else cursor.position
            for name, cursor in self._cursors.items()
        }
        return positions if len(positions) > 1 else next(iter(positions.values()))

    async def __aenter__(self) -> Self:
        # Before the route is known: it is kept from then on.
        self._router.users.append(self._uses)
        try:
            await self._open()
        except BaseException:
            self._router.users.remove(self._uses)
            raise
        return self

    async def _open(self) -> None:
        route = await self._router.refresh(self.subject, create=False)
        if len(route.partitions) > 1 and not isinstance(self._start, str) and self._start[0] == "sequence":
            raise InvalidArgument(
                f"{self.subject!r} has {len(route.partitions)} partitions, each with sequences of its own: start at "
                "'earliest', 'latest' or a time"
            )
        self._follow(route, self._start)
        # Fixes "latest" and times now, not at the first read.
        await asyncio.gather(*(cursor.fix() for cursor in self._cursors.values()))
        self._opened = True

    def _uses(self, subject: str) -> bool:
        return subject == self.subject

    def _follow(self, route: SubjectRoute, start: Any) -> None:
        """Read what the route leads to; partitions that are new begin at ``start``."""
        self._route = route
        for name in self._cursors.keys() - set(route.partitions):
            self._give_up(self._cursors.pop(name))
        for name in route.partitions:
            if name not in self._cursors:
                node = self._router.node(route, name.group)
                self._cursors[name] = ReadPosition(node, self._limits, self.subject, name, start, self._rest)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Read no more."""
        self._closed = True
        if self._uses in self._router.users:
            self._router.users.remove(self._uses)
        for cursor in self._cursors.values():
            self._give_up(cursor)

    @staticmethod
    def _give_up(cursor: ReadPosition) -> None:
        reading, cursor.reading = cursor.reading, None
        if reading is not None:
            reading.cancel()

    async def fetch(self, count: int = 500, wait: Duration = 1.0) -> list[Message]:
        """Up to ``count`` messages, or ``pull_bytes`` of them: what is there, or the first within ``wait`` seconds."""
        if count < 1:
            raise InvalidArgument(f"count must be 1 or more, not {count}")
        await self._fill(count, seconds_of(wait))
        rest = self._rest
        return [rest.popleft() for _ in range(min(count, len(rest)))]

    async def _fill(self, count: int, seconds: float) -> None:
        """Have messages at hand, waiting at most that long for the first of them."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while not self._rest:
            self._check_open()
            remaining = max(deadline - loop.time(), 0.0)
            wait = min(remaining, self._limits.pull_wait_seconds)
            route = self._router.known(self.subject)
            if route is not None and route is not self._route:
                self._follow(route, "earliest")
            first = next(iter(self._cursors.values()))
            try:
                if len(self._cursors) == 1 and first.reading is None:
                    await first.read(count, wait)
                else:
                    await self._fill_from_all(count, wait)
            except StaleRoute:
                route = await self._router.refresh(self.subject, create=False)
                if self._cursors.keys() <= set(route.partitions):
                    raise
                # Retention has emptied a partition, and it has left the route.
                continue
            if remaining <= 0:
                break

    async def _fill_from_all(self, count: int, wait: float) -> None:
        """Read from all partitions at once, until one of them has something."""
        if wait <= 0:
            # What is there now; who waits already would only say what comes.
            answers = await asyncio.gather(
                *(cursor.read(count, 0.0) for cursor in self._cursors.values()), return_exceptions=True
            )
            for answer in answers:
                if isinstance(answer, Unavailable | Timeout):
                    log.info("a partition of %s cannot be read: %s", self.subject, answer)
                elif isinstance(answer, BaseException):
                    raise answer
            self._collect()
            return
        for cursor in self._cursors.values():
            if cursor.reading is None:
                cursor.reading = tasks.child(cursor.read(count, wait), f"plait-read-{self.subject}")
        reads = [cursor.reading for cursor in self._cursors.values() if cursor.reading is not None]
        await asyncio.wait(reads, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
        self._collect()

    def _collect(self) -> None:
        """Reads that have ended, also while no caller waited for them: the next ones may begin."""
        for cursor in self._cursors.values():
            reading = cursor.reading
            if reading is not None and reading.done():
                cursor.reading = None
                try:
                    reading.result()
                except (Unavailable, Timeout) as error:
                    # The others go on.
                    log.info("partition %s cannot be read: %s", cursor.name, error)

    def _check_open(self) -> None:
        if self._router.meta.closed is not None:
            raise self._router.meta.closed
        if self._closed:
            raise Closed("the reader is closed")
        if not self._opened:
            how = "with" if self._router.meta.blocking else "async with"
            raise Closed(f"the reader is not open; use '{how} client.reader(...)'")

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        """The next message, however long it takes."""
        while not self._rest:
            if self._closed:
                raise StopAsyncIteration
            await self._fill(ITERATION_COUNT, self._limits.pull_wait_seconds)
        return self._rest.popleft()
