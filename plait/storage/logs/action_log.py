"""The action log: every pull, ack, nack, reset and offline event in order, and the names their numbers stand for.

A first-hand log, in the same frames as messages. One frame holds the events of one loop turn; its stamp's ``durable``
field is the message-log end it presumes (R3), its ``producer`` field that of the kept log, and replay stops at the
first frame that presumes more than was recovered. ``partition`` tells the two kinds of frame apart: events are fixed
40-byte records, definitions msgpack.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from plait.frame.builder import FrameParts, build_frame
from plait.frame.columns import Column
from plait.frame.header import pack_stamp
from plait.frame.validation import SMALL_COUNT
from plait.frame.view import FrameView, wrap_binary
from plait.model.retry_policy import Retry
from plait.storage.logs.header_rows import HeaderRows, head_rows

DIRECTORY = "action"
#: Frame kinds, in the stamp's partition field.
EVENTS = 1
DEFINITIONS = 2


class Action(IntEnum):
    """What happened."""

    PULL = 1
    ACK = 2
    NACK = 3
    OFFLINE = 4
    RESET = 5
    #: Retention or damage took what the group had not finished; of an ordered group, so many rows (as a due time).
    SKIP = 6
    FORGET_CONSUMER = 7
    FORGET_GROUP = 8
    #: Out of attempts: what was handed out is a dead letter.
    BURY = 9
    #: Dead letters are handed out again, or forgotten.
    REVIVE = 10
    PURGE = 11
    #: Of group 0: delayed rows of the schedule partition ``consumer`` shall never be due.
    CANCEL = 12
    #: Of an ordered group: logical partitions [start, end) are the consumer's (0: nobody's), under an epoch.
    LOCK = 13
    #: They have gone from one strand to another, which is new or has come equally far.
    MOVE = 14
    #: A key has a strand of its own from now on, or has none any more.
    HOLD = 15
    JOIN = 16
    #: A strand waits until somebody decides, or goes on.
    PARK = 17
    RESUME = 18
    #: What a strand has not done of what it has come by.
    RETURN = 19


#: What these are about is not a range of rows.
NOT_OF_ROWS = frozenset((Action.LOCK, Action.MOVE, Action.HOLD, Action.JOIN, Action.PARK, Action.RESUME))

#: The time of an event is when its rows are due, not when it happened.
FLAG_DUE = 1
#: Nobody had begun with what came back: it was no attempt.
FLAG_UNCOUNTED = 2
#: How many rows were lost, which stands in the place of the time, is an estimate.
FLAG_ESTIMATED = 4

EVENT = np.dtype(
    [
        ("action", "u1"),
        ("flags", "u1"),
        ("attempt", "<u2"),
        ("group", "<u4"),
        ("consumer", "<u4"),
        ("epoch", "<u4"),
        ("start", "<u8"),
        ("end", "<u8"),
        ("time", "<i8"),
    ]
)
EVENT_SIZE = EVENT.itemsize
_EVENT = Struct("<BBHIIIQQq")
assert EVENT_SIZE == _EVENT.size == 40
#: Rows of one frame: keeps it far below the limit of a frame's size, however much one loop turn brings.
EVENTS_MAX = 100_000
DEFINITIONS_MAX = 5_000


class GroupDefinition(msgspec.Struct, tag="group", frozen=True):
    """A group of one subject and its settings, under the number that events use."""

    id: int
    partition: int
    name: str
    start: int
    broadcast: bool
    delivery: str
    created: int
    #: None: as usual.
    retry: Retry | None = None
    #: Each logical partition has one owner at a time...
    ordered: bool = False
    #: ...and that is all: a message that fails holds nothing back, whatever its subject's order is.
    affinity: bool = False
    #: The version of the subject's route that the group began with, here or at another partition.
    began: int = 0


class ConsumerDefinition(msgspec.Struct, tag="consumer", frozen=True):
    """A consumer of a group, under the number that events use."""

    id: int
    group: int
    client: str
    #: Of an ordered group: what is kept of the secret that continues its session (``proof_of``).
    proof: int = 0


Definition = GroupDefinition | ConsumerDefinition

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Definition)


class ActionBuffer:
    """Events and definitions that are not in the log yet."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._definitions: list[bytes] = []
        self._frames: list[FrameParts] = []

    def __bool__(self) -> bool:
        return bool(self._events or self._definitions or self._frames)

    @property
    def size_bound(self) -> int:
        """At least the bytes that ``drain`` will give."""
        definitions, events = len(self._definitions), len(self._events)
        frames = 2 + definitions // DEFINITIONS_MAX + events // EVENTS_MAX
        size = 256 * frames + sum(map(len, self._definitions)) + 8 * definitions + (EVENT_SIZE + 4) * events
        return size + sum(frame.size for frame in self._frames)

    def event(
        self,
        action: Action,
        group: int,
        consumer: int,
        start: int,
        end: int,
        attempt: int,
        epoch: int,
        time: int,
        flags: int = 0,
    ) -> None:
        self._events.append(_EVENT.pack(action, flags, min(attempt, 0xFFFF), group, consumer, epoch, start, end, time))

    def define(self, definition: Definition) -> None:
        self._definitions.append(_encoder.encode(definition))

    def seal(self, index: int, ends: tuple[int, int], epoch: int, time: int) -> int:
        """Put what is buffered into frames, definitions first, numbered from ``index`` on; how many.

        ``ends`` are those of the message log and of the kept log that they rest on.
        """
        presumed, kept = ends
        stamp = (presumed, epoch, time)
        definitions, self._definitions = self._definitions, []
        events, self._events = self._events, []
        frames = _frames(definitions, DEFINITIONS, DEFINITIONS_MAX, index, stamp)
        frames += _frames(events, EVENTS, EVENTS_MAX, index + len(frames), stamp, kept=kept)
        self._frames += frames
        return len(frames)

    def drain(self) -> list[FrameParts]:
        """The sealed frames, which leave the buffer."""
        frames, self._frames = self._frames, []
        return frames


def _column(rows: list[bytes]) -> list[bytes] | pa.BinaryArray:
    """Bodies of a frame. Given many as a list, Arrow loads pandas where there is one, which takes long."""
    if len(rows) <= SMALL_COUNT:
        return rows
    return wrap_binary(np.cumsum([0, *map(len, rows)], dtype=np.int32), memoryview(b"".join(rows)))


def presumed_kept(frame: FrameView) -> int:
    """The kept-log end that an action frame rests on."""
    return frame.producer


def encode_definitions(definitions: list[Definition]) -> list[HeaderRows]:
    """Names again, for the head of a new segment, whose frames are numbered as all others (``Log.on_segment``)."""
    return head_rows([_encoder.encode(definition) for definition in definitions], DEFINITIONS_MAX)


def _frames(
    rows: list[bytes],
    kind: int,
    rows_max: int,
    index: int,
    stamp: tuple[int, int, int],
    kept: int = 0,
) -> list[FrameParts]:
    presumed, epoch, time = stamp
    frames = []
    for start in range(0, len(rows), rows_max):
        frame = build_frame(_column(rows[start : start + rows_max]), producer=kept, first=index)
        frame.stamp_with(pack_stamp(kind, index, time, presumed, epoch))
        frames.append(frame)
        index += 1
    return frames


def read_events(frame: FrameView) -> npt.NDArray[Any]:
    """The events of a frame as one array."""
    _, data = frame.variable(Column.BODY)
    return np.frombuffer(data, EVENT)


def read_definitions(frame: FrameView) -> list[Definition]:
    """The definitions of a frame."""
    return [_decoder.decode(row) for row in frame.binary(Column.BODY).to_pylist()]
