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
from plait.model.reason import Reason
from plait.model.retry_policy import Retry
from plait.wire.packets import PACKET_SIZE_MAX

PROTOCOL_VERSION = 1

#: (start, end, epoch) of sequences.
EpochRange = tuple[int, int, int]
#: (start, end, attempt) of sequences.
AttemptRange = tuple[int, int, int]
#: Logical partitions [first, end).
LpRun = tuple[int, int]
#: The same, and the epoch of the right to them.
LpGrant = tuple[int, int, int]
#: The same, and the sequence up to which they are wanted; 0: all that there will be.
LpWant = tuple[int, int, int, int]
#: Logical partitions [first, end) with one history: (index of the partition, where its rows of them end; None: it is
#: where they are sent now), the oldest first.
LpHistory = tuple[int, int, list[tuple[int, int | None]]]
#: "earliest", "latest", ("sequence", n), ("time", microseconds), or None: what is usual.
Start = str | tuple[str, int] | None


class PacketHead(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A packet head."""

    KIND: ClassVar[int] = 0


class Hello(PacketHead, frozen=True):
    """The first packet of a client: which versions it speaks and who it is."""

    KIND: ClassVar[int] = 1
    version_min: int
    version_max: int
    client: str
    capabilities: list[str] = []


class Welcome(PacketHead, frozen=True):
    """The answer: the version both use, and the server's facts."""

    KIND: ClassVar[int] = 2
    version: int
    server: str
    group: str
    epoch: int
    consumer_lost_seconds: float
    producer_window_frames: int
    capabilities: list[str] = []


class ErrorReply(PacketHead, frozen=True):
    """Any request may be answered by this."""

    KIND: ClassVar[int] = 3
    code: str
    message: str
    details: dict[str, Any] = {}


class DoneReply(PacketHead, frozen=True):
    """The request is carried out; there is nothing to add."""

    KIND: ClassVar[int] = 4


class NackReply(PacketHead, frozen=True):
    """The answer to ``NackRequest``: how many messages of these ranges are dead letters by it."""

    KIND: ClassVar[int] = 32
    dead: int = 0


class HeartbeatRequest(PacketHead, frozen=True):
    """Sent every second; keeps the connection and all its consumers alive."""

    KIND: ClassVar[int] = 5


class PartitionNumberRequest(PacketHead, frozen=True):
    """Which number has this partition here? ``delayed``: for rows that are to be delivered at a time of their own."""

    KIND: ClassVar[int] = 10
    name: str
    delayed: bool = False


class PartitionNumberReply(PacketHead, frozen=True):
    """The partition that takes the rows."""

    KIND: ClassVar[int] = 11
    partition: int
    name: str


class SendRequest(PacketHead, frozen=True):
    """The payload is one frame. A oneway send has no answer."""

    KIND: ClassVar[int] = 12
    partition: int
    oneway: bool = False


class SendReply(PacketHead, frozen=True):
    """Rows are stored from this sequence; None: they were stored earlier, their sequence is not remembered."""

    KIND: ClassVar[int] = 13
    sequence: int | None


class AttachRequest(PacketHead, frozen=True):
    """Become a member of a group on the partition ``name``; no group: broadcast.

    ``holds`` names what is still in the client's hands. It is of the partition number ``partition``: when the subject
    was made anew since, there is nothing of it to hold. ``ordered``: it gets what it has the locks of (``LeaseRequest``);
    with ``affinity`` as well, a failed message never holds its key. ``token`` is a number that an ordered member makes
    at random and keeps secret. With it the member continues its earlier session and has its locks; the same client id
    with another token waits for the end of that session's lease. ``began`` is the version of the route that the group
    began with: all messages of a partition that took its first ones later belong to it, whatever ``start`` says.
    """

    KIND: ClassVar[int] = 20
    name: str
    group: str | None
    client: str
    start: Start = None
    delivery: str = "at_least_once"
    holds: list[EpochRange] = []
    partition: int = 0
    retry: Retry | None = None
    ordered: bool = False
    affinity: bool = False
    token: int = 0
    began: int = 0


class AttachReply(PacketHead, frozen=True):
    """The member's session: every later request names it.

    From attempt number ``reasons_from`` on a failure may be the last, and its reason is wanted. Who is ``ordered`` has
    its locks for ``lease_seconds`` from the sending of a request that renews them. ``strict``: a failed message holds
    its key. ``attempts`` is how many the group gives a message; 0: no limit.
    """

    KIND: ClassVar[int] = 21
    session: int
    partition: int
    name: str
    group: str
    reasons_from: int = 1
    lease_seconds: float = 0.0
    strict: bool = False
    attempts: int = 0


class PullRequest(PacketHead, frozen=True):
    """Rows for a member: at most ``count``, about ``size`` bytes, within ``wait`` seconds."""

    KIND: ClassVar[int] = 22
    session: int
    count: int
    size: int
    wait: float


class PullReply(PacketHead, frozen=True):
    """The payload is frames; the ranges say which attempt each row is on; ``more``: there are rows left already.

    A ``news`` other than that of the last ``LeaseReply``: ask again, there are locks to be had or to be given up. For an
    ordered member there is one range and one of ``tags`` for each frame, in their order: a frame may hold rows that lie
    between those of another one, and a tag tells apart what belongs to which.
    """

    KIND: ClassVar[int] = 23
    ranges: list[AttemptRange] = []
    more: bool = False
    news: int = 0
    tags: list[int] = []


class AckRequest(PacketHead, frozen=True):
    """These ranges are done.

    From an ordered member each range has a tag, that of the frame (``PullReply``), and means those rows that came with it
    and lie in the range. It ends where the next row of its frame is, or behind the last: nothing is left between two.
    It may reach over rows of the frame that the broker has back.
    With tag 0 it means just what it says; so do all ranges of what was pulled in an earlier session. Every row that
    came is spoken of: also what the member drops, because a message before it failed and holds its key, it gives back
    (a ``NackRequest`` that is not ``counted``). Rows of such a key that come before the answer to its nack are of that kind.
    """

    KIND: ClassVar[int] = 24
    session: int
    ranges: list[EpochRange]
    tags: list[int] = []


class NackRequest(PacketHead, frozen=True):
    """These ranges failed: the group gets them again after ``delay`` seconds; None: as its retry policy says.

    ``reject``: they go to the dead letters at once. Not ``counted``: it was no attempt, as nobody began with them or
    nothing can be handled now; what the member waits for is answered with nothing first, as it would only get the same
    rows again.

    ``lp_ranges``, with a tag each in ``lp_tags``, are given back by an ordered member that has not begun with them: the
    rows that came with the tag, lie in the range and are of the logical partitions ``lps``, whatever lies between.
    Nothing else that is said here is of them.
    """

    KIND: ClassVar[int] = 25
    session: int
    ranges: list[EpochRange]
    delay: float | None = None
    reason: Reason | None = None
    reject: bool = False
    counted: bool = True
    tags: list[int] = []
    lps: list[LpRun] = []
    lp_ranges: list[EpochRange] = []
    lp_tags: list[int] = []


class DetachRequest(PacketHead, frozen=True):
    """Leave the group; what is unacked goes back at once."""

    KIND: ClassVar[int] = 26
    session: int


class LeaseRequest(PacketHead, frozen=True):
    """An ordered member asks for the locks of these logical partitions, all that it wants, and renews its lease.

    What it has and does not name any more it gives up, once nothing of it is in its hands. Where the route led
    elsewhere for a while, rows are wanted up to the fence only, as others come before those behind it. ``parked`` are
    hashes of keys that are parked where their rows were before: they are parked here too; those in ``resumed`` are no
    longer. ``route`` is the version of the route that it goes by: of an older one than the partition has heard of,
    rows are handed out only where that led to.
    """

    KIND: ClassVar[int] = 27
    session: int
    wants: list[LpWant]
    parked: list[int] = []
    resumed: list[int] = []
    route: int = 0


class LeaseReply(PacketHead, frozen=True):
    """What of it the member has, for the lease's time from when it asked.

    ``owned`` may be handled, under that epoch. ``leaving`` is wanted by somebody with a higher epoch: nothing new
    of it is handed out, what is not begun is to be given back, and with the last ack it is gone. ``drained``: all of it
    is done up to where it is wanted, but for keys whose hashes are in ``parked``. ``inherited`` are those of them that
    are parked only because somebody said that they are where their rows were before. ``again``, wanted or not: these
    end here and have rows left below that, whatever was said before. ``refused``: somebody else has been there with
    that epoch, ask the meta server again.
    """

    KIND: ClassVar[int] = 28
    seconds: float
    news: int
    owned: list[LpGrant] = []
    leaving: list[LpRun] = []
    drained: list[LpRun] = []
    refused: list[LpGrant] = []
    parked: list[int] = []
    inherited: list[int] = []
    again: list[LpRun] = []


class RenewRequest(PacketHead, frozen=True):
    """(session, token) of members whose leases continue, over any connection. Answered with ``DoneReply``."""

    KIND: ClassVar[int] = 29
    sessions: list[tuple[int, int]]


class ReadRequest(PacketHead, frozen=True):
    """Rows of the partition ``name``, without a group. ``start`` as in attach, or a sequence to go on from."""

    KIND: ClassVar[int] = 30
    name: str
    start: Start
    count: int
    size: int
    wait: float


class ReadReply(PacketHead, frozen=True):
    """The payload is frames; go on from ``next``."""

    KIND: ClassVar[int] = 31
    partition: int
    name: str
    next: int


class AdminRequest(PacketHead, frozen=True):
    """A management request by name."""

    KIND: ClassVar[int] = 40
    operation: str
    arguments: dict[str, Any] = {}


class AdminReply(PacketHead, frozen=True):
    """The result of a management request."""

    KIND: ClassVar[int] = 41
    result: msgspec.Raw


class RouteRequest(PacketHead, frozen=True):
    """To a meta server: where is this subject? It is made if it is not there, where that is allowed."""

    KIND: ClassVar[int] = 50
    subject: str
    create: bool = True


class RouteReply(PacketHead, frozen=True):
    """The subject's route: its partitions as (name, broker group), and the history of each logical partition.

    ``brokers`` has the addresses of each broker group and its state: "RW", "R", "W" or "NRW"; ``metas`` are the
    addresses of all meta servers. ``passed`` has, for each group, what it has finished in partitions that took more
    once, as their brokers have reported: (index of the partition, first, end, fence).
    """

    KIND: ClassVar[int] = 51
    subject: str
    version: int
    order: str
    partitions: list[tuple[str, str]]
    histories: list[LpHistory]
    brokers: dict[str, tuple[list[str], str]]
    metas: list[str] = []
    passed: dict[str, list[tuple[int, int, int, int]]] = {}


class MemberHeartbeatRequest(PacketHead, frozen=True):
    """A client tells a meta server that it lives, and of which (subject, group, ordered) it is a member.

    Not answered before ``wait`` seconds are over, unless there is something newer than ``seen``. ``leaving``: it is
    going, and has no members any more. ``affinity`` are (subject, group) of those that are members by affinity.
    ``instance`` is a number that a client makes at random: another process with the same client id has another.
    """

    KIND: ClassVar[int] = 52
    client: str
    members: list[tuple[str, str, bool]]
    seen: int = 0
    wait: float = 0.0
    leaving: bool = False
    affinity: list[tuple[str, str]] = []
    instance: int = 0


class MemberHeartbeatReply(PacketHead, frozen=True):
    """What the client's members are to do: (subject, group, "exclusive" or "shared", logical partitions).

    Only of those for which that is newer than what the client has ``seen``: it goes on with what it knows of others.
    ``metas`` are the addresses of all meta servers; ``routes`` the versions of the members' subjects' routes;
    ``refused`` the (subject, group, code, text) of memberships that cannot be: the others are as if it was alone.
    """

    KIND: ClassVar[int] = 53
    seen: int
    members: list[tuple[str, str, str, list[LpGrant]]]
    metas: list[str] = []
    routes: dict[str, int] = {}
    refused: list[tuple[str, str, str, str]] = []


def _kinds() -> dict[int, type[PacketHead]]:
    return {kind.KIND: kind for kind in PacketHead.__subclasses__()}


_ANSWERS: list[tuple[type[PacketHead], type[PacketHead]]] = [
    (Hello, Welcome),
    (HeartbeatRequest, DoneReply),
    (PartitionNumberRequest, PartitionNumberReply),
    (SendRequest, SendReply),
    (AttachRequest, AttachReply),
    (PullRequest, PullReply),
    (AckRequest, DoneReply),
    (NackRequest, NackReply),
    (DetachRequest, DoneReply),
    (LeaseRequest, LeaseReply),
    (RenewRequest, DoneReply),
    (ReadRequest, ReadReply),
    (AdminRequest, AdminReply),
    (RouteRequest, RouteReply),
    (MemberHeartbeatRequest, MemberHeartbeatReply),
]
#: The kind that each kind of request is answered with, unless it is refused.
ANSWERS: dict[int, int] = {request.KIND: answer.KIND for request, answer in _ANSWERS}
_DECODERS: dict[int, msgspec.msgpack.Decoder[Any]] = {
    number: msgspec.msgpack.Decoder(kind) for number, kind in _kinds().items()
}
_encoder = msgspec.msgpack.Encoder()

#: The largest head: an answer with half a million ranges.
HEAD_SIZE_MAX = 8 * MIB
#: Heads whose values may be anything: a byte of them can become a whole object.
OPEN_HEAD_SIZE_MAX = 64 * KIB
#: Every logical partition by itself and many times the parked keys that a group may have; many sessions. More would
#: keep a server from everything else while it is decoded.
LEASE_HEAD_SIZE_MAX = 1 * MIB
#: ``REQUEST_RANGES_MAX`` ranges with tags, the runs of all logical partitions and a reason, several times over.
RANGES_HEAD_SIZE_MAX = 256 * KIB
#: What an error says; the value it names may be long.
MESSAGE_LENGTH_MAX = 4_000
_HEAD_SIZES_MAX = {
    AdminRequest.KIND: OPEN_HEAD_SIZE_MAX,
    ErrorReply.KIND: OPEN_HEAD_SIZE_MAX,
    AttachRequest.KIND: RANGES_HEAD_SIZE_MAX,
    AckRequest.KIND: RANGES_HEAD_SIZE_MAX,
    NackRequest.KIND: RANGES_HEAD_SIZE_MAX,
    LeaseRequest.KIND: LEASE_HEAD_SIZE_MAX,
    RenewRequest.KIND: LEASE_HEAD_SIZE_MAX,
    # Its result is not decoded here; a listing may fill a packet.
    AdminReply.KIND: PACKET_SIZE_MAX,
}


#: The head of a message's packet.
encode: Callable[[PacketHead], bytes] = _encoder.encode


def decode(kind: int, head: memoryview) -> PacketHead:
    """The message of a packet; ``ProtocolError`` for anything else."""
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise ProtocolError(f"packet kind {kind} is not known; is the other side newer?")
    limit = _HEAD_SIZES_MAX.get(kind, HEAD_SIZE_MAX)
    if len(head) > limit:
        raise ProtocolError(f"a head of {len(head)} bytes for a packet of kind {kind} is over the limit of {limit}")
    try:
        message: PacketHead = decoder.decode(head)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, InvalidArgument) as error:
        raise ProtocolError(f"packet of kind {kind} does not decode: {error}") from None
    return message


def failure_of(error: PlaitError) -> ErrorReply:
    """The packet that tells of an error."""
    details = {name: value for name, value in error.details.items() if _plain(value)}
    message = error.message
    if len(message) > MESSAGE_LENGTH_MAX:
        message = message[: MESSAGE_LENGTH_MAX - 3] + "..."
    return ErrorReply(error.code, message, details)


def _plain(value: Any) -> bool:
    """What says the same on the other side."""
    if isinstance(value, list):
        return all(isinstance(each, int) or _short(each) for each in value)
    return _short(value) if isinstance(value, str) else isinstance(value, int | float | None)


def _short(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MESSAGE_LENGTH_MAX


def error_of(failure: ErrorReply) -> PlaitError:
    """The error that a packet tells of."""
    error = from_code(failure.code, failure.message)
    # Not as arguments: what the names in there are is up to the other side.
    error.details = dict(failure.details)
    return error
