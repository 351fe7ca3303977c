"""The action log: every pull, ack, nack, reset and offline event in order, and the names their numbers stand for.

A first-hand log, in the same frames as messages. One frame holds the events of one loop turn; its stamp's ``durable``
field is the message-log end it presumes (R3), and replay stops at the first frame that presumes more than was
recovered. ``partition`` tells the two kinds of frame apart: events are fixed 40-byte records, definitions msgpack.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from plait.frame.builder import FrameParts, build_frame
from plait.frame.columns import Column
from plait.frame.header import pack_stamp
from plait.frame.view import FrameView

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
    #: Retention or damage took what the group had not finished.
    SKIP = 6
    FORGET_CONSUMER = 7
    FORGET_GROUP = 8


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
assert EVENT_SIZE == 40


class GroupDefinition(msgspec.Struct, tag="group", frozen=True):
    """A group of one subject and its settings, under the number that events use."""

    id: int
    partition: int
    name: str
    start: int
    broadcast: bool
    delivery: str
    created: int


class ConsumerDefinition(msgspec.Struct, tag="consumer", frozen=True):
    """A consumer of a group, under the number that events use."""

    id: int
    group: int
    client: str


Definition = GroupDefinition | ConsumerDefinition

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Definition)


class ActionBuffer:
    """Events and definitions of the present loop turn."""

    def __init__(self) -> None:
        self._events: list[tuple[int, int, int, int, int, int, int, int, int]] = []
        self._definitions: list[bytes] = []

    def __bool__(self) -> bool:
        return bool(self._events or self._definitions)

    @property
    def size_bound(self) -> int:
        """At least the bytes that ``drain`` will give."""
        definitions = sum(map(len, self._definitions)) + 8 * len(self._definitions)
        return 512 + definitions + (EVENT_SIZE + 4) * len(self._events)

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
    ) -> None:
        self._events.append((action, 0, min(attempt, 0xFFFF), group, consumer, epoch, start, end, time))

    def define(self, definition: Definition) -> None:
        self._definitions.append(_encoder.encode(definition))

    def drain(self, *, index: int, presumed: int, epoch: int, time: int) -> list[FrameParts]:
        """Frames for what is buffered, definitions first; ``presumed`` is the message-log end they rest on."""
        frames = []
        if self._definitions:
            frames.append(_frame(self._definitions, DEFINITIONS, index, presumed, epoch, time))
        if self._events:
            data = np.array(self._events, EVENT).tobytes()
            rows = [data[i : i + EVENT_SIZE] for i in range(0, len(data), EVENT_SIZE)]
            frames.append(_frame(rows, EVENTS, index + len(frames), presumed, epoch, time))
        self._events = []
        self._definitions = []
        return frames


def definition_frame(definitions: list[Definition], *, index: int, presumed: int, epoch: int, time: int) -> FrameParts:
    """All names again, for the head of a new segment: each segment can be read alone."""
    return _frame([_encoder.encode(d) for d in definitions], DEFINITIONS, index, presumed, epoch, time)


def _frame(rows: list[bytes], kind: int, index: int, presumed: int, epoch: int, time: int) -> FrameParts:
    frame = build_frame(rows, producer=0, first=index)
    frame.stamp_with(pack_stamp(kind, index, time, presumed, epoch))
    return frame


def read_events(frame: FrameView) -> npt.NDArray[Any]:
    """The events of a frame as one array."""
    _, data = frame.variable(Column.BODY)
    return np.frombuffer(data, EVENT)


def read_definitions(frame: FrameView) -> list[Definition]:
    """The definitions of a frame."""
    return [_decoder.decode(row) for row in frame.binary(Column.BODY).to_pylist()]
