"""Checkpoints of a running broker: tracks dirty shards, copies them, and writes the copies.

A checkpoint does not stop the broker. ``begin`` records where the logs end; then the dirty shards are copied in steps,
each with the log positions at the moment of its step. The steps may be in different turns. Recovery reads the logs from
the positions that ``begin`` recorded, and applies to each partition only what its shard does not include.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import msgspec

from plait.broker.catalog import Catalog
from plait.broker.commit import SyncWork
from plait.broker.partitions.partition import LogPositions
from plait.broker.recovery import shards as state
from plait.broker.schedule.bucketed import BUCKET_ROWS_MAX, BUCKET_ROWS_NOW_MAX, BucketedRows
from plait.broker.transactions.half_publisher import HalfPublisher
from plait.broker.transactions.transaction_table import TRANSACTIONS_SHARD
from plait.broker.turn import Turn
from plait.storage.checkpoint import CheckpointManifest, Checkpoints
from plait.storage.logs.consume_log import DIRECTORY as CONSUME_DIRECTORY
from plait.storage.logs.consume_log import ConsumeLog, partition_of
from plait.storage.producers import ProducerTable
from plait.storage.schedule.bucket_writer import BucketWriter

#: Time between checkpoints that are made only so that expired segments can be deleted (``Snapshots.wanted``).
#: After ``storage.checkpoint.KEEP`` of them, about ten seconds, no kept checkpoint needs an expired segment. A shorter
#: retention must take effect within a minute (docs/cli.md). A broker that always has expired segments makes one at each
#: interval, which costs it little.
WANTED_SECONDS: Final = 2.0
#: One call of ``settle_some`` notifies at most this many consume logs that their records are in files.
SETTLE_LOGS: Final = 500


class CheckpointWork:
    """One checkpoint: its shards are copied in steps on the loop, and written in a thread that may block."""

    def __init__(
        self, snapshots: Snapshots, manifest: CheckpointManifest, buckets: BucketWriter, garbage: list[str]
    ) -> None:
        self._catalog = snapshots.catalog
        self._turn = snapshots.turn
        self._table = snapshots.producers
        self._checkpoints = snapshots.checkpoints
        self.manifest = manifest
        self.buckets = buckets
        self._garbage = garbage
        #: Numbers of the shards that are not copied yet.
        self._partitions = deque(sorted(self._turn.dirty_shards))
        self._producers = deque(sorted(self._table.dirty))
        #: Numbers of the copied shards, and their contents by name.
        self.copied_partitions: set[int] = set()
        self.copied_producers: set[int] = set()
        self.shards: dict[str, bytes] = {}
        table = snapshots.half_publisher.table
        if table.dirty:
            # Copied when the checkpoint begins: recovery reads the logs from there on.
            self.shards[TRANSACTIONS_SHARD] = table.dump()
            table.dirty = False
        self.consume: list[tuple[ConsumeLog, int, bytes]] = []
        #: Set when all shards are copied.
        self.sync: SyncWork | None = None
        #: True if the checkpoint is durable.
        self.written = False
        #: Why the checkpoint could not be written.
        self.error: OSError | None = None

    # --- copying --------------------------------------------------------------------------------

    def copy_some(self, partitions: int | None = None) -> bool:
        """Copy some more shards in their current state; False: all are copied, and ``run`` may be called.

        One call copies shards until it has copied ``partitions`` partitions; None: ``BrokerConfig.copy_partitions``.
        Raises ``StorageFailed`` when the broker has failed meanwhile.
        """
        turn = self._turn
        position = turn.settled_position()
        count, limit = 0, turn.config.copy_partitions if partitions is None else partitions
        while self._partitions and count < limit:
            count += self._copy_partitions(self._partitions.popleft(), position)
        while self._producers and count < limit:
            count += self._copy_producers(self._producers.popleft(), position)
        if self._partitions or self._producers:
            return True
        message_end, retained_end, action_end = (log.written for log in turn.logs)
        self.manifest = msgspec.structs.replace(
            self.manifest,
            message_end=message_end,
            retained_end=retained_end,
            action_end=action_end,
            next_partition=self._catalog.next_partition,
            next_group=self._catalog.next_group,
            next_consumer=self._catalog.next_consumer,
        )
        self.sync = turn.begin_sync()
        return False

    def copy_all(self) -> CheckpointWork:
        """Copy all remaining shards at once, for a caller that waits for the checkpoint."""
        while self.sync is None:
            self.copy_some()
        return self

    def _copy_partitions(self, shard: int, position: LogPositions) -> int:
        self._turn.dirty_shards.discard(shard)
        self.copied_partitions.add(shard)
        states = []
        for partition in self._catalog.shards[shard].values():
            log = partition.consume_log
            if len(log) > log.flushed:
                at, data = log.flush()
                self.consume.append((log, at, data))
            states.append(state.dump_partition(partition, log.generation, len(log)))
        self.shards[f"{state.SHARD_PREFIX}{shard:03d}"] = msgspec.msgpack.encode(
            state.PartitionShard(shard, position, states)
        )
        return len(states)

    def _copy_producers(self, shard: int, position: LogPositions) -> int:
        self._table.dirty.discard(shard)
        self.copied_producers.add(shard)
        producers = self._table.shards[shard]
        entries = self._table.dump(producers)
        self.shards[f"producers-{shard:02d}"] = msgspec.msgpack.encode((shard, position.message, entries))
        return len(producers)

    # --- writing --------------------------------------------------------------------------------

    def run(self) -> None:
        """Write the logs, then the state derived from them, then the manifest. Blocks.

        Raises OSError when the logs could not be synced. When only the checkpoint cannot be written, for example on a
        full disk, ``error`` is set and the previous checkpoint stays valid.
        """
        assert self.sync is not None, "run() before all shards are copied"
        self.sync.run()
        checkpoints = self._checkpoints
        try:
            for log, at, data in self.consume:
                log.write_records(at, data)
            disk = checkpoints.disk
            if self.consume:
                disk.sync_directory(CONSUME_DIRECTORY)
            shards = self.shards | self.buckets.run()
            checkpoints.write(self.manifest, shards, self.buckets.dropped(checkpoints.last))
            self.written = True
            used = self.buckets.paths
            for path in self._garbage:
                if path not in used:
                    disk.remove(path)
        except OSError as error:
            self.error = error


class Snapshots:
    """Decides when a broker makes a checkpoint, and of which shards."""

    def __init__(
        self,
        turn: Turn,
        catalog: Catalog,
        producers: ProducerTable,
        checkpoints: Checkpoints,
        bucketed: BucketedRows,
        half_publisher: HalfPublisher,
    ) -> None:
        self.turn = turn
        self.catalog = catalog
        self.producers = producers
        self.checkpoints = checkpoints
        self._bucketed = bucketed
        self.half_publisher = half_publisher
        self._last_message_end = 0
        self._last_time = turn.clock.monotonic()
        #: The running checkpoint.
        self.work: CheckpointWork | None = None
        #: Consume logs whose last records were written to files, and which are not notified yet.
        self._unsettled: deque[tuple[ConsumeLog, int, bytes]] = deque()
        #: True if the oldest checkpoint is the only reason why expired segments of the message log cannot be deleted.
        self.wanted = False

    @property
    def running(self) -> bool:
        return self.work is not None or bool(self._unsettled)

    @property
    def due(self) -> bool:
        """Whether enough bytes were written, or enough time has passed, since the last checkpoint."""
        if self.running:
            return False
        turn, config = self.turn, self.turn.config
        if turn.message_log.end - self._last_message_end >= config.checkpoint_bytes:
            return True
        passed = turn.clock.monotonic() - self._last_time
        if self.wanted and passed >= WANTED_SECONDS:
            return True
        return passed >= config.checkpoint_seconds and bool(
            turn.dirty_shards or self.producers.dirty or self.half_publisher.table.dirty
        )

    def make(self, *, clean: bool = False) -> None:
        """Make a checkpoint now. Blocks; raises OSError when it could not be written."""
        work = self.begin(clean=clean, waited_for=True).copy_all()
        work.run()
        self.end(work)
        while self.settle_some():
            pass
        if work.error is not None:
            raise work.error

    def begin(self, *, clean: bool = False, waited_for: bool = False) -> CheckpointWork:
        """Begin a checkpoint: it has all that is committed now, and later changes up to the copying of each shard.

        The caller calls ``copy_some``, then ``run`` in a thread, then ``end``.
        """
        turn = self.turn
        if self.work is not None:
            # The previous checkpoint was abandoned: ``end`` was not called, and no commit waits for its sync.
            if self.work.sync is not None:
                turn.syncs.pop(self.work.sync, None)
            self._finish(self.work)
        while self.settle_some():
            pass
        position = turn.settled_position()
        last = self.checkpoints.last
        number = last.number + 1 if last else 1
        message_end, retained_end, action_end = (log.written for log in turn.logs)
        self._last_message_end = message_end
        self._last_time = turn.clock.monotonic()
        buckets = self._bucketed.begin(number, BUCKET_ROWS_NOW_MAX if waited_for else BUCKET_ROWS_MAX)
        manifest = CheckpointManifest(
            number=number,
            message_offset=message_end,
            action_offset=action_end,
            retained_offset=retained_end,
            epoch=turn.epoch,
            action_index=position.action,
            clean=clean,
            time=turn.clock.now(),
            unbucketed_offset=buckets.unbucketed_offset,
            transactions_offset=self.half_publisher.log_needed,
        )
        self.work = CheckpointWork(self, manifest, buckets, self.checkpoints.unneeded(number, self._in_use))
        return self.work

    def end(self, work: CheckpointWork) -> None:
        """Finish a checkpoint. If it was not written (``work.error``), the next one covers its changes too."""
        if work.sync is not None:
            self.turn.end_sync(work.sync)
        if work is self.work:
            self._finish(work)

    def _finish(self, work: CheckpointWork) -> None:
        self.work = None
        self._bucketed.end(work.buckets, written=work.written)
        if work.written:
            self._unsettled.extend(work.consume)
        else:
            self.half_publisher.table.dirty |= TRANSACTIONS_SHARD in work.shards
            self.turn.dirty_shards |= work.copied_partitions
            self.producers.dirty |= work.copied_producers

    def settle_some(self) -> bool:
        """Notify some consume logs that the checkpoint wrote their records; False: all are notified."""
        for _ in range(min(len(self._unsettled), SETTLE_LOGS)):
            log, at, data = self._unsettled.popleft()
            log.flushed_to(at, data)
        return bool(self._unsettled)

    def drop_unknown_consume_logs(self) -> None:
        """Let a later checkpoint delete the consume logs that no partition uses, once no kept checkpoint needs them."""
        for name in self.checkpoints.disk.list(CONSUME_DIRECTORY):
            path = f"{CONSUME_DIRECTORY}/{name}"
            if not self._in_use(path):
                self.checkpoints.replaced(path)

    def _in_use(self, path: str) -> bool:
        """Whether the file is the consume log of a partition, or a bucket."""
        number = partition_of(path)
        partition = self.catalog.partitions.get(number) if number is not None else None
        return self._bucketed.uses(path) if partition is None else partition.consume_log.path == path
