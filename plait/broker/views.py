"""Views of subjects, groups and consumers, for listings."""

from __future__ import annotations

import numpy as np

from plait.broker.broker import Broker
from plait.broker.groups.ordered_group import OrderedGroup
from plait.broker.groups.row_counts import LAG_COUNTED_MAX, RowCounter
from plait.broker.groups.shared_group import Group, Journal
from plait.broker.partitions.partition import Partition
from plait.wire.admin.subjects import ConsumerInfo, GroupInfo, SubjectInfo


def subject_view(broker: Broker, partition: Partition) -> SubjectInfo:
    settings, config = partition.row.settings, broker.config
    seconds, size = settings.retention_seconds, settings.retention_bytes
    return SubjectInfo(
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


def group_view(group: Group, journal: Journal | None = None) -> GroupInfo:
    """The view of a group. With a ``journal``, rows of an ordered group are read to count them."""
    if isinstance(group, OrderedGroup):
        return _ordered_view(group, journal)
    log, partition = group.pull_log, group.partition
    held, returned, waiting = log.held_count, log.returned.count, log.waiting.count
    consumers = [
        ConsumerInfo(c.client, c.connected, log.held[c.id].count if c.id in log.held else 0)
        for c in group.consumers.values()
    ]
    return GroupInfo(
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


def _ordered_view(group: OrderedGroup, journal: Journal | None) -> GroupInfo:
    partition, cursors = group.partition, list(group.cursors)
    counter = RowCounter(group, journal, LAG_COUNTED_MAX)
    held, returned, waiting, lag = 0, 0, 0, 0
    held_by: dict[int, int] = {}
    for cursor in cursors:
        count = counter.count(cursor, cursor.all_held())
        held_by[cursor.owner] = held_by.get(cursor.owner, 0) + count
        held += count
        returned += counter.count(cursor, cursor.returned)
        waiting += cursor.waiting.count
        lag += counter.count(cursor, [(cursor.next, partition.visible)])
    return GroupInfo(
        partition.row.subject,
        group.name,
        group.definition.broadcast,
        group.definition.delivery,
        group.retry,
        max(cursor.next for cursor in cursors),
        group.floor,
        lag + held + returned + waiting,
        held,
        returned,
        waiting,
        group.redelivered_count,
        group.lost_count,
        sum(consumer.connected for consumer in group.consumers.values()),
        [
            ConsumerInfo(c.client, c.connected, held_by.get(c.id, 0), int(np.count_nonzero(group.locks.owner == c.id)))
            for c in group.consumers.values()
        ],
        group.pull_log.dead.count,
        not group.definition.affinity,
        len(group.cursors.by_key),
        len(group.parked()),
        "key" if group.definition.affinity else None,
        not counter.exact,
        group.lost_estimated,
    )
