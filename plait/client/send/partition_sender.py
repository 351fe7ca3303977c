"""Sends the frames of one partition, in order.

A frame is under way from its send until the broker's reply. When the link is lost, the frames that were under way are
in doubt and are resent in order over the next link; the broker recognizes the ones that it has stored. When the broker
permanently refuses a frame, its rows fail or move to another partition (``SubjectSender``). Later frames name it as
their predecessor, so the broker refuses them too; when all replies have arrived, those frames are changed to follow the
last row that the broker has stored.

A sender *drains* when its partition no longer takes some of the rows: it sends no new frames, and resends the frames in
doubt until they are answered. Then every sent frame has a result, and the frames that are not stored are taken back
(R8).

A row without a reply in time fails: whether it is stored is unknown, and later rows continue. This breaks no order,
because a row that is not stored by then never will be: once a later frame is stored here, the broker refuses the row as
out of sequence; once its key has moved, this partition is sealed for the key.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
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

#: Errors of a broker that has not stored the frame and may store it later.
REFUSALS: Final = (ReadOnly, DiskFull, FlowControl)


class SentFrame:
    """A sealed frame, its batch, and the state of its send."""

    __slots__ = ("batch", "deadline", "doubt", "parts", "refusal", "sent", "sent_at", "size", "tries", "under_way")

    def __init__(self, parts: FrameParts, batch: PendingBatch, size: int, deadline: float) -> None:
        self.parts = parts
        self.batch = batch
        #: Bytes of the send buffer that its rows take.
        self.size = size
        self.deadline = deadline
        #: Sent over the current link and not answered.
        self.under_way = False
        #: Sent over any link.
        self.sent = False
        #: Under way when a link was lost, and not answered since: the broker may have stored it.
        self.doubt = False
        self.sent_at = 0.0
        #: How many partitions definitely refused it.
        self.tries = 0
        #: The error of the last refusal.
        self.refusal: PlaitError | None = None


class PartitionSender:
    """Sends and resends the frames of one partition; see the states in the module docstring."""

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
        "producer",
        "subject",
        "subject_sender",
    )

    def __init__(self, subject_sender: SubjectSender) -> None:
        self.subject_sender = subject_sender
        self.producer = subject_sender.producer
        self.subject = subject_sender.subject
        #: The partition and its node; None until the route is known.
        self.name: PartitionName | None = None
        self.node: Node | None = None
        #: Producer sequence of the last row sealed for this partition, the predecessor of the next frame.
        self.last = 0
        #: Producer sequence of the last row that the broker is known to have stored, and the producer id of that row.
        self._confirmed = 0
        self._confirmed_of = 0
        #: A frame was refused: later ones wait until all replies have arrived, and then follow ``_confirmed``.
        self._broken = False
        #: The error of a broker that no longer knows the producer.
        self._forgotten: UnknownProducer | None = None
        #: No new frames are sent, because the partition no longer takes some of the rows.
        self.draining = False
        #: The partition's number at its broker, valid in this data epoch; a later epoch may reuse the number.
        self._partition: int | None = None
        self._epoch = 0
        self._stale: int | None = None
        self._routing: asyncio.Task[None] | None = None
        self._frames: deque[SentFrame] = deque()
        self._under_way = 0
        self._link: Link | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        #: After a refusal: the timer of the next attempt, and its pause.
        self._retry: asyncio.TimerHandle | None = None
        self._pause = 0.0
        #: The timer after which unsent frames move to another partition, because the broker cannot be reached.
        self._elsewhere: asyncio.TimerHandle | None = None
        self._idle: list[asyncio.Future[None]] = []

    def bind(self, node: Node, name: PartitionName) -> None:
        """Set the partition, and start to send."""
        self.node, self.name = node, name
        self.producer.attach(self, node)
        self._link = node.link
        self._pump()

    # --- frames in ------------------------------------------------------------------------------

    def push(self, parts: FrameParts, batch: PendingBatch, size: int) -> None:
        """Append a sealed frame whose predecessor is ``last``."""
        self._add(SentFrame(parts, batch, size, self.producer.loop.time() + self.producer.limits.send_seconds))

    def take_over(self, frame: SentFrame) -> None:
        """Append a frame of another queue that is not stored anywhere, with new producer sequences."""
        self._renumber_frame(frame)
        self._add(frame)

    def _renumber_frame(self, frame: SentFrame) -> None:
        """Give a frame new producer sequences, as the successor of the last frame."""
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
        """Remove all frames, none of which is stored, and return them in order."""
        frames, self._frames = self._frames, deque()
        self.last = self._confirmed if self._confirmed_of == self.producer.id else 0
        self._broken = False
        self._forgotten = None
        self._stop_timers()
        return list(frames)

    # --- frames out -----------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """The window is full: callers that can wait should do so."""
        return len(self._frames) >= self.producer.limits.in_flight_frames

    @property
    def connected(self) -> bool:
        """There is a link to the broker."""
        return self._link is not None and not self._link.closed

    @property
    def resolved(self) -> bool:
        """Every sent frame has a result: none is under way or in doubt."""
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
            partial(self._answered, link, frame),
            frame.parts.parts,
            frame.parts.size,
        )

    # --- partition number and link --------------------------------------------------------------

    def _find_route(self) -> None:
        if self._routing is None:
            self._routing = tasks.start(self._route(), f"plait-route-{self.subject}", failed=self._defect)

    def _defect(self, error: Exception) -> None:
        """The task that asks for the number failed: fail the rows that wait for it. The next send asks again."""
        self.subject_sender.abandon(tasks.error_of(error))

    async def _find(self) -> None:
        """Ask the broker for the partition's number."""
        assert self.node is not None
        assert self.name is not None
        link = self._link
        routed: m.PartitionNumberReply = await self.node.request(
            m.PartitionNumberRequest(self.name.name, self.subject_sender.delayed)
        )
        self._partition = routed.partition
        self._epoch = link.welcome.epoch if link is not None and link.welcome is not None else 0
        if self._stale is not None and self._stale != self._partition:
            # A different partition now, which has no rows of this producer.
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
            self._wrong_partition(error)
        except PlaitError as error:
            self._refuse_all(error)
        finally:
            self._routing = None
        self._pump()

    def _refuse_all(self, error: PlaitError) -> None:
        """The broker refused to tell the partition's number: refuse all frames."""
        if isinstance(error, REFUSALS):
            for frame in list(self._frames):
                self._refused_for_now(frame, error)
        else:
            self.subject_sender.abandon(error)

    def new_link(self, link: Link) -> None:
        """There is a new link: resend the frames that were under way, in order."""
        self._link = link
        self._stop_elsewhere()
        if self._partition is not None and (link.welcome is None or link.welcome.epoch != self._epoch):
            # A broker that lost the tail of its log may have given the number to another partition.
            self._stale, self._partition = self._partition, None
        self._under_way = 0
        for frame in self._frames:
            if frame.under_way:
                frame.under_way, frame.doubt = False, True
        self._pump()

    def link_lost(self) -> None:
        """The link is lost: wait for the next one, for a limited time."""
        if self._frames:
            self._unreached()

    def _unreached(self) -> None:
        """Frames wait for a disconnected broker. Start the timer after which they move, if they may."""
        if self.node is None:
            self.subject_sender.look()
        elif self._elsewhere is None and self.subject_sender.movable:
            pause = self.subject_sender.patience(self)
            self._elsewhere = self.producer.loop.call_later(pause, self._go_elsewhere)

    def _go_elsewhere(self) -> None:
        self._elsewhere = None
        if self.connected:
            return
        error = self.node.last_error if self.node is not None else None
        refusal = error or Unavailable(f"the broker of {self.name} is not connected")
        for frame in list(self._frames):
            if not frame.sent and self.subject_sender.move(frame, self, refusal):
                self._broken = True
        if any(not frame.sent for frame in self._frames):
            # No other partition takes them now.
            pause = self.producer.limits.send_retry_max_seconds
            self._elsewhere = self.producer.loop.call_later(pause, self._go_elsewhere)

    def _stop_elsewhere(self) -> None:
        if self._elsewhere is not None:
            self._elsewhere.cancel()
            self._elsewhere = None

    # --- draining -------------------------------------------------------------------------------

    def drain(self) -> None:
        """Send no new frames, and call ``SubjectSender.resolved`` when every sent frame has a result."""
        self.draining = True

    def resume(self) -> None:
        """Send new frames again."""
        if self.draining:
            self.draining = False
            self._pump()

    def _wrong_partition(self, error: PlaitError) -> None:
        """The broker does not have the partition, or the partition does not take some rows: get a newer route."""
        self._broken = True
        version = error.details.get("version")
        if version is None:
            # The partition was deleted, with its rows.
            self._partition = None
            self._confirmed = 0
            for frame in self._frames:
                frame.doubt = False
        self.drain()
        self.subject_sender.stale(int(version or 0))

    # --- replies --------------------------------------------------------------------------------

    def _answered(self, link: Link, frame: SentFrame, answer: Any, _: memoryview, error: PlaitError | None) -> None:
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
            self.subject_sender.stored(self, frame)
            frame.batch.partition = self.name
            self._settle(frame, answer.sequence, None)
        elif isinstance(error, Unavailable):
            # The link is lost; the frame is resent over the next one.
            frame.doubt = True
            return
        elif isinstance(error, StaleRoute):
            frame.doubt = False
            self._wrong_partition(error)
        elif isinstance(error, OutOfSequence):
            self._confirmed, self._confirmed_of = int(error.details.get("last", 0)), frame.parts.producer
            self._refused(frame, error)
        elif isinstance(error, UnknownProducer):
            if self._confirmed and self._confirmed_of == frame.parts.producer:
                self._forget(frame, error)
            else:
                # The broker never stored a row of this queue: the frame's predecessor was refused or timed out.
                self._refused(frame, error)
        elif isinstance(error, REFUSALS):
            self._refused_for_now(frame, error)
        else:
            self.remove(frame)
            self._settle(frame, None, error)
            self._broken = True
            if isinstance(error, ProducerConflict) and frame.parts.producer == self.producer.id:
                # Another process uses this producer id: unsent frames get a new one.
                self.producer.renew()
        if self.draining or self._under_way < len(self._frames):
            self._after_answer()

    def _after_answer(self) -> None:
        if self.draining and self.resolved:
            self.subject_sender.resolved()
        self._pump()

    def _refused(self, frame: SentFrame, error: PlaitError) -> None:
        """A frame does not follow the last stored row: make it do so and resend it, or fail it if it did so already."""
        self._broken = True
        frame.doubt = False
        confirmed = self._confirmed if self._confirmed_of == frame.parts.producer else 0
        if not self.draining and (frame.parts.previous == confirmed or frame.parts.first <= confirmed):
            self.remove(frame)
            self._settle(frame, None, error)

    def _refused_for_now(self, frame: SentFrame, error: PlaitError) -> None:
        """The broker refuses all sends for now.

        A frame in doubt stays, because the broker may have stored it earlier, and so does a frame of a strict subject
        or of a pinned sender: they are resent until their deadline. Other frames move to another partition, or fail.
        """
        self._broken = True
        frame.refusal = error
        if frame.doubt or self.subject_sender.holds:
            if self._retry is None:
                limits = self.producer.limits
                self._pause = min(self._pause * 2 or limits.send_retry_first_seconds, limits.send_retry_max_seconds)
                self._retry = self.producer.loop.call_later(self._pause, self._try_again)
        elif not self.subject_sender.move(frame, self, error):
            self.remove(frame)
            self._settle(frame, None, error)

    def _try_again(self) -> None:
        self._retry = None
        self._pump()

    def _repair(self) -> None:
        """All replies have arrived: make the remaining frames follow the last stored row, in order."""
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
        """Give the current producer id to frames of an older one, unless the broker may have stored them."""
        for frame in self._frames:
            if frame.parts.producer != self.producer.id and not frame.doubt:
                frame.parts.producer = frame.batch.producer = self.producer.id
                frame.parts.first = frame.batch.first = self.producer.take(frame.parts.count)

    def _forget(self, frame: SentFrame, error: UnknownProducer) -> None:
        """The broker no longer knows the producer: a frame in doubt, which it may have stored earlier, fails (R9).

        A frame that was sent only once is definitely refused. It waits with the later ones until all replies have
        arrived.
        """
        self._broken = True
        self._forgotten = error
        if frame.doubt:
            self.remove(frame)
            self._settle(frame, None, error)

    def _renew(self, error: UnknownProducer) -> None:
        """All replies have arrived. The broker no longer knows the producer: frames not in doubt get a new id (R9)."""
        self._forgotten = None
        if self._confirmed_of == self.producer.id:
            self.producer.renew()
        frames, self._frames = self._frames, deque()
        self._confirmed = self.last = 0
        for frame in frames:
            if frame.doubt or self.subject_sender.pinned:
                self._settle(frame, None, error)
            else:
                self._renumber_frame(frame)
                self._frames.append(frame)

    def remove(self, frame: SentFrame) -> None:
        """Remove a frame, if it is still here."""
        try:
            self._frames.remove(frame)
        except ValueError:
            pass

    def _settle(self, frame: SentFrame, sequence: int | None, error: PlaitError | None) -> None:
        if error is not None and frame.batch.posted:
            self.subject_sender.note(error)
        frame.batch.settle(sequence, error)
        self.producer.released(frame.size)
        if self._idle:
            self._wake_idle()

    def _arm(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due = deadline
        self._timer = self.producer.loop.call_at(deadline, self._expire)

    def _expire(self) -> None:
        """Fail the rows without a reply in time. Whether they are stored is unknown, unless the broker refused them."""
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
            self._after_answer()

    def _timeout(self) -> Timeout:
        node = self.node or self.producer.router.meta
        cause = self.subject_sender.route_error or (node.last_error if node.link is None else None)
        detail = f": {cause}" if cause else ""
        limit = self.producer.limits.send_seconds
        return Timeout(
            f"no answer for a send to {self.subject!r} within {limit:g} s{detail}",
            subject=self.subject,
            seconds=limit,
        )

    # --- waiting --------------------------------------------------------------------------------

    def _wake_idle(self) -> None:
        idle, self._idle = self._idle, []
        for future in idle:
            if not future.done():
                future.set_result(None)

    async def wait_for_room(self) -> None:
        """Wait until the window has room."""
        while self.full and self.producer.closed is None:
            future: asyncio.Future[None] = self.producer.loop.create_future()
            self._idle.append(future)
            await future

    def batches(self) -> list[PendingBatch]:
        """The batches of all frames."""
        return [frame.batch for frame in self._frames]

    def stop(self) -> None:
        """Cancel the timers: the sender is no longer used."""
        self._stop_timers()

    def _stop_timers(self) -> None:
        self._stop_elsewhere()
        for timer in (self._timer, self._retry):
            if timer is not None:
                timer.cancel()
        self._timer = self._retry = None
        # Callers that wait for room check again.
        self._wake_idle()

    def abandon(self, error: PlaitError) -> None:
        """Fail all frames with ``error``."""
        if self._routing is not None and error.code == "closed":
            self._routing.cancel()
        self._under_way = 0
        for frame in self.take_back():
            frame.under_way = False
            self._settle(frame, None, error)
