"""Reads a subject without a group. Nothing is acked, and the broker stores no position.

Rows of one partition are returned in the order of the partition; rows of several partitions are mixed as they arrive.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from types import TracebackType
from typing import Any, Self

from plait import tasks
from plait.client.arguments import Duration, seconds_of
from plait.client.consume.delivered import DeliveredFrame
from plait.client.net.node import Node
from plait.client.net.router import Router, SubjectRoute
from plait.client.types import Message, PartitionName
from plait.errors import Closed, InvalidArgument, PlaitError, StaleRoute, Timeout, Unavailable
from plait.frame.view import frames_in
from plait.limits import ClientLimits
from plait.model.filter_terms import FilterTerms
from plait.wire import messages as m

log = logging.getLogger("plait.client")

#: Messages that iteration requests at a time.
ITERATION_COUNT = 1_000


class ReadPosition:
    """The position of a reader in one partition, which advances as it reads."""

    def __init__(
        self,
        node: Node,
        limits: ClientLimits,
        subject: str,
        name: PartitionName,
        start: Any,
        rows: deque[Message],
        filter_terms: FilterTerms | None,
    ) -> None:
        self._filter = filter_terms
        self._node = node
        self._limits = limits
        self._subject = subject
        self.name = name
        #: Where the next read starts: the given start until the first reply, then a sequence.
        self.position: Any = start
        #: Receives the messages in the same step in which the position advances: a reader that is cancelled while it
        #: waits for other partitions does not lose them.
        self._rows = rows
        self._given_up = False
        #: A read that runs in the background.
        self.reading: asyncio.Task[None] | None = None

    def give_up(self) -> None:
        """End the read that runs in the background, and begin no other request."""
        self._given_up = True
        if self.reading is not None:
            self.reading.cancel()
            self.reading = None

    async def fix(self) -> None:
        """Resolve "latest" and times to a sequence now, not at the first read."""
        answer, _ = await self._ask(0, 0.0)
        self.position = ["sequence", answer.next]

    async def read(self, count: int, wait: float) -> None:
        """Read up to ``count`` messages, waiting ``wait`` seconds for the first.

        A read with a filter examines a part of the log with each request. It ends when the time is over, wherever the
        search is, and the next read continues there. Adds nothing if a concurrent read has advanced the position.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait
        more = True
        while more:
            begun = self.position
            answer, payload = await self._ask(count, wait)
            if self.position is not begun:
                return
            messages: list[Message] = []
            for frame in frames_in(payload):
                frame.verify()
                delivered = DeliveredFrame(frame, self._subject, self.name, None, [(frame.base, frame.end, 1)])
                messages += delivered.messages(0, frame.count)
            self._rows.extend(messages)
            self.position = ["sequence", answer.next]
            wait = deadline - loop.time()
            more = answer.more and not messages and wait > 0 and not self._given_up

    async def _ask(self, count: int, wait: float) -> tuple[m.ReadReply, memoryview]:
        while True:
            link = await self._node.ready(self._limits.send_seconds)
            request = m.ReadRequest(self.name.name, self.position, count, self._limits.pull_bytes, wait, self._filter)
            try:
                async with asyncio.timeout(wait + self._limits.request_seconds):
                    return await link.request_payload(request)
            except Unavailable:
                continue
            except TimeoutError:
                raise Timeout(f"no answer to a read of {self._subject!r} in {self.name}; read again") from None


class Reader:
    """A position in a subject that advances as it reads. Resumes after a restart of the server."""

    def __init__(
        self, router: Router, limits: ClientLimits, subject: str, start: Any, filter_terms: FilterTerms | None = None
    ) -> None:
        self._filter = filter_terms
        self._router = router
        self._limits = limits
        self.subject = subject
        self._start = start
        self._route: SubjectRoute | None = None
        self._partitions: dict[PartitionName, ReadPosition] = {}
        self._opened = False
        self._closed = False
        self._rest: deque[Message] = deque()
        #: Ends the wait for messages when the route gets other partitions; None: no call waits.
        self._wait: asyncio.Timeout | None = None

    @property
    def position(self) -> Any:
        """Where the next read starts; with several partitions, a dict of their names to their positions."""
        if not self._partitions:
            return self._start
        # A reader that starts at this position must get the messages that were read and not fetched.
        first = {message.partition: message.sequence for message in reversed(self._rest)}
        positions = {
            str(name): ["sequence", first[name]] if name in first else partition.position
            for name, partition in self._partitions.items()
        }
        return positions if len(positions) > 1 else next(iter(positions.values()))

    async def __aenter__(self) -> Self:
        # Before the route is requested, so that the router does not drop it.
        self._router.users.append(self._uses)
        self._router.on_route.append(self._new_route)
        try:
            await self._open()
        except BaseException:
            self._forget_route()
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
        # Resolves "latest" and times now, not at the first read.
        await asyncio.gather(*(partition.fix() for partition in self._partitions.values()))
        self._opened = True

    def _uses(self, subject: str) -> bool:
        return subject == self.subject

    def _forget_route(self) -> None:
        if self._uses in self._router.users:
            self._router.users.remove(self._uses)
            self._router.on_route.remove(self._new_route)

    def _new_route(self, route: SubjectRoute) -> None:
        """Begin to read new partitions at once, whatever the present reads wait for."""
        if route.subject == self.subject and self._wait is not None and not self._wait.expired():
            self._wait.reschedule(0.0)

    def _follow(self, route: SubjectRoute, start: Any) -> None:
        """Read the partitions of the route; new ones start at ``start``."""
        self._route = route
        for name in self._partitions.keys() - set(route.partitions):
            self._partitions.pop(name).give_up()
        for name in route.partitions:
            if name not in self._partitions:
                node = self._router.node(route, name.group)
                self._partitions[name] = ReadPosition(
                    node, self._limits, self.subject, name, start, self._rest, self._filter
                )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop reading."""
        self._closed = True
        self._forget_route()
        for partition in self._partitions.values():
            partition.give_up()

    async def fetch(self, count: int = 500, wait: Duration = 1.0) -> list[Message]:
        """Up to ``count`` messages, or ``pull_bytes`` of them. Waits up to ``wait`` seconds for the first.

        A reader with a filter also searches stored messages for no longer than this; the next call continues there.
        """
        if count < 1:
            raise InvalidArgument(f"count must be 1 or more, not {count}")
        await self._fill(count, seconds_of(wait))
        rest = self._rest
        return [rest.popleft() for _ in range(min(count, len(rest)))]

    async def _fill(self, count: int, seconds: float) -> None:
        """Read messages into ``_rest``, waiting at most ``seconds`` for the first."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while not self._rest:
            self._check_open()
            remaining = max(deadline - loop.time(), 0.0)
            wait = min(remaining, self._limits.pull_wait_seconds)
            route = self._router.known(self.subject)
            if route is not None and route is not self._route:
                self._follow(route, "earliest")
            try:
                await self._read(count, wait)
            except StaleRoute:
                route = await self._router.refresh(self.subject, create=False)
                if self._partitions.keys() <= set(route.partitions):
                    raise
                # Retention has emptied a partition, and it was removed from the route.
                continue
            if remaining <= 0:
                break

    async def _read(self, count: int, wait: float) -> None:
        """Read until there are messages, the wait is over, or the route has other partitions."""
        first = next(iter(self._partitions.values()))
        try:
            async with asyncio.timeout(None) as self._wait:
                if len(self._partitions) == 1 and first.reading is None:
                    await first.read(count, wait)
                else:
                    await self._fill_from_all(count, wait)
        except TimeoutError as error:
            if isinstance(error, PlaitError):
                raise
        finally:
            self._wait = None

    async def _fill_from_all(self, count: int, wait: float) -> None:
        """Read from all partitions at once, until one of them has messages."""
        if wait <= 0:
            # Only stored messages are wanted. A background read would wait for new ones, so start new reads.
            answers = await asyncio.gather(
                *(partition.read(count, 0.0) for partition in self._partitions.values()), return_exceptions=True
            )
            for answer in answers:
                if isinstance(answer, Unavailable | Timeout):
                    log.info("cannot read a partition of %s: %s", self.subject, answer)
                elif isinstance(answer, BaseException):
                    raise answer
            self._collect()
            return
        for partition in self._partitions.values():
            if partition.reading is None:
                partition.reading = tasks.child(partition.read(count, wait), f"plait-read-{self.subject}")
        reads = [partition.reading for partition in self._partitions.values() if partition.reading is not None]
        await asyncio.wait(reads, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
        self._collect()

    def _collect(self) -> None:
        """Remove the background reads that have ended, so that the next ones can start."""
        for partition in self._partitions.values():
            reading = partition.reading
            if reading is not None and reading.done():
                partition.reading = None
                try:
                    reading.result()
                except (Unavailable, Timeout) as error:
                    # The other partitions continue.
                    log.info("cannot read partition %s: %s", partition.name, error)

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
        """The next message; waits without limit."""
        while not self._rest:
            if self._closed:
                raise StopAsyncIteration
            await self._fill(ITERATION_COUNT, self._limits.pull_wait_seconds)
        return self._rest.popleft()
