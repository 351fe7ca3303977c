"""Views of subjects, groups and consumers, for listings."""

from __future__ import annotations

import numpy as np

from plait.broker.broker import Broker
from plait.broker.groups.group import Group
from plait.broker.groups.ordered.ordered_group import OrderedGroup
from plait.broker.groups.ordered.row_counts import LAG_COUNTED_MAX, RowCounter
from plait.broker.groups.shared_group import SharedGroup
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


def group_view(group: Group, *, counted: bool = False) -> GroupInfo:
    """The view of a group. With ``counted``, rows of an ordered group are read to count them."""
    if isinstance(group, OrderedGroup):
        return _ordered_view(group, LAG_COUNTED_MAX if counted else 0)
    assert isinstance(group, SharedGroup)
    cursor, partition = group.cursor, group.partition
    held, returned, waiting = cursor.held_count, cursor.returned.count, cursor.waiting.count
    consumers = [
        ConsumerInfo(c.client, c.connected, cursor.held[c.id].count if c.id in cursor.held else 0)
        for c in group.consumers.values()
    ]
    return GroupInfo(
        partition.row.subject,
        group.name,
        group.definition.broadcast,
        group.definition.delivery,
        group.retry,
        cursor.next,
        cursor.floor,
        max(partition.visible - cursor.next, 0) + held + returned + waiting,
        held,
        returned,
        waiting,
        group.redelivered_count,
        group.lost_count,
        sum(consumer.online for consumer in consumers),
        consumers,
        group.failures.dead.count,
    )


def _ordered_view(group: OrderedGroup, counted_max: int) -> GroupInfo:
    partition, cursors = group.partition, list(group.cursors)
    counter = RowCounter(partition, group.reader, counted_max)
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
        group.failures.dead.count,
        not group.definition.affinity,
        len(group.cursors.by_key),
        len(group.policy.parked()),
        "key" if group.definition.affinity else None,
        not counter.exact,
        group.lost_estimated,
    )
