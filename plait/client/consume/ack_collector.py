"""Collects the outcomes of delivered rows and sends them to the broker as acks and nacks.

One request is in flight at a time. Outcomes reported in one turn of the event loop, and those reported while a request
is in flight, are sent together as ranges, so that acking each message by itself is cheap. Outcomes that cannot be sent
because the connection is lost are sent after the next attach. Only the first outcome of a message takes effect: an ack
after a nack, or a nack after an ack, is ignored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from plait import tasks
from plait.client.consume.ack_spool import AckSpool
from plait.client.consume.delivered import DeliveredFrame, Deliveries, flat
from plait.client.consume.failure import EpochRange
from plait.client.consume.ordered.failed_keys import FrameOutcomes
from plait.client.consume.outcomes import PendingOutcomes
from plait.client.net.node import ConsumerSession
from plait.errors import PlaitError, StaleSession, Timeout, Unavailable
from plait.limits import REQUEST_RANGES_MAX, ClientLimits
from plait.wire import messages as m

if TYPE_CHECKING:
    from plait.client.consume.pull_client import PullClient

#: With several partitions, the collector waits this long for further acks of a frame before it sends: rows are handled
#: one after another, and one ack request per row and partition would cost more than the rows.
LINGER_SECONDS = 0.001


class AckCollector:
    """The outcomes of one partition's rows, for its pull client."""

    def __init__(
        self, client: PullClient, limits: ClientLimits, spool: AckSpool | None = None, *, any_thread: bool = False
    ) -> None:
        self._client = client
        self._limits = limits
        self._spool = spool
        self.deliveries = Deliveries(self._outcome_reported, self.gather, self.flush, any_thread=any_thread)
        #: The id of the partition whose rows the pending outcomes belong to.
        self.partition = 0
        self._session: ConsumerSession | None = None
        self._attached = asyncio.Event()
        self.pending = PendingOutcomes()
        #: The outcomes of the request in flight.
        self._in_flight: PendingOutcomes | None = None
        #: Called after the broker has stored outcomes.
        self.on_stored: Callable[[], None] | None = None
        #: The task that sends what ``_start`` cannot send as one request.
        self._task: asyncio.Task[None] | None = None
        #: Callers of ``flush`` that wait for the reply to a request that ``_start`` sent.
        self._waiting: list[asyncio.Future[None]] = []
        self._error: PlaitError | None = None

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        self.deliveries.loop = loop
        outcomes = self._spool.load() if self._spool is not None else None
        if outcomes is not None:
            self.partition = outcomes.partition
            self.pending.add(outcomes.acks, outcomes.failures())

    def forget(self) -> None:
        """Discard all pending outcomes and open rows: their messages no longer exist."""
        self.gather()
        self.pending = PendingOutcomes(self.pending.holds)
        self.deliveries.forget()
        if self._spool is not None and not self.deliveries.closed:
            self._schedule()

    def attached(self, session: ConsumerSession) -> None:
        """Start to send over a new session with the broker, the first one or a later one."""
        self._session = session
        self.pending.new_session()
        self.deliveries.reasons_from, self.deliveries.attempts = session.reply.reasons_from, session.reply.attempts
        self._attached.set()
        if self.pending.acks or self.pending.nacks or self.deliveries.unsent:
            self._schedule()

    def detached(self) -> None:
        """Stop sending until the next session, because the session is lost."""
        self._session = None
        self._attached.clear()

    @property
    def unsent(self) -> list[EpochRange]:
        """Rows whose outcome the broker does not have yet: it must not deliver them to another consumer meanwhile."""
        outcomes = [each.plain() for each in (self._in_flight, self.pending) if each is not None]
        return [piece for acks, nacks in outcomes for ranges in (acks, *nacks.values()) for piece in ranges]

    @property
    def under_way(self) -> bool:
        """True if there are outcomes that the broker does not have yet, or an error for ``flush`` to raise."""
        reported = self.deliveries.unsent or self.deliveries.inbox or self.pending.acks or self.pending.nacks
        waits = self._in_flight is not None or (self._task is not None and not self._task.done())
        return bool(reported) or waits or self._error is not None

    # --- collecting -----------------------------------------------------------------------------

    def gather(self) -> None:
        """Collect the outcomes of all frames."""
        deliveries = self.deliveries
        if deliveries.inbox:
            deliveries.absorb()
        if not deliveries.unsent:
            return
        unsent, deliveries.unsent = deliveries.unsent, {}
        pending, failed = self.pending, False
        outcomes: list[FrameOutcomes] = []
        for frame in unsent:
            acks, nacks = frame.collect()
            outcomes.append((frame, acks, nacks))
            failed = failed or bool(nacks)
        if failed and pending.holds is not None:
            outcomes = pending.holds.apply(outcomes)
        for frame, acks, nacks in outcomes:
            if acks:
                frame.put(acks, pending.acks)
            for how, runs in nacks.items():
                if runs:
                    frame.put(runs, pending.nacks.setdefault(how, {}))

    def _outcome_reported(self, delivered: DeliveredFrame) -> None:
        """Send the outcomes of the frame's rows, which were acked or nacked, at the end of this turn of the loop."""
        self._schedule(linger=delivered.open_count > 1 and self._client.fetcher.prefetch.partitions > 1)

    def _schedule(self, *, linger: bool = False) -> None:
        loop = self.deliveries.check_open()
        self.deliveries.scheduled = True
        if linger:
            loop.call_later(LINGER_SECONDS, self._start)
        else:
            loop.call_soon(self._start)

    # --- sending --------------------------------------------------------------------------------

    def _start(self) -> None:
        """Send what is pending, unless a request or task is under way. Acks that fit into one request need no task."""
        self.deliveries.scheduled = False
        if self.deliveries.closed or self._in_flight is not None or (self._task is not None and not self._task.done()):
            return
        if self._spool is None:
            try:
                self.gather()
                session, pending = self._session, self.pending
                if not pending.acks and not pending.nacks:
                    return
                if not pending.nacks and session is not None and not session.link.closed:
                    ranges, tags = flat(pending.acks)
                    if len(ranges) <= REQUEST_RANGES_MAX:
                        self._client.progressed()
                        self._in_flight, self.pending = pending, PendingOutcomes(pending.holds)
                        request = m.AckRequest(session.number, ranges, tags)
                        session.link.call(request, partial(self._acked, pending, session))
                        return
            except Exception as error:  # noqa: BLE001 (the pull client gets it, as an error of the task)
                self._defect(error)
                return
        self._begin(self._send_all())

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = tasks.start(work, "plait-acks", failed=self._defect)

    def _defect(self, error: Exception) -> None:
        self._error = tasks.error_of(error)
        self._client.failed(self._error)

    def _acked(
        self, sending: PendingOutcomes, session: ConsumerSession, _: Any, __: memoryview, error: PlaitError | None
    ) -> None:
        self._in_flight = None
        pending = self.pending
        try:
            if error is None:
                if self.on_stored is not None:
                    self.on_stored()
                if (self.deliveries.unsent or pending.acks or pending.nacks) and not self.deliveries.scheduled:
                    self._start()
            else:
                self._put_back(sending, session)
                if not self.deliveries.closed:
                    self._begin(self._resend(error, session))
        finally:
            self._wake_waiting()

    def _wake_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def _put_back(self, sending: PendingOutcomes, session: ConsumerSession) -> None:
        """The broker may not have stored these outcomes: send them again."""
        if session is not self._session:
            # The session is lost: the tags of these ranges are not valid in the next one.
            sending.new_session()
        self.pending.give_back(sending)

    async def _resend(self, failure: PlaitError, session: ConsumerSession) -> None:
        if await self._continues_after(failure, session):
            await self._send_all()

    async def _send_all(self) -> None:
        """Send until nothing is pending. Outcomes that are added meanwhile leave with the next request."""
        while True:
            self.gather()
            sending, session = self.pending, self._session
            if sending.acks or sending.nacks:
                self._client.progressed()
            if not (sending.acks or sending.nacks) or session is None or session.link.closed:
                # Without a link they are sent after the next attach.
                if await self._save_and_recheck():
                    continue
                return
            self._in_flight, self.pending = sending, PendingOutcomes(sending.holds)
            try:
                await sending.send(session, self._client.partition, self._client.terms.group)
                self._in_flight = None
                if self.on_stored is not None:
                    self.on_stored()
            except BaseException as error:
                self._in_flight = None
                # Put back also when ``close`` stops waiting for a reply.
                self._put_back(sending, session)
                if not isinstance(error, PlaitError):
                    # The loop may be ending, so the spool is written here and not in a thread.
                    if self._spool is not None and (write := self._spool.change(self.partition, *self.pending.plain())):
                        write()
                    raise
                failure = error
            else:
                continue
            if not await self._continues_after(failure, session):
                return

    async def _continues_after(self, failure: PlaitError, session: ConsumerSession) -> bool:
        """Handle a failed request. True: send the pending outcomes again; False: the next attach does."""
        if isinstance(failure, Unavailable | StaleSession):
            if self._session is None or self._session is session:
                self._client.lost(stale=isinstance(failure, StaleSession))
                return await self._save_and_recheck()
        elif failure.retryable:
            await self._save()
            await asyncio.sleep(self._limits.reconnect_max_seconds)
        else:
            self._error = failure
            self._client.failed(failure)
            await self._save()
            return False
        return True

    async def flush(self) -> None:
        """Wait until the broker has every ack and nack reported so far."""
        deliveries = self.deliveries
        while not (deliveries.closed and deliveries.gone):
            if deliveries.inbox:
                deliveries.absorb()
            if self._error is not None:
                raise self._error
            if deliveries.unsent:
                self._start()
            if (task := self._task) is not None and not task.done():
                # ``asyncio.wait`` rather than ``await task``: ``close`` cancels the task, not the callers of ``flush``.
                await asyncio.wait([task])
                if not task.cancelled() and (error := task.exception()) is not None:
                    raise error
                continue
            if self._in_flight is None and not (self.pending.acks or self.pending.nacks or deliveries.unsent):
                return
            if deliveries.closed:
                deliveries.check_open()
            if self._in_flight is not None:
                answered = asyncio.get_running_loop().create_future()
                self._waiting.append(answered)
                await answered
                continue
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

    # --- the spool ------------------------------------------------------------------------------

    async def _save(self) -> None:
        """Write the pending outcomes to the spool, if there is one. Outcomes reported meanwhile need another write."""
        if self._spool is not None:
            await self._spool.save(self.partition, *self.pending.plain())

    async def _save_and_recheck(self) -> bool:
        """Save to the spool, if there is one. True: newer outcomes were reported, or some can be sent by now."""
        if self._spool is None:
            return False
        await self._save()
        up = self._session is not None and not self._session.link.closed
        return bool(self.deliveries.unsent or (up and (self.pending.acks or self.pending.nacks)))

    async def close(self, *, flush: bool = True) -> None:
        """Send the pending outcomes (if ``flush``) within ``request_seconds``. Then acks and nacks raise ``Closed``."""
        if flush and not self.deliveries.closed:
            try:
                async with asyncio.timeout(self._limits.request_seconds):
                    await self.flush()
            except (PlaitError, TimeoutError):
                # Messages whose ack was not sent are delivered again: delivery is at least once.
                pass
        self.deliveries.closed = True
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._wake_waiting()
        await self._save()
        if self._spool is not None:
            await self._spool.saved()
