"""What a broker tells about its subjects and groups."""

from __future__ import annotations

import msgspec

from plait.broker.broker import Broker
from plait.broker.group import Group
from plait.broker.partition import Partition
from plait.retry import Retry


class SubjectView(msgspec.Struct, frozen=True):
    """A subject as listings show it."""

    subject: str
    partition: str
    start: int
    end: int
    count: int
    size: int
    groups: int
    created: int
    retention_seconds: float | None
    retention_bytes: int | None


class ConsumerView(msgspec.Struct, frozen=True):
    """A consumer as listings show it."""

    client: str
    online: bool
    held: int


class GroupView(msgspec.Struct, frozen=True):
    """A group as listings show it; ``lag`` counts what is not done yet, handed out or not."""

    subject: str
    group: str
    broadcast: bool
    delivery: str
    retry: Retry
    next: int
    floor: int
    lag: int
    unacked: int
    returned: int
    waiting: int
    redelivered: int
    lost: int
    online: int
    consumers: list[ConsumerView]
    dead: int = 0


def subject_view(broker: Broker, partition: Partition) -> SubjectView:
    settings, config = partition.row.settings, broker.config
    seconds, size = settings.retention_seconds, settings.retention_bytes
    return SubjectView(
        partition.row.subject,
        f"{partition.row.name}@{config.group}",
        partition.start,
        partition.visible,
        partition.visible - partition.start,
        partition.size,
        len(partition.groups),
        partition.row.created,
        config.retention_seconds if seconds is None else seconds,
        config.retention_bytes if size is None else size,
    )


def group_view(group: Group) -> GroupView:
    log, partition = group.pull_log, group.partition
    held, returned, waiting = log.held_count, log.returned.count, log.waiting.count
    consumers = [
        ConsumerView(c.client, c.connected, log.held[c.id].count if c.id in log.held else 0)
        for c in group.consumers.values()
    ]
    return GroupView(
        partition.row.subject,
        group.name,
        group.definition.broadcast,
        group.definition.delivery,
        group.retry,
        log.next,
        log.floor,
        max(partition.visible - log.next, 0) + held + returned + waiting,
        held,
        returned,
        waiting,
        group.redelivered_count,
        group.lost_count,
        sum(consumer.online for consumer in consumers),
        consumers,
        log.dead.count,
    )
