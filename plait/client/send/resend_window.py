"""The frames of one partition that have no result yet: their order, their states and their producer sequences.

Each frame names its predecessor, and the broker stores the frame only after its predecessor. So when the broker refuses
a frame, it refuses the later frames too: the window is *broken*. When all replies have arrived, ``repair`` makes the
remaining frames follow the last row that the broker has stored.

| state | sent over the current link | the broker may have stored it |
| --- | --- | --- |
| NEW | no | no: it was never sent |
| REFUSED | no | no: the broker replied that it has not |
| DOUBT | no | yes: it was under way when a link was lost |
| UNDER_WAY | yes | yes |
| RESENT | yes | yes, even if the broker refuses it now: it was in doubt |
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from plait.client.arguments import to_datetime
from plait.client.send.producer import Producer
from plait.client.types import MessageId, PartitionName, Receipt
from plait.errors import OutOfSequence, PlaitError, ProducerConflict, UnknownProducer
from plait.frame.builder import FrameParts


class SendState(enum.IntEnum):
    """The state of a frame; see the module docstring. The states from ``UNDER_WAY`` on wait for a reply."""

    NEW = 0
    REFUSED = 1
    DOUBT = 2
    UNDER_WAY = 3
    RESENT = 4


NEW, REFUSED, DOUBT, UNDER_WAY, RESENT = SendState

#: The next state when a frame is sent, when its link is lost, when the broker refuses it, and when it is known that no
#: earlier send of it is stored.
ON_SEND: Final = {NEW: UNDER_WAY, REFUSED: UNDER_WAY, DOUBT: RESENT}
ON_LOST: Final = {NEW: NEW, REFUSED: REFUSED, DOUBT: DOUBT, UNDER_WAY: DOUBT, RESENT: DOUBT}
ON_REFUSED: Final = {UNDER_WAY: REFUSED, RESENT: DOUBT}
NOT_STORED: Final = {NEW: NEW, REFUSED: REFUSED, DOUBT: REFUSED, UNDER_WAY: UNDER_WAY, RESENT: UNDER_WAY}


class PendingBatch(msgspec.Struct, eq=False):
    """The shared result of the rows of one frame, and the callers that wait for it. No future unless one is awaited."""

    producer: int = 0
    first: int = 0
    count: int = 0
    partition: PartitionName | None = None
    #: Of the first row; of delayed rows, its number in the schedule.
    sequence: int | None = None
    settled: bool = False
    #: Some rows were posted: their tickets may never be awaited, so ``flush`` raises the error.
    posted: bool = False
    error: PlaitError | None = None
    waiters: list[asyncio.Future[None]] = []
    #: Due times in microseconds since 1970, one for each row or one for all; None: the rows are not delayed.
    dues: Sequence[int] | npt.NDArray[np.int64] | int | None = None
    #: If the rows were split: the new batches, and for each row its batch and its row in that batch.
    pieces: tuple[list[PendingBatch], npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None
    #: How many of those batches have no result yet.
    open: int = 0
    #: The batch that this one was split from.
    parent: PendingBatch | None = None

    def split(self, pieces: Sequence[npt.NDArray[np.int64]]) -> list[PendingBatch]:
        """A new batch for each piece, given as row numbers; this batch has a result when all of them have one."""
        which = np.empty(sum(map(len, pieces)), np.int64)
        numbers = np.empty_like(which)
        batches: list[PendingBatch] = []
        for index, rows in enumerate(pieces):
            each = self.dues is not None and not isinstance(self.dues, int)
            dues = np.asarray(self.dues, np.int64)[rows] if each else self.dues
            batches.append(PendingBatch(count=len(rows), posted=self.posted, dues=dues, parent=self))
            which[rows], numbers[rows] = index, np.arange(len(rows))
        self.pieces, self.open = (batches, which, numbers), len(batches)
        return batches

    def receipt(self, row: int) -> Receipt:
        """The receipt of a row; raises the error of the send."""
        if self.pieces is not None:
            batches, which, rows = self.pieces
            return batches[int(which[row])].receipt(int(rows[row]))
        if self.error is not None:
            raise self.error
        assert self.partition is not None
        number = None if self.sequence is None else self.sequence + row
        # Skips the Python constructor of the NamedTuple: every awaited send makes one.
        message_id = tuple.__new__(MessageId, (self.producer, self.first + row))
        if self.dues is None:
            return Receipt(message_id, self.partition, number)
        due = self.dues if isinstance(self.dues, int) else int(self.dues[row])
        return Receipt(message_id, self.partition, None, to_datetime(due), number)

    def settle(self, sequence: int | None, error: PlaitError | None) -> None:
        """Set the result of all rows and wake the waiting callers."""
        self.sequence = sequence
        self.error = error
        # Last, because another thread may read it.
        self.settled = True
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        parent = self.parent
        if parent is not None:
            parent.open -= 1
            if not parent.open:
                assert parent.pieces is not None
                parent.settle(None, next((piece.error for piece in parent.pieces[0] if piece.error is not None), None))

    async def wait(self) -> None:
        """Wait for the result of the rows. Cancelling one waiter does not affect the others."""
        if not self.settled:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.waiters.append(future)
            await future


class SentFrame(msgspec.Struct, eq=False):
    """A sealed frame, its batch, and the state of its send."""

    parts: FrameParts
    batch: PendingBatch
    #: Bytes of the send buffer that its rows take.
    size: int
    deadline: float
    state: SendState = NEW
    sent_at: float = 0.0
    #: How many partitions definitely refused it.
    tries: int = 0
    #: The error of the last refusal.
    refusal: PlaitError | None = None

    @property
    def doubt(self) -> bool:
        """True if the frame was under way when a link was lost, and was not answered since. It may be stored."""
        return self.state is DOUBT or self.state is RESENT


class ResendWindow:
    """The frames of one partition without a result, in order."""

    __slots__ = ("_confirmed", "_forgotten", "_last", "_producer", "broken", "frames", "under_way", "waiting")

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self.frames: deque[SentFrame] = deque()
        #: How many frames are under way.
        self.under_way = 0
        #: Callers that wait for room.
        self.waiting: list[asyncio.Future[None]] = []
        #: True if a frame was refused: later frames wait until all replies have arrived, and then follow
        #: ``_confirmed``.
        self.broken = False
        #: (producer id, producer sequence) of the last row of this partition that was sealed...
        self._last = (0, 0)
        #: ...and of the last one that the broker is known to have stored.
        self._confirmed = (0, 0)
        #: The error of the broker, if it no longer knows the producer.
        self._forgotten: UnknownProducer | None = None

    @property
    def last(self) -> int:
        """The predecessor of the next frame: a producer sequence, 0 if there is none of the current producer id."""
        producer, last = self._last
        return last if producer == self._producer.id else 0

    @last.setter
    def last(self, last: int) -> None:
        self._last = (self._producer.id, last)

    @property
    def resolved(self) -> bool:
        """True if every sent frame has a result: none is under way or in doubt."""
        return not self.under_way and not any(frame.doubt for frame in self.frames)

    @property
    def full(self) -> bool:
        """True if ``wait_for_room`` waits."""
        return len(self.frames) >= self._producer.limits.in_flight_frames

    async def wait_for_room(self) -> None:
        """Wait until the window is not full, or the producer is closed."""
        while self.full and self._producer.closed is None:
            future: asyncio.Future[None] = self._producer.loop.create_future()
            self.waiting.append(future)
            await future

    def wake(self) -> None:
        """Let the callers that wait for room check again."""
        waiting, self.waiting = self.waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    # --- in and out -----------------------------------------------------------------------------

    def add(self, frame: SentFrame) -> None:
        """Append a frame that follows ``last``."""
        parts = frame.parts
        self._last = (parts.producer, parts.first + parts.count - 1)
        self.frames.append(frame)

    def renumber(self, frame: SentFrame) -> None:
        """Give a frame that is not stored anywhere new producer sequences, so that it follows ``last``."""
        self._number(frame)
        frame.state = NEW
        frame.parts.follow(self.last)

    def _number(self, frame: SentFrame) -> None:
        parts, batch = frame.parts, frame.batch
        parts.producer = batch.producer = self._producer.id
        parts.first = batch.first = self._producer.take(parts.count)

    def remove(self, frame: SentFrame) -> None:
        """Remove a frame, if it is still here."""
        try:
            self.frames.remove(frame)
        except ValueError:
            return
        if self.waiting:
            self.wake()

    def fail(self, frame: SentFrame, error: PlaitError) -> None:
        """Remove a frame: its sends raise ``error``."""
        self.remove(frame)
        self.settle(frame, None, error)

    def settle(self, frame: SentFrame, sequence: int | None, error: PlaitError | None) -> None:
        """Set the result of a frame that was removed."""
        if error is not None and frame.batch.posted:
            self._producer.note(error)
        frame.batch.settle(sequence, error)
        producer = self._producer
        producer.buffered -= frame.size
        if producer.waiting:
            producer.wake_waiting()
        if self.waiting:
            self.wake()

    def expire(self, now: float, timeout: Callable[[], PlaitError]) -> bool:
        """Fail frames after their deadline, with ``timeout`` if they may be stored or were never refused, else with the
        refusal. Returns whether there were any."""
        expired = [frame for frame in self.frames if frame.deadline <= now]
        for frame in expired:
            unknown = frame.doubt or frame.state is UNDER_WAY
            if frame.state >= UNDER_WAY:
                self.answered(frame)
            self.fail(frame, timeout() if unknown or frame.refusal is None else frame.refusal)
        return bool(expired)

    def abandon(self, error: PlaitError) -> None:
        """Fail all frames."""
        self.under_way = 0
        for frame in self.take_back():
            # A late reply is ignored.
            frame.state = NEW
            self.settle(frame, None, error)

    def take_back(self) -> list[SentFrame]:
        """Remove all frames and return them in order. The next frame follows the last stored row."""
        frames, self.frames = self.frames, deque()
        self._last = self._confirmed
        self.broken = False
        self._forgotten = None
        return list(frames)

    # --- sends and replies ----------------------------------------------------------------------

    def answered(self, frame: SentFrame, states: Mapping[SendState, SendState] = ON_REFUSED) -> None:
        """Record that the frame is no longer under way, and is not known to be stored."""
        frame.state = states[frame.state]
        self.under_way -= 1

    def stored(self, frame: SentFrame, partition: PartitionName | None, sequence: int | None) -> None:
        """Remove the frame, which the broker has stored from ``sequence`` on."""
        self.under_way -= 1
        if self.frames and self.frames[0] is frame:
            self.frames.popleft()
        else:
            self.remove(frame)
        parts = frame.parts
        self._confirmed = (parts.producer, parts.first + parts.count - 1)
        frame.batch.partition = partition
        self.settle(frame, sequence, None)

    def lost(self) -> None:
        """Record that the link is lost, with the replies to all frames that were under way."""
        self.under_way = 0
        for frame in self.frames:
            frame.state = ON_LOST[frame.state]

    def refused(self, frame: SentFrame, error: PlaitError, *, draining: bool) -> None:
        """Fail a frame that the broker has refused, unless it can be stored after ``repair``."""
        self.broken = True
        producer = frame.parts.producer
        if isinstance(error, UnknownProducer) and self._confirmed_of(producer):
            # A frame that was sent only once is definitely refused: it waits until all replies have arrived (R9).
            self._forgotten = error
            fails = frame.doubt
        elif isinstance(error, OutOfSequence | UnknownProducer):
            # ``UnknownProducer``: the broker never stored a row of this window, and the frame's predecessor was refused
            # or timed out.
            if isinstance(error, OutOfSequence):
                self._confirmed = (producer, int(error.details.get("last", 0)))
            frame.state = NOT_STORED[frame.state]
            confirmed = self._confirmed_of(producer)
            # A frame that follows the last stored row, and is refused, cannot be stored by a resend.
            fails = not draining and (frame.parts.previous == confirmed or frame.parts.first <= confirmed)
        else:
            fails = True
            if isinstance(error, ProducerConflict) and producer == self._producer.id:
                # Another process uses this producer id: unsent frames get a new one.
                self._producer.renew()
        if fails:
            self.fail(frame, error)

    def replaced(self) -> None:
        """Record that the partition was created again, so that it has no rows of this producer."""
        self._confirmed = (self._confirmed[0], 0)
        self.broken = True

    def deleted(self) -> None:
        """Record that the partition was deleted, with its rows."""
        self._confirmed = (self._confirmed[0], 0)
        for frame in self.frames:
            frame.state = NOT_STORED[frame.state]

    def _confirmed_of(self, producer: int) -> int:
        known, last = self._confirmed
        return last if known == producer else 0

    # --- repair ---------------------------------------------------------------------------------

    def repair(self, *, pinned: bool) -> None:
        """Make the remaining frames follow the last stored row, in order, when all replies have arrived.

        If the broker no longer knows the producer, the frames get a new producer id. Frames in doubt fail then (R9);
        with ``pinned`` all frames fail.
        """
        self.broken = False
        if self._forgotten is not None:
            error, self._forgotten = self._forgotten, None
            self._renew(error, pinned)
            return
        current = self._producer.id
        for frame in self.frames:
            if frame.parts.producer != current and not frame.doubt:
                self._number(frame)
        producer = self.frames[0].parts.producer if self.frames else current
        last = self._confirmed_of(producer)
        for frame in self.frames:
            if frame.parts.producer != producer:
                producer, last = frame.parts.producer, 0
            frame.parts.follow(last)
            last = frame.parts.last
        self._last = (producer, last)

    def _renew(self, error: UnknownProducer, pinned: bool) -> None:
        if self._confirmed[0] == self._producer.id:
            self._producer.renew()
        frames, self.frames = self.frames, deque()
        self._confirmed = self._last = (0, 0)
        for frame in frames:
            if pinned or frame.doubt:
                self.settle(frame, None, error)
            else:
                self.renumber(frame)
                self.add(frame)
