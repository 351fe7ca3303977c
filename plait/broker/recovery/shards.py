"""Encodes the broker's derived state as checkpoint shards, and decodes it.

Partitions, with their groups and consumers, are spread over shards by number; producers have separate shards. Only
changed shards are encoded again (R1). Each shard is copied at another moment, and records the log positions up to which
it includes the logs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from plait.broker.groups.group import AttachedConsumer, Group
from plait.broker.groups.ordered.ordered_group import OrderedGroup, new_group
from plait.broker.partitions.partition import LogPositions, Partition
from plait.broker.turn import Turn
from plait.storage.catalog import PartitionRow
from plait.storage.cursor import CursorState
from plait.storage.logs.action_log import GroupDefinition
from plait.storage.logs.retained_log import RetainedRows

#: One turn of the loop copies one shard: with 100,000 partitions a shard has 400 of them. The number is part of the
#: format, because a checkpoint keeps the unchanged shards of earlier ones.
SHARD_PREFIX: Final = "partitions-"


class ConsumerState(msgspec.Struct, array_like=True):
    """A consumer in a checkpoint."""

    id: int
    client: str
    proof: int = 0


class GroupState(msgspec.Struct, array_like=True):
    """A group in a checkpoint."""

    definition: GroupDefinition
    consumers: list[ConsumerState]
    #: A shared group has one cursor.
    cursors: list[CursorState]
    #: Of an ordered group: logical partitions [first, end), their owner and the highest epoch.
    locks: list[tuple[int, int, int, int]]
    #: The packed ``Ranges`` of ``Failures``.
    failures: tuple[bytes, bytes, bytes]
    retained: bytes
    redelivered_count: int
    lost_count: int
    lost_estimated: bool
    used: int
    filtered_count: int = 0


class PartitionState(msgspec.Struct, array_like=True):
    """A partition in a checkpoint; the first ``flushed`` records of its consume log are in a file."""

    row: PartitionRow
    start: int
    next: int
    size: int
    epochs: list[tuple[int, int]]
    generation: int
    flushed: int
    groups: list[GroupState]
    addressed: bool = False
    #: True if it ever had a row with a priority above 0.
    ranked: bool = False


class PartitionShard(msgspec.Struct, array_like=True):
    """The partitions of a shard, and the log positions up to which they include the logs."""

    number: int
    position: LogPositions
    partitions: list[PartitionState]


ProducerState = tuple[int, int, list[tuple[int, int, list[list[int]], list[list[int]]]]]


class ProducerShard(msgspec.Struct, array_like=True):
    """The producers of a shard. They include the frames before the offset ``message`` of the message log."""

    number: int
    message: int
    producers: list[ProducerState]


def dump_partition(partition: Partition, generation: int, flushed: int) -> PartitionState:
    """The state of a partition and its groups, with the consume log as it is after the flush."""
    return PartitionState(
        partition.row,
        partition.start,
        partition.next,
        partition.size,
        partition.epochs,
        generation,
        flushed,
        [_dump_group(group) for group in partition.groups.values()],
        partition.addressed,
        partition.ranked,
    )


def _dump_group(group: Group) -> GroupState:
    return GroupState(
        group.definition,
        [ConsumerState(c.id, c.client, c.proof) for c in group.consumers.values()],
        group.dump(),
        group.locks.dump() if isinstance(group, OrderedGroup) else [],
        group.failures.dump(),
        group.retained.dump(),
        group.redelivered_count,
        group.lost_count,
        group.lost_estimated,
        group.used,
        group.filtered_count,
    )


def load_groups(state: PartitionState, partition: Partition, turn: Turn, last_contact: float) -> Iterable[Group]:
    """Load the groups of a partition from a checkpoint; their consumers have not reconnected yet."""
    for entry in state.groups:
        group = new_group(entry.definition, partition, turn.limits, turn)
        group.load(entry.cursors)
        group.failures.load(entry.failures)
        group.retained = RetainedRows.load(entry.retained)
        group.redelivered_count = entry.redelivered_count
        group.lost_count = entry.lost_count
        group.lost_estimated = entry.lost_estimated
        group.used = entry.used
        group.filtered_count = entry.filtered_count
        for consumer in entry.consumers:
            group.add(AttachedConsumer(consumer.id, group, consumer.client, last_contact, consumer.proof))
        if isinstance(group, OrderedGroup):
            for lock in entry.locks:
                group.locks.set([lock])
        yield group
