"""What client and server say to each other: one struct a packet kind.

Heads are msgpack arrays, so that a later version may add fields at the end: a reader ignores what it does not know and
gives what is missing its default. docs/formats.md lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import msgspec

from plait.errors import InvalidArgument, PlaitError, ProtocolError, from_code
from plait.limits import KIB, MIB
from plait.reason import Reason
from plait.retry import Retry
from plait.wire.packets import PACKET_SIZE_MAX

PROTOCOL_VERSION = 1

#: (start, end, epoch) of sequences.
EpochRange = tuple[int, int, int]
#: (start, end, attempt) of sequences.
AttemptRange = tuple[int, int, int]
#: "earliest", "latest", ("sequence", n), ("time", microseconds), or None: what is usual.
Start = str | tuple[str, int] | None


class Message(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A packet head."""

    KIND: ClassVar[int] = 0


class Hello(Message, frozen=True):
    """The first packet of a client: which versions it speaks and who it is."""

    KIND: ClassVar[int] = 1
    version_min: int
    version_max: int
    client: str
    capabilities: list[str] = []


class Welcome(Message, frozen=True):
    """The answer: the version both use, and the server's facts."""

    KIND: ClassVar[int] = 2
    version: int
    server: str
    group: str
    epoch: int
    consumer_lost_seconds: float
    producer_window_frames: int
    capabilities: list[str] = []


class Failure(Message, frozen=True):
    """Any request may be answered by this."""

    KIND: ClassVar[int] = 3
    code: str
    message: str
    details: dict[str, Any] = {}


class Done(Message, frozen=True):
    """The request is carried out; there is nothing to add."""

    KIND: ClassVar[int] = 4


class Heartbeat(Message, frozen=True):
    """Sent every second; keeps the connection and all its consumers alive."""

    KIND: ClassVar[int] = 5


class Route(Message, frozen=True):
    """Where do rows of this subject go? ``delayed``: those that are to be delivered at a time of their own."""

    KIND: ClassVar[int] = 10
    subject: str
    delayed: bool = False


class Routed(Message, frozen=True):
    """The partition that takes the rows."""

    KIND: ClassVar[int] = 11
    partition: int
    name: str


class Send(Message, frozen=True):
    """The payload is one frame. A oneway send has no answer."""

    KIND: ClassVar[int] = 12
    partition: int
    oneway: bool = False


class Sent(Message, frozen=True):
    """Rows are stored from this sequence; None: they were stored earlier, their sequence is not remembered."""

    KIND: ClassVar[int] = 13
    sequence: int | None


class Attach(Message, frozen=True):
    """Become a member of a group; no group: broadcast. ``holds`` names what is still in the client's hands.

    It is of ``partition``: when the subject was made anew since, there is nothing of it to hold.
    """

    KIND: ClassVar[int] = 20
    subject: str
    group: str | None
    client: str
    start: Start = None
    delivery: str = "at_least_once"
    holds: list[EpochRange] = []
    partition: int = 0
    retry: Retry | None = None


class Attached(Message, frozen=True):
    """The member's session: every later request names it.

    From attempt number ``reasons_from`` on a failure may be the last, and its reason is wanted.
    """

    KIND: ClassVar[int] = 21
    session: int
    partition: int
    name: str
    group: str
    reasons_from: int = 1


class Pull(Message, frozen=True):
    """Rows for a member: at most ``count``, about ``size`` bytes, within ``wait`` seconds."""

    KIND: ClassVar[int] = 22
    session: int
    count: int
    size: int
    wait: float


class Pulled(Message, frozen=True):
    """The payload is frames; the ranges say which attempt each row is on; ``more``: there are rows left already."""

    KIND: ClassVar[int] = 23
    ranges: list[AttemptRange] = []
    more: bool = False


class Ack(Message, frozen=True):
    """These ranges are done."""

    KIND: ClassVar[int] = 24
    session: int
    ranges: list[EpochRange]


class Nack(Message, frozen=True):
    """These ranges failed: the group gets them again after ``delay`` seconds; None: as its retry policy says.

    ``reject``: they go to the dead letters at once. Not ``counted``: it was no attempt, as nobody began with them or
    nothing can be handled now; what the member waits for is answered with nothing first, as it would only get the same
    rows again.
    """

    KIND: ClassVar[int] = 25
    session: int
    ranges: list[EpochRange]
    delay: float | None = None
    reason: Reason | None = None
    reject: bool = False
    counted: bool = True


class Detach(Message, frozen=True):
    """Leave the group; what is unacked goes back at once."""

    KIND: ClassVar[int] = 26
    session: int


class Read(Message, frozen=True):
    """Rows without a group. ``start`` as in attach, or a sequence to go on from."""

    KIND: ClassVar[int] = 30
    subject: str
    start: Start
    count: int
    size: int
    wait: float


class ReadReply(Message, frozen=True):
    """The payload is frames; go on from ``next``."""

    KIND: ClassVar[int] = 31
    partition: int
    name: str
    next: int


class Admin(Message, frozen=True):
    """A management request by name."""

    KIND: ClassVar[int] = 40
    operation: str
    arguments: dict[str, Any] = {}


class AdminReply(Message, frozen=True):
    """The result of a management request."""

    KIND: ClassVar[int] = 41
    result: msgspec.Raw


def _kinds() -> dict[int, type[Message]]:
    return {kind.KIND: kind for kind in Message.__subclasses__()}


_DECODERS: dict[int, msgspec.msgpack.Decoder[Any]] = {
    number: msgspec.msgpack.Decoder(kind) for number, kind in _kinds().items()
}
_encoder = msgspec.msgpack.Encoder()

#: The largest head: half a million ranges of a consumer that holds every other row.
HEAD_SIZE_MAX = 8 * MIB
#: Heads whose values may be anything: a byte of them can become a whole object.
OPEN_HEAD_SIZE_MAX = 64 * KIB
#: What an error says; the value it names may be long.
MESSAGE_LENGTH_MAX = 4_000
_HEAD_SIZES_MAX = {
    Admin.KIND: OPEN_HEAD_SIZE_MAX,
    Failure.KIND: OPEN_HEAD_SIZE_MAX,
    # Its result is not decoded here; a listing may fill a packet.
    AdminReply.KIND: PACKET_SIZE_MAX,
}


#: The head of a message's packet.
encode: Callable[[Message], bytes] = _encoder.encode


def decode(kind: int, head: memoryview) -> Message:
    """The message of a packet; ``ProtocolError`` for anything else."""
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise ProtocolError(f"packet kind {kind} is not known; is the other side newer?")
    limit = _HEAD_SIZES_MAX.get(kind, HEAD_SIZE_MAX)
    if len(head) > limit:
        raise ProtocolError(f"a head of {len(head)} bytes for a packet of kind {kind} is over the limit of {limit}")
    try:
        message: Message = decoder.decode(head)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, InvalidArgument) as error:
        raise ProtocolError(f"packet of kind {kind} does not decode: {error}") from None
    return message


def failure_of(error: PlaitError) -> Failure:
    """The packet that tells of an error."""
    details = {k: v for k, v in error.details.items() if isinstance(v, int | str | float | None)}
    message = error.message
    if len(message) > MESSAGE_LENGTH_MAX:
        message = message[: MESSAGE_LENGTH_MAX - 3] + "..."
    return Failure(error.code, message, details)


def error_of(failure: Failure) -> PlaitError:
    """The error that a packet tells of."""
    error = from_code(failure.code, failure.message)
    # Not as arguments: what the names in there are is up to the other side.
    error.details = dict(failure.details)
    return error
