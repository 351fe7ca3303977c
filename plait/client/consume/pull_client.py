"""One partition of a consumer: attaches to the broker, pulls rows, and reports their outcomes.

``AckCollector`` sends the outcomes. After a lost connection the pull client attaches again and names the rows that the
consumer still holds (R13). If it was disconnected for too long, or the broker has ended its session, it drops the rows
that no handler has begun, because the broker has delivered them to another consumer by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from plait import tasks
from plait.client.consume.ack_collector import AckCollector
from plait.client.consume.ack_spool import AckSpool
from plait.client.consume.attaching import StartingSession, limited, open_ranges
from plait.client.consume.delivered import DeliveredFrame, Piece
from plait.client.consume.failure import UNBEGUN, EpochRange
from plait.client.consume.outcomes import split_nack
from plait.client.consume.row_runs import merged
from plait.client.consume.terms import Terms
from plait.client.net.node import ConsumerSession, Node
from plait.client.types import PartitionName
from plait.errors import FrameError, GroupBusy, PlaitError, StaleRoute, StaleSession, Unavailable
from plait.frame.view import frames_in
from plait.limits import REQUEST_RANGES_MAX
from plait.wire import messages as m
from plait.wire.link import Link

if TYPE_CHECKING:
    from plait.client.consume.fetcher import Fetcher

log = logging.getLogger("plait.client")

#: Consecutive damaged replies after which the consumer fails. The broker verifies rows that it delivers a second time.
BROKEN_MAX = 3
#: A pull for a large fetch may return this many times ``pull_bytes``.
LARGE_PULL = 4
#: Pulls in flight at a time, per partition.
PULLS_MAX = 3


class Pull(NamedTuple):
    """A pull in flight."""

    session: ConsumerSession
    #: The number of rows that it requests.
    rows: int
    number: int


class PullClient:
    """The consumer's connection to one partition."""

    def __init__(
        self, fetcher: Fetcher, node: Node, terms: Terms, partition: PartitionName, spool: AckSpool | None
    ) -> None:
        self.fetcher = fetcher
        self._node = node
        self._limits = fetcher.limits
        self.terms = terms
        self.partition = partition
        self.collector = AckCollector(self, fetcher.limits, spool, any_thread=fetcher.any_thread)
        #: The rows that the consumer holds.
        self.deliveries = self.collector.deliveries
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        #: None: not attached.
        self.session: ConsumerSession | None = None
        self._starting = StartingSession()
        #: The secret with which an ordered consumer resumes its locks; 0: none.
        self._token = 0
        #: ``leave`` ends the session at the broker at once; False: it ends when its lease expires.
        self.detaches = True
        self._detached: asyncio.Future[None] | None = None
        self._stale = False
        self._lost_at = 0.0
        #: True if the route no longer names the partition.
        self.retiring = False
        #: Pulls in flight, and the rows they request.
        self.pulls = self.asked = 0
        #: The number of the last pull.
        self._pull_number = 0
        #: True if the last pull left rows at the broker.
        self.more = False
        self._broken = 0
        self.collector.open(self._loop)
        self._partition_id = self.collector.partition
        node.on_lost.append(self.lost)

    # --- opening and closing --------------------------------------------------------------------

    def start(self) -> None:
        """Attach if needed, and attach again after every lost connection."""
        self._task = tasks.start(
            self._stay_attached(),
            f"plait-consumer-{self.partition.name}",
            failed=lambda error: self.failed(tasks.error_of(error)),
        )

    async def leave(self) -> None:
        """Return the rows that no handler has begun, and leave the group. The caller has sent all outcomes before."""
        if self.lost in self._node.on_lost:
            self._node.on_lost.remove(self.lost)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        session = self.session or await self._starting.last(self._limits.request_seconds, ends=self.detaches)
        if session is not None and not session.link.closed:
            try:
                async with asyncio.timeout(self._limits.request_seconds):
                    with contextlib.suppress(PlaitError):
                        await self._give_back(session)
                    if self.detaches:
                        await session.link.request(m.DetachRequest(session.number))
            except (PlaitError, TimeoutError):
                if self.detaches:
                    # The connection keeps the session alive. A stalled broker reads this request before a later
                    # consumer with the same client id attaches, which would otherwise be refused.
                    session.end()
        self.session = None

    async def _give_back(self, session: ConsumerSession) -> None:
        """Return prefetched rows that no handler has begun, as if they had not been delivered."""
        ranges = _close_pieces(self.fetcher.take_back(self))
        while ranges or self.pulls:
            # The nack also ends the pulls suspended at the broker, which would return the same rows again. Rows of a
            # pull that was answered just before arrive before the reply to the nack.
            for nack in split_nack(m.NackRequest(session.number, ranges, *UNBEGUN)):
                await session.link.request(nack)
            ranges = _close_pieces(self.fetcher.take_back(self))
            if not ranges:
                break

    async def attach_first(self, seconds: float) -> None:
        """Attach within ``seconds``, or raise the reason why it is not possible."""
        deadline = self._loop.time() + seconds
        while True:
            link = await self._node.ready(max(deadline - self._loop.time(), 0))
            try:
                return await self._attach(link)
            except (StaleRoute, Unavailable) as error:
                if self._loop.time() >= deadline:
                    raise
                if isinstance(error, Unavailable):
                    continue
                await asyncio.sleep(self._limits.reconnect_first_seconds)
                await self.fetcher.refresh_route()
                if self.fetcher.error is not None:
                    raise self.fetcher.error from None
                route = self.fetcher.router.known(self.terms.subject)
                if route is not None and self.partition not in route.partitions:
                    raise

    def _holds(self) -> list[EpochRange]:
        """The rows that the consumer still holds, as at most ``REQUEST_RANGES_MAX`` ranges."""
        holds = open_ranges(self.deliveries)
        if len(holds) > REQUEST_RANGES_MAX:
            self._drop_unbegun()
            holds = open_ranges(self.deliveries)
        return limited(holds + merged(self.collector.unsent), self.partition)

    async def _attach(self, link: Link) -> None:
        terms = self.terms.with_filter_of(self.fetcher.terms)
        request = terms.attach_request(self.partition.name, self._partition_id, self._holds(), self._token)
        session = await self._starting.session(link, request)
        if self._partition_id not in (0, session.reply.partition):
            # The subject was deleted and created again: drop its old messages and their outcomes.
            self.collector.forget()
            self.fetcher.take_back(self)
        self._partition_id = self.collector.partition = session.reply.partition
        self.session = session
        self.fetcher.has_more(self)
        self.pulls = self.asked = 0
        self.collector.attached(session)
        self.fetcher.prefetch.note_ranked(session.reply.ranked)
        self._attached_as(session.reply)
        if self.fetcher.learn_filter(session.reply):
            self.pull()

    def _attached_as(self, attached: m.AttachReply) -> None:
        """A new session has started."""

    async def _stay_attached(self) -> None:
        """Attach again whenever the link or the session is lost."""
        while True:
            if self.session is not None and not self.session.link.closed:
                self._detached = self._loop.create_future()
                await self._detached
            self.lost()
            pause = self._limits.reconnect_first_seconds
            while self.session is None:
                try:
                    link = await self._node.ready()
                    self._drop_unstarted(link)
                    await self._attach(link)
                except PlaitError as error:
                    if isinstance(error, GroupBusy):
                        log.warning("%s", error)
                    elif not error.retryable:
                        self.failed(error)
                        return
                    await asyncio.sleep(pause)
                    if isinstance(error, StaleRoute):
                        await self.fetcher.refresh_route()
                    pause = min(2 * pause, self._limits.reconnect_max_seconds)

    def lost(self, *, stale: bool = False) -> None:
        """Drop the session: the link is closed, or the broker has ended the session (``stale``)."""
        self._stale |= stale
        if self.session is not None:
            self.session = None
            self.fetcher.has_more(self)
            self._lost_at = self._node.last_contact
            self.collector.detached()
        if self._detached is not None and not self._detached.done():
            self._detached.set_result(None)

    def _drop_unstarted(self, link: Link) -> None:
        """Drop the rows that no handler has begun, if the broker may have delivered them to other consumers.

        That is so after it ended the session, and after a disconnection long enough for it to do so.
        """
        if not self.terms.tracks:
            # Rows delivered at most once are never redelivered.
            self._stale = False
            return
        lost_seconds = link.welcome.consumer_lost_seconds if link.welcome else 5.0
        if not self._stale and self._loop.time() - self._lost_at < lost_seconds:
            return
        self._stale = False
        self._drop_unbegun()

    def _drop_unbegun(self) -> None:
        """Close the rows that no handler has begun without reporting an outcome: the broker redelivers them."""
        self.collector.gather()
        _close_pieces(self.fetcher.take_back(self))

    # --- pulling --------------------------------------------------------------------------------

    def pull(self, *, patient: bool = True) -> None:
        """Pull as many rows as there is room for. If that is only a few, ``patient`` waits for more room."""
        session, fetcher = self.session, self.fetcher
        if session is None or self.retiring or session.link.closed:
            return
        # While the broker has more rows, it reads the next ones during the transfer of these.
        while self.pulls < (PULLS_MAX if self.more else 1) and (count := self.wanted(patient=patient)) > 0:
            size = self._limits.pull_bytes
            if fetcher.prefetch.large:
                # Bytes limit a large pull, not a count that ends inside a frame.
                size *= LARGE_PULL
            self.pulls += 1
            self.asked += count
            self._pull_number += 1
            session.link.call(
                m.PullRequest(session.number, count, size, self._limits.pull_wait_seconds),
                functools.partial(self._pulled, Pull(session, count, self._pull_number)),
            )
        if fetcher.prefetch.starved:
            fetcher.relieve_soon()

    def wanted(self, *, patient: bool = True) -> int:
        """The number of rows that the next pull requests; 0: do not pull now. ``patient``: 0 rather than a few rows."""
        fetcher, prefetch, deliveries = self.fetcher, self.fetcher.prefetch, self.deliveries
        partitions, limits = prefetch.partitions, self._limits
        if fetcher.stopping or fetcher.suspended:
            return 0
        if not fetcher.tracks:
            # Nothing is prefetched: the partitions share the demand evenly.
            demand = fetcher.demand - fetcher.buffer.count
            return -(-demand // partitions) - self.asked if demand > 0 else 0
        held = deliveries.held + self.asked
        if fetcher.spans and deliveries.open and deliveries.span() >= max(prefetch.span, 2 * prefetch.ahead):
            return 0
        if partitions > 1:
            return prefetch.wanted(self, patient=patient)
        if held and deliveries.bytes >= limits.prefetch_bytes:
            return 0
        room = prefetch.ahead - held
        return room if room > 0 and not prefetch.large else prefetch.whole(room, 1)

    def _pulled(self, pull: Pull, answer: Any, payload: memoryview, error: PlaitError | None) -> None:
        if pull.session is not self.session:
            return
        self.pulls -= 1
        self.asked -= pull.rows
        if error is not None:
            self._refused(error, self.pull)
            return
        if answer.paused:
            self.fetcher.pauses.note(self.terms, answer.paused)
        if self.more != answer.more:
            self.more = answer.more
            self.fetcher.has_more(self)
        if len(payload):
            try:
                self._take_in(answer, payload, pull.number)
                self._broken = 0
                if self.fetcher.suspended:
                    self.fetcher.hand_back()
            except FrameError as broken:
                self._take_back(broken)
        if self.fetcher.waiting:
            self.fetcher.wake()
        # After the woken callers have run: they take the buffered rows first, which makes room.
        self._loop.call_soon(self.pull)

    def _refused(self, error: PlaitError, again: Callable[[], None]) -> None:
        """The broker has refused a request of the session; ``again`` repeats it after a temporary error."""
        if isinstance(error, StaleSession | Unavailable):
            self.lost(stale=isinstance(error, StaleSession))
        elif error.retryable:
            self._loop.call_later(self._limits.reconnect_max_seconds, again)
        else:
            self.failed(error)

    def _take_in(self, answer: m.PullReply, payload: memoryview, number: int) -> None:
        deliveries = self.deliveries if self.fetcher.tracks else None
        ranges = answer.ranges
        for frame in frames_in(payload):
            frame.verify()
            attempts = ranges if len(ranges) == 1 else [r for r in ranges if r[0] < frame.end and r[1] > frame.base]
            delivered = DeliveredFrame(frame, self.terms.subject, self.partition, deliveries, attempts)
            if deliveries is not None:
                deliveries.add(delivered)
            self.fetcher.buffer.append(delivered)

    def _take_back(self, broken: FrameError) -> None:
        """End the session of a damaged reply and attach again: the broker redelivers its rows, without bad ones."""
        self._broken += 1
        if self._broken > BROKEN_MAX or not self.terms.tracks:
            self.failed(broken)
            return
        log.warning("rows of %s arrived damaged and are pulled again: %s", self.partition, broken)
        assert self.session is not None
        self.session.end()
        self.lost()

    def progressed(self) -> None:
        """Pull more rows if there is room, after rows got an outcome."""
        fetcher = self.fetcher
        if fetcher.retiring:
            fetcher.leave_retired()
        if fetcher.prefetch.partitions > 1:
            fetcher.prefetch.report(self)
        self.pull()
        if fetcher.prefetch.starved:
            fetcher.relieve_soon()

    def failed(self, error: PlaitError) -> None:
        self.fetcher.fail(error)


def _close_pieces(pieces: list[Piece]) -> list[EpochRange]:
    """Close rows without reporting an outcome; returns the ranges of those that were open."""
    ranges: list[EpochRange] = []
    for delivered, start, stop in pieces:
        mask = np.zeros(delivered.count, bool)
        mask[start:stop] = True
        ranges += delivered.ranges(delivered.close_rows(mask))
    return ranges
