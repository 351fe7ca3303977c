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
from typing import Any, NamedTuple, Protocol

from plait import tasks
from plait.client.consume.ack_collector import AckCollector, Piece
from plait.client.consume.ack_requests import split_nack
from plait.client.consume.ack_spool import AckSpool
from plait.client.consume.buffer import BufferedRows
from plait.client.consume.delivered import DeliveredFrame
from plait.client.consume.failure import UNBEGUN, EpochRange, FailureOutcome
from plait.client.consume.pending_outcomes import merged
from plait.client.consume.prefetch import Prefetch
from plait.client.net.node import Node
from plait.client.types import PartitionName
from plait.errors import FrameError, GroupBusy, PlaitError, StaleRoute, StaleSession, Unavailable
from plait.frame.view import frames_in
from plait.limits import REQUEST_RANGES_MAX, ClientLimits
from plait.model.logical_partitions import LpSet
from plait.model.reason import Reason
from plait.model.retry_policy import Retry
from plait.wire import messages as m
from plait.wire.link import Link

log = logging.getLogger("plait.client")

#: Consecutive damaged replies after which the consumer fails. The broker verifies rows that it delivers a second time.
BROKEN_MAX = 3
#: A pull for a large fetch may return this many times ``pull_bytes``.
LARGE_PULL = 4
#: Pulls in flight at a time, per partition.
PULLS_MAX = 3


class Terms(NamedTuple):
    """The settings that a consumer attaches with, the same on each partition."""

    subject: str
    group: str | None
    client: str
    start: Any
    delivery: str
    retry: Retry | None = None
    ordered: bool = False
    affinity: bool = False
    #: The route version that the group began with.
    began: int = 0

    @property
    def tracks(self) -> bool:
        """Rows need outcomes. False for at_most_once: pulled rows count as handled unless ``close`` returns them."""
        return self.delivery != "at_most_once"


class Feed(Protocol):
    """The interface of a consumer to its pull clients."""

    @property
    def buffer(self) -> BufferedRows:
        """The rows that were delivered and not yet handed to the user."""

    @property
    def prefetch(self) -> Prefetch[PullClient]:
        """The limits of the consumer."""

    @property
    def several(self) -> bool:
        """The consumer has several partitions."""

    @property
    def suspended(self) -> bool:
        """The consumer is suspended and returns rows that arrive."""

    def wanted(self, client: PullClient, *, patient: bool) -> int:
        """The number of rows that the next pull requests; 0: do not pull. ``patient``: 0 rather than a few rows."""

    def take_back(self, client: PullClient, lps: LpSet | None = None) -> list[Piece]:
        """Remove and return the partition's rows (of ``lps``; None: all) that no handler has begun."""

    def hand_back(self) -> None:
        """Return the rows of all partitions that no handler has begun to their brokers."""

    def news(self) -> None:
        """Wake the callers that wait for rows."""

    def pulled(self) -> None:
        """A partition has sent its pulls, possibly for fewer rows than before: starved partitions may have room."""

    def has_more(self, client: PullClient) -> None:
        """``client.attached`` or ``client.more`` has changed."""

    def room(self, client: PullClient) -> None:
        """Rows of a partition got an outcome: there may be room to pull more."""

    def failed(self, error: PlaitError) -> None:
        """The consumer cannot continue."""

    def named(self, client: PullClient) -> bool:
        """The newest known route names the client's partition."""

    async def refresh_route(self) -> None:
        """Refresh the route: the broker does not have the partition."""


class PullClient:
    """The consumer's connection to one partition."""

    def __init__(
        self,
        feed: Feed,
        node: Node,
        limits: ClientLimits,
        terms: Terms,
        partition: PartitionName,
        kind: type[DeliveredFrame],
        spool: AckSpool | None = None,
    ) -> None:
        self._feed = feed
        self._node = node
        self._limits = limits
        self._terms = terms
        self._kind = kind
        self.partition = partition
        self.collector = AckCollector(self, limits, spool)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._link: Link | None = None
        self._session = 0
        self.attached = False
        #: ``leave`` ends the session at the broker at once; False: it ends when its lease expires.
        self.detaches = True
        self._detached: asyncio.Future[None] | None = None
        self._stale = False
        self._lost_at = 0.0
        self._partition_id = 0
        #: The route no longer names the partition.
        self.retiring = False
        #: Frames with open rows, oldest first.
        self.open: dict[DeliveredFrame, None] = {}
        self.open_bytes = 0
        self._pulled_count = 0
        #: Pulls in flight, and the rows they request.
        self.pulls = 0
        self.asked = 0
        #: The number of the last pull.
        self._pull_number = 0
        #: The last pull left rows at the broker.
        self.more = False
        #: Consecutive damaged replies.
        self._broken = 0

    # --- opening and closing --------------------------------------------------------------------

    def prepare(self, loop: asyncio.AbstractEventLoop) -> None:
        """Bind the client to the loop and load its spool. Called once, before anything else."""
        self._loop = loop
        self.collector.open(loop)
        self._partition_id = self.collector.partition
        self._node.on_lost.append(self._link_lost)

    def start(self) -> None:
        """Attach if needed, and attach again after every lost connection."""
        assert self._loop is not None
        name = f"plait-consumer-{self.partition.name}"
        self._task = tasks.start(self._stay_attached(self._loop), name, failed=self._defect)

    def _defect(self, error: Exception) -> None:
        self._feed.failed(tasks.error_of(error))

    async def leave(self) -> None:
        """Return the rows that no handler has begun, and leave the group. The caller has sent all outcomes before."""
        if self._link_lost in self._node.on_lost:
            self._node.on_lost.remove(self._link_lost)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        link = self._link
        if self.attached and link is not None and not link.closed:
            try:
                async with asyncio.timeout(self._limits.request_seconds):
                    with contextlib.suppress(PlaitError):
                        await self._give_back(link)
                    if self.detaches:
                        await link.request(m.DetachRequest(self._session))
            except (PlaitError, TimeoutError):
                if self.detaches and not link.closed:
                    # The connection keeps the session alive. A stalled broker reads this request before a later
                    # consumer with the same client id attaches, which would otherwise be refused.
                    link.call(m.DetachRequest(self._session), _ignore)
        self.attached = False

    async def _give_back(self, link: Link) -> None:
        """Return prefetched rows that no handler has begun, as if they had not been delivered."""
        ranges = self._unbegun()
        while ranges or self.pulls:
            # The nack also ends the pulls suspended at the broker, which would return the same rows again. Rows of a
            # pull that was answered just before arrive before the reply to the nack.
            for nack in split_nack(m.NackRequest(self._session, ranges, *UNBEGUN)):
                await link.request(nack)
            ranges = self._unbegun()
            if not ranges:
                break

    def _unbegun(self) -> list[EpochRange]:
        """Close the rows that no handler has begun; returns their ranges."""
        pieces = self._feed.take_back(self)
        for delivered, start, stop in pieces:
            delivered.nack_rows(slice(start, stop), UNBEGUN)
        return [piece for d in dict.fromkeys(d for d, _, _ in pieces) for piece in d.collect()[1].get(UNBEGUN, [])]

    async def attach_first(self, seconds: float) -> None:
        """Attach within ``seconds``, or raise the reason why it is not possible."""
        assert self._loop is not None
        deadline = self._loop.time() + seconds
        while True:
            link = await self._node.ready(max(deadline - self._loop.time(), 0))
            try:
                return await self._attach(link)
            except StaleRoute:
                if self._loop.time() >= deadline:
                    raise
                await asyncio.sleep(self._limits.reconnect_first_seconds)
                await self._feed.refresh_route()
                if not self._feed.named(self):
                    raise
            except Unavailable:
                if self._loop.time() >= deadline:
                    raise

    def _token(self) -> int:
        """The session token; 0: the session needs none."""
        return 0

    def _holds(self) -> list[EpochRange]:
        """The rows that the consumer still holds, as at most ``REQUEST_RANGES_MAX`` ranges."""
        holds = merged([piece for delivered in self.open for piece in delivered.open_ranges()])
        if len(holds) > REQUEST_RANGES_MAX:
            # Drop the rows that no handler has begun: the broker redelivers them.
            self._drop(self._feed.take_back(self))
            holds = merged([piece for delivered in self.open for piece in delivered.open_ranges()])
        holds += merged(self.collector.unsent)
        if len(holds) > REQUEST_RANGES_MAX:
            log.warning(
                "%s: the messages being handled form %d separate ranges, and an attach request takes %d; "
                "the other messages may be delivered again",
                self.partition,
                len(holds),
                REQUEST_RANGES_MAX,
            )
        return holds[:REQUEST_RANGES_MAX]

    async def _attach(self, link: Link) -> None:
        holds = self._holds()
        terms = self._terms
        attached = await _attach(
            link,
            m.AttachRequest(
                self.partition.name,
                terms.group,
                terms.client,
                terms.start,
                terms.delivery,
                holds,
                self._partition_id,
                terms.retry,
                terms.ordered,
                terms.affinity,
                self._token(),
                terms.began,
            ),
        )
        if self._partition_id not in (0, attached.partition):
            self._forget_all()
        self._partition_id = self.collector.partition = attached.partition
        self._session = attached.session
        self._link = link
        self.attached = True
        self._feed.has_more(self)
        self.pulls = self.asked = 0
        self.collector.attached(link, attached.session, attached.reasons_from, attached.attempts)
        self._attached_as(attached, link)
        self.pull()

    def _attached_as(self, attached: m.AttachReply, link: Link) -> None:
        """A new session has started."""

    async def _stay_attached(self, loop: asyncio.AbstractEventLoop) -> None:
        """Attach again whenever the link or the session is lost."""
        while True:
            if self.attached and self._link is not None and not self._link.closed:
                self._detached = loop.create_future()
                await self._detached
            self._lose(stale=False)
            pause = self._limits.reconnect_first_seconds
            while not self.attached:
                try:
                    link = await self._node.ready()
                    self._drop_unstarted(link, loop)
                    await self._attach(link)
                except PlaitError as error:
                    if isinstance(error, GroupBusy):
                        log.warning("%s", error)
                    elif not error.retryable:
                        self._feed.failed(error)
                        return
                    await asyncio.sleep(pause)
                    if isinstance(error, StaleRoute):
                        await self._feed.refresh_route()
                    pause = min(2 * pause, self._limits.reconnect_max_seconds)

    def _link_lost(self) -> None:
        self._lose(stale=False)

    def _lose(self, *, stale: bool) -> None:
        """The link is closed, or the broker has ended the session (``stale``)."""
        self._stale |= stale
        if self.attached:
            self.attached = False
            self._feed.has_more(self)
            self._lost_at = self._node.last_contact
            self.collector.detached()
        if self._detached is not None and not self._detached.done():
            self._detached.set_result(None)

    def _drop_unstarted(self, link: Link, loop: asyncio.AbstractEventLoop) -> None:
        """Drop the rows that no handler has begun, if the broker may have delivered them to other consumers.

        That is so after it ended the session, and after a disconnection long enough for it to do so.
        """
        if not self._terms.tracks:
            # Rows delivered at most once are never redelivered.
            self._stale = False
            return
        lost_seconds = link.welcome.consumer_lost_seconds if link.welcome else 5.0
        if not self._stale and loop.time() - self._lost_at < lost_seconds:
            return
        self._stale = False
        self._drop(self._feed.take_back(self))

    def _drop(self, pieces: list[Piece]) -> None:
        """Close rows without reporting an outcome: the broker has taken them back already."""
        frames = dict.fromkeys(d for d, _, _ in pieces)
        for delivered in frames:
            self.collector.collect_now(delivered)
        for delivered, start, stop in pieces:
            delivered.nack_rows(slice(start, stop))
        for delivered in frames:
            delivered.collect()
            if not delivered.open_count:
                self.frame_closed(delivered)

    # --- pulling --------------------------------------------------------------------------------

    def held(self) -> int:
        """Open rows: those that the user holds and those in the buffer."""
        return sum([delivered.open_count for delivered in self.open]) if self.open else 0

    def span(self) -> int:
        """Rows received since the oldest row that is still open."""
        oldest = next(iter(self.open), None)
        return 0 if oldest is None else self._pulled_count - oldest.position

    def pull(self, *, patient: bool = True) -> None:
        """Pull as many rows as there is room for. If that is only a few, ``patient`` waits for more room."""
        link = self._link
        if not self.attached or self.retiring or link is None or link.closed:
            return
        # While the broker has more rows, it reads the next ones during the transfer of these.
        while self.pulls < (PULLS_MAX if self.more else 1) and (count := self._feed.wanted(self, patient=patient)) > 0:
            size = self._limits.pull_bytes
            if self._feed.prefetch.large:
                # Bytes limit a large pull, not a count that ends inside a frame.
                size *= LARGE_PULL
            self.pulls += 1
            self.asked += count
            self._pull_number += 1
            link.call(
                m.PullRequest(self._session, count, size, self._limits.pull_wait_seconds),
                functools.partial(self._pulled, self._session, count, self._pull_number),
            )
        if self._feed.prefetch.starved:
            self._feed.pulled()

    def _pulled(
        self, session: int, count: int, number: int, answer: Any, payload: memoryview, error: PlaitError | None
    ) -> None:
        if session != self._session or not self.attached:
            return
        assert self._loop is not None
        self.pulls -= 1
        self.asked -= count
        if error is not None:
            if isinstance(error, StaleSession | Unavailable):
                self._lose(stale=isinstance(error, StaleSession))
            elif error.retryable:
                self._loop.call_later(self._limits.reconnect_max_seconds, self.pull)
            else:
                self._feed.failed(error)
            return
        if self.more != answer.more:
            self.more = answer.more
            self._feed.has_more(self)
        if len(payload):
            try:
                self._take_in(answer, payload, number)
                self._broken = 0
                if self._feed.suspended:
                    self._feed.hand_back()
            except FrameError as broken:
                self._take_back(broken)
        self._feed.news()
        # After the woken callers have run: they take the buffered rows first, which makes room.
        self._loop.call_soon(self.pull)

    def _take_in(self, answer: m.PullReply, payload: memoryview, number: int) -> None:
        collector = self.collector if self._terms.tracks else None
        ranges = answer.ranges
        for frame in frames_in(payload):
            frame.verify()
            attempts = ranges if len(ranges) == 1 else [r for r in ranges if r[0] < frame.end and r[1] > frame.base]
            delivered = self._kind(frame, self._terms.subject, self.partition, collector, attempts)
            if collector is not None:
                self._opened(delivered)
            self._feed.buffer.append(delivered)

    def _opened(self, delivered: DeliveredFrame) -> None:
        """Track a frame: its rows are held until they have outcomes."""
        delivered.position = self._pulled_count
        self._pulled_count += delivered.count
        self.open[delivered] = None
        self.open_bytes += delivered.size

    def _take_back(self, broken: FrameError) -> None:
        """The reply is damaged: end the session and attach again.

        The broker then redelivers the rows that this consumer does not hold. It verifies them and leaves out bad ones.
        """
        self._broken += 1
        if self._broken > BROKEN_MAX or not self._terms.tracks:
            self._feed.failed(broken)
            return
        log.warning("rows of %s arrived damaged and are pulled again: %s", self.partition, broken)
        assert self._link is not None
        self._link.call(m.DetachRequest(self._session), _ignore)
        self._lose(stale=False)

    def _forget_all(self) -> None:
        """The subject was deleted and created again: drop its old messages and their outcomes."""
        self.collector.forget()
        for delivered in self.open:
            delivered.collector = None
        self.open.clear()
        self.open_bytes = 0
        self._feed.take_back(self)

    # --- outcomes (OutcomeListener) -------------------------------------------------------------

    @property
    def alone(self) -> bool:
        """The consumer has no other partition."""
        return not self._feed.several

    def frame_closed(self, delivered: DeliveredFrame) -> None:
        """Every row of the frame has an outcome."""
        if delivered in self.open:
            del self.open[delivered]
            self.open_bytes -= delivered.size

    def progressed(self) -> None:
        """Rows got an outcome: there may be room to pull more."""
        self._feed.room(self)

    def outcomes_stored(self) -> None:
        """The broker has stored the outcomes that were sent."""

    def dead_lettered(self, count: int, failed: FailureOutcome) -> None:
        """``count`` of the rows that failed with this outcome became dead letters."""
        log.warning(
            "%d message%s of %s went to the dead letters of group %s: %s",
            count,
            "" if count == 1 else "s",
            self.partition,
            self._terms.group,
            failed.reason or Reason(),
        )

    def lost(self, *, stale: bool) -> None:
        """The link is closed, or the broker has ended the session (``stale``)."""
        self._lose(stale=stale)

    def failed(self, error: PlaitError) -> None:
        """No further outcome can be sent."""
        self._feed.failed(error)


async def _attach(link: Link, attach: m.AttachRequest) -> m.AttachReply:
    """Start a session. If the caller is cancelled, end the session, as it would block the consumer's next attach."""
    future: asyncio.Future[m.AttachReply] = asyncio.get_running_loop().create_future()

    def leave(session: int) -> None:
        if not link.closed:
            link.call(m.DetachRequest(session), _ignore)

    def answered(answer: Any, _: memoryview, error: PlaitError | None) -> None:
        if future.done():
            if error is None:
                leave(answer.session)
        elif error is not None:
            future.set_exception(error)
        else:
            future.set_result(answer)

    link.call(attach, answered)
    try:
        return await future
    except asyncio.CancelledError:
        if not future.cancelled() and future.exception() is None:
            # The reply arrived in the same turn of the loop.
            leave(future.result().session)
        raise


def _ignore(_: Any, __: memoryview, ___: PlaitError | None) -> None:
    """Ignore the reply to a detach: requests are processed in order, so the next one follows it in any case."""
