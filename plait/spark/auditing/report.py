"""What an audit found, as users get it: in Python, as JSON, and as the source of the table and the page."""

from __future__ import annotations

from typing import Final

import msgspec

#: Broken promises by the name that facts have, in a line that says what it means.
PROMISES: Final = {
    "missing": "stored messages that are not in the message log any more",
    "behind_fence": "messages stored where no route leads to: ordered groups never get them",
    "stored_twice": "messages whose id is stored a second time",
    "stored_out_of_order": "messages of a strict subject stored before an earlier one of their key and sender",
    "lost": "messages that the group passed by without anybody being handed them",
    "double_acks": "messages acked by two who had no right to both",
    "two_hands": "messages in two consumers' hands at once",
    "out_of_order": "messages acked before an earlier one of their key",
    "invented": "messages that were handed out or acked and never stored",
}


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from send to first ack; each is right to about 4 %."""

    count: int
    p50: float
    p90: float
    p99: float
    p999: float
    max: float


class Moment(msgspec.Struct, frozen=True):
    """The end of a stretch of time, what had been stored until then and what was not settled by then."""

    #: Microseconds since 1970.
    time: int
    stored: int
    lag: int


class DeathCount(msgspec.Struct, frozen=True):
    """What dead letters died of; no type: it is not kept any more."""

    type: str | None
    handler: str | None
    count: int


class Example(msgspec.Struct, frozen=True):
    """A message that shows a broken promise."""

    promise: str
    partition: str
    sequence: int


class GroupAudit(msgspec.Struct, kw_only=True):
    """A consumer group of a subject, over all its partitions."""

    subject: str
    group: str
    #: "shared", "ordered", "affinity" or "broadcast".
    kind: str
    delivery: str
    #: A key's order is promised, and a failed message holds its key back ("strict"), or not ("best_tried"); "none": no
    #: order is promised. "not_known": an older archive does not say of some partition, judged as on "best_tried".
    order: str
    #: Messages from where the group began, and what became of them.
    messages: int
    acked: int
    dead: int
    expired: int
    #: All that is neither: in consumers' hands, to be handed out again, not handed out yet.
    unacked: int
    in_hands: int
    returned: int
    pending: int
    #: What the action log does not go back far enough to say.
    unknown: int
    lost: int
    double_acks: int
    two_hands: int
    out_of_order: int
    invented: int
    #: Deliveries beyond the first, by what went before.
    redelivered: dict[str, int]
    #: Acks beyond the first.
    acked_again: int
    #: Failed attempts, and deaths.
    retried: int
    died: int
    deaths: list[DeathCount]
    latency: Latency | None
    lag: list[Moment]
    #: Which promises are broken; none: all that the group was promised held.
    broken: list[str]
    examples: list[Example]
    #: Somebody deleted it.
    forgotten: bool


class PartitionAudit(msgspec.Struct, frozen=True, kw_only=True):
    """One partition of a subject."""

    partition: str
    #: Messages that were read, and the sequences [first, end) that the log has.
    messages: int
    first: int
    end: int
    #: Sequences between them that it has not.
    missing: int


class HotKey(msgspec.Struct, frozen=True):
    """A key with many messages; at least so many, where the log is longer than one block."""

    key: str
    count: int


class SubjectAudit(msgspec.Struct, kw_only=True):
    """A subject, and all that was read of it."""

    subject: str
    messages: int
    missing: int
    #: Stored behind a fence, with an id that is stored already, before an earlier message of the key.
    behind_fence: int
    stored_twice: int
    stored_out_of_order: int
    partitions: list[PartitionAudit]
    hot_keys: list[HotKey]
    #: The fullest partition and logical partition, as multiples of the mean.
    partition_skew: float
    slot_skew: float
    groups: list[GroupAudit]
    examples: list[Example]

    @property
    def broken(self) -> list[str]:
        """Which promises on how its messages are stored are broken."""
        promises = ("missing", "behind_fence", "stored_twice", "stored_out_of_order")
        return [promise for promise in promises if getattr(self, promise)]


class AuditReport(msgspec.Struct, kw_only=True):
    """All of it."""

    #: Where it was read from, and when what was read begins and ends: microseconds since 1970.
    place: str
    time_min: int
    time_max: int
    since: int | None
    until: int | None
    #: No promise was found broken...
    held: bool
    #: ...and each group could be judged, for a part of its messages at least.
    judged: bool
    subjects: list[SubjectAudit]

    def groups(self) -> list[GroupAudit]:
        """Those of all subjects."""
        return [group for subject in self.subjects for group in subject.groups]
