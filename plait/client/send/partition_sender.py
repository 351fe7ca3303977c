"""Sends the frames of one partition, in order.

A frame is under way from its send until the broker's reply. When the link is lost, the frames that were under way are
in doubt and are resent in order over the next link; the broker recognizes the ones that it has stored. When the broker
permanently refuses a frame, its rows fail or move to another partition (``SubjectSender``). ``ResendWindow`` has the
states of the frames.

A sender *drains* when its partition no longer accepts some of the rows: it sends no new frames, and resends the frames
in doubt until they are answered. Then every sent frame has a result, and the subject sender takes back the frames that
are not stored (R8).

A row without a reply in time fails. Whether it is stored is unknown, and later rows are sent. The order stays correct,
because a row that is not stored by then is never stored later: after a later frame is stored here, the broker refuses
the row as out of sequence; after its key has moved, this partition is sealed for the key.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from plait.client.net.node import Node
from plait.client.send.open_rows import OpenRows
from plait.client.send.partition_link import PartitionLink
from plait.client.send.resend_window import NEW, NOT_STORED, ON_LOST, ON_SEND, UNDER_WAY, ResendWindow, SentFrame
from plait.client.types import PartitionName
from plait.errors import (
    DiskFull,
    FlowControl,
    PlaitError,
    RateLimited,
    ReadOnly,
    StaleRoute,
    SubjectNotFound,
    Timeout,
    Unavailable,
)
from plait.limits import ClientLimits
from plait.wire import messages as m
from plait.wire.link import Link

if TYPE_CHECKING:
    from plait.client.send.subject_sender import SubjectSender

log = logging.getLogger("plait.client")

#: Errors of a broker that has not stored the frame and may store it later.
REFUSALS: Final = (ReadOnly, DiskFull, FlowControl)


def pause_of(error: RateLimited, limits: ClientLimits) -> float:
    """Seconds until the next attempt: as the broker says, and not long, because the rate may be changed meanwhile."""
    return min(float(error.details.get("seconds", 0.0)), limits.send_retry_max_seconds)


class PartitionSender:
    """Sends and resends the frames of one partition; see the module docstring."""

    def __init__(self, subject_sender: SubjectSender) -> None:
        self.subject_sender = subject_sender
        self.producer = subject_sender.producer
        self.window = ResendWindow(self.producer)
        self.rows = OpenRows(self.producer, self.window, self.push, delayed=subject_sender.delayed)
        self.target = PartitionLink(self.producer, self.window, self._looked, delayed=subject_sender.delayed)
        #: True if no new frames are sent, because the partition no longer accepts some of the rows.
        self.draining = False
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        #: After a refusal: the timer of the next attempt, and its pause.
        self._retry: asyncio.TimerHandle | None = None
        self._pause = 0.0
        #: Frames that may be under way; fewer for a moment after the broker refused some because of a rate.
        self._allowed = self.producer.limits.in_flight_frames
        #: No row times out before this (loop time), because the broker refused some because of a rate; 0: never.
        self._patience = 0.0
        #: The timer after which unsent frames move to another partition, because the broker cannot be reached.
        self._elsewhere: asyncio.TimerHandle | None = None

    def bind(self, node: Node, name: PartitionName) -> None:
        """Set the partition, and start to send."""
        target = self.target
        target.node, target.name, target.link = node, name, node.link
        node.on_link.append(self._new_link)
        node.on_lost.append(self._link_lost)
        self._pump()

    @property
    def empty(self) -> bool:
        """True if there are no rows, no frames, and no request for the partition's number."""
        return not (self.rows.bodies or self.window.frames or self.target.busy)

    # --- frames in ------------------------------------------------------------------------------

    def seal(self) -> None:
        """Make frames of the open rows."""
        self.target.seal_oneway()
        self.rows.seal()

    def take_over(self, frame: SentFrame) -> None:
        """Send a frame of another partition that is not stored anywhere, with new producer sequences."""
        self.window.renumber(frame)
        self.push(frame)

    def push(self, frame: SentFrame) -> None:
        """Send a frame whose predecessor is the last one of the window."""
        self.window.add(frame)
        if self._timer is None or frame.deadline < self._due:
            self._arm(frame.deadline)
        self._pump()

    def take_back(self) -> list[SentFrame]:
        """Remove all rows, none of which is stored, and return them as frames in order."""
        self.seal()
        self._stop_timers()
        frames = self.window.take_back()
        for frame in frames:
            frame.deadline = max(frame.deadline, self._patience)
        return frames

    # --- frames out -----------------------------------------------------------------------------

    def _pump(self) -> None:
        """Send frames until the window is full."""
        window, link = self.window, self.target.link
        if window.under_way >= len(window.frames):
            return
        if link is None or link.closed:
            self._unreached()
            return
        if self._retry is not None:
            return
        if window.broken and not self.draining:
            if window.under_way:
                return
            window.repair(pinned=self.subject_sender.pinned)
        number = self.target.number
        if number is None:
            if not self.draining or not window.resolved:
                self.target.look()
            return
        limit = self._allowed
        for frame in window.frames:
            if window.under_way >= limit:
                return
            if frame.state < UNDER_WAY and (not self.draining or frame.doubt):
                frame.state = ON_SEND[frame.state]
                window.under_way += 1
                frame.sent_at = self.producer.loop.time()
                link.call(
                    m.SendRequest(number),
                    partial(self._answered, link, frame),
                    frame.parts.parts,
                    frame.parts.size,
                )

    # --- number and link --------------------------------------------------------------------

    def _looked(self, error: PlaitError | None) -> None:
        """Continue when the request for the partition's number has ended."""
        if isinstance(error, StaleRoute | SubjectNotFound):
            self._wrong_partition(error)
        elif isinstance(error, REFUSALS):
            for frame in list(self.window.frames):
                self._refused(frame, error)
        elif error is not None and not isinstance(error, Unavailable | Timeout):
            self.subject_sender.abandon(error)
        # After a lost link, the next one asks again.
        self._pump()

    def _new_link(self, link: Link) -> None:
        """Resend the frames that were under way, in order, over a new link."""
        self.producer.health.changed()
        self.target.renew(link)
        self._stop_elsewhere()
        self.window.lost()
        self._pump()

    def _link_lost(self) -> None:
        """Wait a limited time for the next link, after the link was lost."""
        self.producer.health.changed()
        if self.window.frames:
            self._unreached()

    def _unreached(self) -> None:
        """Start the timer after which frames that wait for a disconnected broker move, if they may."""
        if self.target.node is None:
            self.subject_sender.lookup.start()
        elif self._elsewhere is None and self.subject_sender.partitioner is not None and not self.subject_sender.holds:
            pause = self.subject_sender.patience(self)
            self._elsewhere = self.producer.loop.call_later(pause, self._go_elsewhere)

    def _go_elsewhere(self) -> None:
        self._elsewhere = None
        target = self.target
        if target.connected:
            return
        error = target.node.last_error if target.node is not None else None
        refusal = error or Unavailable(f"the broker of {target.name} is not connected")
        for frame in list(self.window.frames):
            if frame.state is NEW and self.subject_sender.move(frame, self, refusal):
                self.window.broken = True
        if any(frame.state is NEW for frame in self.window.frames):
            # No other partition accepts them now.
            pause = self.producer.limits.send_retry_max_seconds
            self._elsewhere = self.producer.loop.call_later(pause, self._go_elsewhere)

    def _stop_elsewhere(self) -> None:
        if self._elsewhere is not None:
            self._elsewhere.cancel()
            self._elsewhere = None

    # --- draining -------------------------------------------------------------------------------

    def resume(self) -> None:
        """Send new frames again."""
        if self.draining:
            self.draining = False
            self._pump()

    def _wrong_partition(self, error: PlaitError) -> None:
        """Get a newer route: the broker does not have the partition, or the partition does not accept some rows."""
        self.window.broken = True
        version = error.details.get("version")
        if version is None:
            # The partition was deleted, with its rows.
            self.target.number = None
            self.window.deleted()
        self.draining = True
        self.subject_sender.lookup.start(int(version or 0))

    # --- replies --------------------------------------------------------------------------------

    def _answered(self, link: Link, frame: SentFrame, answer: Any, _: memoryview, error: PlaitError | None) -> None:
        if link is not self.target.link or frame.state < UNDER_WAY:
            return
        window = self.window
        if error is None:
            window.stored(frame, self.target.name, answer.sequence)
            self._pause = 0.0
            if self._allowed < self.producer.limits.in_flight_frames:
                self._allowed = min(2 * self._allowed, self.producer.limits.in_flight_frames)
            sender = self.subject_sender
            sender.lookup.backoff = 0.0
            sender.used_at = frame.sent_at
            if sender.partitioner is not None:
                now = self.producer.loop.time()
                self.producer.health.answered(self.target.group, now - frame.sent_at, now)
        elif isinstance(error, Unavailable):
            # The link is lost; the frame is resent over the next one.
            window.answered(frame, ON_LOST)
            return
        else:
            window.answered(frame)
            if isinstance(error, StaleRoute):
                frame.state = NOT_STORED[frame.state]
                self._wrong_partition(error)
            elif isinstance(error, RateLimited):
                self._limited(frame, error)
            elif isinstance(error, REFUSALS):
                self._refused(frame, error)
            else:
                window.refused(frame, error, draining=self.draining)
        if self.draining or window.under_way < len(window.frames):
            self._after_answer()

    def _after_answer(self) -> None:
        if self.draining and self.window.resolved:
            self.subject_sender.resolved()
        self._pump()

    def _refused(self, frame: SentFrame, error: PlaitError) -> None:
        """Resend, move or fail a frame of a broker that temporarily refuses all sends.

        A frame in doubt stays, because the broker may have stored it earlier. A frame of a strict subject or of a
        pinned sender stays too. Frames that stay are resent until their deadline. All others move to another partition,
        or fail.
        """
        self.window.broken = True
        frame.refusal = error
        if frame.doubt or self.subject_sender.holds:
            if self._retry is None:
                limits = self.producer.limits
                self._pause = min(self._pause * 2 or limits.send_retry_first_seconds, limits.send_retry_max_seconds)
                self._retry = self.producer.loop.call_later(self._pause, self._try_again)
        elif not self.subject_sender.move(frame, self, error):
            self.window.fail(frame, error)

    def _limited(self, frame: SentFrame, error: RateLimited) -> None:
        """Resend a frame in its order when the subject's rate allows it; see docs/rates.md.

        The first resend is one frame, and pauses become longer while other producers are faster, so that few frames
        travel in vain. No row times out meanwhile: callers wait.
        """
        self.window.broken = True
        frame.refusal = error
        self._allowed = 1
        if not self._patience:
            log.warning("sends to %s wait: %s", self.target.name, error)
        if self._retry is None:
            limits, loop = self.producer.limits, self.producer.loop
            self._pause = max(pause_of(error, limits), min(2 * self._pause, limits.send_retry_max_seconds))
            self._patience = loop.time() + self._pause + limits.send_seconds
            self._retry = loop.call_later(self._pause, self._try_again)

    def _try_again(self) -> None:
        self._retry = None
        self._pump()

    # --- deadlines ------------------------------------------------------------------------------

    def _arm(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due = deadline
        self._timer = self.producer.loop.call_at(deadline, self._expire)

    def _expire(self) -> None:
        """Fail the rows without a reply in time. Whether they are stored is unknown, unless the broker refused them."""
        self._timer = None
        window = self.window
        if self._patience > self.producer.loop.time():
            self._arm(self._patience)
            return
        expired = window.expire(self.producer.loop.time(), lambda: self.subject_sender.timeout(self.target.node))
        if window.frames:
            self._arm(min(frame.deadline for frame in window.frames))
        if expired:
            self._after_answer()

    # --- the end --------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop the timers and leave the node: the sender is no longer used."""
        self._stop_timers()
        if self.target.node is not None:
            self.target.node.on_link.remove(self._new_link)
            self.target.node.on_lost.remove(self._link_lost)

    def _stop_timers(self) -> None:
        self._stop_elsewhere()
        for timer in (self._timer, self._retry):
            if timer is not None:
                timer.cancel()
        self._timer = self._retry = None
        # Callers that wait for room check again.
        self.window.wake()

    def abandon(self, error: PlaitError) -> None:
        """Fail all rows with ``error``."""
        if error.code == "closed":
            self.target.cancel()
        self.rows.fail(error)
        self._stop_timers()
        self.draining = False
        self.window.abandon(error)
