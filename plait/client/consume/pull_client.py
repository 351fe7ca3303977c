"""One partition of a consumer: attaches, pulls, and tells its broker what became of the rows.

What became of the rows is told by ``AckCollector``. After a lost connection it attaches again and names what is still in
the consumer's hands (R13); when it was out of contact for too long, or the broker has given it up, it drops what the
user has not started, because somebody else has it by now.
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
from plait.client.consume.delivered import DeliveredFrame
from plait.client.consume.failure import UNBEGUN, EpochRange, FailureOutcome
from plait.client.consume.pending_outcomes import merged
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

#: Damaged answers in a row before the consumer gives up: the broker checks what it hands out a second time.
BROKEN_MAX = 3
#: A pull for a large fetch may bring so many times the bytes of others.
LARGE_PULL = 4
#: Pulls under way at a time.
PULLS_MAX = 3


class Terms(NamedTuple):
    """What a consumer asks of its group, on each partition."""

    subject: str
    group: str | None
    client: str
    start: Any
    delivery: str
    retry: Retry | None = None
    ordered: bool = False
    affinity: bool = False
    #: The version of the route that the group began with.
    began: int = 0

    @property
    def tracks(self) -> bool:
        """At most once: what is pulled counts as handled, unless it is given back when the consumer closes."""
        return self.delivery != "at_most_once"


class Feed(Protocol):
    """The consumer, as its partitions see it."""

    @property
    def pulling(self) -> bool:
        """Rows are wanted at all."""

    @property
    def several(self) -> bool:
        """There are several partitions."""

    @property
    def suspended(self) -> bool:
        """What comes is for others."""

    def wanted(self, client: PullClient, *, patient: bool) -> int:
        """How many rows the next pull asks for; 0: none now. ``patient``: none rather than few."""

    def large(self) -> bool:
        """It is for large fetches."""

    def arrived(self, delivered: DeliveredFrame) -> None:
        """A frame came."""

    def take_back(self, client: PullClient, lps: LpSet | None = None) -> list[Piece]:
        """The partition's rows (of some logical partitions) that nobody began with; nobody gets them from us now."""

    def hand_back(self) -> None:
        """The same of all partitions, and they are for others."""

    def news(self) -> None:
        """Whoever waits for rows is to look again."""

    def pulled(self) -> None:
        """A partition got what it asked for, or less, and has asked for more: others may have room."""

    def has_more(self, client: PullClient) -> None:
        """Whether a partition is attached and has more rows at its broker has changed."""

    def room(self, client: PullClient) -> None:
        """Rows of a partition were settled: there may be room for new ones."""

    def failed(self, error: PlaitError) -> None:
        """Nothing works any more."""

    def named(self, client: PullClient) -> bool:
        """The newest route names its partition."""

    async def astray(self) -> None:
        """The partition is not where the route says: look at the route again."""


class PullClient:
    """See the module."""

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
        #: Where its messages are stored.
        self.partition = partition
        self.settling = AckCollector(self, limits, spool)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._link: Link | None = None
        self._session = 0
        self.attached = False
        #: Leaving ends the session at the broker at once; otherwise it ends with the lease.
        self.detaches = True
        self._detached: asyncio.Future[None] | None = None
        self._stale = False
        self._lost_at = 0.0
        self._partition_id = 0
        #: The route does not name the partition any more.
        self.retiring = False
        #: Frames with rows that are not settled, oldest first.
        self.open: dict[DeliveredFrame, None] = {}
        self.open_bytes = 0
        self._pulled_count = 0
        #: Pulls under way, and the rows they ask for.
        self.pulls = 0
        self.asked = 0
        #: Pulls so far.
        self._pull_number = 0
        #: The last pull left rows at the broker.
        self.more = False
        #: Damaged answers in a row.
        self._broken = 0

    # --- opening and closing --------------------------------------------------------------------

    def prepare(self, loop: asyncio.AbstractEventLoop) -> None:
        """Before anything else."""
        self._loop = loop
        self.settling.open(loop)
        self._partition_id = self.settling.partition
        self._node.on_lost.append(self._link_lost)

    def start(self) -> None:
        """Attach, if that was not done, and stay so."""
        assert self._loop is not None
        name = f"plait-consumer-{self.partition.name}"
        self._task = tasks.start(self._stay_attached(self._loop), name, failed=self._defect)

    def _defect(self, error: Exception) -> None:
        self._feed.failed(tasks.error_of(error))

    async def leave(self) -> None:
        """Give back what nobody began with and leave the group; what was said was sent before."""
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
                    # The connection keeps the session alive. A broker that stood still reads this before the attach of
                    # this consumer's successor, which would find its name taken.
                    link.call(m.DetachRequest(self._session), _ignore)
        self.attached = False

    async def _give_back(self, link: Link) -> None:
        """What was pulled ahead and nobody began with goes back as if it had not been delivered."""
        ranges = self._unbegun()
        while ranges or self.pulls:
            # It ends the pulls that wait at the broker, too: they would only bring the same rows again. What such a
            # pull brought just before comes before the answer.
            for nack in split_nack(m.NackRequest(self._session, ranges, *UNBEGUN)):
                await link.request(nack)
            ranges = self._unbegun()
            if not ranges:
                break

    def _unbegun(self) -> list[EpochRange]:
        """Rows that nobody began with, which are not ours any more."""
        pieces = self._feed.take_back(self)
        for delivered, start, stop in pieces:
            delivered.nack_rows(slice(start, stop), UNBEGUN)
        return [piece for d in dict.fromkeys(d for d, _, _ in pieces) for piece in d.collect()[1].get(UNBEGUN, [])]

    async def attach_first(self, seconds: float) -> None:
        """Attach within so many seconds, or raise why that cannot be."""
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
                await self._feed.astray()
                if not self._feed.named(self):
                    raise
            except Unavailable:
                if self._loop.time() >= deadline:
                    raise

    def _token(self) -> int:
        """What proves that a session is this one's, where that is needed."""
        return 0

    def _holds(self) -> list[EpochRange]:
        """What is still here, in as many ranges as one attach takes."""
        holds = merged([piece for delivered in self.open for piece in delivered.open_ranges()])
        if len(holds) > REQUEST_RANGES_MAX:
            # Rows that no handler has begun with come again.
            self._drop(self._feed.take_back(self))
            holds = merged([piece for delivered in self.open for piece in delivered.open_ranges()])
        holds += merged(self.settling.unsent)
        if len(holds) > REQUEST_RANGES_MAX:
            log.warning(
                "%s: messages being handled lie in %d separate ranges, and a broker takes %d when a consumer attaches; "
                "the rest may be delivered again",
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
        self._partition_id = self.settling.partition = attached.partition
        self._session = attached.session
        self._link = link
        self.attached = True
        self._feed.has_more(self)
        self.pulls = self.asked = 0
        self.settling.attached(link, attached.session, attached.reasons_from, attached.attempts)
        self._attached_as(attached, link)
        self.pull()

    def _attached_as(self, attached: m.AttachReply, link: Link) -> None:
        """The session is new."""

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
                        await self._feed.astray()
                    pause = min(2 * pause, self._limits.reconnect_max_seconds)

    def _link_lost(self) -> None:
        self._lose(stale=False)

    def _lose(self, *, stale: bool) -> None:
        """The link is gone, or the broker has given the session up."""
        self._stale |= stale
        if self.attached:
            self.attached = False
            self._feed.has_more(self)
            self._lost_at = self._node.heard
            self.settling.detached()
        if self._detached is not None and not self._detached.done():
            self._detached.set_result(None)

    def _drop_unstarted(self, link: Link, loop: asyncio.AbstractEventLoop) -> None:
        """Given up, or out of contact long enough to be: others have what we had not started."""
        if not self._terms.tracks:
            # What was handed out at most once is nobody else's.
            self._stale = False
            return
        lost_seconds = link.welcome.consumer_lost_seconds if link.welcome else 5.0
        if not self._stale and loop.time() - self._lost_at < lost_seconds:
            return
        self._stale = False
        self._drop(self._feed.take_back(self))

    def _drop(self, pieces: list[Piece]) -> None:
        """The broker has them back already: nobody is told."""
        frames = dict.fromkeys(d for d, _, _ in pieces)
        for delivered in frames:
            self.settling.settle_now(delivered)
        for delivered, start, stop in pieces:
            delivered.nack_rows(slice(start, stop))
        for delivered in frames:
            delivered.collect()
            if not delivered.open_count:
                self.settled(delivered)

    # --- pulling --------------------------------------------------------------------------------

    def held(self) -> int:
        """Rows in the user's hands, and those that wait for it."""
        return sum([delivered.open_count for delivered in self.open]) if self.open else 0

    def span(self) -> int:
        """Rows pulled since the oldest one that is still open."""
        oldest = next(iter(self.open), None)
        return 0 if oldest is None else self._pulled_count - oldest.position

    def pull(self, *, patient: bool = True) -> None:
        """Ask for rows, as many as there is room for; where that is few, ``patient`` waits for more room."""
        link = self._link
        if not self.attached or self.retiring or link is None or link.closed or not self._feed.pulling:
            return
        # While there is more at the broker, it reads the next rows during the transfer of these.
        while self.pulls < (PULLS_MAX if self.more else 1) and (count := self._feed.wanted(self, patient=patient)) > 0:
            size = self._limits.pull_bytes
            if self._feed.large():
                # Whole frames: their bytes limit a large pull, not a count that ends inside of one.
                size *= LARGE_PULL
            self.pulls += 1
            self.asked += count
            self._pull_number += 1
            link.call(
                m.PullRequest(self._session, count, size, self._limits.pull_wait_seconds),
                functools.partial(self._pulled, self._session, count, self._pull_number),
            )
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
        # After whoever was woken: the rows that are here come first.
        self._loop.call_soon(self.pull)

    def _take_in(self, answer: m.PullReply, payload: memoryview, number: int) -> None:
        owner = self.settling if self._terms.tracks else None
        ranges = answer.ranges
        for frame in frames_in(payload):
            frame.verify()
            attempts = ranges if len(ranges) == 1 else [r for r in ranges if r[0] < frame.end and r[1] > frame.base]
            delivered = self._kind(frame, self._terms.subject, self.partition, owner, attempts)
            if owner is not None:
                self._opened(delivered)
            self._feed.arrived(delivered)

    def _opened(self, delivered: DeliveredFrame) -> None:
        """Its rows are in our hands until they are settled."""
        delivered.position = self._pulled_count
        self._pulled_count += delivered.count
        self.open[delivered] = None
        self.open_bytes += delivered.size

    def _take_back(self, broken: FrameError) -> None:
        """Rows came damaged: the broker gets back what is not in our hands, looks closer, and leaves out the bad."""
        self._broken += 1
        if self._broken > BROKEN_MAX or not self._terms.tracks:
            self._feed.failed(broken)
            return
        log.warning("rows of %s came damaged and are asked for again: %s", self.partition, broken)
        assert self._link is not None
        self._link.call(m.DetachRequest(self._session), _ignore)
        self._lose(stale=False)

    def _forget_all(self) -> None:
        """The subject was deleted and made anew: its old messages are nobody's, and their acks mean nothing."""
        self.settling.forget()
        for delivered in self.open:
            delivered.owner = None
        self.open.clear()
        self.open_bytes = 0
        self._feed.take_back(self)

    # --- what became of the rows ----------------------------------------------------------------

    @property
    def alone(self) -> bool:
        """It is the only partition of its consumer."""
        return not self._feed.several

    def settled(self, delivered: DeliveredFrame) -> None:
        """No row of the frame is open any more."""
        if delivered in self.open:
            del self.open[delivered]
            self.open_bytes -= delivered.size

    def progressed(self) -> None:
        """Rows were settled: there may be room for new ones."""
        self._feed.room(self)

    def told(self) -> None:
        """The broker knows what was said."""

    def died(self, count: int, failed: FailureOutcome) -> None:
        """So many of the rows that failed in this way are dead letters."""
        log.warning(
            "%d message%s of %s went to the dead letters of group %s: %s",
            count,
            "" if count == 1 else "s",
            self.partition,
            self._terms.group,
            failed.reason or Reason(),
        )

    def lost(self, *, stale: bool) -> None:
        """The link is gone, or the broker has given the session up."""
        self._lose(stale=stale)

    def failed(self, error: PlaitError) -> None:
        """Nothing can be settled any more."""
        self._feed.failed(error)


async def _attach(link: Link, attach: m.AttachRequest) -> m.AttachReply:
    """Ask for a session. Who does not wait for it any more leaves none behind: it would be in its own way next time."""
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
            # It came in the same moment.
            leave(future.result().session)
        raise


def _ignore(_: Any, __: memoryview, ___: PlaitError | None) -> None:
    """What is said next comes after it, whatever the answer."""
