"""One subject's frames on their way to its partition, in order.

A frame is under way until the broker answers. When the link is lost, the frames under way are sent again in order over
the next one. When the broker refuses a frame for good, its rows fail to their caller; the frames behind it name it as
their predecessor and are refused too, so once all answers are in they are signed anew as successors of what the broker
really has, and sent again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from plait.client.rows import ROW_SIZE, SHORT_BODY_MAX, SHORT_KEY_MAX, OpenRows
from plait.client.types import MessageId, PartitionName, PendingBatch, Receipt, Ticket
from plait.errors import OutOfSequence, PlaitError, StaleRoute, Timeout, Unavailable, UnknownProducer
from plait.frame.builder import FrameParts
from plait.frame.header import FLAG_UNSEQUENCED
from plait.wire import messages as m
from plait.wire.dial import Link

if TYPE_CHECKING:
    from plait.client.producer import Producer

#: Fewer rows than this are not sent in halves.
AHEAD_COUNT = 64


class Frame:
    """A sealed frame and who waits for it."""

    __slots__ = ("batch", "deadline", "parts", "sent", "size", "under_way")

    def __init__(self, parts: FrameParts, batch: PendingBatch, size: int, deadline: float) -> None:
        self.parts = parts
        self.batch = batch
        #: Buffer bytes that its rows take.
        self.size = size
        self.deadline = deadline
        #: Sent over the present link and not answered.
        self.under_way = False
        #: Sent over any link: the broker may have it.
        self.sent = False


class SubjectQueue:
    """See the module."""

    __slots__ = (
        "_ahead",
        "_broken",
        "_confirmed",
        "_epoch",
        "_frame_bytes",
        "_frame_count",
        "_frames",
        "_idle",
        "_linger",
        "_link",
        "_oneway",
        "_partition",
        "_routing",
        "_rows",
        "_stale",
        "_timer",
        "_under_way",
        "error",
        "last",
        "name",
        "producer",
        "subject",
        "urgent",
    )

    def __init__(self, producer: Producer, subject: str) -> None:
        self.producer = producer
        self.subject = subject
        #: Producer sequence of the last row sealed for this partition: the next frame's predecessor.
        self.last = 0
        #: Producer sequence of the last row that the broker is known to have.
        self._confirmed = 0
        #: A frame was refused: those behind it wait until all answers are in, then follow ``_confirmed``.
        self._broken = False
        #: Its open rows leave at the end of this turn.
        self.urgent = False
        #: The first error of a posted frame since the last flush.
        self.error: PlaitError | None = None
        self.name: PartitionName | None = None
        self._partition: int | None = None
        #: The broker's epoch that gave the partition its number; another one may have given it to another subject.
        self._epoch = 0
        self._stale: int | None = None
        self._routing: asyncio.Task[None] | None = None
        self._frame_bytes = producer.limits.frame_bytes
        self._frame_count = producer.limits.frame_count
        self._rows = self._new_rows()
        #: The row with which open rows go ahead, if no frame waits: half of what the last frame had.
        self._ahead = AHEAD_COUNT // 2 - 1
        self._oneway = OpenRows()
        self._linger: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._frames: deque[Frame] = deque()
        self._under_way = 0
        self._link: Link | None = producer.node.link
        self._idle: list[asyncio.Future[None]] = []

    # --- rows in --------------------------------------------------------------------------------

    def post(
        self,
        body: Any,
        key: str | int | None,
        tags: Iterable[str] | None,
        headers: Mapping[str, Any] | None,
    ) -> Ticket:
        """Add a row that leaves when the frame is full or has lingered."""
        rows = self._rows
        bodies, keys = rows.bodies, rows.keys
        row = len(bodies)
        # What most rows are, in as few steps as possible: bytes and a short text key, in rows without anything else.
        if (
            tags is None
            and headers is None
            and rows.plain
            and keys is not None
            and type(key) is str
            and type(body) is bytes
            and 0 < len(key) < SHORT_KEY_MAX
            and key.isascii()
            and len(body) <= SHORT_BODY_MAX
        ):
            bodies.append(body)
            keys.append(key)
            size = len(body) + len(key) + ROW_SIZE
            rows.size += size
        else:
            size = rows.add(body, key, tags, headers)
        producer = self.producer
        producer.buffered += size
        batch = rows.batch
        batch.posted = True
        if rows.size >= self._frame_bytes or row >= self._frame_count - 1:
            self.seal()
        elif row == 0 and self._linger is None:
            self._linger = producer.loop.call_later(producer.limits.linger_seconds, self.seal)
        return Ticket(batch, row)

    def send(
        self,
        body: Any,
        key: str | int | None,
        tags: Iterable[str] | None,
        headers: Mapping[str, Any] | None,
    ) -> tuple[PendingBatch, int]:
        """Add a row that leaves at the end of this loop turn, with the others of the turn; where its fate shows.

        When nothing is under way, the first half of many rows goes ahead: the broker works on it meanwhile.
        """
        rows = self._rows
        bodies = rows.bodies
        row = len(bodies)
        batch = rows.batch
        if (
            key is None
            and tags is None
            and headers is None
            and rows.plain
            and rows.keys is None
            and type(body) is bytes
            and len(body) <= SHORT_BODY_MAX
        ):
            bodies.append(body)
            size = len(body) + ROW_SIZE
            rows.size += size
        else:
            size = rows.add(body, key, tags, headers)
        self.producer.buffered += size
        if rows.size >= self._frame_bytes or row >= self._frame_count - 1 or (row >= self._ahead and not self._frames):
            self.seal()
        elif not self.urgent:
            self.urgent = True
            self.producer.soon(self)
        return batch, row

    async def send_oneway(
        self,
        body: Any,
        key: str | int | None,
        tags: Iterable[str] | None,
        headers: Mapping[str, Any] | None,
    ) -> Receipt:
        """Add a row that leaves at the end of this turn, once, without an answer."""
        while self.name is None or self._partition is None:
            link = self._link
            self._partition, self.name = await self._find()
            self._routed(link)
        rows = self._oneway
        rows.add(body, key, tags, headers)
        number = self.producer.take_oneway(1)
        if len(rows.bodies) == 1:
            rows.batch.first = number
        if rows.size >= self.producer.limits.frame_bytes:
            self._seal_oneway()
            # Nothing counts what is under way: the socket says when it takes more, and others get their turn.
            link = self.producer.node.link
            if link is not None:
                await link.drained()
            await asyncio.sleep(0)
        elif not self.urgent:
            self.urgent = True
            self.producer.soon(self)
        return Receipt(MessageId(self.producer.oneway_id, number), self.name, None)

    def _seal_oneway(self) -> None:
        rows, self._oneway = self._oneway, OpenRows()
        link = self.producer.node.link
        if link is None or self._partition is None:
            return
        producer = self.producer
        parts = rows.build(
            producer.oneway_id, rows.batch.first, 0, producer.now(), producer.compression, FLAG_UNSEQUENCED
        )
        link.notify(m.Send(self._partition, oneway=True), parts.parts, parts.size)

    def seal(self) -> None:
        """Make a frame of the open rows and send it as soon as the window allows."""
        if self._oneway.bodies:
            self._seal_oneway()
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        rows = self._rows
        if not rows.bodies:
            return
        self._rows = self._new_rows()
        self._ahead = max(AHEAD_COUNT, len(rows.bodies)) // 2 - 1
        producer = self.producer
        try:
            parts = rows.build(
                producer.id, producer.take(len(rows.bodies)), self.last, producer.now(), producer.compression
            )
        except PlaitError as error:
            if rows.batch.posted and self.error is None:
                self.error = error
            rows.batch.settle(None, error)
            producer.released(rows.size)
            return
        self.push(parts, rows.batch, rows.size)

    def push(self, parts: FrameParts, batch: PendingBatch, size: int) -> None:
        """Queue a sealed frame that follows ``last``."""
        self.last = parts.last
        deadline = self.producer.loop.time() + self.producer.limits.send_seconds
        self._frames.append(Frame(parts, batch, size, deadline))
        if self._timer is None:
            self._timer = self.producer.loop.call_at(deadline, self._expire)
        self._pump()

    # --- frames out -----------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """As many frames wait as may be under way: the sender had better wait too."""
        return len(self._frames) >= self.producer.limits.in_flight_frames

    def _pump(self) -> None:
        """Send frames until the window is full."""
        link = self._link
        if link is None or link.closed or self._under_way >= len(self._frames):
            return
        if self._broken:
            if not self._under_way:
                self._repair()
            else:
                return
        if self._partition is None:
            self._find_route()
            return
        window = self.producer.limits.in_flight_frames
        for frame in self._frames:
            if self._under_way >= window:
                return
            if not frame.under_way:
                self._send(link, frame)

    def _send(self, link: Link, frame: Frame) -> None:
        frame.under_way = frame.sent = True
        self._under_way += 1
        assert self._partition is not None
        link.call(
            m.Send(self._partition),
            lambda answer, _, error: self._answered(link, frame, answer, error),
            frame.parts.parts,
            frame.parts.size,
        )

    def _find_route(self) -> None:
        if self._routing is None:
            self._routing = self.producer.loop.create_task(self._route(), name=f"plait-route-{self.subject}")

    def _new_rows(self) -> OpenRows:
        return OpenRows()

    async def _find(self) -> tuple[int, PartitionName]:
        """Where its rows go."""
        return await self.producer.route(self.subject)

    async def _route(self) -> None:
        link = self._link
        try:
            self._partition, self.name = await self._find()
            self._routed(link)
        except (Unavailable, Timeout):
            # The next link asks again.
            pass
        except PlaitError as error:
            self.abandon(error)
        finally:
            self._routing = None
        self._pump()

    def _routed(self, link: Link | None) -> None:
        """The route is known; where it leads elsewhere than before, nothing of this producer is there."""
        self._epoch = link.welcome.epoch if link is not None and link.welcome is not None else 0
        if self._stale is not None and self._stale != self._partition:
            self._confirmed = 0
            self._broken = True
        self._stale = None

    def new_link(self, link: Link) -> None:
        """The connection was made again: what was under way is sent again, in order."""
        self._link = link
        if self._partition is not None and (link.welcome is None or link.welcome.epoch != self._epoch):
            # A broker that lost its last moments may have given the number to another subject since.
            self._stale, self._partition = self._partition, None
        self._under_way = 0
        for frame in self._frames:
            frame.under_way = False
        self._pump()

    # --- answers --------------------------------------------------------------------------------

    def _answered(self, link: Link, frame: Frame, answer: Any, error: PlaitError | None) -> None:
        if link is not self._link or not frame.under_way:
            return
        frame.under_way = False
        self._under_way -= 1
        if error is None:
            if self._frames and self._frames[0] is frame:
                self._frames.popleft()
            else:
                self._remove(frame)
            self._confirmed = frame.parts.last
            frame.batch.partition = self.name
            self._settle(frame, answer.sequence, None)
        elif isinstance(error, Unavailable):
            # The link is gone; the next one sends the frame again.
            return
        elif isinstance(error, StaleRoute):
            # Another partition, which has nothing of this producer.
            self._partition = None
            self._confirmed = 0
            self._broken = True
        elif isinstance(error, OutOfSequence):
            self._confirmed = int(error.details.get("last", 0))
            self._refused(frame, error)
        elif isinstance(error, UnknownProducer):
            if self._confirmed:
                self._lose_producer(frame.parts.producer, error)
            else:
                # The broker never had a row of this queue: the frame's predecessor was refused or timed out.
                self._refused(frame, error)
        else:
            self._remove(frame)
            self._settle(frame, None, error)
            self._broken = True
        self._pump()

    def _refused(self, frame: Frame, error: PlaitError) -> None:
        """A frame does not follow what the broker has: sign it anew, unless that has been tried."""
        self._broken = True
        if frame.parts.previous == self._confirmed or frame.parts.first <= self._confirmed:
            self._remove(frame)
            self._settle(frame, None, error)

    def _repair(self) -> None:
        """All answers are in: what is left follows what the broker has, in order."""
        self._broken = False
        last = self._confirmed
        producer = self._frames[0].parts.producer if self._frames else self.producer.id
        for frame in self._frames:
            if frame.parts.producer != producer:
                producer, last = frame.parts.producer, 0
            frame.parts.follow(last)
            last = frame.parts.last
        self.last = last if producer == self.producer.id else 0

    def _lose_producer(self, producer: int, error: UnknownProducer) -> None:
        """What was sent is in doubt; what was not, and what comes next, has a new producer id (R9)."""
        if producer == self.producer.id:
            self.producer.renew()
        frames, self._frames = self._frames, deque()
        self._under_way = 0
        self._confirmed = 0
        self._broken = False
        for frame in frames:
            frame.under_way = False
            if frame.sent:
                self._settle(frame, None, error)
                continue
            frame.parts.producer = frame.batch.producer = self.producer.id
            frame.parts.first = frame.batch.first = self.producer.take(frame.parts.count)
            frame.parts.follow(self.last)
            self.last = frame.parts.last
            self._frames.append(frame)

    def _remove(self, frame: Frame) -> None:
        try:
            self._frames.remove(frame)
        except ValueError:
            pass

    def _settle(self, frame: Frame, sequence: int | None, error: PlaitError | None) -> None:
        if error is not None and frame.batch.posted and self.error is None:
            self.error = error
        frame.batch.settle(sequence, error)
        self.producer.released(frame.size)
        if self._idle:
            self._tell_idle()

    def _expire(self) -> None:
        """Rows that got no answer in time fail to their caller; their fate is unknown."""
        self._timer = None
        now = self.producer.loop.time()
        expired = [frame for frame in self._frames if frame.deadline <= now]
        for frame in expired:
            self._remove(frame)
            if frame.under_way:
                frame.under_way = False
                self._under_way -= 1
            reason = self.producer.node.last_error
            detail = f": {reason}" if reason and self.producer.node.link is None else ""
            limit = self.producer.limits.send_seconds
            self._settle(frame, None, Timeout(f"no answer for a send to {self.subject!r} within {limit:g} s{detail}"))
        if self._frames:
            self._timer = self.producer.loop.call_at(self._frames[0].deadline, self._expire)

    # --- waiting --------------------------------------------------------------------------------

    def _tell_idle(self) -> None:
        idle, self._idle = self._idle, []
        for future in idle:
            if not future.done():
                future.set_result(None)

    async def wait_for_room(self) -> None:
        """Until fewer frames wait than may be under way."""
        while self.full and self.producer.closed is None:
            await self._next_settled()

    async def _next_settled(self) -> None:
        future: asyncio.Future[None] = self.producer.loop.create_future()
        self._idle.append(future)
        await future

    async def flush(self) -> PlaitError | None:
        """Until everything so far is settled; the first error since the last flush."""
        self.seal()
        batches = [frame.batch for frame in self._frames]
        for batch in batches:
            await batch.wait()
        error, self.error = self.error, None
        return error

    def abandon(self, error: PlaitError) -> None:
        """Everything open fails."""
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._routing is not None and error.code == "closed":
            self._routing.cancel()
        rows, self._rows = self._rows, self._new_rows()
        frames, self._frames = self._frames, deque()
        self._under_way = 0
        self._broken = False
        self.last = self._confirmed
        for frame in frames:
            frame.under_way = False
            self._settle(frame, None, error)
        if rows.bodies:
            if rows.batch.posted and self.error is None:
                self.error = error
            rows.batch.settle(None, error)
            self.producer.released(rows.size)
        self._tell_idle()
