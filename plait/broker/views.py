"""Views of subjects, groups and consumers, for listings."""

from __future__ import annotations

import numpy as np

from plait.broker.broker import Broker
from plait.broker.groups.group import Group
from plait.broker.groups.ordered.ordered_group import OrderedGroup
from plait.broker.groups.ordered.row_reader import LAG_COUNTED_MAX, RowCounter
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
        settings.send_rate,
    )


def group_view(group: Group, *, counted: bool = False) -> GroupInfo:
    """The view of a group. With ``counted``, rows of an ordered group are read to count them."""
    partition, definition = group.partition, group.definition
    consumers = group.consumers.values()
    held_by: dict[int, int] = {}
    if isinstance(group, OrderedGroup):
        counter = RowCounter(partition, group.reader, LAG_COUNTED_MAX if counted else 0)
        returned = lag = 0
        for cursor in group.cursors:
            held_by[cursor.owner] = held_by.get(cursor.owner, 0) + counter.count(cursor, cursor.all_held())
            returned += counter.count(cursor, cursor.returned)
            lag += counter.count(cursor, [(cursor.next, partition.visible)])
        owner = group.locks.owner
        shown = [
            ConsumerInfo(c.client, c.connected, held_by.get(c.id, 0), int(np.count_nonzero(owner == c.id)))
            for c in consumers
        ]
        online, exact = sum(consumer.connected for consumer in consumers), counter.exact
        holding, parked = len(group.cursors.by_key), len(group.policy.parked())
    else:
        assert isinstance(group, SharedGroup)
        held_by = {holder: ranges.count for holder, ranges in group.cursor.held.items()}
        cursor = group.cursor
        returned, lag = cursor.returned.count, max(partition.visible - cursor.next, 0) + cursor.passed.count
        shown = [ConsumerInfo(c.client, c.connected, held_by.get(c.id, 0)) for c in consumers]
        online, exact = sum(consumer.online for consumer in consumers), True
        holding = parked = 0
    held = sum(held_by.values())
    waiting = sum(cursor.waiting.count for cursor in group.positions.values())
    return GroupInfo(
        partition.row.subject,
        group.name,
        definition.broadcast,
        definition.delivery,
        group.retry,
        max(cursor.next for cursor in group.positions.values()),
        group.floor,
        lag + held + returned + waiting,
        held,
        returned,
        waiting,
        group.redelivered_count,
        group.lost_count,
        online,
        shown,
        group.failures.dead.count,
        definition.ordered and not definition.affinity,
        holding,
        parked,
        "key" if definition.affinity else None,
        not exact,
        group.lost_estimated,
        group.filtered_count,
        definition.filter,
        definition.filter_version,
        group.paused or None,
        None if group.rate is None else group.rate.rate,
        definition.fair_by,
    )
