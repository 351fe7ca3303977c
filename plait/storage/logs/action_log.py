"""The action log: every pull, ack, nack, seal, lock and offline event in order, and the names of its numbers.

A first-hand log, in the same frames as messages. One frame has the events of one loop turn. The frame depends on the
message log up to the offset in the ``durable`` field of its stamp (R3), and on the retained log up to the offset in its
``producer`` field. Replay stops at the first frame that depends on more than was recovered. The ``partition`` field is
the kind of the frame: events are 40-byte records (``action_events``), definitions are msgpack.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from plait.frame.columns import Column
from plait.frame.view import FrameView
from plait.model.filter_terms import FilterTerms
from plait.model.retry_policy import Retry
from plait.storage.logs.action_events import EVENT
from plait.storage.logs.segment import HeaderRows, header_rows

DIRECTORY = "action"
#: Frame kinds, in the stamp's partition field.
EVENTS = 1
DEFINITIONS = 2
#: The most rows of one frame: keeps it far below the size limit of a frame, whatever the number of events in a turn.
EVENTS_MAX = 100_000
DEFINITIONS_MAX = 5_000


class GroupDefinition(msgspec.Struct, tag="group", frozen=True):
    """A group of one subject and its settings; events name it by ``id``."""

    id: int
    partition: int
    name: str
    start: int
    broadcast: bool
    delivery: str
    created: int
    #: None: the default policy.
    retry: Retry | None = None
    #: True if each logical partition has one owner at a time...
    ordered: bool = False
    #: ...and True if a failed message holds nothing back, even if the subject is strict.
    affinity: bool = False
    #: The version of the subject's route when the group was created, in this partition or another one.
    began: int = 0
    #: What a message must be like to be delivered; None: every message is.
    filter: FilterTerms | None = None
    #: How often the filter was set, in all partitions: the filter with the highest number is the newest.
    filter_version: int = 0
    #: What identifies the tenant of a message: "key", or the name of a header. None: the group treats all alike.
    fair_by: str | None = None


class ConsumerDefinition(msgspec.Struct, tag="consumer", frozen=True):
    """A consumer of a group; events name it by ``id``."""

    id: int
    group: int
    client: str
    #: For an ordered group: a digest of the session token (``proof_of``).
    proof: int = 0


Definition = GroupDefinition | ConsumerDefinition

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Definition)


def presumed_retained(frame: FrameView) -> int:
    """The offset in the retained log up to which an action frame depends on it."""
    return frame.producer


def encode_definitions(definitions: list[Definition]) -> list[HeaderRows]:
    """Definitions for the header of a new segment (``Log.on_segment``). Header frames are numbered like all others."""
    return header_rows([_encoder.encode(definition) for definition in definitions], DEFINITIONS_MAX)


def read_events(frame: FrameView) -> npt.NDArray[Any]:
    _, data = frame.variable(Column.BODY)
    return np.frombuffer(data, EVENT)


def read_definitions(frame: FrameView) -> list[Definition]:
    return [_decoder.decode(row) for row in frame.binary(Column.BODY).to_pylist()]
