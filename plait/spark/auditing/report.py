"""The result of an audit: returned in Python, printed as JSON, and rendered as the table and the HTML page."""

from __future__ import annotations

from typing import Final

import msgspec

#: Name of a broken promise in facts and reports → its meaning in one line.
PROMISES: Final = {
    "missing": "stored messages that are no longer in the message log",
    "behind_fence": "messages stored after a fence, where no route leads: ordered groups never receive them",
    "stored_twice": "messages whose id is stored a second time",
    "stored_out_of_order": "messages of a strict subject stored after one of the same key and producer sent later",
    "lost": "messages that the group passed without delivering them",
    "double_acks": "messages acked by two clients, one of which did not hold them",
    "delivered_twice": "messages held by two consumers at once",
    "out_of_order": "messages acked before an earlier one of the same key",
    "invented": "messages that were delivered or acked and never stored",
}

#: The most examples in the line of a broken promise.
SHOWN_MAX: Final = 5


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from send to first ack, accurate to about 4 %."""

    count: int
    p50: float
    p90: float
    p99: float
    p999: float
    max: float


class Moment(msgspec.Struct, frozen=True):
    """A point in time: how many messages were stored by then, and how many of these had no outcome yet."""

    #: Microseconds since 1970.
    time: int
    stored: int
    lag: int


class DeathCount(msgspec.Struct, frozen=True):
    """Dead letters with the same reason. No type: the reason is no longer stored."""

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
    #: "strict": order per key, a failed message holds back its key. "best_tried": order per key, it does not. "none":
    #: no order is promised.
    order: str
    #: Messages since the group began, and their outcomes.
    messages: int
    acked: int
    dead: int
    expired: int
    #: Left out by the filter of the group.
    filtered: int
    #: None of these: held by consumers, waiting for redelivery, or not delivered yet.
    unacked: int
    in_flight: int
    returned: int
    pending: int
    #: Messages whose outcome is not known, because the action log begins after them.
    unknown: int
    lost: int
    double_acks: int
    delivered_twice: int
    out_of_order: int
    invented: int
    #: Deliveries beyond the first, by cause.
    redelivered: dict[str, int]
    #: Acks beyond the first.
    acked_again: int
    #: Failed attempts, and messages that became dead letters.
    retried: int
    died: int
    deaths: list[DeathCount]
    latency: Latency | None
    lag: list[Moment]
    #: The broken promises. Empty: every promise to the group held.
    broken: list[str]
    examples: list[Example]
    #: The group was deleted.
    forgotten: bool


class PartitionAudit(msgspec.Struct, frozen=True, kw_only=True):
    """One partition of a subject."""

    partition: str
    #: Messages that were read, and the range [first, end) of sequences in the log.
    messages: int
    first: int
    end: int
    #: Sequences in this range that the log does not have.
    missing: int


class HotKey(msgspec.Struct, frozen=True):
    """A key with many messages. ``count`` is a lower bound if the log is longer than one block."""

    key: str
    count: int


class SubjectAudit(msgspec.Struct, kw_only=True):
    """A subject: its messages, partitions and groups."""

    subject: str
    messages: int
    missing: int
    #: The numbers of messages that were stored after a fence, stored with an id that is already stored, and stored
    #: after a message of the same key and producer that was sent later.
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
        """The broken promises about how its messages are stored."""
        promises = ("missing", "behind_fence", "stored_twice", "stored_out_of_order")
        return [promise for promise in promises if getattr(self, promise)]


class AuditReport(msgspec.Struct, kw_only=True):
    """The result of an audit."""

    #: The data directory or archive, and the time range of its logs in microseconds since 1970.
    place: str
    time_min: int
    time_max: int
    since: int | None
    until: int | None
    #: No promise was found broken.
    held: bool
    #: Each group could be judged, at least for a part of its messages.
    judged: bool
    subjects: list[SubjectAudit]

    def groups(self) -> list[GroupAudit]:
        """The groups of all subjects."""
        return [group for subject in self.subjects for group in subject.groups]

    def broken(self) -> list[str]:
        """A line for each broken promise."""
        lines = []
        for subject in self.subjects:
            holders: list[tuple[str, SubjectAudit | GroupAudit]] = [("the message log", subject)]
            holders += [(f"group {group.group}", group) for group in subject.groups]
            for holder, audit in holders:
                for promise in audit.broken:
                    places = [f"{each.partition} {each.sequence}" for each in audit.examples if each.promise == promise]
                    shown = f", such as {', '.join(places[:SHOWN_MAX])}" if places else ""
                    lines.append(f"{subject.subject}, {holder}: {PROMISES[promise]}{shown}")
        return lines

    def unknown(self) -> list[str]:
        """A line for each group with messages that could not be judged."""
        return [
            f"{group.subject}, group {group.group}: the outcome of {group.unknown:,} of {group.messages:,} messages is "
            "not known, because the action log begins after them; audit an archive, which begins earlier"
            for group in self.groups()
            if group.unknown
        ]


def format_seconds(seconds: float) -> str:
    """Three digits and a suitable unit."""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 0.001)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
