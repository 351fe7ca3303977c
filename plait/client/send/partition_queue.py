"""One partition's rows on their way in: what was added since the last frame left, and when it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from plait.client.send.open_rows import ROW_SIZE, SHORT_BODY_MAX, SHORT_KEY_MAX, OpenRows
from plait.client.send.partition_sender import PartitionSender, SentFrame
from plait.client.types import MessageId, PendingBatch, Receipt, Ticket
from plait.errors import PlaitError
from plait.frame.header import FLAG_UNSEQUENCED
from plait.wire import messages as m

if TYPE_CHECKING:
    from plait.client.send.subject_sender import SubjectSender

#: Fewer rows than this are not sent in halves.
AHEAD_COUNT = 64


class PartitionQueue(PartitionSender):
    """See the module; the frames are the lane's."""

    __slots__ = ("_ahead", "_frame_bytes", "_frame_count", "_linger", "_oneway", "_rows", "urgent")

    def __init__(self, outlet: SubjectSender) -> None:
        super().__init__(outlet)
        #: Its open rows leave at the end of this turn.
        self.urgent = False
        self._frame_bytes = self.producer.limits.frame_bytes
        self._frame_count = self.producer.limits.frame_count
        self._rows = self._new_rows()
        #: The row with which open rows go ahead, if no frame waits: half of what the last frame had.
        self._ahead = AHEAD_COUNT // 2 - 1
        self._oneway = OpenRows()
        self._linger: asyncio.TimerHandle | None = None

    def _new_rows(self) -> OpenRows:
        return OpenRows()

    @property
    def fresh(self) -> bool:
        """No row was added since the last frame left."""
        return not self._rows.bodies

    @property
    def empty(self) -> bool:
        """No row is here, and no frame of any."""
        return not (self._rows.bodies or self._oneway.bodies or self._frames or self._routing is not None)

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
        if self.name is None:
            entry = await self.outlet.ready()
            if entry is not self:
                return await entry.send_oneway(body, key, tags, headers)
        while self._partition is None:
            await self._find()
        rows = self._oneway
        if rows.bodies and rows.batch.first + len(rows.bodies) != self.producer.oneway_next:
            # Numbers in between went to rows of another queue: those of a frame follow on each other.
            self._seal_oneway()
            rows = self._oneway
        rows.add(body, key, tags, headers)
        number = self.producer.take_oneway(1)
        if len(rows.bodies) == 1:
            rows.batch.first = number
        if rows.size >= self.producer.limits.frame_bytes:
            self._seal_oneway()
            # Nothing counts what is under way: the socket says when it takes more, and others get their turn.
            if self._link is not None:
                await self._link.drained()
            await asyncio.sleep(0)
        elif not self.urgent:
            self.urgent = True
            self.producer.soon(self)
        assert self.name is not None
        return Receipt(MessageId(self.producer.oneway_id, number), self.name, None)

    def _seal_oneway(self) -> None:
        rows, self._oneway = self._oneway, OpenRows()
        link = self._link
        if link is None or self._partition is None:
            return
        producer = self.producer
        parts = rows.build(
            producer.oneway_id, rows.batch.first, 0, producer.now(), producer.compression, FLAG_UNSEQUENCED
        )
        link.notify(m.SendRequest(self._partition, oneway=True), parts.parts, parts.size)

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
            self._fail_rows(rows, error)
            return
        self.push(parts, rows.batch, rows.size)

    def _fail_rows(self, rows: OpenRows, error: PlaitError) -> None:
        if rows.batch.posted:
            self.outlet.note(error)
        rows.batch.settle(None, error)
        self.producer.released(rows.size)

    def take_back(self) -> list[SentFrame]:
        """All rows, none of which is stored, as frames in order; they are no longer here."""
        self.seal()
        return super().take_back()

    def abandon(self, error: PlaitError) -> None:
        """Everything open fails."""
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        rows, self._rows = self._rows, self._new_rows()
        super().abandon(error)
        if rows.bodies:
            self._fail_rows(rows, error)
