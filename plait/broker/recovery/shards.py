"""Encodes the broker's derived state as checkpoint shards, and decodes it.

Partitions, with their groups and consumers, are spread over shards by number; producers have separate shards. Only
changed shards are encoded again (R1). Each shard is copied at a different moment and has the log positions up to which
it includes the logs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from plait.broker.groups.ordered_group import OrderedGroup, new_group
from plait.broker.groups.shared_group import AttachedConsumer, Group
from plait.broker.partitions.partition import SHARDS, LogPositions, Partition
from plait.broker.turn import Turn
from plait.storage.catalog import PartitionRow
from plait.storage.cursor import CursorState
from plait.storage.due_ranges import Due
from plait.storage.logs.action_log import GroupDefinition
from plait.storage.logs.retained_log import RetainedRows
from plait.storage.producers import ProducerTable
from plait.storage.pull_log import PullLog, PullLogState
from plait.storage.ranges import Range

#: One turn of the loop copies one shard: with 100,000 partitions a shard has 400 of them. The number is part of the
#: format, because a checkpoint keeps the unchanged shards of earlier ones.
SHARD_PREFIX: Final = "partitions-"


class ConsumerState(msgspec.Struct, array_like=True):
    """A consumer in a checkpoint."""

    id: int
    client: str
    proof: int = 0


class OrderedState(msgspec.Struct, array_like=True):
    """The cursors and locks of an ordered group in a checkpoint."""

    cursors: list[CursorState]
    #: Logical partitions [first, end), their owner and the highest epoch.
    locks: list[tuple[int, int, int, int]]


class GroupState(msgspec.Struct, array_like=True):
    """A group in a checkpoint."""

    definition: GroupDefinition
    next: int
    returned: list[Range]
    held: dict[int, list[Range]]
    consumers: list[ConsumerState]
    redelivered_count: int
    lost_count: int
    used: int
    waiting: list[Due] = []
    #: Packed ``Ranges``.
    dead: bytes = b""
    failing: bytes = b""
    resent: bytes = b""
    kept: bytes = b""
    #: None unless the group is ordered.
    ordered: OrderedState | None = None
    lost_estimated: bool = False


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


_encoder = msgspec.msgpack.Encoder()
_partitions = msgspec.msgpack.Decoder(PartitionShard)
_producers = msgspec.msgpack.Decoder(ProducerShard)


def shard_of(partition: int) -> int:
    """The shard that a partition is in."""
    return partition % SHARDS


def partition_shard(shard: int) -> str:
    """The name of a shard of partitions."""
    return f"{SHARD_PREFIX}{shard:03d}"


def producer_shard(shard: int) -> str:
    """The name of a shard of the producer table."""
    return f"producers-{shard:02d}"


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
    )


def _dump_group(group: Group) -> GroupState:
    log = group.pull_log.dump(durable_holds=group.logs_pulls)
    consumers = [ConsumerState(c.id, c.client, c.proof) for c in group.consumers.values()]
    return GroupState(
        group.definition,
        log.next,
        log.returned,
        log.held,
        consumers,
        group.redelivered_count,
        group.lost_count,
        group.used,
        log.waiting,
        log.dead,
        log.failing,
        log.resent,
        group.retained.dump(),
        OrderedState(group.cursors.dump(), group.locks.dump()) if isinstance(group, OrderedGroup) else None,
        group.lost_estimated,
    )


def load_groups(state: PartitionState, partition: Partition, turn: Turn, last_contact: float) -> Iterable[Group]:
    """Load the groups of a partition from a checkpoint; their consumers have not reconnected yet."""
    for entry in state.groups:
        group = new_group(entry.definition, partition, turn.limits, turn)
        group.pull_log = PullLog.load(
            PullLogState(entry.next, entry.returned, entry.held, entry.waiting, entry.dead, entry.failing, entry.resent)
        )
        group.retained = RetainedRows.load(entry.kept)
        group.redelivered_count = entry.redelivered_count
        group.lost_count = entry.lost_count
        group.lost_estimated = entry.lost_estimated
        group.used = entry.used
        for consumer in entry.consumers:
            group.add(AttachedConsumer(consumer.id, group, consumer.client, last_contact, consumer.proof))
        if isinstance(group, OrderedGroup) and entry.ordered is not None:
            group.cursors.load(entry.ordered.cursors)
            for first, end, owner, epoch in entry.ordered.locks:
                group.locks.set(first, end, owner, epoch)
        yield group


def encode_partitions(shard: int, position: LogPositions, states: list[PartitionState]) -> bytes:
    return _encoder.encode(PartitionShard(shard, position, states))


def decode_partitions(data: bytes) -> PartitionShard:
    return _partitions.decode(data)


def encode_producers(table: ProducerTable, shard: int, message: int) -> bytes:
    """Encode one shard of the table; the cost depends on this shard alone."""
    return _encoder.encode((shard, message, table.dump(table.in_shard(shard))))


def decode_producers(data: bytes) -> ProducerShard:
    return _producers.decode(data)
