"""Consuming: pulls ahead of need, hands out rows, and tells the broker what became of them.

Acks of one moment leave together as ranges, one request at a time, so that acking each message by itself costs
little. After a lost connection the consumer attaches again and names what is still in its hands (R13); when it was out
of contact for too long, it drops what the user has not started, because somebody else has it by now.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

from plait.client.batch import ArrowBatch, Batch, Piece
from plait.client.delivered import Delivered, EpochRange
from plait.client.node import Node
from plait.client.types import Message, PartitionName
from plait.errors import Closed, FrameError, GroupBusy, PlaitError, StaleSession, Unavailable
from plait.frame.view import frames_in
from plait.limits import ClientLimits
from plait.wire import messages as m
from plait.wire.dial import Link


class Consumer:
    """A member of a group. Use it with ``async with``; leaving gives back what is not acked."""

    def __init__(
        self,
        node: Node,
        limits: ClientLimits,
        subject: str,
        group: str | None,
        client: str,
        start: Any,
        delivery: str,
    ) -> None:
        self._node = node
        self._limits = limits
        self.subject = subject
        self.group = group
        self.client_id = client
        self._start = start
        self._delivery = delivery
        self._link: Link | None = None
        self._session = 0
        self._partition: PartitionName | None = None
        self._buffer: deque[Delivered] = deque()
        self._buffered_count = 0
        self._open: dict[Delivered, None] = {}
        self._open_bytes = 0
        self._pulled_count = 0
        self._demand = 0
        self._ahead = limits.prefetch_count
        self._pulling = False
        #: The last pull left rows at the broker.
        self._more = False
        self._arrived: asyncio.Future[None] | None = None
        self._unsent: dict[Delivered, None] = {}
        self._acks: list[EpochRange] = []
        self._nacks: list[EpochRange] = []
        self._settling: asyncio.Task[None] | None = None
        self._settle_scheduled = False
        self._attached = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._error: PlaitError | None = None
        self._closed = False
        self._lost_at = 0.0

    # --- opening and closing --------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        await self._attach(await self._node.ready(self._limits.request_seconds))
        self._task = self._loop.create_task(self._stay_attached(), name=f"plait-consumer-{self.subject}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Send the acks that are left, give back the rest, and leave the group."""
        if self._closed:
            return
        try:
            await asyncio.wait_for(self.flush(), self._limits.request_seconds)
        except (PlaitError, TimeoutError):
            # What was not acked is delivered again: that is the promise.
            pass
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._settling is not None:
            self._settling.cancel()
        link = self._link
        if link is not None and not link.closed:
            try:
                await asyncio.wait_for(link.request(m.Detach(self._session)), self._limits.request_seconds)
            except (PlaitError, TimeoutError):
                pass
        self._wake()

    async def _attach(self, link: Link) -> None:
        holds = [piece for delivered in self._open for piece in delivered.open_ranges()]
        attached: m.Attached = await link.request(
            m.Attach(self.subject, self.group, self.client_id, self._start, self._delivery, holds)
        )
        self._session = attached.session
        group = link.welcome.group if link.welcome else ""
        self._partition = PartitionName(attached.name, group)
        self._link = link
        self._pulling = False
        self._attached.set()
        if self._acks or self._nacks or self._unsent:
            self._schedule_settle()
        self._pull()

    async def _stay_attached(self) -> None:
        """Attach again whenever the link or the session is lost."""
        while True:
            link = self._link
            if link is not None and not link.closed and self._attached.is_set():
                lost: asyncio.Future[None] = self._loop.create_future()
                self._detached = lost
                await lost
            self._attached.clear()
            self._lost_at = self._node.heard or self._loop.time()
            pause = self._limits.reconnect_first_seconds
            while True:
                try:
                    link = await self._node.ready()
                    self._drop_unstarted(link)
                    await self._attach(link)
                    break
                except (Unavailable, StaleSession, GroupBusy):
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, self._limits.reconnect_max_seconds)
                except PlaitError as error:
                    if error.retryable:
                        await asyncio.sleep(pause)
                        continue
                    self._error = error
                    self._wake()
                    return

    _detached: asyncio.Future[None] | None = None

    def _lose(self) -> None:
        """The link or the session is gone."""
        self._attached.clear()
        if self._detached is not None and not self._detached.done():
            self._detached.set_result(None)

    def _drop_unstarted(self, link: Link) -> None:
        """Out of contact too long: others have what we had not started."""
        lost_seconds = link.welcome.consumer_lost_seconds if link.welcome else 5.0
        if self._loop.time() - self._lost_at < lost_seconds:
            return
        for delivered in self._buffer:
            untaken = slice(delivered.taken, delivered.count)
            delivered.nacking.append(untaken)
            delivered.collect()
            delivered.count = delivered.taken
            if not delivered.open_count:
                self._forget(delivered)
        self._buffer.clear()
        self._buffered_count = 0

    # --- pulling --------------------------------------------------------------------------------

    def _wanted(self) -> int:
        """How many rows the next pull asks for; 0: none now."""
        if self._demand > self._buffered_count:
            return max(self._demand - self._buffered_count, min(self._ahead, self._limits.prefetch_count))
        if self._delivery == "at_most_once":
            # What is pulled counts as handled: nothing is pulled that nobody waits for.
            return 0
        held = self._held_count()
        if held >= self._ahead or self._open_bytes >= self._limits.prefetch_bytes:
            return 0
        if self._span() >= max(self._limits.prefetch_span, 2 * self._ahead):
            return 0
        return self._ahead - held

    def _held_count(self) -> int:
        return self._buffered_count + sum(
            min(delivered.open_count, delivered.taken) for delivered in self._open if delivered.taken
        )

    def _span(self) -> int:
        """Rows pulled since the oldest one that is still open."""
        oldest = next(iter(self._open), None)
        return 0 if oldest is None else self._pulled_count - oldest.position

    def _pull(self) -> None:
        link = self._link
        if self._pulling or self._closed or link is None or link.closed or not self._attached.is_set():
            return
        count = self._wanted()
        if count <= 0:
            return
        self._pulling = True
        size = self._limits.pull_bytes if self._demand <= self._limits.prefetch_count else 4 * self._limits.pull_bytes
        request = m.Pull(self._session, count, size, self._limits.pull_wait_seconds)
        link.call(request, lambda answer, payload, error: self._pulled(link, answer, payload, error))

    def _pulled(self, link: Link, answer: Any, payload: memoryview, error: PlaitError | None) -> None:
        if link is not self._link:
            return
        self._pulling = False
        if error is not None:
            if isinstance(error, StaleSession | Unavailable):
                self._lose()
            elif error.retryable:
                self._loop.call_later(self._limits.reconnect_max_seconds, self._pull)
            else:
                self._error = error
                self._wake()
            return
        self._more = answer.more
        if len(payload):
            try:
                self._take_in(answer, payload)
            except FrameError as broken:
                self._error = broken
        self._pull()
        self._wake()

    def _take_in(self, answer: m.Pulled, payload: memoryview) -> None:
        assert self._partition is not None
        track = self._delivery != "at_most_once"
        for frame in frames_in(payload):
            frame.verify()
            ranges = answer.ranges
            attempts = ranges if len(ranges) == 1 else [r for r in ranges if r[0] < frame.end and r[1] > frame.base]
            delivered = Delivered(frame, self.subject, self._partition, self if track else None, attempts)
            delivered.position = self._pulled_count
            self._pulled_count += delivered.count
            self._buffer.append(delivered)
            self._buffered_count += delivered.count
            if track:
                self._open[delivered] = None
                self._open_bytes += delivered.size

    def _forget(self, delivered: Delivered) -> None:
        if delivered in self._open:
            del self._open[delivered]
            self._open_bytes -= delivered.size

    # --- handing out ----------------------------------------------------------------------------

    async def fetch(self, count: int = 500, wait: float = 1.0) -> Batch:
        """Up to ``count`` messages: all that are there, or the first that come within ``wait`` seconds."""
        return Batch(self, await self._fetch(count, wait))

    async def fetch_arrow(self, count: int = 50_000, wait: float = 1.0) -> ArrowBatch:
        """Like ``fetch``, as an Arrow table that is not copied."""
        return ArrowBatch(self, await self._fetch(count, wait))

    async def _fetch(self, count: int, wait: float) -> list[Piece]:
        from plait.client.arguments import seconds_of

        self._ahead = max(self._limits.prefetch_count, min(count, 1 << 20))
        deadline = self._loop.time() + seconds_of(wait)
        while self._buffered_count < count:
            self._refuse_when_closed()
            if self._buffered_count and not (self._more and self._attached.is_set()):
                break
            remaining = deadline - self._loop.time()
            self._demand = count
            self._pull()
            if remaining <= 0 or not await self._arrival(remaining):
                break
        self._demand = 0
        pieces = self._take(count)
        self._pull()
        return pieces

    def _take(self, count: int) -> list[Piece]:
        pieces: list[Piece] = []
        while count > 0 and self._buffer:
            delivered = self._buffer[0]
            start = delivered.taken
            stop = min(delivered.count, start + count)
            delivered.taken = stop
            pieces.append((delivered, start, stop))
            count -= stop - start
            self._buffered_count -= stop - start
            if stop == delivered.count:
                self._buffer.popleft()
        return pieces

    async def _arrival(self, seconds: float) -> bool:
        if self._arrived is None:
            self._arrived = self._loop.create_future()
        try:
            await asyncio.wait_for(asyncio.shield(self._arrived), seconds)
        except TimeoutError:
            return False
        return True

    def _wake(self) -> None:
        arrived, self._arrived = self._arrived, None
        if arrived is not None and not arrived.done():
            arrived.set_result(None)

    def _refuse_when_closed(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed or self._node.closed:
            raise Closed("the consumer is closed")

    async def __aiter__(self) -> AsyncIterator[Message]:
        while True:
            for delivered, start, stop in await self._fetch(100, 3600.0):
                for message in delivered.messages(start, stop):
                    yield message

    # --- settling -------------------------------------------------------------------------------

    def settle_soon(self, delivered: Delivered) -> None:
        """Rows were acked or nacked: tell the broker at the end of this turn."""
        self._unsent[delivered] = None
        if not self._settle_scheduled:
            self._schedule_settle()

    def settle_now(self, delivered: Delivered) -> None:
        """Count what was acked so far before anything else is said of the frame."""
        acks, nacks = delivered.collect()
        self._acks += acks
        self._nacks += nacks

    def _schedule_settle(self) -> None:
        self._settle_scheduled = True
        self._loop.call_soon(self._start_settling)

    def _start_settling(self) -> None:
        self._settle_scheduled = False
        if self._settling is None or self._settling.done():
            self._settling = self._loop.create_task(self._settle(), name="plait-acks")

    async def _settle(self) -> None:
        """Send acks and nacks until there are none; whatever is added meanwhile goes with the next request."""
        while True:
            for delivered in self._unsent:
                self.settle_now(delivered)
                if not delivered.open_count:
                    self._forget(delivered)
            self._unsent.clear()
            if not self._acks and not self._nacks:
                break
            self._pull()
            link = self._link
            if link is None or link.closed or not self._attached.is_set():
                # Sent after the next attach.
                break
            acks, nacks = _merge(self._acks), _merge(self._nacks)
            self._acks, self._nacks = [], []
            try:
                # Failures first: a success must never be known before the failures that came with it.
                if nacks:
                    await link.request(m.Nack(self._session, nacks))
                    nacks = []
                if acks:
                    await link.request(m.Ack(self._session, acks))
            except PlaitError as error:
                if isinstance(error, Unavailable):
                    self._acks, self._nacks = acks + self._acks, nacks + self._nacks
                    break
                if isinstance(error, StaleSession):
                    self._acks, self._nacks = acks + self._acks, nacks + self._nacks
                    self._lose()
                    break
                if not error.retryable:
                    self._error = error
                    break
                self._acks, self._nacks = acks + self._acks, nacks + self._nacks
                await asyncio.sleep(self._limits.reconnect_max_seconds)

    async def flush(self) -> None:
        """Until the broker has every ack and nack so far."""
        while not self._closed:
            if self._error is not None:
                raise self._error
            settling = self._settling
            if self._unsent and (settling is None or settling.done()):
                self._start_settling()
                settling = self._settling
            if settling is not None and not settling.done():
                await asyncio.shield(settling)
                continue
            if self._unsent:
                continue
            if not self._acks and not self._nacks:
                return
            # Not attached at the moment: they leave after the next attach.
            await asyncio.wait_for(self._attached.wait(), self._limits.send_seconds)
            self._start_settling()


def _merge(ranges: list[EpochRange]) -> list[EpochRange]:
    """Neighbouring ranges of one epoch joined."""
    if len(ranges) < 2:
        return ranges
    ranges.sort()
    merged = [ranges[0]]
    for start, end, epoch in ranges[1:]:
        last_start, last_end, last_epoch = merged[-1]
        if start <= last_end and epoch == last_epoch:
            merged[-1] = (last_start, max(end, last_end), epoch)
        else:
            merged.append((start, end, epoch))
    return merged
