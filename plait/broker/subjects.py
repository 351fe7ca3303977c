"""Creates, changes and deletes subjects. Each change is a catalog row in the message log before it takes effect."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from plait.broker.partitions.partition import Partition
from plait.errors import LimitExceeded, StaleRoute, SubjectExists, SubjectNotFound
from plait.model.settings import SubjectSettings
from plait.storage.catalog import FORWARD, SCHEDULE, STAGE, PartitionRow
from plait.storage.logs.consume_log import ConsumeLog

if TYPE_CHECKING:
    from plait.broker.broker import Broker


def make(broker: Broker, subject: str, *, create: bool) -> Partition:
    """Create a subject on first use; raises ``SubjectNotFound`` where that is not allowed.

    Where meta servers create partitions, a client that names an unknown one gets ``StaleRoute`` and asks a meta server
    again: the name can be that of any partition of a subject.
    """
    if create and broker.routed:
        # The meta servers could not create it here either.
        broker.turn.refuse_when_full()
        raise StaleRoute(f"this broker has no partition {subject!r}; get the route of its subject from a meta server")
    if not (create and broker.config.auto_create):
        raise SubjectNotFound(
            f"subject {subject!r} does not exist; create it with 'plait subject create {subject}'", subject=subject
        )
    return broker.create_subject(subject)


def create_subject(broker: Broker, subject: str, settings: SubjectSettings | None) -> Partition:
    """Create a subject. Its definition is in the message log before its first row."""
    if subject in broker.subjects:
        raise SubjectExists(f"subject {subject!r} exists already", subject=subject)
    refuse_more(broker)
    broker.turn.refuse_when_full()
    row = PartitionRow(broker.next_partition, subject, subject, broker.clock.now(), settings or SubjectSettings())
    return create_partition(broker, row)


def refuse_more(broker: Broker) -> None:
    """Raise when the broker is at its limit of subjects."""
    limit = broker.limits.subjects
    if len(broker.subjects) >= limit:
        raise LimitExceeded(
            f"subject limit reached ({limit} per broker, limit `subjects`); delete some or raise it",
            limit="subjects",
            value=limit,
        )


def create_partition(broker: Broker, row: PartitionRow) -> Partition:
    """Create a partition with the next number."""
    broker.segment_headers.define([row])
    broker.next_partition += 1
    partition = Partition(row, ConsumeLog(broker.disk, row.id, broker.maps), broker.known_rows)
    broker.add_partition(partition)
    broker.turn.touch(partition)
    return partition


def update_subject(broker: Broker, subject: str, settings: SubjectSettings) -> None:
    """Change the settings of a subject."""
    partition = broker.partition_of(subject, create=False)
    row = msgspec.structs.replace(partition.row, settings=settings)
    broker.segment_headers.define([row])
    partition.redefine(row)
    broker.turn.touch(partition)
    broker.retention_wanted = True


def delete_subject(broker: Broker, subject: str) -> None:
    """Delete a subject with its messages, delayed messages and groups."""
    # Frames of this turn must precede the deletion in the log: recovery treats frames after it as damage.
    broker.turn.commit()
    if broker.turn.failed is not None:
        raise broker.turn.failed
    partition = broker.partition_of(subject, create=False)
    schedule = broker.schedules.by_subject.get(subject)
    gone = [partition, *broker.forwards.of(subject)]
    if schedule is not None:
        gone.append(schedule.partition)
    broker.segment_headers.define([msgspec.structs.replace(each.row, deleted=True) for each in gone])
    for group in list(partition.groups.values()):
        for waiter in list(group.waiters):
            waiter.time_out()
        for consumer in group.consumers.values():
            broker.sessions.pop(consumer.session, None)
    for waiter in list(partition.readers):
        waiter.time_out()
    for each in gone:
        drop_partition(broker, each)
    broker.forwards.forget(partition.row.subject)
    broker.retention_wanted = True


def added(broker: Broker, partition: Partition) -> None:
    """Register a partition that the catalog defines."""
    if partition.row.kind == SCHEDULE:
        broker.schedules.add(partition)
    elif partition.row.kind == STAGE:
        broker.stages.add(partition)
    elif partition.row.kind == FORWARD:
        broker.forwards.add(partition)
    else:
        broker.subjects[partition.row.name] = partition
        broker.schedules.enters(partition)


def drop_partition(broker: Broker, partition: Partition) -> None:
    """Unregister a partition that the catalog marks as deleted."""
    broker.turn.touch(partition)
    broker.remove_partition(partition)
    if broker.subjects.get(partition.row.name) is partition:
        del broker.subjects[partition.row.name]
    if partition.row.kind == SCHEDULE:
        broker.schedules.remove(partition)
    if partition.row.kind == STAGE:
        broker.stages.remove(partition)
    elif partition.row.kind == FORWARD:
        broker.forwards.remove(partition)
    else:
        broker.producers.forget_partition(partition.id)
    for group in partition.groups.values():
        group.expected = 0
        broker.leases.remove(group)
    broker.group_count -= len(partition.groups)
    broker.snapshots.remove(partition)
