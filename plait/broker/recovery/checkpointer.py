"""Checkpoints of a running broker: tracks dirty shards, copies them, and writes the copies.

A checkpoint does not stop the broker. ``begin`` records where the logs end; then the dirty shards are copied one after
another, each in its own turn, with the log positions at that moment. Recovery reads the logs from the positions that
``begin`` recorded, and applies to each partition only what its shard does not include.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

import msgspec

from plait.broker.partitions.partition import SHARDS, LogPositions, Partition
from plait.broker.recovery import shards as state
from plait.broker.schedule.bucketed import BUCKET_ROWS_MAX, BUCKET_ROWS_NOW_MAX
from plait.storage.checkpoint import KEEP, CheckpointManifest
from plait.storage.logs.consume_log import DIRECTORY as CONSUME_DIRECTORY
from plait.storage.logs.consume_log import ConsumeLog, partition_of

if TYPE_CHECKING:
    from plait.broker.broker import Broker
    from plait.broker.commit import SyncWork
    from plait.storage.schedule.bucket_writer import BucketWriter


#: Time between checkpoints that are made only so that expired segments can be deleted (``Snapshots.wanted``): ``KEEP``
#: of them fit well into the minute within which space is freed, and do not load a broker that frees space all the time.
WANTED_SECONDS: Final = 2.0
#: Consume logs that one turn notifies that their records are in files.
SETTLE_LOGS: Final = 500


class CheckpointWork:
    """One checkpoint: its shards are copied in steps on the loop, and written in a thread that may block."""

    def __init__(self, broker: Broker, manifest: CheckpointManifest, buckets: BucketWriter, garbage: list[str]) -> None:
        self._broker = broker
        self.manifest = manifest
        self.buckets = buckets
        self._garbage = garbage
        #: Numbers of the shards that are not copied yet.
        self._partitions = deque(sorted(broker.turn.dirty_shards))
        self._producers = deque(sorted(broker.producers.dirty))
        #: Numbers of the copied shards, and their contents by name.
        self.copied_partitions: set[int] = set()
        self.copied_producers: set[int] = set()
        self.shards: dict[str, bytes] = {}
        self.consume: list[tuple[ConsumeLog, int, bytes]] = []
        #: Set when all shards are copied.
        self.sync: SyncWork | None = None
        #: The checkpoint is durable.
        self.written = False
        #: Why the checkpoint could not be written.
        self.error: OSError | None = None

    # --- copying --------------------------------------------------------------------------------

    def copy_some(self, partitions: int | None = None) -> bool:
        """Copy some more shards in their current state; False: all are copied, and ``run`` may be called.

        One call copies shards until it has copied ``partitions`` partitions; None: ``BrokerConfig.copy_partitions``.
        Raises ``StorageFailed`` when the broker has failed meanwhile.
        """
        broker = self._broker
        position = broker.turn.settled_position()
        count, limit = 0, broker.config.copy_partitions if partitions is None else partitions
        while self._partitions and count < limit:
            count += self._copy_partitions(self._partitions.popleft(), position)
        while self._producers and count < limit:
            count += self._copy_producers(self._producers.popleft(), position)
        if self._partitions or self._producers:
            return True
        message_end, kept_end, action_end = (log.written for log in broker.logs)
        self.manifest = msgspec.structs.replace(
            self.manifest,
            message_end=message_end,
            kept_end=kept_end,
            action_end=action_end,
            next_partition=broker.next_partition,
            next_group=broker.next_group,
            next_consumer=broker.next_consumer,
        )
        self.sync = broker.turn.begin_sync()
        return False

    def copy_all(self) -> CheckpointWork:
        """Copy all remaining shards at once, for a caller that waits for the checkpoint."""
        while self.sync is None:
            self.copy_some()
        return self

    def _copy_partitions(self, shard: int, position: LogPositions) -> int:
        """Copy a shard of partitions. Returns their number."""
        snapshots = self._broker.snapshots
        self._broker.turn.dirty_shards.discard(shard)
        self.copied_partitions.add(shard)
        states = []
        for partition in snapshots.partitions_of(shard):
            log = partition.consume_log
            if len(log) > log.flushed:
                at, data = log.flush()
                self.consume.append((log, at, data))
            states.append(state.dump_partition(partition, log.generation, len(log)))
        self.shards[state.partition_shard(shard)] = state.encode_partitions(shard, position, states)
        return len(states)

    def _copy_producers(self, shard: int, position: LogPositions) -> int:
        """Copy a shard of producers. Returns their number."""
        table = self._broker.producers
        table.dirty.discard(shard)
        self.copied_producers.add(shard)
        self.shards[state.producer_shard(shard)] = state.encode_producers(table, shard, position.message)
        return table.count_in_shard(shard)

    # --- writing --------------------------------------------------------------------------------

    def run(self) -> None:
        """Write the logs, then the state derived from them, then the manifest. Blocks.

        Raises OSError when the logs could not be synced. When only the checkpoint cannot be written, for example on a
        full disk, ``error`` is set and the previous checkpoint stays valid.
        """
        assert self.sync is not None, "run() before all shards are copied"
        self.sync.run()
        checkpoints = self._broker.checkpoints
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

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        #: The partitions of each shard, so that copying a shard does not visit all partitions.
        self._shards: list[dict[int, Partition]] = [{} for _ in range(SHARDS)]
        #: (last checkpoint that may use the file, path) of replaced consume logs and finished buckets.
        self._garbage: list[tuple[int, str]] = []
        self._last_message_end = 0
        self._last_time = broker.clock.monotonic()
        #: The running checkpoint.
        self.work: CheckpointWork | None = None
        #: Consume logs whose last records were written to files, and which are not notified yet.
        self._unsettled: deque[tuple[ConsumeLog, int, bytes]] = deque()
        #: Expired segments of the message log cannot be deleted only because the oldest checkpoint begins in them.
        self.wanted = False

    def add(self, partition: Partition) -> None:
        """Register a partition."""
        self._shards[state.shard_of(partition.id)][partition.id] = partition

    def remove(self, partition: Partition) -> None:
        """Unregister a partition. Its consume log's file is deleted once no kept checkpoint needs it."""
        self._shards[state.shard_of(partition.id)].pop(partition.id, None)
        self.replaced(partition.consume_log.path)

    def partitions_of(self, shard: int) -> Iterable[Partition]:
        """The partitions in a shard."""
        return self._shards[shard].values()

    @property
    def running(self) -> bool:
        """Whether a checkpoint is running."""
        return self.work is not None or bool(self._unsettled)

    @property
    def due(self) -> bool:
        """Whether enough bytes were written, or enough time has passed, since the last checkpoint."""
        if self.running:
            return False
        broker, config = self._broker, self._broker.config
        if broker.message_log.end - self._last_message_end >= config.checkpoint_bytes:
            return True
        if self.wanted and broker.clock.monotonic() - self._last_time >= WANTED_SECONDS:
            return True
        if not broker.turn.dirty_shards and not broker.producers.dirty:
            return False
        return broker.clock.monotonic() - self._last_time >= config.checkpoint_seconds

    def make(self, *, clean: bool) -> None:
        """Make a checkpoint now. Blocks; raises OSError when it could not be written."""
        work = self.begin(clean=clean, waited_for=True).copy_all()
        work.run()
        self.end(work)
        while self.settle_some():
            pass
        if work.error is not None:
            raise work.error

    def begin(self, *, clean: bool, waited_for: bool) -> CheckpointWork:
        """Begin a checkpoint. It includes all that is committed now, and some later changes."""
        broker = self._broker
        if self.work is not None:
            # The previous checkpoint was abandoned: ``end`` was not called, and no commit waits for its sync.
            if self.work.sync is not None:
                self._broker.turn.syncs.pop(self.work.sync, None)
            self._finish(self.work)
        while self.settle_some():
            pass
        position = broker.turn.settled_position()
        last = broker.checkpoints.last
        number = last.number + 1 if last else 1
        message_end, kept_end, action_end = (log.written for log in broker.logs)
        self._last_message_end = message_end
        self._last_time = broker.clock.monotonic()
        buckets = broker.schedules.bucketed.begin(number, BUCKET_ROWS_NOW_MAX if waited_for else BUCKET_ROWS_MAX)
        manifest = CheckpointManifest(
            number=number,
            message_offset=message_end,
            action_offset=action_end,
            kept_offset=kept_end,
            message_end=message_end,
            action_end=action_end,
            kept_end=kept_end,
            epoch=broker.turn.epoch,
            action_index=position.action,
            clean=clean,
            time=broker.clock.now(),
            next_partition=broker.next_partition,
            next_group=broker.next_group,
            next_consumer=broker.next_consumer,
            unbucketed_offset=buckets.unbucketed_offset,
            shards={},
        )
        # A file that a failed checkpoint left behind may be in use again under the same name.
        used = {bucket.path for bucket in broker.schedules.buckets.values()}
        used.update(log.path for log in self._consume_logs(path for _, path in self._garbage))
        self._garbage = [(after, path) for after, path in self._garbage if path not in used]
        garbage = [path for after, path in self._garbage if number > after + KEEP]
        self._garbage = [(after, path) for after, path in self._garbage if number <= after + KEEP]
        self.work = CheckpointWork(broker, manifest, buckets, garbage)
        return self.work

    def end(self, work: CheckpointWork) -> None:
        """Finish a checkpoint after ``work.run``."""
        if work.sync is not None:
            self._broker.turn.end_sync(work.sync)
        if work is self.work:
            self._finish(work)

    def _finish(self, work: CheckpointWork) -> None:
        self.work = None
        self._broker.schedules.bucketed.end(work.buckets, written=work.written)
        if work.written:
            self._unsettled.extend(work.consume)
        else:
            self._broker.turn.dirty_shards |= work.copied_partitions
            self._broker.producers.dirty |= work.copied_producers

    def settle_some(self) -> bool:
        """Notify some consume logs that the checkpoint wrote their records; False: all are notified."""
        for _ in range(min(len(self._unsettled), SETTLE_LOGS)):
            log, at, data = self._unsettled.popleft()
            log.flushed_to(at, data)
        return bool(self._unsettled)

    def drop_unknown_consume_logs(self) -> None:
        """Delete files of unknown partitions and of earlier generations, which an earlier process did not delete."""
        names = [f"{CONSUME_DIRECTORY}/{name}" for name in self._broker.disk.list(CONSUME_DIRECTORY)]
        known = {log.path for log in self._consume_logs(names)}
        for path in names:
            if path not in known:
                self.replaced(path)

    def _consume_logs(self, paths: Iterable[str]) -> Iterator[ConsumeLog]:
        """The consume logs of the known partitions that these files belong to."""
        for path in paths:
            number = partition_of(path)
            partition = self._broker.partitions.get(number) if number is not None else None
            if partition is not None:
                yield partition.consume_log

    def replaced(self, path: str) -> None:
        """Delete a file once no kept checkpoint needs it."""
        last = self._broker.checkpoints.last
        self._garbage.append((last.number if last else 0, path))
