"""Acks and nacks on their way to the broker.

Those of one moment leave together as ranges, one request at a time, so that acking each message by itself costs little.
What could not be sent because the connection is lost is sent after the next attach. The first word on a message
counts: an ack after a nack, or a nack after an ack, changes nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Protocol

from plait import tasks
from plait.client.consume.ack_requests import split_ack, split_nack
from plait.client.consume.ack_spool import AckSpool
from plait.client.consume.delivered import DeliveredFrame, Owner
from plait.client.consume.failure import FAILED, EpochRange, FailureOutcome
from plait.client.consume.pending_outcomes import PendingOutcomes, SharedPending
from plait.errors import Closed, PlaitError, StaleSession, Timeout, Unavailable
from plait.limits import ClientLimits
from plait.wire.link import Link

#: Rows [start, stop) of a delivered frame.
Piece = tuple[DeliveredFrame, int, int]
#: Where a consumer has several partitions, the acks of a frame wait for each other so long: its rows are handled one
#: after another, and an ack for each partition and each moment would cost more than the rows.
LINGER_SECONDS = 0.001
#: Requests under way at a time: where every row has a reason of its own, nobody waits for each.
REQUESTS_MAX = 64


class OutcomeListener(Protocol):
    """Who is told what became of the rows: the partition's pull client."""

    @property
    def alone(self) -> bool:
        """It is the only one of its consumer."""

    def settled(self, delivered: DeliveredFrame) -> None:
        """No row of the frame is open any more."""

    def progressed(self) -> None:
        """Rows were settled: there may be room for new ones."""

    def told(self) -> None:
        """The broker knows what was said."""

    def died(self, count: int, failed: FailureOutcome) -> None:
        """So many of the rows that failed in this way are dead letters."""

    def lost(self, *, stale: bool) -> None:
        """The link is gone, or the broker has given the session up (``stale``)."""

    def failed(self, error: PlaitError) -> None:
        """Nothing can be settled any more."""


class AckCollector:
    """See the module. Everything but ``from_thread`` is for the loop's thread alone."""

    def __init__(
        self,
        listener: OutcomeListener,
        limits: ClientLimits,
        spool: AckSpool | None = None,
        pending: PendingOutcomes | None = None,
    ) -> None:
        self._listener = listener
        self._limits = limits
        self._spool = spool
        #: The partition that what is said is of.
        self.partition = 0
        #: From this attempt on the broker wants to know why a message failed.
        self.reasons_from = 1
        #: How many attempts the group gives a message; 0: no limit.
        self.attempts = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._link: Link | None = None
        self._session = 0
        self._attached: asyncio.Event | None = None
        #: Frames with rows that were acked or nacked and not collected.
        self._unsent: dict[DeliveredFrame, None] = {}
        self._pending: PendingOutcomes = SharedPending() if pending is None else pending
        #: What is being said.
        self._saying: PendingOutcomes | None = None
        self._task: asyncio.Task[None] | None = None
        self._scheduled = False
        #: The last change of the spool.
        self._writing: asyncio.Future[None] | None = None
        #: Words of other threads: a row, and how it failed; None: it is done.
        self._inbox: deque[tuple[DeliveredFrame, int, FailureOutcome | None]] = deque()
        self._inbox_scheduled = False
        self._error: PlaitError | None = None
        self._closed = False

    def forget(self) -> None:
        """What was said is of no use any more: the messages are gone."""
        self.gather()
        self._pending.clear()
        if self._spool is not None and not self._closed:
            self._schedule()

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._attached = asyncio.Event()
        words = self._spool.load() if self._spool is not None else None
        if words is not None:
            self.partition = words.partition
            self._pending.add(words.acks, words.failures())

    def _change(self) -> Callable[[], None] | None:
        """What is to be done so that what cannot be said now is kept; None: nothing, or there is no place for it."""
        return None if self._spool is None else self._spool.change(self.partition, *self._pending.plain())

    async def _keep(self) -> None:
        """What cannot be said now is kept, where there is a place for it. Acks that come meanwhile are kept next."""
        change = self._change()
        if change is not None:
            assert self._loop is not None
            self._writing = self._loop.run_in_executor(None, change)
            await asyncio.shield(self._writing)

    async def _kept(self) -> bool:
        """``_keep``; whether there is something to be said or kept by now."""
        if self._spool is None:
            return False
        await self._keep()
        up = self._link is not None and not self._link.closed
        return bool(self._unsent) or (up and bool(self._pending))

    def attached(self, link: Link, session: int, reasons_from: int = 1, attempts: int = 0) -> None:
        """The way to the broker is open, for the first time or again."""
        self._link = link
        self._session = session
        self._pending.new_session()
        self.reasons_from = reasons_from
        self.attempts = attempts
        assert self._attached is not None
        self._attached.set()
        if self._pending or self._unsent:
            self._schedule()

    def detached(self) -> None:
        """The way to the broker is closed."""
        self._link = None
        if self._attached is not None:
            self._attached.clear()

    @property
    def unsent(self) -> list[EpochRange]:
        """Rows that were spoken of, which the broker does not know: until then nobody else may get them."""
        words = [self._pending.plain()] if self._saying is None else [self._saying.plain(), self._pending.plain()]
        return [piece for acks, nacks in words for ranges in (acks, *nacks.values()) for piece in ranges]

    # --- words on rows --------------------------------------------------------------------------

    def settle_soon(self, delivered: DeliveredFrame) -> None:
        """Rows were acked or nacked: tell the broker at the end of this turn."""
        self._unsent[delivered] = None
        if not self._scheduled:
            self._schedule(linger=delivered.open_count > 1 and not self._listener.alone)

    def settle_now(self, delivered: DeliveredFrame) -> None:
        """Collect what was said so far before anything else is said of the frame."""
        self._pending.collect([delivered])

    def gather(self) -> None:
        """Collect what was said so far of all frames."""
        self.absorb()
        unsent, self._unsent = self._unsent, {}
        self._pending.collect(unsent)
        for delivered in unsent:
            if not delivered.open_count:
                self._listener.settled(delivered)

    def from_thread(self, delivered: DeliveredFrame, row: int, failed: FailureOutcome | None) -> None:
        """The same from any thread: kept aside, and the loop is woken once for all that come before it looks."""
        loop = self._loop
        if self._closed or loop is None:
            raise _closed()
        self._inbox.append((delivered, row, failed))
        if not self._inbox_scheduled:
            self._inbox_scheduled = True
            try:
                loop.call_soon_threadsafe(self.absorb)
            except RuntimeError:
                raise _closed() from None

    def absorb(self) -> None:
        """Take what other threads have said so far."""
        self._inbox_scheduled = False
        inbox = self._inbox
        while inbox:
            delivered, row, failed = inbox.popleft()
            delivered.note(row, failed)
            if not self._closed:
                self.settle_soon(delivered)

    # --- to the broker --------------------------------------------------------------------------

    def _schedule(self, *, linger: bool = False) -> None:
        if self._closed or self._loop is None:
            raise _closed()
        self._scheduled = True
        if linger:
            self._loop.call_later(LINGER_SECONDS, self._start)
        else:
            self._loop.call_soon(self._start)

    def _start(self) -> None:
        self._scheduled = False
        if self._closed or self._loop is None:
            return
        if self._task is None or self._task.done():
            self._task = tasks.start(self._settle(), "plait-acks", failed=self._defect)

    def _defect(self, error: Exception) -> None:
        self._error = tasks.error_of(error)
        self._listener.failed(self._error)

    async def _settle(self) -> None:
        """Send until there is nothing left; whatever is added meanwhile goes with the next request."""
        while True:
            self.gather()
            if not self._pending:
                if await self._kept():
                    continue
                break
            self._listener.progressed()
            link = self._link
            if link is None or link.closed:
                # Sent after the next attach.
                if await self._kept():
                    continue
                break
            saying, session = self._pending.take(), self._session
            self._saying = saying
            try:
                # Failures first: a success must never be known before the failures that came with it.
                await self._tell_failures(link, session, saying)
                acks = saying.ack(session)
                if acks is not None:
                    for ack in split_ack(acks):
                        await link.request(ack)
                self._listener.told()
            except BaseException as error:
                self._saying = None
                if session != self._session:
                    # There is another session already, where its words mean something else.
                    saying.new_session()
                # Also when close gives up on an answer: what the broker may not know is said again.
                self._pending.give_back(saying)
                if not isinstance(error, PlaitError):
                    # There may be no loop that waits for a thread any more.
                    change = self._change()
                    if change is not None:
                        change()
                    raise
                failure: PlaitError | None = error
            else:
                self._saying = None
                failure = None
            if failure is None:
                continue
            if isinstance(failure, Unavailable | StaleSession):
                if session == self._session:
                    self._listener.lost(stale=isinstance(failure, StaleSession))
                    if not await self._kept():
                        break
            elif failure.retryable:
                await self._keep()
                await asyncio.sleep(self._limits.reconnect_max_seconds)
            else:
                self._error = failure
                self._listener.failed(failure)
                await self._keep()
                break

    async def _tell_failures(self, link: Link, session: int, saying: PendingOutcomes) -> None:
        """Send them all; what the broker has is taken out. Raises the first error, once all answers are in."""
        nacks = [(failed, nack) for failed in saying.failures() for nack in split_nack(saying.nack(session, failed))]
        unanswered = Counter(failed for failed, _ in nacks)
        for at in range(0, len(nacks), REQUESTS_MAX):
            some = nacks[at : at + REQUESTS_MAX]
            answers = await asyncio.gather(*(link.request(nack) for _, nack in some), return_exceptions=True)
            for (failed, _), answer in zip(some, answers, strict=True):
                if not isinstance(answer, BaseException):
                    unanswered[failed] -= 1
                    if not unanswered[failed]:
                        saying.told(failed)
                    if answer.dead:
                        self._listener.died(answer.dead, failed)
            for answer in answers:
                if isinstance(answer, BaseException):
                    raise answer

    async def flush(self) -> None:
        """Until the broker has every ack and nack so far."""
        while True:
            self.absorb()
            if self._error is not None:
                raise self._error
            if self._unsent and not self._running:
                self._start()
            if self._running:
                task = self._task
                assert task is not None
                # Not by its result: ``close`` cancels the task, not those who wait for it.
                await asyncio.wait([task])
                if not task.cancelled() and (error := task.exception()) is not None:
                    raise error
                continue
            if not self._pending and not self._unsent:
                return
            if self._closed or self._attached is None:
                raise _closed()
            # Not attached at the moment: they leave after the next attach.
            limit = self._limits.send_seconds
            try:
                async with asyncio.timeout(limit):
                    await self._attached.wait()
            except TimeoutError:
                raise Timeout(
                    f"acks could not be sent within {limit:g} s; what they are about may be delivered again"
                ) from None
            self._start()

    @property
    def closed(self) -> bool:
        """Nothing can be said any more."""
        return self._closed

    @property
    def quiet(self) -> bool:
        """There is nothing to wait for, and nothing to raise."""
        return self._error is None and not self.under_way

    @property
    def under_way(self) -> bool:
        """Something was said that the broker does not know yet."""
        return bool(self._unsent or self._pending or self._inbox or self._running)

    @property
    def _running(self) -> bool:
        return self._task is not None and not self._task.done()

    async def close(self, *, tell: bool = True) -> None:
        """Send what is left (``tell``), within a request's time; afterwards every word raises ``Closed``."""
        if tell and not self._closed:
            try:
                async with asyncio.timeout(self._limits.request_seconds):
                    await self.flush()
            except (PlaitError, TimeoutError):
                # What was not acked is delivered again: that is the promise.
                pass
        self._closed = True
        if self._running:
            assert self._task is not None
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._keep()
        if self._writing is not None:
            await self._writing


def ack_pieces(pieces: list[Piece]) -> None:
    """All of their rows that are open are done."""
    _absorb_all(pieces)
    for delivered, start, stop in pieces:
        if delivered.owner is not None:
            delivered.owner.settle_soon(delivered)
            delivered.acking.append(slice(start, stop))


def nack_pieces(pieces: list[Piece], failed: FailureOutcome = FAILED) -> None:
    """All of their rows that are open failed."""
    _absorb_all(pieces)
    for delivered, start, stop in pieces:
        if delivered.owner is not None:
            delivered.owner.settle_soon(delivered)
            delivered.nack_rows(slice(start, stop), failed)


async def flush_pieces(pieces: list[Piece]) -> None:
    """Until their brokers have every ack and nack so far."""
    await flush_all(_owners(pieces))


async def flush_all(owners: Iterable[Owner]) -> None:
    """Until the brokers have what was said to these; one that cannot be told does not keep the others waiting."""
    several = list(owners)
    if len(several) == 1:
        await several[0].flush()
    elif several:
        for outcome in await asyncio.gather(*(owner.flush() for owner in several), return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome


def _absorb_all(pieces: list[Piece]) -> None:
    """What other threads said before counts before."""
    for owner in _owners(pieces):
        owner.absorb()


def _owners(pieces: list[Piece]) -> list[Owner]:
    return list(dict.fromkeys(delivered.owner for delivered, _, _ in pieces if delivered.owner is not None))


def _closed() -> Closed:
    return Closed("the consumer is closed; what was not acked then was given back")
