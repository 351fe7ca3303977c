"""Consuming: pulls ahead of need and hands out rows.

What became of the rows is told by ``Settling``. After a lost connection the consumer attaches again and names what is
still in its hands (R13); when it was out of contact for too long, or the broker has given it up, it drops what the user
has not started, because somebody else has it by now.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import deque
from types import TracebackType
from typing import Any, Self

from plait.client.arguments import Duration, seconds_of
from plait.client.batch import ArrowBatch, Batch
from plait.client.delivered import Delivered, SharedDelivered
from plait.client.handed_over import HandedOver
from plait.client.node import Node
from plait.client.settling import Piece, Settling
from plait.client.spool import Spool
from plait.client.types import Message, PartitionName
from plait.client.words import UNBEGUN, EpochRange
from plait.errors import Closed, FrameError, GroupBusy, InvalidArgument, PlaitError, StaleSession, Unavailable
from plait.frame.view import frames_in
from plait.limits import ClientLimits
from plait.retry import Retry
from plait.wire import messages as m
from plait.wire.dial import Link

log = logging.getLogger("plait.client")

#: Rows that iteration makes into messages at a time, and asks for where nothing is pulled ahead.
ITERATION_COUNT = 100
#: Damaged answers in a row before the consumer gives up: the broker checks what it hands out a second time.
BROKEN_MAX = 3
#: A pull for a large fetch may bring so many times the bytes of others.
LARGE_PULL = 4
#: Pulls under way at a time.
PULLS_MAX = 3
#: More than any fetch can mean.
FETCH_COUNT_MAX = 1 << 20


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
        retry: Retry | None = None,
        *,
        any_thread: bool = False,
        spool: Spool | None = None,
    ) -> None:
        self.subject = subject
        self.group = group
        self.client_id = client
        self._node = node
        self._limits = limits
        self._start = start
        self._delivery = delivery
        self._retry = retry
        #: Nothing is pulled for the time being.
        self._suspended = False
        #: At most once: what is pulled counts as handled, so there is nothing to track and nothing pulled ahead.
        self._tracks = delivery != "at_most_once"
        self._delivered: type[Delivered] = SharedDelivered if any_thread else Delivered
        self._settling = Settling(_Bridge(self), limits, spool)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._link: Link | None = None
        self._session = 0
        self._attached = False
        self._detached: asyncio.Future[None] | None = None
        self._stale = False
        self._lost_at = 0.0
        self._partition: PartitionName | None = None
        self._partition_id = 0
        #: Frames with rows that the user has not got yet.
        self._buffer: deque[Delivered] = deque()
        self._buffered_count = 0
        #: Rows that were taken for a blocking caller who has not asked for them yet.
        self._handed_over = HandedOver()
        #: Messages of the buffer's first frame that iteration has made already, the next one last.
        self._ready: list[Message] = []
        #: Frames with rows that are not settled, oldest first.
        self._open: dict[Delivered, None] = {}
        self._open_bytes = 0
        self._pulled_count = 0
        self._demand = 0
        self._ahead = limits.prefetch_count
        #: Pulls under way, and the rows they ask for.
        self._pulls = 0
        self._asked = 0
        #: The last pull left rows at the broker.
        self._more = False
        #: Who waits for rows: told True when there is news, False when its time is up.
        self._waiting: list[asyncio.Future[bool]] = []
        self._warned = False
        #: Damaged answers in a row.
        self._broken = 0
        self._error: PlaitError | None = None
        self._stopping = False
        self._closed = False

    # --- opening and closing --------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._closed or self._loop is not None:
            raise Closed("a consumer is opened once; ask the client for another one")
        self._loop = asyncio.get_running_loop()
        self._settling.open(self._loop)
        self._partition_id = self._settling.partition
        self._node.on_lost.append(self._link_lost)
        try:
            await self._attach_first(self._loop)
        except BaseException:
            self._closed = True
            self._node.on_lost.remove(self._link_lost)
            raise
        self._task = self._loop.create_task(self._stay_attached(self._loop), name=f"plait-consumer-{self.subject}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Send the acks that are left, give back the rest, and leave the group."""
        if self._closed:
            return
        self._halt()
        await self._settling.close()
        self._closed = True
        if self._link_lost in self._node.on_lost:
            self._node.on_lost.remove(self._link_lost)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        link = self._link
        if self._attached and link is not None and not link.closed:
            try:
                async with asyncio.timeout(self._limits.request_seconds):
                    with contextlib.suppress(PlaitError):
                        await self._give_back(link)
                    await link.request(m.Detach(self._session))
            except (PlaitError, TimeoutError):
                # The broker notices by itself.
                pass
        self._wake()

    async def _give_back(self, link: Link) -> None:
        """What was pulled ahead and nobody began with goes back as if it had not been delivered."""
        if not self._tracks:
            return
        ranges = self._unbegun()
        while ranges or self._pulls:
            # It ends the pulls that wait at the broker, too: they would only bring the same rows again. What such a
            # pull brought just before comes before the answer.
            await link.request(m.Nack(self._session, ranges, *UNBEGUN))
            ranges = self._unbegun()
            if not ranges:
                break

    def _unbegun(self) -> list[EpochRange]:
        """Rows that nobody began with, which are not ours any more."""
        pieces = self._take_unstarted()
        for delivered, start, stop in pieces:
            delivered.nack_rows(slice(start, stop), UNBEGUN)
        return [piece for d in dict.fromkeys(d for d, _, _ in pieces) for piece in d.collect()[1].get(UNBEGUN, [])]

    def _take_unstarted(self) -> list[Piece]:
        """Rows that nobody began with; nobody gets them from us any more."""
        pieces = [*self._handed_over.take_back(), *((d, d.taken, d.count) for d in self._buffer)]
        for delivered in self._buffer:
            delivered.taken = delivered.count
        self._buffer.clear()
        self._buffered_count = 0
        self._ready = []
        return pieces

    def _halt(self) -> None:
        """Whoever comes from now on gets nothing."""
        self._stopping = True
        if self._tracks:
            # What was handed over at most once is nobody else's.
            self._handed_over.stop()

    def _stop(self) -> None:
        """Pull no more and hand out no more; who waits for rows gets none."""
        self._halt()
        self._wake()

    async def _attach_first(self, loop: asyncio.AbstractEventLoop) -> None:
        deadline = loop.time() + self._limits.request_seconds
        while True:
            link = await self._node.ready(max(deadline - loop.time(), 0))
            try:
                return await self._attach(link)
            except Unavailable:
                if loop.time() >= deadline:
                    raise

    async def _attach(self, link: Link) -> None:
        holds = [piece for delivered in self._open for piece in delivered.open_ranges()]
        holds += self._settling.unsent
        attached: m.Attached = await link.request(
            m.Attach(
                self.subject,
                self.group,
                self.client_id,
                self._start,
                self._delivery,
                holds,
                self._partition_id,
                self._retry,
            )
        )
        if self._partition_id not in (0, attached.partition):
            self._forget_all()
        self._partition_id = self._settling.partition = attached.partition
        self._session = attached.session
        self._partition = PartitionName(attached.name, link.welcome.group if link.welcome else "")
        self._link = link
        self._attached = True
        self._pulls = self._asked = 0
        self._settling.attached(link, attached.session, attached.reasons_from)
        self._pull()

    async def _stay_attached(self, loop: asyncio.AbstractEventLoop) -> None:
        """Attach again whenever the link or the session is lost."""
        while True:
            if self._attached and self._link is not None and not self._link.closed:
                self._detached = loop.create_future()
                await self._detached
            self._lose(stale=False)
            pause = self._limits.reconnect_first_seconds
            while not self._attached:
                try:
                    link = await self._node.ready()
                    self._drop_unstarted(link, loop)
                    await self._attach(link)
                except PlaitError as error:
                    if isinstance(error, GroupBusy):
                        log.warning("%s", error)
                    elif not error.retryable:
                        self._fail(error)
                        return
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, self._limits.reconnect_max_seconds)

    def _link_lost(self) -> None:
        self._lose(stale=False)

    def _lose(self, *, stale: bool) -> None:
        """The link is gone, or the broker has given the session up."""
        self._stale |= stale
        if self._attached:
            self._attached = False
            self._lost_at = self._node.heard
            self._settling.detached()
        if self._detached is not None and not self._detached.done():
            self._detached.set_result(None)

    def _drop_unstarted(self, link: Link, loop: asyncio.AbstractEventLoop) -> None:
        """Given up, or out of contact long enough to be: others have what we had not started."""
        if not self._tracks:
            # What was handed out at most once is nobody else's.
            self._stale = False
            return
        lost_seconds = link.welcome.consumer_lost_seconds if link.welcome else 5.0
        if not self._stale and loop.time() - self._lost_at < lost_seconds:
            return
        self._stale = False
        pieces = self._take_unstarted()
        frames = dict.fromkeys(d for d, _, _ in pieces)
        for delivered in frames:
            self._settling.settle_now(delivered)
        for delivered, start, stop in pieces:
            delivered.nack_rows(slice(start, stop))
        for delivered in frames:
            # The broker has them back already: nobody is told.
            delivered.collect()
            if not delivered.open_count:
                self._forget(delivered)

    def _suspend(self) -> None:
        """Pull nothing until ``_resume``; what was pulled and not begun is for others."""
        self._suspended = True
        self._hand_back()

    def _resume(self) -> None:
        self._suspended = False
        self._pull()

    def _hand_back(self) -> None:
        if self._tracks and not self._settling.closed:
            self._settling.nack_pieces(self._take_unstarted(), UNBEGUN)

    def _fail(self, error: PlaitError) -> None:
        self._error = error
        self._wake()

    # --- pulling --------------------------------------------------------------------------------

    def _wanted(self) -> int:
        """How many rows the next pull asks for; 0: none now."""
        if not self._tracks:
            return self._demand - self._buffered_count - self._asked
        held = self._held_count() + self._asked
        if not held:
            return self._ahead
        if held >= self._ahead or self._open_bytes >= self._limits.prefetch_bytes:
            return 0
        if self._span() >= max(self._limits.prefetch_span, 2 * self._ahead):
            return 0
        return self._ahead - held

    def _held_count(self) -> int:
        """Rows in the user's hands, and those that wait for it."""
        return self._buffered_count + sum(
            delivered.open_count - (delivered.count - delivered.taken) for delivered in self._open
        )

    def _span(self) -> int:
        """Rows pulled since the oldest one that is still open."""
        oldest = next(iter(self._open), None)
        return 0 if oldest is None else self._pulled_count - oldest.position

    def _pull(self) -> None:
        link = self._link
        if not self._attached or self._stopping or self._suspended or link is None or link.closed:
            return
        wanting = self._demand > self._buffered_count and not self._pulls
        if wanting and not self._settling.under_way and not self._wanted():
            self._warn_of_unacked()
        # While there is more at the broker, it reads the next rows during the transfer of these.
        while self._pulls < (PULLS_MAX if self._more else 1) and (count := self._wanted()) > 0:
            size = self._limits.pull_bytes
            if self._ahead > self._limits.prefetch_count:
                # Whole frames: their bytes limit a large pull, not a count that ends inside of one.
                size *= LARGE_PULL
                count = max(count, self._ahead // 2)
            self._pulls += 1
            self._asked += count
            link.call(
                m.Pull(self._session, count, size, self._limits.pull_wait_seconds),
                functools.partial(self._pulled, self._session, count),
            )

    def _warn_of_unacked(self) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "%s has %d messages that are not acked, which is its limit: ack or nack some to get more",
                self.subject,
                self._held_count(),
            )

    def _pulled(self, session: int, count: int, answer: Any, payload: memoryview, error: PlaitError | None) -> None:
        if session != self._session or not self._attached:
            return
        self._pulls -= 1
        self._asked -= count
        if error is not None:
            if isinstance(error, StaleSession | Unavailable):
                self._lose(stale=isinstance(error, StaleSession))
            elif error.retryable:
                assert self._loop is not None
                self._loop.call_later(self._limits.reconnect_max_seconds, self._pull)
            else:
                self._fail(error)
            return
        self._more = answer.more
        if len(payload):
            try:
                self._take_in(answer, payload)
                self._broken = 0
                if self._suspended:
                    self._hand_back()
            except FrameError as broken:
                self._take_back(broken)
        self._wake()
        assert self._loop is not None
        # After whoever was woken: the rows that are here come first.
        self._loop.call_soon(self._pull)

    def _take_in(self, answer: m.Pulled, payload: memoryview) -> None:
        assert self._partition is not None
        owner = self._settling if self._tracks else None
        ranges = answer.ranges
        for frame in frames_in(payload):
            frame.verify()
            attempts = ranges if len(ranges) == 1 else [r for r in ranges if r[0] < frame.end and r[1] > frame.base]
            delivered = self._delivered(frame, self.subject, self._partition, owner, attempts)
            delivered.position = self._pulled_count
            self._pulled_count += delivered.count
            self._buffer.append(delivered)
            self._buffered_count += delivered.count
            if owner is not None:
                self._open[delivered] = None
                self._open_bytes += delivered.size

    def _take_back(self, broken: FrameError) -> None:
        """Rows came damaged: the broker gets back what is not in our hands, looks closer, and leaves out the bad."""
        self._broken += 1
        if self._broken > BROKEN_MAX or not self._tracks:
            self._fail(broken)
            return
        log.warning("rows of %s came damaged and are asked for again: %s", self.subject, broken)
        assert self._link is not None
        self._link.call(m.Detach(self._session), _ignore)
        self._lose(stale=False)

    def _forget_all(self) -> None:
        """The subject was deleted and made anew: its old messages are nobody's, and their acks mean nothing."""
        self._settling.forget()
        for delivered in self._open:
            delivered.owner = None
        self._open.clear()
        self._open_bytes = 0
        self._take_unstarted()

    def _forget(self, delivered: Delivered) -> None:
        if delivered in self._open:
            del self._open[delivered]
            self._open_bytes -= delivered.size

    # --- handing out ----------------------------------------------------------------------------

    async def fetch(self, count: int = 500, wait: Duration = 1.0) -> Batch:
        """Up to ``count`` messages: all that are there, or the first that come within ``wait`` seconds."""
        return Batch(self._settling, await self._fetch(count, wait))

    async def fetch_arrow(self, count: int = 50_000, wait: Duration = 1.0) -> ArrowBatch:
        """Like ``fetch``, as an Arrow table that is not copied."""
        return ArrowBatch(self._settling, await self._fetch(count, wait))

    async def flush(self) -> None:
        """Until the broker has every ack and nack so far."""
        await self._settling.flush()

    async def _fetch(self, count: int, wait: Duration) -> list[Piece]:
        if count < 1:
            raise InvalidArgument(f"count must be 1 or more, not {count}")
        seconds = seconds_of(wait)
        loop = self._opened()
        if count > self._limits.prefetch_count:
            # Who asks for so many gets them: one batch in the user's hands, the next one on its way.
            self._ahead = max(self._ahead, 2 * min(count, FETCH_COUNT_MAX))
        deadline = loop.time() + seconds
        try:
            while self._buffered_count < count and not self._stopping:
                self._opened()
                if self._buffered_count and not (self._more and self._attached):
                    break
                remaining = deadline - loop.time()
                self._demand = count
                self._pull()
                if self._buffered_count and not self._pulls:
                    # The limits allow no more until some are acked: what is here has to do.
                    break
                if remaining <= 0 or not await self._arrival(remaining):
                    break
        finally:
            self._demand = 0
        pieces = self._take(count)
        self._pull()
        return pieces

    def _take(self, count: int) -> list[Piece]:
        pieces: list[Piece] = []
        self._ready = []
        while count > 0 and self._buffer and not self._stopping:
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

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        """The next message, however long it takes. Several tasks may iterate over one consumer."""
        while not self._stopping:
            message = self._next_ready()
            if message is not None:
                return message
            self._opened()
            self._demand = 1 if self._tracks else min(ITERATION_COUNT, self._limits.prefetch_count)
            try:
                self._pull()
                await self._arrival(None)
            finally:
                self._demand = 0
        if self._closed:
            self._opened()
        raise StopAsyncIteration

    def _next_ready(self) -> Message | None:
        """A message that is here already; None when there is none."""
        if not self._buffer:
            return None
        delivered = self._buffer[0]
        if not self._ready:
            self._ready = delivered.messages(delivered.taken, min(delivered.count, delivered.taken + ITERATION_COUNT))
            self._ready.reverse()
        message = self._ready.pop()
        delivered.taken += 1
        self._buffered_count -= 1
        if delivered.taken == delivered.count:
            self._buffer.popleft()
        return message

    async def _arrival(self, seconds: float | None) -> bool:
        """Until there is news, at most so long; whether there is."""
        loop = self._opened()
        future: asyncio.Future[bool] = loop.create_future()
        self._waiting.append(future)
        timer = None if seconds is None else loop.call_later(seconds, _time_out, future)
        try:
            return await future
        finally:
            if timer is not None:
                timer.cancel()
            if future in self._waiting:
                self._waiting.remove(future)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(True)

    def _opened(self) -> asyncio.AbstractEventLoop:
        if self._error is not None:
            raise self._error
        if self._node.closed is not None:
            raise self._node.closed
        if self._closed:
            raise Closed("the consumer is closed")
        if self._loop is None:
            raise Closed("the consumer is not open; use 'async with client.consumer(...)'")
        return self._loop


def _time_out(future: asyncio.Future[bool]) -> None:
    if not future.done():
        future.set_result(False)


def _ignore(_: Any, __: memoryview, ___: PlaitError | None) -> None:
    """What is said next comes after it, whatever the answer."""


class _Bridge:
    """What ``Settling`` tells its consumer, kept off the consumer's public face."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer

    def settled(self, delivered: Delivered) -> None:
        self._consumer._forget(delivered)

    def progressed(self) -> None:
        self._consumer._pull()

    def lost(self, *, stale: bool) -> None:
        self._consumer._lose(stale=stale)

    def failed(self, error: PlaitError) -> None:
        self._consumer._fail(error)
