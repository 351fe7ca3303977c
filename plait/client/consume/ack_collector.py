"""Collects the outcomes of delivered rows and sends them to the broker as acks and nacks.

One request is in flight at a time. Outcomes reported in one turn of the event loop, and those reported while a request
is in flight, are sent together as ranges, so that acking each message by itself is cheap. Outcomes that cannot be sent
because the connection is lost are sent after the next attach. The first outcome of a message counts: an ack after a
nack, or a nack after an ack, has no effect.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

from plait import tasks
from plait.client.consume.ack_requests import split_ack, split_nack
from plait.client.consume.ack_spool import AckSpool
from plait.client.consume.delivered import DeliveredFrame, OutcomeCollector
from plait.client.consume.failure import FAILED, EpochRange, FailureOutcome
from plait.client.consume.pending_outcomes import PendingOutcomes, SharedPending
from plait.errors import Closed, PlaitError, StaleSession, Timeout, Unavailable
from plait.limits import REQUEST_RANGES_MAX, ClientLimits
from plait.wire.link import Link

#: Rows [start, stop) of a delivered frame.
Piece = tuple[DeliveredFrame, int, int]
#: With several partitions, the collector waits this long for further acks of a frame before it sends: rows are handled
#: one after another, and one ack request per row and partition would cost more than the rows.
LINGER_SECONDS = 0.001
#: Nack requests in flight at a time. If every row has its own reason there is one request per row, and waiting for each
#: reply in turn would be slow.
REQUESTS_MAX = 64


class OutcomeListener(Protocol):
    """Receives the progress of an ``AckCollector``: the partition's pull client."""

    @property
    def alone(self) -> bool:
        """The consumer has no other partition."""

    def frame_closed(self, delivered: DeliveredFrame) -> None:
        """Every row of the frame has an outcome."""

    def progressed(self) -> None:
        """Rows got an outcome, so there may be room to pull more."""

    def outcomes_stored(self) -> None:
        """The broker has stored the outcomes that were sent."""

    def dead_lettered(self, count: int, failed: FailureOutcome) -> None:
        """``count`` of the rows that failed with this outcome became dead letters."""

    def lost(self, *, stale: bool) -> None:
        """The link is closed, or the broker has ended the session (``stale``)."""

    def failed(self, error: PlaitError) -> None:
        """No further outcome can be sent."""


class AckCollector:
    """The outcomes of one partition's rows. Only ``from_thread`` may be called from another thread than the loop's."""

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
        #: The id of the partition whose rows the pending outcomes belong to.
        self.partition = 0
        #: The first attempt whose failure reason the broker needs.
        self.reasons_from = 1
        #: The group's maximum number of attempts per message; 0: no limit.
        self.attempts = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._link: Link | None = None
        self._session = 0
        self._attached: asyncio.Event | None = None
        #: Frames with acks or nacks that are not collected yet.
        self._unsent: dict[DeliveredFrame, None] = {}
        self._pending: PendingOutcomes = SharedPending() if pending is None else pending
        #: The outcomes of the request in flight.
        self._in_flight: PendingOutcomes | None = None
        #: Sends the outcomes that ``_send_acks`` does not send.
        self._task: asyncio.Task[None] | None = None
        #: Callers of ``flush`` that wait for the answer to an ack of ``_send_acks``.
        self._waiting: list[asyncio.Future[None]] = []
        self._scheduled = False
        #: The latest write of the spool.
        self._writing: asyncio.Future[None] | None = None
        #: Outcomes reported by other threads: a frame, a row, and its failure; None: acked.
        self._inbox: deque[tuple[DeliveredFrame, int, FailureOutcome | None]] = deque()
        self._inbox_scheduled = False
        self._error: PlaitError | None = None
        self._closed = False

    def forget(self) -> None:
        """Discard all pending outcomes: their messages no longer exist."""
        self.gather()
        self._pending.clear()
        if self._spool is not None and not self._closed:
            self._schedule()

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._attached = asyncio.Event()
        outcomes = self._spool.load() if self._spool is not None else None
        if outcomes is not None:
            self.partition = outcomes.partition
            self._pending.add(outcomes.acks, outcomes.failures())

    def _spool_write(self) -> Callable[[], None] | None:
        """The write that saves the pending outcomes in the spool; None: no spool, or it is up to date."""
        return None if self._spool is None else self._spool.change(self.partition, *self._pending.plain())

    async def _save(self) -> None:
        """Write the pending outcomes to the spool, if any. Outcomes that arrive meanwhile need another write."""
        write = self._spool_write()
        if write is not None:
            assert self._loop is not None
            self._writing = self._loop.run_in_executor(None, write)
            await asyncio.shield(self._writing)

    async def _save_and_recheck(self) -> bool:
        """``_save``; returns True if there are outcomes to send or to save by now."""
        if self._spool is None:
            return False
        await self._save()
        up = self._link is not None and not self._link.closed
        return bool(self._unsent) or (up and bool(self._pending))

    def attached(self, link: Link, session: int, reasons_from: int = 1, attempts: int = 0) -> None:
        """A session with the broker has started, the first one or a later one."""
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
        """The session is lost."""
        self._link = None
        if self._attached is not None:
            self._attached.clear()

    @property
    def unsent(self) -> list[EpochRange]:
        """Rows whose outcome the broker does not have yet: it must not deliver them to another consumer meanwhile."""
        outcomes = (
            [self._pending.plain()] if self._in_flight is None else [self._in_flight.plain(), self._pending.plain()]
        )
        return [piece for acks, nacks in outcomes for ranges in (acks, *nacks.values()) for piece in ranges]

    # --- outcomes of rows -----------------------------------------------------------------------

    async def ack(self, delivered: DeliveredFrame, rows: slice) -> None:
        """Ack rows of a frame, and wait until the broker has every outcome reported so far."""
        if self._closed or self._loop is None:
            raise _closed()
        if self._inbox:
            # Outcomes that other threads reported earlier count first.
            self.absorb()
        self._unsent[delivered] = None
        delivered.acking.append(rows)
        await self.flush()

    def collect_soon(self, delivered: DeliveredFrame) -> None:
        """Rows of the frame were acked or nacked: send their outcomes at the end of this turn of the loop."""
        self._unsent[delivered] = None
        if not self._scheduled:
            self._schedule(linger=delivered.open_count > 1 and not self._listener.alone)

    def collect_now(self, delivered: DeliveredFrame) -> None:
        """Collect the frame's outcomes now, before the caller adds other outcomes to the frame."""
        self._pending.collect([delivered])

    def gather(self) -> None:
        """Collect the outcomes of all frames."""
        if self._inbox:
            self.absorb()
        unsent, self._unsent = self._unsent, {}
        self._pending.collect(unsent)
        for delivered in unsent:
            if not delivered.open_count:
                self._listener.frame_closed(delivered)

    def from_thread(self, delivered: DeliveredFrame, row: int, failed: FailureOutcome | None) -> None:
        """Report an outcome from any thread. It is queued; the loop is woken once for all queued outcomes."""
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
        """Take the outcomes that other threads have queued."""
        self._inbox_scheduled = False
        inbox = self._inbox
        while inbox:
            delivered, row, failed = inbox.popleft()
            delivered.note(row, failed)
            if not self._closed:
                self.collect_soon(delivered)

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
        if self._closed or self._loop is None or self._in_flight is not None or self._running:
            # The task, or the answer to the request in flight, sends the rest.
            return
        try:
            sent = self._send_acks()
        except Exception as error:  # noqa: BLE001 (the listener gets it, as an error of the task)
            self._defect(error)
            return
        if not sent:
            self._task = tasks.start(self._send_all(), "plait-acks", failed=self._defect)

    def _send_acks(self) -> bool:
        """Send the pending outcomes as one request, without a task.

        Returns False if there is a spool, if some outcomes are not acks, or if they do not fit into one request.
        """
        if self._spool is not None:
            return False
        self.gather()
        link = self._link
        if not self._pending:
            return True
        if link is None or link.closed or not self._pending.only_acks(REQUEST_RANGES_MAX):
            return False
        self._listener.progressed()
        sending, session = self._pending.take(), self._session
        request = sending.ack(session)
        assert request is not None
        self._in_flight = sending
        link.call(request, partial(self._acked, sending, session))
        return True

    def _acked(self, sending: PendingOutcomes, session: int, _: Any, __: memoryview, error: PlaitError | None) -> None:
        """The answer to an ack of ``_send_acks``."""
        self._in_flight = None
        try:
            if error is None:
                self._listener.outcomes_stored()
                if (self._unsent or self._pending) and not self._scheduled:
                    self._start()
            else:
                self._put_back(sending, session)
                if not self._closed:
                    self._task = tasks.start(self._resend(error, session), "plait-acks", failed=self._defect)
        finally:
            self._wake_waiting()

    def _wake_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def _put_back(self, sending: PendingOutcomes, session: int) -> None:
        """The broker may not have stored these outcomes: send them again."""
        if session != self._session:
            # A new session has started, in which the tags of these ranges are not valid.
            sending.new_session()
        self._pending.give_back(sending)

    async def _resend(self, failure: PlaitError, session: int) -> None:
        if await self._continues_after(failure, session):
            await self._send_all()

    def _defect(self, error: Exception) -> None:
        self._error = tasks.error_of(error)
        self._listener.failed(self._error)

    async def _send_all(self) -> None:
        """Send until nothing is pending. Outcomes that are added meanwhile leave with the next request."""
        while True:
            self.gather()
            if not self._pending:
                if await self._save_and_recheck():
                    continue
                break
            self._listener.progressed()
            link = self._link
            if link is None or link.closed:
                # Sent after the next attach.
                if await self._save_and_recheck():
                    continue
                break
            sending, session = self._pending.take(), self._session
            self._in_flight = sending
            try:
                # Nacks first: the broker must not store an ack before the nacks that were reported with it.
                await self._send_nacks(link, session, sending)
                acks = sending.ack(session)
                if acks is not None:
                    for ack in split_ack(acks):
                        await link.request(ack)
                self._listener.outcomes_stored()
            except BaseException as error:
                self._in_flight = None
                # Put back also when ``close`` stops waiting for a reply.
                self._put_back(sending, session)
                if not isinstance(error, PlaitError):
                    # The loop may be ending, so the spool is written here and not in a thread.
                    write = self._spool_write()
                    if write is not None:
                        write()
                    raise
                failure: PlaitError | None = error
            else:
                self._in_flight = None
                failure = None
            if failure is not None and not await self._continues_after(failure, session):
                break

    async def _continues_after(self, failure: PlaitError, session: int) -> bool:
        """Handle a failed request. True: send the pending outcomes again; False: the next attach does."""
        if isinstance(failure, Unavailable | StaleSession):
            if session == self._session:
                self._listener.lost(stale=isinstance(failure, StaleSession))
                return await self._save_and_recheck()
        elif failure.retryable:
            await self._save()
            await asyncio.sleep(self._limits.reconnect_max_seconds)
        else:
            self._error = failure
            self._listener.failed(failure)
            await self._save()
            return False
        return True

    async def _send_nacks(self, link: Link, session: int, sending: PendingOutcomes) -> None:
        """Send all nacks and remove those that the broker has stored. After all replies, raises the first error."""
        nacks = [(failed, nack) for failed in sending.failures() for nack in split_nack(sending.nack(session, failed))]
        unanswered = Counter(failed for failed, _ in nacks)
        for at in range(0, len(nacks), REQUESTS_MAX):
            some = nacks[at : at + REQUESTS_MAX]
            answers = await asyncio.gather(*(link.request(nack) for _, nack in some), return_exceptions=True)
            for (failed, _), answer in zip(some, answers, strict=True):
                if not isinstance(answer, BaseException):
                    unanswered[failed] -= 1
                    if not unanswered[failed]:
                        sending.confirm(failed)
                    if answer.dead:
                        self._listener.dead_lettered(answer.dead, failed)
            for answer in answers:
                if isinstance(answer, BaseException):
                    raise answer

    async def flush(self) -> None:
        """Wait until the broker has every ack and nack reported so far."""
        while True:
            if self._inbox:
                self.absorb()
            if self._error is not None:
                raise self._error
            if self._unsent:
                self._start()
            if self._in_flight is not None and not self._running:
                if self._closed or self._loop is None:
                    raise _closed()
                answered = self._loop.create_future()
                self._waiting.append(answered)
                await answered
                continue
            if self._running:
                task = self._task
                assert task is not None
                # ``asyncio.wait`` rather than ``await task``: ``close`` cancels the task, not the callers of ``flush``.
                await asyncio.wait([task])
                if not task.cancelled() and (error := task.exception()) is not None:
                    raise error
                continue
            if not self._pending and not self._unsent:
                return
            if self._closed or self._attached is None:
                raise _closed()
            # There is no session: the outcomes leave after the next attach.
            limit = self._limits.send_seconds
            try:
                async with asyncio.timeout(limit):
                    await self._attached.wait()
            except TimeoutError:
                raise Timeout(
                    f"acks could not be sent within {limit:g} s (limit `send_seconds`); "
                    "their messages may be delivered again"
                ) from None
            self._start()

    @property
    def closed(self) -> bool:
        """The collector takes no more outcomes."""
        return self._closed

    @property
    def quiet(self) -> bool:
        """``flush`` would return at once: nothing is pending, and there is no error to raise."""
        return self._error is None and not self.under_way

    @property
    def under_way(self) -> bool:
        """There are outcomes that the broker does not have yet."""
        return bool(self._unsent or self._pending or self._inbox or self._in_flight is not None or self._running)

    @property
    def _running(self) -> bool:
        return self._task is not None and not self._task.done()

    async def close(self, *, flush: bool = True) -> None:
        """Send the pending outcomes (if ``flush``) within ``request_seconds``. Then acks and nacks raise ``Closed``."""
        if flush and not self._closed:
            try:
                async with asyncio.timeout(self._limits.request_seconds):
                    await self.flush()
            except (PlaitError, TimeoutError):
                # Messages whose ack was not sent are delivered again: delivery is at least once.
                pass
        self._closed = True
        if self._running:
            assert self._task is not None
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._wake_waiting()
        await self._save()
        if self._writing is not None:
            await self._writing


def ack_pieces(pieces: list[Piece]) -> None:
    """Ack all rows of the pieces that have no outcome."""
    _absorb_all(pieces)
    for delivered, start, stop in pieces:
        if delivered.collector is not None:
            delivered.collector.collect_soon(delivered)
            delivered.acking.append(slice(start, stop))


def nack_pieces(pieces: list[Piece], failed: FailureOutcome = FAILED) -> None:
    """Nack all rows of the pieces that have no outcome."""
    _absorb_all(pieces)
    for delivered, start, stop in pieces:
        if delivered.collector is not None:
            delivered.collector.collect_soon(delivered)
            delivered.nack_rows(slice(start, stop), failed)


async def flush_pieces(pieces: list[Piece]) -> None:
    """Wait until the brokers have every ack and nack reported so far for the pieces' partitions."""
    await flush_all(_collectors(pieces))


async def flush_all(collectors: Iterable[OutcomeCollector]) -> None:
    """Flush all collectors at the same time, so that an unreachable broker does not delay the others."""
    several = list(collectors)
    if len(several) == 1:
        await several[0].flush()
    elif several:
        for outcome in await asyncio.gather(*(collector.flush() for collector in several), return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome


def _absorb_all(pieces: list[Piece]) -> None:
    """Outcomes that other threads reported earlier count first."""
    for collector in _collectors(pieces):
        collector.absorb()


def _collectors(pieces: list[Piece]) -> list[OutcomeCollector]:
    return list(dict.fromkeys(delivered.collector for delivered, _, _ in pieces if delivered.collector is not None))


def _closed() -> Closed:
    return Closed("the consumer is closed; messages that were not acked by then were returned to the group")
