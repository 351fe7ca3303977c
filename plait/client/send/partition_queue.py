"""The queue of one partition: collects open rows, and decides when they become a frame."""

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

#: A group of fewer rows is not sent in two halves.
AHEAD_COUNT = 64


class PartitionQueue(PartitionSender):
    """Collects rows into frames; its base class sends them."""

    __slots__ = ("_ahead", "_frame_bytes", "_frame_count", "_linger", "_oneway", "_rows", "urgent")

    def __init__(self, subject_sender: SubjectSender) -> None:
        super().__init__(subject_sender)
        #: The open rows are sealed at the end of this loop turn.
        self.urgent = False
        self._frame_bytes = self.producer.limits.frame_bytes
        self._frame_count = self.producer.limits.frame_count
        self._rows = self._new_rows()
        #: If no frame waits, open rows are sealed early with this row: half of what the last frame had.
        self._ahead = AHEAD_COUNT // 2 - 1
        self._oneway = OpenRows()
        self._linger: asyncio.TimerHandle | None = None

    def _new_rows(self) -> OpenRows:
        return OpenRows()

    @property
    def no_open_rows(self) -> bool:
        """No row was added after the last frame was sealed."""
        return not self._rows.bodies

    @property
    def empty(self) -> bool:
        """There are no rows, no frames, and no request for the route."""
        return not (self._rows.bodies or self._oneway.bodies or self._frames or self._routing is not None)

    def post(
        self,
        body: Any,
        key: str | int | None,
        tags: Iterable[str] | None,
        headers: Mapping[str, Any] | None,
    ) -> Ticket:
        """Add a row. It is sent when the frame is full, or after ``linger_seconds``."""
        rows = self._rows
        bodies, keys = rows.bodies, rows.keys
        row = len(bodies)
        # The fast path for most rows: a bytes body and a short text key, and no row here has tags or headers.
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
        """Add a row that is sent at the end of this loop turn, with the other rows of the turn.

        Returns the batch that gets the result, and the row's number in it. When no frame waits, the first half of many
        rows is sent early, so that the broker works on it while the client adds the second half.
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
        """Add a row that is sent once, at the end of this loop turn, and gets no reply."""
        if self.name is None:
            entry = await self.subject_sender.ready()
            if entry is not self:
                return await entry.send_oneway(body, key, tags, headers)
        while self._partition is None:
            await self._find()
        rows = self._oneway
        if rows.bodies and rows.batch.first + len(rows.bodies) != self.producer.oneway_next:
            # The producer sequences of a frame must be consecutive, and another queue took some in between.
            self._seal_oneway()
            rows = self._oneway
        rows.add(body, key, tags, headers)
        number = self.producer.take_oneway(1)
        if len(rows.bodies) == 1:
            rows.batch.first = number
        if rows.size >= self.producer.limits.frame_bytes:
            self._seal_oneway()
            # No window limits oneway frames: wait until the socket accepts more, and let other tasks run.
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
        """Make a frame of the open rows; it is sent as soon as the window allows."""
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
            self.subject_sender.note(error)
        rows.batch.settle(None, error)
        self.producer.released(rows.size)

    def take_back(self) -> list[SentFrame]:
        """Remove all rows, none of which is stored, and return them as frames in order."""
        self.seal()
        return super().take_back()

    def abandon(self, error: PlaitError) -> None:
        """Fail all rows with ``error``."""
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        rows, self._rows = self._rows, self._new_rows()
        super().abandon(error)
        if rows.bodies:
            self._fail_rows(rows, error)
