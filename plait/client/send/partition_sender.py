"""One partition's frames on their way, in order.

A frame is under way until the broker answers. When the link is lost, the frames that were under way are in doubt and
are sent again in order over the next one: the broker knows those it has. When the broker refuses a frame for good, its
rows fail to their caller or go elsewhere (``client.outlet``); the frames behind it name it as their predecessor and
are refused too, so once all answers are in they are signed anew as successors of what the broker really has.

A lane whose partition does not take some of the rows any more *drains*: it sends nothing new, and what is in doubt is
sent again until it is answered. Then the fate of every frame is known, and what is not stored is taken back (R8).

A row that got no answer in time fails to its caller, with its fate unknown, and those behind it go on. That breaks no
order: if it is not stored, it never will be. Once a frame behind it is stored here, the broker refuses it as one
that does not follow; once its key has moved, this partition is sealed for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from plait import tasks
from plait.client.types import PartitionName, PendingBatch
from plait.errors import (
    DiskFull,
    FlowControl,
    OutOfSequence,
    PlaitError,
    ProducerConflict,
    ReadOnly,
    StaleRoute,
    SubjectNotFound,
    Timeout,
    Unavailable,
    UnknownProducer,
)
from plait.frame.builder import FrameParts
from plait.wire import messages as m
from plait.wire.link import Link

if TYPE_CHECKING:
    from plait.client.net.node import Node
    from plait.client.send.subject_sender import SubjectSender

#: A broker that says so has not stored the frame, and might later.
REFUSALS: Final = (ReadOnly, DiskFull, FlowControl)


class SentFrame:
    """A sealed frame and who waits for it."""

    __slots__ = ("batch", "deadline", "doubt", "parts", "refusal", "sent", "sent_at", "size", "tries", "under_way")

    def __init__(self, parts: FrameParts, batch: PendingBatch, size: int, deadline: float) -> None:
        self.parts = parts
        self.batch = batch
        #: Buffer bytes that its rows take.
        self.size = size
        self.deadline = deadline
        #: Sent over the present link and not answered.
        self.under_way = False
        #: Sent over any link.
        self.sent = False
        #: Under way when a link was lost, and not answered since: the broker may have it.
        self.doubt = False
        self.sent_at = 0.0
        #: Partitions that it was definitely refused by.
        self.tries = 0
        #: What it was last refused with.
        self.refusal: PlaitError | None = None


class PartitionSender:
    """See the module."""

    __slots__ = (
        "_broken",
        "_confirmed",
        "_confirmed_of",
        "_due",
        "_elsewhere",
        "_epoch",
        "_forgotten",
        "_frames",
        "_idle",
        "_link",
        "_partition",
        "_pause",
        "_retry",
        "_routing",
        "_stale",
        "_timer",
        "_under_way",
        "draining",
        "last",
        "name",
        "node",
        "outlet",
        "producer",
        "subject",
    )

    def __init__(self, outlet: SubjectSender) -> None:
        self.outlet = outlet
        self.producer = outlet.producer
        self.subject = outlet.subject
        #: The partition and the node that has it; None: the route is not known yet.
        self.name: PartitionName | None = None
        self.node: Node | None = None
        #: Producer sequence of the last row sealed for this partition: the next frame's predecessor.
        self.last = 0
        #: Producer sequence of the last row that the broker is known to have, and of which producer id.
        self._confirmed = 0
        self._confirmed_of = 0
        #: A frame was refused: those behind it wait until all answers are in, then follow ``_confirmed``.
        self._broken = False
        #: The broker does not know the producer any more: as it said so.
        self._forgotten: UnknownProducer | None = None
        #: Nothing new is sent: the partition does not take some of it.
        self.draining = False
        #: The partition's number at its broker, and the epoch that gave it; another one may have given it to another.
        self._partition: int | None = None
        self._epoch = 0
        self._stale: int | None = None
        self._routing: asyncio.Task[None] | None = None
        self._frames: deque[SentFrame] = deque()
        self._under_way = 0
        self._link: Link | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        #: After a refusal: when to try again, and how long that was.
        self._retry: asyncio.TimerHandle | None = None
        self._pause = 0.0
        #: When what was never sent goes elsewhere, as the broker is not reached.
        self._elsewhere: asyncio.TimerHandle | None = None
        self._idle: list[asyncio.Future[None]] = []

    def bind(self, node: Node, name: PartitionName) -> None:
        """It is known where the rows go."""
        self.node, self.name = node, name
        self.producer.attach(self, node)
        self._link = node.link
        self._pump()

    # --- frames in ------------------------------------------------------------------------------

    def push(self, parts: FrameParts, batch: PendingBatch, size: int) -> None:
        """Queue a sealed frame that follows ``last``."""
        self._add(SentFrame(parts, batch, size, self.producer.loop.time() + self.producer.limits.send_seconds))

    def take_over(self, frame: SentFrame) -> None:
        """Queue a frame that is not stored anywhere, under numbers of its own, behind all others."""
        self._sign(frame)
        self._add(frame)

    def _sign(self, frame: SentFrame) -> None:
        """Numbers of its own, as the successor of the last frame."""
        producer, parts = self.producer, frame.parts
        parts.producer = frame.batch.producer = producer.id
        parts.first = frame.batch.first = producer.take(parts.count)
        parts.follow(self.last)
        frame.sent = frame.doubt = frame.under_way = False
        self.last = parts.last

    def _add(self, frame: SentFrame) -> None:
        self.last = frame.parts.last
        self._frames.append(frame)
        if self._timer is None or frame.deadline < self._due:
            self._arm(frame.deadline)
        self._pump()

    def take_back(self) -> list[SentFrame]:
        """All frames, none of which is stored, in order; they are no longer here."""
        frames, self._frames = self._frames, deque()
        self.last = self._confirmed if self._confirmed_of == self.producer.id else 0
        self._broken = False
        self._forgotten = None
        self._stop_timers()
        return list(frames)

    # --- frames out -----------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """As many frames wait as may be under way: the sender had better wait too."""
        return len(self._frames) >= self.producer.limits.in_flight_frames

    @property
    def connected(self) -> bool:
        """Its broker is there."""
        return self._link is not None and not self._link.closed

    @property
    def resolved(self) -> bool:
        """The fate of everything that was sent is known."""
        return not self._under_way and not any(frame.doubt for frame in self._frames)

    def _pump(self) -> None:
        """Send frames until the window is full."""
        if self._under_way >= len(self._frames):
            return
        link = self._link
        if link is None or link.closed:
            self._unreached()
            return
        if self._retry is not None:
            return
        if self._broken and not self.draining:
            if self._under_way:
                return
            self._repair()
        if self._partition is None:
            if not self.draining or not self.resolved:
                self._find_route()
            return
        window = self.producer.limits.in_flight_frames
        for frame in self._frames:
            if self._under_way >= window:
                return
            if not frame.under_way and (not self.draining or frame.doubt):
                self._send(link, frame)

    def _send(self, link: Link, frame: SentFrame) -> None:
        frame.under_way = frame.sent = True
        frame.sent_at = self.producer.loop.time()
        self._under_way += 1
        assert self._partition is not None
        link.call(
            m.SendRequest(self._partition),
            lambda answer, _, error: self._answered(link, frame, answer, error),
            frame.parts.parts,
            frame.parts.size,
        )

    # --- the way there --------------------------------------------------------------------------

    def _find_route(self) -> None:
        if self._routing is None:
            self._routing = tasks.start(self._route(), f"plait-route-{self.subject}", failed=self._defect)

    def _defect(self, error: Exception) -> None:
        """What asked for the route failed: what waits for it fails, the next send asks again."""
        self.outlet.abandon(tasks.error_of(error))

    async def _find(self) -> None:
        """Learn the partition's number at its broker."""
        assert self.node is not None
        assert self.name is not None
        link = self._link
        routed: m.PartitionNumberReply = await self.node.request(
            m.PartitionNumberRequest(self.name.name, self.outlet.delayed)
        )
        self._partition = routed.partition
        self._epoch = link.welcome.epoch if link is not None and link.welcome is not None else 0
        if self._stale is not None and self._stale != self._partition:
            # Elsewhere than before: nothing of this producer is there.
            self._confirmed = 0
            self._broken = True
        self._stale = None

    async def _route(self) -> None:
        try:
            await self._find()
        except (Unavailable, Timeout):
            # The next link asks again.
            pass
        except (StaleRoute, SubjectNotFound) as error:
            self._astray(error)
        except PlaitError as error:
            self._refuse_all(error)
        finally:
            self._routing = None
        self._pump()

    def _refuse_all(self, error: PlaitError) -> None:
        """The broker takes nothing at all at present."""
        if isinstance(error, REFUSALS):
            for frame in list(self._frames):
                self._turned_away(frame, error)
        else:
            self.outlet.abandon(error)

    def new_link(self, link: Link) -> None:
        """The connection was made again: what was under way is sent again, in order."""
        self._link = link
        self._stop_elsewhere()
        if self._partition is not None and (link.welcome is None or link.welcome.epoch != self._epoch):
            # A broker that lost its last moments may have given the number to another subject since.
            self._stale, self._partition = self._partition, None
        self._under_way = 0
        for frame in self._frames:
            if frame.under_way:
                frame.under_way, frame.doubt = False, True
        self._pump()

    def link_lost(self) -> None:
        """The connection is gone; the broker may be back at once, or not for long."""
        if self._frames:
            self._unreached()

    def _unreached(self) -> None:
        """Frames wait for a broker that is not connected; where the rows may go elsewhere, they do so after a while."""
        if self.node is None:
            self.outlet.look()
        elif self._elsewhere is None and self.outlet.movable:
            pause = self.outlet.patience(self)
            self._elsewhere = self.producer.loop.call_later(pause, self._go_elsewhere)

    def _go_elsewhere(self) -> None:
        self._elsewhere = None
        if self.connected:
            return
        error = self.node.last_error if self.node is not None else None
        refusal = error or Unavailable(f"the broker of {self.name} is not connected")
        for frame in list(self._frames):
            if not frame.sent and self.outlet.move(frame, self, refusal):
                self._broken = True
        if any(not frame.sent for frame in self._frames):
            # Nobody else takes them at present.
            pause = self.producer.limits.send_retry_max_seconds
            self._elsewhere = self.producer.loop.call_later(pause, self._go_elsewhere)

    def _stop_elsewhere(self) -> None:
        if self._elsewhere is not None:
            self._elsewhere.cancel()
            self._elsewhere = None

    # --- draining -------------------------------------------------------------------------------

    def drain(self) -> None:
        """Send nothing new; the outlet is told when the fate of what was sent is known."""
        self.draining = True

    def resume(self) -> None:
        """Go on."""
        if self.draining:
            self.draining = False
            self._pump()

    def _astray(self, error: PlaitError) -> None:
        """The partition is not here, or does not take some of the rows: the route is another one."""
        self._broken = True
        version = error.details.get("version")
        if version is None:
            # What was in it is gone with it.
            self._partition = None
            self._confirmed = 0
            for frame in self._frames:
                frame.doubt = False
        self.drain()
        self.outlet.stale(int(version or 0))

    # --- answers --------------------------------------------------------------------------------

    def _answered(self, link: Link, frame: SentFrame, answer: Any, error: PlaitError | None) -> None:
        if link is not self._link or not frame.under_way:
            return
        frame.under_way = False
        self._under_way -= 1
        if error is None:
            if self._frames and self._frames[0] is frame:
                self._frames.popleft()
            else:
                self.remove(frame)
            self._confirmed, self._confirmed_of = frame.parts.last, frame.parts.producer
            self._pause = 0.0
            self.outlet.stored(self, frame)
            frame.batch.partition = self.name
            self._settle(frame, answer.sequence, None)
        elif isinstance(error, Unavailable):
            # The link is gone; the next one sends the frame again.
            frame.doubt = True
            return
        elif isinstance(error, StaleRoute):
            frame.doubt = False
            self._astray(error)
        elif isinstance(error, OutOfSequence):
            self._confirmed, self._confirmed_of = int(error.details.get("last", 0)), frame.parts.producer
            self._refused(frame, error)
        elif isinstance(error, UnknownProducer):
            if self._confirmed and self._confirmed_of == frame.parts.producer:
                self._forget(frame, error)
            else:
                # The broker never had a row of this queue: the frame's predecessor was refused or timed out.
                self._refused(frame, error)
        elif isinstance(error, REFUSALS):
            self._turned_away(frame, error)
        else:
            self.remove(frame)
            self._settle(frame, None, error)
            self._broken = True
            if isinstance(error, ProducerConflict) and frame.parts.producer == self.producer.id:
                # Another process sends under this id: what is not sent yet gets another one.
                self.producer.renew()
        self._go_on()

    def _go_on(self) -> None:
        if self.draining and self.resolved:
            self.outlet.resolved()
        self._pump()

    def _refused(self, frame: SentFrame, error: PlaitError) -> None:
        """A frame does not follow what the broker has: sign it anew, unless that has been tried."""
        self._broken = True
        frame.doubt = False
        confirmed = self._confirmed if self._confirmed_of == frame.parts.producer else 0
        if not self.draining and (frame.parts.previous == confirmed or frame.parts.first <= confirmed):
            self.remove(frame)
            self._settle(frame, None, error)

    def _turned_away(self, frame: SentFrame, error: PlaitError) -> None:
        """The broker takes nothing at present.

        A frame in doubt stays, as the broker may have it from before, and so does one of a strict subject, or one that
        is pinned: all are tried again until their time is over. Others go to another partition, or fail.
        """
        self._broken = True
        frame.refusal = error
        if frame.doubt or self.outlet.holds:
            if self._retry is None:
                limits = self.producer.limits
                self._pause = min(self._pause * 2 or limits.send_retry_first_seconds, limits.send_retry_max_seconds)
                self._retry = self.producer.loop.call_later(self._pause, self._try_again)
        elif not self.outlet.move(frame, self, error):
            self.remove(frame)
            self._settle(frame, None, error)

    def _try_again(self) -> None:
        self._retry = None
        self._pump()

    def _repair(self) -> None:
        """All answers are in: what is left follows what the broker has, in order."""
        self._broken = False
        if self._forgotten is not None:
            self._renew(self._forgotten)
            return
        if any(frame.parts.producer != self.producer.id and not frame.doubt for frame in self._frames):
            self._renumber()
        producer = self._frames[0].parts.producer if self._frames else self.producer.id
        last = self._confirmed if producer == self._confirmed_of else 0
        for frame in self._frames:
            if frame.parts.producer != producer:
                producer, last = frame.parts.producer, 0
            frame.parts.follow(last)
            last = frame.parts.last
        self.last = last if producer == self.producer.id else 0

    def _renumber(self) -> None:
        """Frames of a producer id that was given up, and that the broker cannot have, are of the present one."""
        for frame in self._frames:
            if frame.parts.producer != self.producer.id and not frame.doubt:
                frame.parts.producer = frame.batch.producer = self.producer.id
                frame.parts.first = frame.batch.first = self.producer.take(frame.parts.count)

    def _forget(self, frame: SentFrame, error: UnknownProducer) -> None:
        """The broker has forgotten the producer: a frame that it may have from before is in doubt and fails (R9).

        One that was sent once is definitely refused. It waits, with those behind it, until all answers are in.
        """
        self._broken = True
        self._forgotten = error
        if frame.doubt:
            self.remove(frame)
            self._settle(frame, None, error)

    def _renew(self, error: UnknownProducer) -> None:
        """All answers are in, and the broker does not know the producer: what is not in doubt has a new id (R9)."""
        self._forgotten = None
        if self._confirmed_of == self.producer.id:
            self.producer.renew()
        frames, self._frames = self._frames, deque()
        self._confirmed = self.last = 0
        for frame in frames:
            if frame.doubt or self.outlet.pinned:
                self._settle(frame, None, error)
            else:
                self._sign(frame)
                self._frames.append(frame)

    def remove(self, frame: SentFrame) -> None:
        """The frame is no longer here."""
        try:
            self._frames.remove(frame)
        except ValueError:
            pass

    def _settle(self, frame: SentFrame, sequence: int | None, error: PlaitError | None) -> None:
        if error is not None and frame.batch.posted:
            self.outlet.note(error)
        frame.batch.settle(sequence, error)
        self.producer.released(frame.size)
        if self._idle:
            self._tell_idle()

    def _arm(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due = deadline
        self._timer = self.producer.loop.call_at(deadline, self._expire)

    def _expire(self) -> None:
        """Rows that got no answer in time fail to their caller; their fate is unknown unless they were refused."""
        self._timer = None
        now = self.producer.loop.time()
        expired = [frame for frame in self._frames if frame.deadline <= now]
        for frame in expired:
            self.remove(frame)
            error = self._timeout() if frame.refusal is None or frame.doubt or frame.under_way else frame.refusal
            if frame.under_way:
                frame.under_way = False
                self._under_way -= 1
            self._settle(frame, None, error)
        if self._frames:
            self._arm(min(frame.deadline for frame in self._frames))
        if expired:
            self._go_on()

    def _timeout(self) -> Timeout:
        node = self.node or self.producer.router.meta
        trouble = self.outlet.trouble or (node.last_error if node.link is None else None)
        detail = f": {trouble}" if trouble else ""
        limit = self.producer.limits.send_seconds
        return Timeout(
            f"no answer for a send to {self.subject!r} within {limit:g} s{detail}", subject=self.subject, seconds=limit
        )

    # --- waiting --------------------------------------------------------------------------------

    def _tell_idle(self) -> None:
        idle, self._idle = self._idle, []
        for future in idle:
            if not future.done():
                future.set_result(None)

    async def wait_for_room(self) -> None:
        """Until fewer frames wait than may be under way."""
        while self.full and self.producer.closed is None:
            future: asyncio.Future[None] = self.producer.loop.create_future()
            self._idle.append(future)
            await future

    def batches(self) -> list[PendingBatch]:
        """Of all frames that wait."""
        return [frame.batch for frame in self._frames]

    def stop(self) -> None:
        """It is not used any more."""
        self._stop_timers()

    def _stop_timers(self) -> None:
        self._stop_elsewhere()
        for timer in (self._timer, self._retry):
            if timer is not None:
                timer.cancel()
        self._timer = self._retry = None
        # Whoever waits for room looks again.
        self._tell_idle()

    def abandon(self, error: PlaitError) -> None:
        """Everything open fails."""
        if self._routing is not None and error.code == "closed":
            self._routing.cancel()
        self._under_way = 0
        for frame in self.take_back():
            frame.under_way = False
            self._settle(frame, None, error)
