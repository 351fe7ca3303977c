"""Start-up: loads the last whole checkpoint, then replays the first-hand logs after it (R2, R3, R18).

The shards of a checkpoint were copied one after another while the logs grew. The logs are read from where the
checkpoint began, and each partition and producer gets only the changes that its shard does not include.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from plait.broker.catalog import Catalog
from plait.broker.partitions.partition import LogPositions, Partition
from plait.broker.recovery import shards as state
from plait.broker.recovery.replay import ActionReplay, MessageReplay
from plait.broker.schedule.bucketed import BucketedRows
from plait.broker.schedule.forwards import Forwards
from plait.broker.staging.stages import Stages
from plait.broker.transactions.transaction_table import TRANSACTIONS_SHARD
from plait.broker.transactions.transactions import Transactions
from plait.broker.turn import Turn
from plait.storage.checkpoint import CheckpointManifest, Checkpoints
from plait.storage.logs.action_log import presumed_retained
from plait.storage.logs.consume_log import RECORD
from plait.storage.logs.frame_traits import traits_of
from plait.storage.logs.log import Log
from plait.storage.logs.recovery import Damage, LogScan, missing_files, settle
from plait.storage.logs.retained_log import is_header
from plait.storage.producers import ProducerTable
from plait.storage.schedule.bucket import SHARD_PREFIX
from plait.storage.schedule.unbucketed import UNBUCKETED_SHARD

#: Why a valid frame is part of a torn tail: an earlier start cut the log before this frame, and the sync of the cut
#: failed. The frame is still on the disk, after frames that were appended in a later epoch.
CUT_BEFORE: Final = "was cut by an earlier start"


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


class Recovery:
    """One recovery of a broker's state; used once."""

    def __init__(
        self,
        turn: Turn,
        catalog: Catalog,
        checkpoints: Checkpoints,
        producers: ProducerTable,
        bucketed: BucketedRows,
        forwards: Forwards,
        stages: Stages,
        transactions: Transactions,
    ) -> None:
        self._turn = turn
        self._catalog = catalog
        self._checkpoints = checkpoints
        self._producers = producers
        self._bucketed = bucketed
        self._stages = stages
        self._transactions = transactions
        self._messages = MessageReplay(turn, catalog, producers, bucketed, forwards, stages, transactions)
        self._rebuilt: list[Partition] = []

    def run(self) -> RecoveryReport:
        turn, checkpoints = self._turn, self._checkpoints
        loaded = checkpoints.load()
        # Without a checkpoint, the logs are read from their first offset.
        message, retained, action = (log.start for log in turn.logs)
        manifest = CheckpointManifest(number=0, message_offset=message, retained_offset=retained, action_offset=action)
        if loaded:
            manifest = self._load(loaded.manifest, loaded.shards)
        starts = manifest.message_offset, manifest.retained_offset, manifest.action_offset
        missing = [
            damage
            for log, start in zip(turn.logs, starts, strict=True)
            for damage in missing_files(log, log.mark.start if log.mark else log.start, start)
        ]
        if self._rebuilt:
            self._rebuild()
        self._bucketed.begin_at(manifest.message_offset)
        if loaded and UNBUCKETED_SHARD in loaded.shards:
            self._bucketed.load_unbucketed(loaded.shards[UNBUCKETED_SHARD], manifest.message_offset)
        actions = ActionReplay(turn, self._catalog, self._bucketed, self._transactions, manifest.action_index)
        scans = self._replay(manifest, actions)
        for group in self._catalog.groups.values():
            group.release_unknown_consumers(turn.clock.now())
        self._bucketed.recovered()
        self._stages.recovered()
        lost = loaded is None and (bool(checkpoints.rejected) or turn.message_log.start > 0)
        self._transactions.recovered(uncertain=lost)
        damages = [*missing, *self._messages.undefined, *actions.unusable]
        damages += [damage for scan in scans for damage in scan.damages]
        untouched = tuple(scan.end for scan in scans) == starts
        clean = manifest.clean and untouched and not damages and not checkpoints.rejected
        # Every start writes a checkpoint, so each unreadable one hides at most one epoch.
        turn.epoch = max(self._messages.epoch_max + (0 if clean else 1 + len(checkpoints.rejected)), 1)
        return RecoveryReport(
            clean=clean,
            epoch=turn.epoch,
            scanned_bytes=scans[0].end - manifest.message_offset,
            frames=self._messages.frames,
            events=actions.events,
            damages=damages,
            rejected_checkpoints=checkpoints.rejected,
            rebuilt_consume_logs=len(self._rebuilt),
        )

    # --- checkpoint -----------------------------------------------------------------------------

    def _load(self, manifest: CheckpointManifest, shards: dict[str, bytes]) -> CheckpointManifest:
        self._messages.epoch_max = manifest.epoch
        self._catalog.next_partition = manifest.next_partition
        self._catalog.next_group = manifest.next_group
        self._catalog.next_consumer = manifest.next_consumer
        self._turn.action_index = manifest.action_index
        partitions: list[state.PartitionShard] = []
        for name, data in shards.items():
            if name.startswith(state.SHARD_PREFIX):
                partitions.append(msgspec.msgpack.decode(data, type=state.PartitionShard))
            elif name.startswith(SHARD_PREFIX):
                self._bucketed.load(data)
            elif name == TRANSACTIONS_SHARD:
                self._transactions.table.load(data)
            elif name != UNBUCKETED_SHARD:
                shard = msgspec.msgpack.decode(data, type=state.ProducerShard)
                self._producers.load(shard.producers)
                self._producers.loaded_until[shard.number] = shard.message
        self._producers.order()
        self._load_partitions(partitions)
        return manifest

    def _load_partitions(self, shards: list[state.PartitionShard]) -> None:
        turn = self._turn
        found: list[tuple[state.PartitionState, LogPositions]] = []
        for shard in shards:
            turn.action_index = max(turn.action_index, shard.position.action)
            self._messages.positions[shard.number] = shard.position
            found += [(entry, shard.position) for entry in shard.partitions]
        # In order of creation: a subject may have been deleted and created again between the copies of two shards, and
        # its name must lead to the newer partition.
        for entry, position in sorted(found, key=lambda each: each[0].row.id):
            partition = self._catalog.make(entry.row)
            partition.start, partition.next, partition.size = entry.start, entry.next, entry.size
            partition.epochs, partition.ranked = entry.epochs, entry.ranked
            partition.addressed = entry.addressed
            partition.position = position
            self._catalog.add(partition)
            for group in state.load_groups(entry, partition, turn, turn.clock.monotonic()):
                self._catalog.add_group(group)
            if not partition.consume_log.load(entry.generation, entry.flushed, entry.next):
                self._rebuilt.append(partition)

    def _rebuild(self) -> None:
        """Read the whole message log once for the partitions whose consume log is lost."""
        wanted = {partition.id: partition for partition in self._rebuilt}
        rows: dict[int, list[tuple[int, ...]]] = {p: [] for p in wanted}
        end = max(partition.position.message for partition in self._rebuilt)
        log = self._turn.message_log
        for offset, frame in LogScan(log, log.start, end):
            if offset >= end:
                break
            if frame.partition in wanted and offset < wanted[frame.partition].position.message:
                fields = frame.base, offset, frame.store_time, frame.size, frame.count, traits_of(frame)
                rows[frame.partition].append(fields)
        for number, partition in wanted.items():
            partition.consume_log.replace(np.array(rows[number], RECORD))
            self._turn.touch(partition)

    # --- logs -----------------------------------------------------------------------------------

    def _replay(self, manifest: CheckpointManifest, actions: ActionReplay) -> tuple[LogScan, LogScan, LogScan]:
        """Replay the message, retained and action logs after the checkpoint. Returns their scans."""
        turn, replay = self._turn, self._messages
        durable = _durable(turn.message_log, manifest.message_end)
        messages = LogScan(turn.message_log, manifest.message_offset, durable, replay.plausible)
        for offset, frame in messages:
            if frame.epoch < replay.epoch_max:
                messages.stop_before(offset, CUT_BEFORE)
            else:
                replay.apply(offset, frame)
        settle(turn.disk, turn.message_log, messages)
        durable = _durable(turn.retained_log, manifest.retained_end)
        kept = LogScan(turn.retained_log, manifest.retained_offset, durable, stamps_durable=False)
        copies = [(offset, frame) for offset, frame in kept if not is_header(frame)]
        settle(turn.disk, turn.retained_log, kept)
        durable = _durable(turn.action_log, manifest.action_end)
        events = LogScan(turn.action_log, manifest.action_offset, durable, stamps_durable=False)
        epoch = manifest.epoch
        for offset, frame in events:
            if frame.epoch < epoch:
                events.stop_before(offset, CUT_BEFORE)
                break
            if frame.durable > messages.end or presumed_retained(frame) > kept.end:
                events.stop_before(offset, "depends on messages that were lost")
                break
            epoch = frame.epoch
            actions.apply(offset, frame)
        replay.epoch_max = max(replay.epoch_max, epoch)
        settle(turn.disk, turn.action_log, events)
        for offset, frame in copies:
            actions.retained(offset, frame)
        return messages, kept, events


def _durable(log: Log, known: int) -> int:
    """The offset up to which a log was durable, by its durable mark and the checkpoint (``known``)."""
    return max(known, log.mark.durable) if log.mark else known
