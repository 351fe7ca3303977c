"""The messages between client and server: one struct for each packet kind.

Heads are msgpack arrays, so that a later version can add fields at the end: a reader ignores unknown fields and gives
missing ones their defaults. docs/formats.md lists all messages.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from plait.model.reason import Reason
from plait.model.retry_policy import Retry

PROTOCOL_VERSION = 1

#: (start, end, epoch) of sequences.
EpochRange = tuple[int, int, int]
#: (start, end, attempt) of sequences.
AttemptRange = tuple[int, int, int]
#: (first, end): logical partitions (LPs) [first, end).
LpRun = tuple[int, int]
#: (first, end, epoch): LPs and the lock epoch of their allocation.
LpGrant = tuple[int, int, int]
#: (first, end, epoch, until): as in a grant, with the sequence up to which rows are wanted; 0: no end.
LpWant = tuple[int, int, int, int]
#: (first, end, history): LPs with the same history, a list of spans, the oldest first. A span is (index of the
#: partition, fence); the fence is None for the partition that takes rows now.
LpHistory = tuple[int, int, list[tuple[int, int | None]]]
#: "earliest", "latest", ("sequence", n), ("time", microseconds), or None: the default.
Start = str | tuple[str, int] | None


class PacketHead(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of all packet heads."""

    KIND: ClassVar[int] = 0


class Hello(PacketHead, frozen=True):
    """The first packet of a client: its protocol versions and its client id."""

    KIND: ClassVar[int] = 1
    version_min: int
    version_max: int
    client: str
    capabilities: list[str] = []


class Welcome(PacketHead, frozen=True):
    """The answer to ``Hello``: the protocol version to use, and the properties of the server."""

    KIND: ClassVar[int] = 2
    version: int
    server: str
    group: str
    epoch: int
    consumer_lost_seconds: float
    producer_window_frames: int
    capabilities: list[str] = []


class ErrorReply(PacketHead, frozen=True):
    """The answer to a request that failed."""

    KIND: ClassVar[int] = 3
    code: str
    message: str
    details: dict[str, Any] = {}


class DoneReply(PacketHead, frozen=True):
    """The answer to a request that succeeded and has no result."""

    KIND: ClassVar[int] = 4


class NackReply(PacketHead, frozen=True):
    """The answer to ``NackRequest``: how many messages of its ranges became dead letters."""

    KIND: ClassVar[int] = 32
    dead: int = 0


class HeartbeatRequest(PacketHead, frozen=True):
    """Sent every second; keeps the connection and all its consumers alive."""

    KIND: ClassVar[int] = 5


class PartitionNumberRequest(PacketHead, frozen=True):
    """Asks for the number of a partition; with ``delayed``, of its schedule partition."""

    KIND: ClassVar[int] = 10
    name: str
    delayed: bool = False


class PartitionNumberReply(PacketHead, frozen=True):
    """The number and name of the partition that takes the rows."""

    KIND: ClassVar[int] = 11
    partition: int
    name: str


class SendRequest(PacketHead, frozen=True):
    """Stores the frame in the payload. A oneway send has no answer."""

    KIND: ClassVar[int] = 12
    partition: int
    oneway: bool = False


class SendReply(PacketHead, frozen=True):
    """The sequence of the first stored row; None: the rows were stored earlier and their sequence is unknown."""

    KIND: ClassVar[int] = 13
    sequence: int | None


class AttachRequest(PacketHead, frozen=True):
    """Attaches a consumer to a group on the partition ``name``; without a group: broadcast.

    ``holds`` are the ranges that the client still holds. They belong to the partition number ``partition``: if the
    subject was deleted and created again since, they are void. An ``ordered`` consumer gets rows of the LPs that it has
    the locks of (``LeaseRequest``); with ``affinity`` as well, a failed message never holds back its key. ``token`` is
    a random secret of an ordered consumer. With the same token the consumer continues its earlier session and has its
    locks; the same client id with another token waits until the lease of that session ends. ``began`` is the version of
    the route that the group began with: the group gets all messages of a partition that took its first row under a
    later version, whatever ``start`` is.
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
    """The session of the consumer, which every later request names.

    From attempt ``reasons_from`` on a failure may be the last one, so the consumer sends its reason. An ordered
    consumer has its locks for ``lease_seconds`` from the moment it sent the request that renews them. ``strict``: a
    failed message holds back its key. ``attempts`` is the number of deliveries before a message becomes a dead letter;
    0: no limit.
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
    """Asks for rows: at most ``count``, about ``size`` bytes, within ``wait`` seconds."""

    KIND: ClassVar[int] = 22
    session: int
    count: int
    size: int
    wait: float


class PullReply(PacketHead, frozen=True):
    """Rows, as frames in the payload. The ranges have the attempt of each row; ``more``: further rows are ready.

    When ``news`` is higher than that of the last ``LeaseReply``, locks are to be granted or released: the consumer
    sends a ``LeaseRequest``. For an ordered consumer there is one range and one tag in ``tags`` for each frame, in
    order: rows of different frames can be interleaved, and the tag identifies the frame of a row.
    """

    KIND: ClassVar[int] = 23
    ranges: list[AttemptRange] = []
    more: bool = False
    news: int = 0
    tags: list[int] = []


class AckRequest(PacketHead, frozen=True):
    """Acks ranges.

    An ordered consumer sends a tag with each range: that of the frame (``PullReply``). The range means the rows of this
    frame that lie in it. It ends at the next row of the frame, or behind the last row, so that ranges leave no gap. It
    may include rows of the frame that were returned to the broker. A range with tag 0 means all its sequences; ranges
    of rows from an earlier session have tag 0. The consumer reports an outcome for every delivered row: rows that it
    drops, because an earlier message failed and holds back their key, it returns (a ``NackRequest`` that is not
    ``counted``). That includes rows of such a key that arrive before the answer to the nack.
    """

    KIND: ClassVar[int] = 24
    session: int
    ranges: list[EpochRange]
    tags: list[int] = []


class NackRequest(PacketHead, frozen=True):
    """Nacks ranges: they are redelivered after ``delay`` seconds; None: according to the group's retry policy.

    ``reject``: they become dead letters at once. Not ``counted``: the rows are returned and it was no attempt, because
    no handler began with them or the consumer cannot handle rows now. The broker then first answers the suspended pull
    of the consumer without rows, as it would only get the same rows again.

    ``lp_ranges``, each with a tag in ``lp_tags``, are rows that an ordered consumer returns without having begun with
    them: the rows with this tag that lie in the range and belong to the LPs ``lps``. The other fields do not apply to
    them.
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
    """Detaches the consumer; its unacked rows are returned at once."""

    KIND: ClassVar[int] = 26
    session: int


class LeaseRequest(PacketHead, frozen=True):
    """An ordered consumer asks for the locks of all LPs that it wants, and renews its lease.

    It releases the locks that it has and does not name, once it holds none of their rows. Where an LP was in another
    partition for a while, rows are wanted only up to the fence, because the rows of that partition come before those
    behind the fence. ``parked`` are hashes of keys that are parked in the partition that had their rows before: the
    broker parks them here too; keys in ``resumed`` are no longer parked there. ``route`` is the version of the route
    that the consumer uses: if the partition knows a newer one, it delivers only rows of LPs that the older route leads
    to.
    """

    KIND: ClassVar[int] = 27
    session: int
    wants: list[LpWant]
    parked: list[int] = []
    resumed: list[int] = []
    route: int = 0


class LeaseReply(PacketHead, frozen=True):
    """The locks of the consumer, valid for the lease's duration from the moment it sent the request.

    The consumer may handle the LPs in ``owned``, under the given epochs. Those in ``leaving`` are wanted by another
    consumer with a higher epoch: the broker delivers no new rows of them, the consumer returns the rows that it has not
    begun, and the last ack releases the lock. ``drained``: every row up to the wanted sequence is done, except for keys
    whose hashes are in ``parked``. ``inherited`` are the parked keys that are parked only because a ``LeaseRequest``
    named them as parked in their earlier partition. ``again``: LPs, wanted or not, that are sealed here and have
    unfinished rows below the fence, although an earlier reply may have called them drained. ``refused``: another
    consumer had the lock with this epoch or a higher one; ask the meta server for a new allocation.
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
    """Renews the leases of (session, token) pairs, over any connection. The answer is ``DoneReply``."""

    KIND: ClassVar[int] = 29
    sessions: list[tuple[int, int]]


class ReadRequest(PacketHead, frozen=True):
    """Reads rows of the partition ``name`` without a group. ``start`` as in ``AttachRequest``, or a sequence."""

    KIND: ClassVar[int] = 30
    name: str
    start: Start
    count: int
    size: int
    wait: float


class ReadReply(PacketHead, frozen=True):
    """Rows, as frames in the payload; the next read starts at ``next``."""

    KIND: ClassVar[int] = 31
    partition: int
    name: str
    next: int


class AdminRequest(PacketHead, frozen=True):
    """An admin request, by the name of its operation."""

    KIND: ClassVar[int] = 40
    operation: str
    arguments: dict[str, Any] = {}


class AdminReply(PacketHead, frozen=True):
    """The result of an admin request."""

    KIND: ClassVar[int] = 41
    result: msgspec.Raw


class RouteRequest(PacketHead, frozen=True):
    """Asks a meta server for the route of a subject. With ``create``, a missing subject is created if allowed."""

    KIND: ClassVar[int] = 50
    subject: str
    create: bool = True


class RouteReply(PacketHead, frozen=True):
    """The route of a subject: its partitions as (name, broker group), and the history of each LP.

    ``brokers`` has the addresses of each broker group and its state: "RW", "R", "W" or "NRW"; ``metas`` are the
    addresses of all meta servers. ``passed`` has, for each group, the sealed LPs that it has finished, as their brokers
    reported: (index of the partition, first, end, fence).
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
    """The heartbeat of a client to a meta server, with its memberships as (subject, group, ordered).

    The answer is delayed by ``wait`` seconds unless there is a change newer than ``seen``. ``leaving``: the client
    closes and ends all its memberships. ``affinity`` are the (subject, group) of members with affinity. ``instance`` is
    a random number: another process with the same client id has another one.
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
    """The shares of the client's members: (subject, group, "exclusive" or "shared", LPs).

    Only shares that changed after ``seen`` of the request are listed: for the others the client keeps the ones that it
    knows. ``metas`` are the addresses of all meta servers; ``routes`` the route versions of the members' subjects;
    ``refused`` the (subject, group, code, text) of memberships that are not possible; they do not affect the other
    ones.
    """

    KIND: ClassVar[int] = 53
    seen: int
    members: list[tuple[str, str, str, list[LpGrant]]]
    metas: list[str] = []
    routes: dict[str, int] = {}
    refused: list[tuple[str, str, str, str]] = []
