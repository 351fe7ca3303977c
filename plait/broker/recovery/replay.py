"""Applies the frames that follow a checkpoint in the first-hand logs to the state of the checkpoint.

The shards of a checkpoint were copied one after another while the logs grew. So each partition gets only the frames
that its shard does not include.
"""

from __future__ import annotations

import logging
from typing import Final

from plait.broker.appender import replay_producers
from plait.broker.catalog import Catalog
from plait.broker.groups.group import AFTER_CLIENT, AttachedConsumer, Group
from plait.broker.groups.ordered.ordered_group import new_group
from plait.broker.partitions.partition import BEGINNING, SHARDS
from plait.broker.schedule.bucketed import BucketedRows
from plait.broker.schedule.forwards import Forwards
from plait.broker.staging.stages import Stages
from plait.broker.transactions.transactions import Transactions
from plait.broker.turn import Turn
from plait.errors import FrameError
from plait.frame.columns import Column
from plait.frame.header import FLAG_FORWARDED, FLAG_UNSEQUENCED
from plait.frame.view import FrameView
from plait.storage.catalog import CATALOG, FORWARD, HALF, SCHEDULE, STAGE, PartitionRow, read_rows
from plait.storage.logs.action_events import (
    Cancelled,
    Event,
    ForgotConsumer,
    ForgotGroup,
    Rewound,
    RowEvent,
    TransactionEvent,
    WentOffline,
    unpack_event,
)
from plait.storage.logs.action_log import (
    DEFINITIONS,
    EVENTS,
    ConsumerDefinition,
    GroupDefinition,
    read_definitions,
)
from plait.storage.logs.frame_traits import traits_of
from plait.storage.logs.recovery import Damage
from plait.storage.logs.retained_log import note_of
from plait.storage.producers import ProducerTable

log = logging.getLogger("plait.broker")

UNDEFINED: Final = "{} messages cannot be read: the definition of partition {} is damaged"


class MessageReplay:
    """Applies frames of the message log."""

    def __init__(
        self,
        turn: Turn,
        catalog: Catalog,
        producers: ProducerTable,
        bucketed: BucketedRows,
        forwards: Forwards,
        stages: Stages,
        transactions: Transactions,
    ) -> None:
        self._turn = turn
        self._catalog = catalog
        self._producers = producers
        self._bucketed = bucketed
        self._forwards = forwards
        self._stages = stages
        self._transactions = transactions
        self.epoch_max = 0
        self.frames = 0
        #: For each shard of partitions, the log positions up to which it includes the logs.
        self.positions = [BEGINNING] * SHARDS
        #: Number of a partition whose definition is damaged → (offset of its first frame, bytes, rows).
        self._unknown: dict[int, tuple[int, int, int]] = {}

    @property
    def undefined(self) -> list[Damage]:
        """The rows of partitions whose definition is damaged."""
        return [
            Damage(self._turn.message_log.directory, offset, size, "damaged", UNDEFINED.format(rows, number))
            for number, (offset, size, rows) in self._unknown.items()
        ]

    def _in_checkpoint(self, partition: int, offset: int) -> bool:
        """Whether the checkpoint includes the effect of the frame at ``offset`` on the partition, or its deletion."""
        return offset < self.positions[partition % SHARDS].message

    def plausible(self, offset: int, frame: FrameView) -> bool:
        """Whether a frame found after damage can be a frame of the log."""
        if frame.durable > offset or frame.epoch < max(self.epoch_max, 1):
            return False
        if frame.partition == CATALOG:
            return frame.producer == 0
        if self._in_checkpoint(frame.partition, offset):
            return True
        partition = self._catalog.partitions.get(frame.partition)
        return partition is not None and frame.base >= partition.next

    def apply(self, offset: int, frame: FrameView) -> None:
        """Apply a frame, except where the checkpoint includes it."""
        self.frames += 1
        self.epoch_max = max(self.epoch_max, frame.epoch)
        if frame.partition == CATALOG:
            for row in read_rows(frame):
                self._define(offset, row)
            return
        partition = self._catalog.partitions.get(frame.partition)
        known = self._in_checkpoint(frame.partition, offset)
        if partition is None:
            if not known:
                self._undefined(offset, frame)
            return
        if not known:
            if frame.base < partition.next:
                return
            base, time = frame.base, frame.store_time
            partition.appended(base, offset, time, frame.size, frame.count, frame.epoch, traits_of(frame))
            self._turn.touch(partition)
        # Producers, schedules and stages are in other shards, which were copied at other moments.
        replay_producers(partition, self._producers, offset, frame)
        if partition.row.kind == SCHEDULE or frame.has(Column.SCHEDULE):
            self._bucketed.replay(partition, offset, frame)
            if partition.row.kind == SCHEDULE and frame.flags & FLAG_FORWARDED:
                self._forwards.replay(offset, frame)
        if partition.row.kind == HALF:
            self._transactions.replay(partition, frame)
        elif frame.flags & FLAG_UNSEQUENCED and partition.row.kind != STAGE:
            self._stages.replay(partition, offset, frame)
            if partition.row.kind == SCHEDULE:
                self._transactions.replay_copy(partition, frame)

    def _undefined(self, offset: int, frame: FrameView) -> None:
        """Count rows of a partition whose definition is damaged; no new partition gets its number."""
        self._catalog.next_partition = max(self._catalog.next_partition, frame.partition + 1)
        first, size, rows = self._unknown.get(frame.partition, (offset, 0, 0))
        self._unknown[frame.partition] = first, size + frame.size, rows + frame.count

    def _define(self, offset: int, row: PartitionRow) -> None:
        catalog = self._catalog
        catalog.next_partition = max(catalog.next_partition, row.id + 1)
        if self._in_checkpoint(row.id, offset):
            if row.deleted:
                self._producers.forget_partition(row.id)
            return
        known = catalog.partitions.get(row.id)
        if row.deleted:
            if known is not None:
                catalog.drop(known)
        elif known is None:
            partition = catalog.make(row)
            catalog.add(partition)
            self._turn.touch(partition)
        elif known.row != row:
            known.redefine(row)
            self._turn.touch(known)
            if row.kind == FORWARD:
                self._forwards.replay_note(known)


class ActionReplay:
    """Applies frames of the action log and of the retained log."""

    def __init__(
        self, turn: Turn, catalog: Catalog, bucketed: BucketedRows, transactions: Transactions, schedule_index: int
    ) -> None:
        self._turn = turn
        self._catalog = catalog
        self._bucketed = bucketed
        self._transactions = transactions
        #: The schedule and the transactions of the checkpoint include the frames of the action log with lower numbers.
        self._schedule_index = schedule_index
        self.events = 0
        #: Frames with correct checksums and an event that cannot be applied.
        self.unusable: list[Damage] = []

    def apply(self, offset: int, frame: FrameView) -> None:
        """Apply a frame of the action log. An event that cannot be applied is skipped and reported."""
        self._turn.action_index = max(self._turn.action_index, frame.base + 1)
        if frame.partition == DEFINITIONS:
            for definition in read_definitions(frame):
                self._definition(definition, frame)
        elif frame.partition == EVENTS:
            for row in frame.binary(Column.BODY).to_pylist():
                try:
                    self._event(*unpack_event(row), frame)
                except Exception as error:
                    reason = f"event {row.hex()} cannot be applied: {error!r}"
                    log.exception("%s", reason)
                    self.unusable.append(Damage("action", offset, frame.size, "damaged", reason))

    def retained(self, offset: int, frame: FrameView) -> None:
        """Add the rows of a frame of the retained log to its group; events remove the rows that it does not need."""
        try:
            group = self._catalog.groups.get(note_of(frame).group)
        except FrameError:
            return
        if group is None or offset < group.partition.position.retained:
            return
        if frame.partition == group.partition.id:
            sequences = frame.sequences()
            # After a power failure, new rows may have the sequences of lost rows. The copies of lost rows are left out.
            group.retained.add(sequences[sequences < group.partition.stored_until(frame.epoch)], offset)
            group.retained.settled()
            self._turn.touch(group.partition)

    def _definition(self, definition: GroupDefinition | ConsumerDefinition, frame: FrameView) -> None:
        catalog, turn = self._catalog, self._turn
        if isinstance(definition, GroupDefinition):
            catalog.next_group = max(catalog.next_group, definition.id + 1)
            partition = catalog.partitions.get(definition.partition)
            if partition is None or frame.base < partition.position.action:
                return
            known = catalog.groups.get(definition.id)
            if known is not None:
                # A segment header repeats the definition; a changed setting is a new definition.
                if known.definition != definition:
                    known.redefine(definition)
                    turn.touch(partition)
                return
            group = new_group(definition, partition, turn.limits, turn)
            group.begin(min(definition.start, partition.stored_until(frame.epoch)))
            catalog.add_group(group)
            turn.touch(partition)
            return
        catalog.next_consumer = max(catalog.next_consumer, definition.id + 1)
        owner = catalog.groups.get(definition.group)
        if owner is not None and frame.base >= owner.partition.position.action:
            last_contact = turn.clock.monotonic()
            consumer = AttachedConsumer(definition.id, owner, definition.client, last_contact, definition.proof)
            if _defined(owner, consumer):
                turn.touch(owner.partition)

    def _event(self, group_id: int, epoch: int, event: Event, frame: FrameView) -> None:
        written = frame.store_time
        if isinstance(event, Cancelled):
            if frame.base >= self._schedule_index:
                self.events += 1
                self._bucketed.replay_cancel(event.partition, event.start, event.end, event.due, epoch)
            return
        if isinstance(event, TransactionEvent):
            if frame.base >= self._schedule_index:
                self.events += 1
                self._transactions.replay_event(event)
            return
        group = self._catalog.groups.get(group_id)
        # A checkpoint made on a full disk includes events that were written to the log after it.
        if group is None or frame.base < group.partition.position.action:
            return
        self.events += 1
        self._turn.touch(group.partition)
        if isinstance(event, ForgotGroup):
            self._catalog.remove_group(group)
            return
        if isinstance(event, ForgotConsumer):
            group.forget(event.consumer, written)
            for member in list(group.consumers.values()):
                if member.id == event.consumer:
                    group.remove(member)
            return
        if isinstance(event, (RowEvent, Rewound, WentOffline)):
            group.used = max(group.used, written)
        # New rows may have the sequences of rows that were lost to damage. The event is about the lost rows only.
        limit = group.partition.stored_until(epoch)
        if isinstance(event, RowEvent):
            event.start, event.end = min(event.start, limit), min(event.end, limit)
        elif isinstance(event, Rewound):
            event.sequence = min(event.sequence, limit)
        group.replay(event, written)


def _defined(group: Group, consumer: AttachedConsumer) -> bool:
    """Apply the definition of a consumer, which may repeat or change an earlier one. Returns whether it is new."""
    known = group.consumers.get(consumer.client)
    if known is not None and (known.id, known.proof) == (consumer.id, consumer.proof):
        return False
    if AFTER_CLIENT in consumer.client:
        before = group.consumers.get(consumer.client.partition(AFTER_CLIENT)[0])
        if before is not None and before.id == consumer.id:
            group.remove(before)
    group.add(consumer)
    return True
