"""The messages between client and server: one struct for each packet kind.

The head of a packet is a msgpack array. A later version can add fields at its end, because a reader ignores fields that
it does not know and gives missing fields their defaults. docs/formats.md has the meaning of all messages and fields.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from plait.model.filter_terms import FilterTerms
from plait.model.reason import Reason
from plait.model.retry_policy import Retry
from plait.model.transaction_row import TransactionRow

PROTOCOL_VERSION = 1

#: (start, end, epoch): the sequences [start, end), with their data epoch.
EpochRange = tuple[int, int, int]
#: (start, end, attempt): the sequences [start, end), with the number of their delivery.
AttemptRange = tuple[int, int, int]
#: (first, end): logical partitions (LPs) [first, end).
LpRun = tuple[int, int]
#: (first, end, epoch): the LPs [first, end), with the lock epoch of their allocation.
LpGrant = tuple[int, int, int]
#: (first, end, epoch, until): a grant, of which the consumer wants only rows with sequences below ``until``; 0: no end.
LpWant = tuple[int, int, int, int]
#: (first, end, history): the LPs [first, end), which have the same history: a list of spans, the oldest first. A span
#: is (index of the partition, fence); the fence is None for the partition that accepts rows now.
LpHistory = tuple[int, int, list[tuple[int, int | None]]]
#: "earliest", "latest", ("sequence", n) or ("time", microseconds). None means the default.
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
    """A client sends it every second to keep the connection and all consumers of the connection alive."""

    KIND: ClassVar[int] = 5


class PartitionNumberRequest(PacketHead, frozen=True):
    """Asks for the number of a partition or, if ``delayed`` or ``half``, of its schedule or half partition."""

    KIND: ClassVar[int] = 10
    name: str
    delayed: bool = False
    half: bool = False


class PartitionNumberReply(PacketHead, frozen=True):
    """The number and name of the partition that stores the rows."""

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
    """Attaches a consumer to a group on the partition ``name``. If ``group`` is None, the consumer gets all messages.

    - ``holds``: the ranges that the client still holds from partition number ``partition``. The broker ignores them if
      the partition has another number now, because the subject was deleted and created again.
    - ``token``: a random secret of an ordered consumer. A consumer that attaches again with the same token keeps its
      locks. A consumer with the same client id and another token gets those locks only after their lease ends.
    - ``began``: the route version that the group began with. If the partition first accepted rows under a later
      version, the group gets all its messages and the broker ignores ``start``.
    - ``filter``: the filter that the member asks for, or (``states_filter`` is False) the newest one that it knows.
      ``filter_version``: the version of the newest filter that it knows. A group with an older one adopts ``filter``.
    - ``fair_by``: what identifies a tenant of the group, "key" or the name of a header; None: it is not fair.
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
    filter: FilterTerms | None = None
    states_filter: bool = False
    filter_version: int = 0
    fair_by: str | None = None


class AttachReply(PacketHead, frozen=True):
    """The session of the consumer, which its later requests name. ``ranked``: rows may overtake others."""

    KIND: ClassVar[int] = 21
    session: int
    partition: int
    name: str
    group: str
    reasons_from: int = 1
    lease_seconds: float = 0.0
    strict: bool = False
    attempts: int = 0
    filter: FilterTerms | None = None
    filter_version: int = 0
    ranked: bool = False


class PullRequest(PacketHead, frozen=True):
    """Asks for rows: at most ``count``, about ``size`` bytes, within ``wait`` seconds."""

    KIND: ClassVar[int] = 22
    session: int
    count: int
    size: int
    wait: float


class PullReply(PacketHead, frozen=True):
    """Rows, as frames in the payload. ``ranges`` has the attempt of each row. ``more``: further rows are ready.

    ``paused``: there are no rows, because the group is paused since then (microseconds since 1970).
    """

    KIND: ClassVar[int] = 23
    ranges: list[AttemptRange] = []
    more: bool = False
    news: int = 0
    tags: list[int] = []
    paused: int = 0


class AckRequest(PacketHead, frozen=True):
    """Acks ranges. An ordered consumer sends the tag of a frame with each: only rows of that frame are acked.

    The consumer reports an outcome for every delivered row. When a message fails and holds back its key, the consumer
    returns the later rows of the key, with a ``NackRequest`` that is not ``counted``. It also returns rows of the key
    that arrive before the answer to the nack.
    """

    KIND: ClassVar[int] = 24
    session: int
    ranges: list[EpochRange]
    tags: list[int] = []


class NackRequest(PacketHead, frozen=True):
    """Nacks ranges. The broker redelivers their rows after ``delay`` seconds; None: as the group's retry policy says.

    If ``reject`` is True, the rows become dead letters at once. If ``counted`` is False, the consumer returns the rows
    and the delivery is no attempt, because no handler began them or the consumer cannot handle rows now. The broker
    then first answers the consumer's suspended pull without rows, because the pull would only get the same rows again.
    ``delay``, ``reason``, ``reject`` and ``counted`` do not apply to ``lp_ranges``, whose rows are returned.
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
    """Detaches the consumer. The broker can deliver its unacked rows to other consumers at once."""

    KIND: ClassVar[int] = 26
    session: int


class LeaseRequest(PacketHead, frozen=True):
    """An ordered consumer asks for the locks of all LPs that it wants, and renews its lease.

    The broker releases its lock of every other LP once the consumer holds no rows of the LP. If an LP moved away and
    came back, the consumer wants rows only below the fence at first, because the other partition's rows come before the
    rows from the fence on. ``parked`` and ``resumed``: hashes of keys that are parked, or no longer parked, in the
    partition that had their rows before; the broker parks or resumes them too.
    """

    KIND: ClassVar[int] = 27
    session: int
    wants: list[LpWant]
    parked: list[int] = []
    resumed: list[int] = []
    route: int = 0


class LeaseReply(PacketHead, frozen=True):
    """The locks of the consumer. They are valid for ``seconds`` from the moment the consumer sent the request."""

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
    """Renews the leases of sessions, given as (session, token), over any connection. The answer is ``DoneReply``."""

    KIND: ClassVar[int] = 29
    sessions: list[tuple[int, int]]


class ReadRequest(PacketHead, frozen=True):
    """Reads rows of the partition ``name`` without a group, from ``start`` on (as in ``AttachRequest``).

    With ``filter``, only rows that match it.
    """

    KIND: ClassVar[int] = 30
    name: str
    start: Start
    count: int
    size: int
    wait: float
    filter: FilterTerms | None = None


class ReadReply(PacketHead, frozen=True):
    """Rows, as frames in the payload; the next read starts at ``next``.

    Of a filtered read, ``more``: it has examined as many rows as one request may, and there are more rows now;
    ``missing``: the ranges [first, end) before ``next`` that are expired or damaged.
    """

    KIND: ClassVar[int] = 31
    partition: int
    name: str
    next: int
    more: bool = False
    missing: list[tuple[int, int]] = []


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
    """Asks a meta server for the route of a subject. ``create``: create a missing subject, if the server allows it."""

    KIND: ClassVar[int] = 50
    subject: str
    create: bool = True


class RouteReply(PacketHead, frozen=True):
    """The route of a subject: its partitions as (name, broker group), and the history of each LP.

    ``brokers`` maps a broker group to its addresses and its state: "RW", "R", "W" or "NRW". ``metas`` are the addresses
    of all meta servers. ``passed`` maps a consumer group to the sealed LPs that it has finished, as their brokers
    reported, each as (index of the partition, first, end, fence).
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

    The meta server answers at once if there is a change newer than ``seen``, otherwise after ``wait`` seconds or at the
    next change. ``leaving``: the client closes and ends all its memberships. ``affinity`` lists (subject, group) of the
    members with affinity. ``instance`` is a random number that tells two processes with the same client id apart.
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

    The reply lists only shares that changed after ``seen`` of the request; the client keeps its other shares. ``metas``
    are the addresses of all meta servers. ``routes`` maps each subject of a member to its route version. ``refused``
    lists the memberships that are not possible, as (subject, group, code, text); the others are not affected.
    """

    KIND: ClassVar[int] = 53
    seen: int
    members: list[tuple[str, str, str, list[LpGrant]]]
    metas: list[str] = []
    routes: dict[str, int] = {}
    refused: list[tuple[str, str, str, str]] = []


class TransactionChecksRequest(PacketHead, frozen=True):
    """A producer of a producer group waits at most ``wait`` seconds for transactions whose outcome is not known."""

    KIND: ClassVar[int] = 60
    producer_group: str
    wait: float


class TransactionChecksReply(PacketHead, frozen=True):
    """Transactions that the producer should decide, each with some of its first messages; empty if none was due."""

    KIND: ClassVar[int] = 61
    transactions: list[TransactionRow] = []
