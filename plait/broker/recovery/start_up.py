"""Start-up: loads the last whole checkpoint, then replays the first-hand logs after it (R2, R3, R18).

The shards of a checkpoint were copied one after another while the logs grew. The logs are read from where the
checkpoint began, and each partition and producer gets only the changes that its shard does not include.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from plait.broker import subjects
from plait.broker.appender import replay_producers
from plait.broker.groups.ordered_group import OrderedGroup, new_group
from plait.broker.groups.shared_group import AFTER_CLIENT, AttachedConsumer, Group
from plait.broker.partitions.partition import BEGINNING, SHARDS, LogPositions, Partition
from plait.broker.recovery import shards as state
from plait.errors import FrameError
from plait.frame.columns import Column
from plait.frame.header import FLAG_FORWARDED, FLAG_UNSEQUENCED
from plait.frame.view import FrameView
from plait.storage.catalog import CATALOG, FORWARD, SCHEDULE, STAGE, PartitionRow, read_rows
from plait.storage.logs.action_log import (
    DEFINITIONS,
    EVENTS,
    FLAG_DUE,
    NOT_OF_ROWS,
    Action,
    ConsumerDefinition,
    GroupDefinition,
    presumed_retained,
    read_definitions,
    read_events,
)
from plait.storage.logs.consume_log import RECORD, ConsumeLog
from plait.storage.logs.log import Log
from plait.storage.logs.recovery import Damage, LogScan, missing_files, settle
from plait.storage.logs.retained_log import is_header, note_of
from plait.storage.ranges import Range
from plait.storage.schedule.bucket import SHARD_PREFIX
from plait.storage.schedule.unbucketed import UNBUCKETED_SHARD

if TYPE_CHECKING:
    from plait.broker.broker import Broker

log = logging.getLogger("plait.broker")


#: Why a valid frame is part of a torn tail: an earlier start cut the log before it, and the sync of the cut failed. The
#: frame is still on the disk, after frames that the log got in a later epoch.
CUT_BEFORE: Final = "was cut by an earlier start"
UNDEFINED: Final = "{} messages cannot be read: the definition of partition {} is damaged"


class RecoveryReport(msgspec.Struct, kw_only=True):
    """The result of a recovery."""

    clean: bool
    epoch: int
    #: Bytes of the message log that were read because no checkpoint covered them.
    scanned_bytes: int
    frames: int
    events: int
    damages: list[Damage]
    rejected_checkpoints: list[str]
    rebuilt_consume_logs: int


def _durable(log: Log, known: int) -> int:
    """The offset up to which a log was durable, by its durable mark and the checkpoint (``known``)."""
    return max(known, log.mark.durable) if log.mark else known


class Recovery:
    """One recovery of a broker's state; used once."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._groups: dict[int, Group] = {}
        self._epoch_max = 0
        self._frames = 0
        self._events = 0
        #: Frames with correct checksums and an event that cannot be applied.
        self._unusable: list[Damage] = []
        #: The log positions up to which each shard of partitions includes the logs.
        self._positions = [BEGINNING] * SHARDS
        #: The checkpoint's schedule includes the frames of the action log with lower numbers.
        self._schedule_index = 0
        #: Number of a partition whose definition is damaged → (offset of its first frame, bytes, rows).
        self._unknown: dict[int, tuple[int, int, int]] = {}

    def run(self) -> RecoveryReport:
        broker = self._broker
        loaded = broker.checkpoints.load()
        manifest = loaded.manifest if loaded else None
        rebuild: list[Partition] = []
        message_start, kept_start, action_start = (log.start for log in broker.logs)
        message_end = kept_end = action_end = 0
        unbucketed = b""
        if loaded is not None and manifest is not None:
            message_start, action_start = manifest.message_offset, manifest.action_offset
            kept_start = manifest.kept_offset
            message_end, kept_end, action_end = manifest.message_end, manifest.kept_end, manifest.action_end
            self._epoch_max = manifest.epoch
            broker.next_partition = manifest.next_partition
            broker.next_group = manifest.next_group
            broker.next_consumer = manifest.next_consumer
            broker.turn.action_index = self._schedule_index = manifest.action_index
            shards: list[state.PartitionShard] = []
            for shard, data in loaded.shards.items():
                if shard.startswith(state.SHARD_PREFIX):
                    shards.append(state.decode_partitions(data))
                elif shard.startswith(SHARD_PREFIX):
                    broker.schedules.bucketed.load(data)
                elif shard == UNBUCKETED_SHARD:
                    unbucketed = data
                else:
                    self._load_producers(state.decode_producers(data))
            broker.producers.order()
            rebuild = self._load_partitions(shards)
        missing = [
            damage
            for log, start in zip(broker.logs, (message_start, kept_start, action_start), strict=True)
            for damage in missing_files(log, log.mark.start if log.mark else log.start, start)
        ]
        if rebuild:
            self._rebuild(rebuild)
        broker.schedules.bucketed.begin_at(message_start)
        if unbucketed:
            broker.schedules.bucketed.load_unbucketed(unbucketed, message_start)
        known = _durable(broker.message_log, message_end)
        messages = LogScan(broker.message_log, message_start, known, self._plausible)
        for offset, frame in messages:
            if frame.epoch < self._epoch_max:
                messages.stop_before(offset, CUT_BEFORE)
            else:
                self._message(offset, frame)
        settle(broker.disk, broker.message_log, messages)
        kept = LogScan(broker.retained_log, kept_start, _durable(broker.retained_log, kept_end), stamps_durable=False)
        copies = [(offset, frame) for offset, frame in kept if not is_header(frame)]
        settle(broker.disk, broker.retained_log, kept)
        known = _durable(broker.action_log, action_end)
        actions = LogScan(broker.action_log, action_start, known, stamps_durable=False)
        epoch = manifest.epoch if manifest is not None else 0
        for offset, frame in actions:
            if frame.epoch < epoch:
                actions.stop_before(offset, CUT_BEFORE)
                break
            if frame.durable > messages.end or presumed_retained(frame) > kept.end:
                actions.stop_before(offset, "depends on messages that were lost")
                break
            epoch = frame.epoch
            self._action(offset, frame)
        settle(broker.disk, broker.action_log, actions)
        for offset, frame in copies:
            self._retained(offset, frame)
        for group in self._groups.values():
            group.release_unknown_consumers(broker.clock.now())
            if isinstance(group, OrderedGroup):
                # The crash may have lost grants whose owners use their locks until the lease ends (R15).
                group.frozen_until = broker.clock.monotonic() + broker.leases.longest
        broker.schedules.bucketed.recovered()
        broker.snapshots.drop_unknown_consume_logs()
        broker.stages.recovered()
        untouched = (messages.end, kept.end, actions.end) == (message_start, kept_start, action_start)
        undefined = [
            Damage(broker.message_log.directory, offset, size, "damaged", UNDEFINED.format(rows, number))
            for number, (offset, size, rows) in self._unknown.items()
        ]
        damages = [*missing, *messages.damages, *undefined, *kept.damages, *actions.damages, *self._unusable]
        rejected = broker.checkpoints.rejected
        clean = manifest is not None and manifest.clean and untouched and not damages and not rejected
        # Every start writes a checkpoint, so each unreadable one hides at most one epoch.
        broker.turn.epoch = max(self._epoch_max + (0 if clean else 1 + len(rejected)), 1)
        for partition in broker.partitions.values():
            partition.visible = partition.next
            broker.numbers.learn(partition.row.route)
            for group in partition.groups.values():
                broker.retries.expect(group)
                if isinstance(group, OrderedGroup):
                    broker.numbers.learn(group.locks.newest)
        return RecoveryReport(
            clean=clean,
            epoch=broker.turn.epoch,
            scanned_bytes=messages.end - message_start,
            frames=self._frames,
            events=self._events,
            damages=damages,
            rejected_checkpoints=rejected,
            rebuilt_consume_logs=len(rebuild),
        )

    # --- checkpoint -----------------------------------------------------------------------------

    def _load_partitions(self, shards: list[state.PartitionShard]) -> list[Partition]:
        """Load the partitions of all shards. Returns those whose consume log must be rebuilt."""
        broker = self._broker
        found: list[tuple[state.PartitionState, LogPositions]] = []
        for shard in shards:
            broker.turn.action_index = max(broker.turn.action_index, shard.position.action)
            self._positions[shard.number] = shard.position
            found += [(entry, shard.position) for entry in shard.partitions]
        broken = []
        # In order of creation: a subject may have been deleted and created again between the copies of two shards, and
        # its name must lead to the newer partition.
        for entry, position in sorted(found, key=lambda each: each[0].row.id):
            partition = Partition(entry.row, ConsumeLog(broker.disk, entry.row.id, broker.maps), broker.known_rows)
            partition.start, partition.next, partition.size = entry.start, entry.next, entry.size
            partition.epochs = entry.epochs
            partition.position = position
            broker.add_partition(partition)
            for group in state.load_groups(entry, partition, broker, broker.clock.monotonic()):
                self._groups[group.id] = group
                broker.add_group(group)
            if not partition.consume_log.load(entry.generation, entry.flushed, entry.next):
                broken.append(partition)
        return broken

    def _load_producers(self, shard: state.ProducerShard) -> None:
        table = self._broker.producers
        table.load(shard.producers)
        table.load_until(shard.number, shard.message)

    def _rebuild(self, partitions: list[Partition]) -> None:
        """Read the whole message log once for the partitions whose consume log is lost."""
        wanted = {partition.id: partition for partition in partitions}
        rows: dict[int, list[tuple[int, int, int, int, int]]] = {p: [] for p in wanted}
        end = max(partition.position.message for partition in partitions)
        log = self._broker.message_log
        for offset, frame in LogScan(log, log.start, end):
            if offset >= end:
                break
            if frame.partition in wanted and offset < wanted[frame.partition].position.message:
                rows[frame.partition].append((frame.base, offset, frame.store_time, frame.size, frame.count))
        for number, partition in wanted.items():
            partition.consume_log.replace(np.array(rows[number], RECORD))
            self._broker.turn.touch(partition)

    def _in_checkpoint(self, partition: int, offset: int) -> bool:
        """Whether the checkpoint includes the effect of the frame at ``offset`` on the partition, even its deletion."""
        return offset < self._positions[state.shard_of(partition)].message

    # --- message log ----------------------------------------------------------------------------

    def _plausible(self, offset: int, frame: FrameView) -> bool:
        if frame.durable > offset or frame.epoch < max(self._epoch_max, 1):
            return False
        if frame.partition == CATALOG:
            return frame.producer == 0
        if self._in_checkpoint(frame.partition, offset):
            return True
        partition = self._broker.partitions.get(frame.partition)
        return partition is not None and frame.base >= partition.next

    def _message(self, offset: int, frame: FrameView) -> None:
        broker = self._broker
        self._frames += 1
        self._epoch_max = max(self._epoch_max, frame.epoch)
        if frame.partition == CATALOG:
            for row in read_rows(frame):
                self._define(offset, row)
            return
        partition = broker.partitions.get(frame.partition)
        known = self._in_checkpoint(frame.partition, offset)
        if partition is None:
            if not known:
                self._undefined(offset, frame)
            return
        if not known:
            if frame.base < partition.next:
                return
            partition.appended(frame.base, offset, frame.store_time, frame.size, frame.count, frame.epoch)
            broker.turn.touch(partition)
        # Producers, schedules and stages are in other shards, which were copied at other moments.
        replay_producers(partition, broker.producers, offset, frame)
        if partition.row.kind == SCHEDULE or frame.has(Column.SCHEDULE):
            broker.schedules.bucketed.replay(partition, offset, frame)
            if partition.row.kind == SCHEDULE and frame.flags & FLAG_FORWARDED:
                broker.forwards.replay(offset, frame)
        if frame.flags & FLAG_UNSEQUENCED and partition.row.kind != STAGE:
            broker.stages.replay(partition, offset, frame)

    def _undefined(self, offset: int, frame: FrameView) -> None:
        """Count rows of a partition whose definition is damaged. A new partition with its number would include them."""
        self._broker.next_partition = max(self._broker.next_partition, frame.partition + 1)
        first, size, rows = self._unknown.get(frame.partition, (offset, 0, 0))
        self._unknown[frame.partition] = first, size + frame.size, rows + frame.count

    def _define(self, offset: int, row: PartitionRow) -> None:
        broker = self._broker
        broker.next_partition = max(broker.next_partition, row.id + 1)
        if self._in_checkpoint(row.id, offset):
            if row.deleted:
                broker.producers.forget_partition(row.id)
            return
        known = broker.partitions.get(row.id)
        if row.deleted:
            if known is not None:
                for group in known.groups.values():
                    self._groups.pop(group.id, None)
                subjects.drop_partition(broker, known)
        elif known is None:
            partition = Partition(row, ConsumeLog(broker.disk, row.id, broker.maps), broker.known_rows)
            broker.add_partition(partition)
            broker.turn.touch(partition)
        elif known.row != row:
            known.redefine(row)
            broker.turn.touch(known)
            if row.kind == FORWARD:
                broker.forwards.replay_note(known)

    # --- action log -----------------------------------------------------------------------------

    def _action(self, offset: int, frame: FrameView) -> None:
        """Apply a frame of the action log. An event that cannot be applied is skipped and reported."""
        broker = self._broker
        self._epoch_max = max(self._epoch_max, frame.epoch)
        broker.turn.action_index = max(broker.turn.action_index, frame.base + 1)
        if frame.partition == DEFINITIONS:
            for definition in read_definitions(frame):
                self._definition(definition, frame)
        elif frame.partition == EVENTS:
            for event in read_events(frame).tolist():
                try:
                    self._event(event, frame)
                except Exception as error:
                    reason = f"event {event} cannot be applied: {error!r}"
                    log.exception("%s", reason)
                    self._unusable.append(Damage("action", offset, frame.size, "damaged", reason))

    def _retained(self, offset: int, frame: FrameView) -> None:
        """Add the rows of a frame of the retained log to its group; events remove those that it does not need."""
        try:
            group = self._groups.get(note_of(frame).group)
        except FrameError:
            return
        if group is None or offset < group.partition.position.retained:
            return
        if frame.partition == group.partition.id:
            sequences = frame.sequences()
            # A power failure may have lost rows, and later rows have their sequences: the copies are not of those.
            group.retained.add(sequences[sequences < group.partition.stored_until(frame.epoch)], offset)
            group.retained.settled()
            self._broker.turn.touch(group.partition)

    def _definition(self, definition: GroupDefinition | ConsumerDefinition, frame: FrameView) -> None:
        broker = self._broker
        if isinstance(definition, GroupDefinition):
            broker.next_group = max(broker.next_group, definition.id + 1)
            partition = broker.partitions.get(definition.partition)
            if partition is None or frame.base < partition.position.action:
                return
            known = self._groups.get(definition.id)
            if known is not None:
                # A segment header repeats the definition; a changed setting is a new definition.
                if known.definition != definition:
                    known.redefine(definition)
                    broker.turn.touch(partition)
                return
            group = new_group(definition, partition, broker.limits, broker.turn)
            group.begin(min(definition.start, partition.stored_until(frame.epoch)))
            partition.add_group(group)
            self._groups[group.id] = group
            broker.add_group(group)
            broker.turn.touch(partition)
            return
        broker.next_consumer = max(broker.next_consumer, definition.id + 1)
        owner = self._groups.get(definition.group)
        if owner is not None and frame.base >= owner.partition.position.action:
            last_contact = broker.clock.monotonic()
            consumer = AttachedConsumer(definition.id, owner, definition.client, last_contact, definition.proof)
            if _defined(owner, consumer):
                broker.turn.touch(owner.partition)

    def _event(self, event: tuple[Any, ...], frame: FrameView) -> None:
        action, flags, attempt, group_id, consumer, epoch, start, end, time = event
        time, due = (0, time) if flags & FLAG_DUE else (time, 0)
        written = frame.store_time
        if action == Action.CANCEL:
            if frame.base >= self._schedule_index:
                self._events += 1
                self._broker.schedules.bucketed.replay_cancel(consumer, start, end, due, epoch)
            return
        group = self._groups.get(group_id)
        # A checkpoint on a full disk includes the effect of events that were written later.
        if group is None or frame.base < group.partition.position.action:
            return
        self._events += 1
        self._broker.turn.touch(group.partition)
        if action in NOT_OF_ROWS:
            group.replay(action, flags, consumer, Range(start, end, attempt), due, written)
        elif action == Action.FORGET_GROUP:
            self._groups.pop(group_id)
            self._broker.remove_group(group)
        elif action == Action.FORGET_CONSUMER:
            group.forget(consumer, written)
            for member in list(group.consumers.values()):
                if member.id == consumer:
                    group.remove(member)
        else:
            group.used = max(group.used, time)
            # Rows may have been lost to damage, and later rows have their sequences: the event does not apply to those.
            limit = group.partition.stored_until(epoch)
            piece = Range(min(start, limit), min(end, limit), attempt)
            group.replay(action, flags, consumer, piece, due, written)


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
