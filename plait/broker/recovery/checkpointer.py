"""Checkpoints of a running broker: what is dirty, the copy that is written, and the blocking work.

A checkpoint does not stop the broker. ``begin`` notes where the logs end; then the dirty shards are copied one after
another, each in a turn of its own, with the positions of the logs at that moment. Recovery reads the logs from where
``begin`` stood, and applies to each partition only what its shard does not have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

import msgspec

from plait.broker.partitions.partition import LogPositions, Partition
from plait.broker.recovery import shards as state
from plait.broker.schedule.bucketed import FILE_MAX, FILE_NOW_MAX
from plait.storage.checkpoint import KEEP, CheckpointManifest
from plait.storage.logs.consume_log import DIRECTORY as CONSUME_DIRECTORY
from plait.storage.logs.consume_log import ConsumeLog, partition_of

if TYPE_CHECKING:
    from plait.broker.broker import Broker
    from plait.broker.commit import SyncWork
    from plait.storage.schedule.bucket_writer import BucketWriter


#: Time between checkpoints that are made only so that expired segments can go (``Snapshots.wanted``): ``KEEP`` of them
#: take a small part of the minute within which space is freed, and a broker that frees all the time is not kept busy.
WANTED_SECONDS: Final = 2.0
#: Consume logs that are told in one turn that their records are in files.
SETTLE_LOGS: Final = 500


class CheckpointWork:
    """What one checkpoint writes: copied in steps on the loop, written where blocking is fine."""

    def __init__(self, broker: Broker, manifest: CheckpointManifest, filing: BucketWriter, garbage: list[str]) -> None:
        self._broker = broker
        self.manifest = manifest
        self.filing = filing
        self._garbage = garbage
        #: Shards that are not copied yet.
        self._partitions = deque(sorted(broker.snapshots.dirty))
        self._producers = deque(sorted(broker.producers.dirty))
        #: Shards that are, by their numbers and by their names.
        self.copied_partitions: set[int] = set()
        self.copied_producers: set[int] = set()
        self.shards: dict[str, bytes] = {}
        self.consume: list[tuple[ConsumeLog, int, bytes]] = []
        #: Begun when all is copied.
        self.sync: SyncWork | None = None
        #: The checkpoint is durable.
        self.written = False
        #: Why it is not.
        self.error: OSError | None = None

    # --- copying --------------------------------------------------------------------------------

    def copy_some(self, partitions: int | None = None) -> bool:
        """Copy a few more shards as they are now; False: that was all, and ``run`` may be called.

        A call copies shards until it has copied so many partitions, or as many as the broker's
        configuration says. Raises ``StorageFailed`` when the broker has failed meanwhile.
        """
        broker = self._broker
        position = broker.settled_position()
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
        self.sync = broker.begin_sync()
        return False

    def copy_all(self) -> CheckpointWork:
        """Copy what is left at once, where the caller waits for the checkpoint anyway."""
        while self.sync is None:
            self.copy_some()
        return self

    def _copy_partitions(self, shard: int, position: LogPositions) -> int:
        """How many partitions there are in it."""
        snapshots = self._broker.snapshots
        snapshots.dirty.discard(shard)
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
        """How many producers there are in it."""
        table = self._broker.producers
        table.dirty.discard(shard)
        self.copied_producers.add(shard)
        self.shards[state.producer_shard(shard)] = state.encode_producers(table, shard, position.message)
        return table.count_in_shard(shard)

    # --- writing --------------------------------------------------------------------------------

    def run(self) -> None:
        """Logs first, then what is derived from them, then the manifest that says so. Blocks.

        Raises OSError when the logs could not be synced. A checkpoint that cannot be written, as on a full disk, is
        no such failure: the one before still counts, and ``error`` says why.
        """
        assert self.sync is not None, "nothing is written before all is copied"
        self.sync.run()
        checkpoints = self._broker.checkpoints
        try:
            for log, at, data in self.consume:
                log.write_records(at, data)
            disk = checkpoints.disk
            if self.consume:
                disk.sync_directory(CONSUME_DIRECTORY)
            shards = self.shards | self.filing.run()
            checkpoints.write(self.manifest, shards, self.filing.dropped(checkpoints.last))
            self.written = True
            used = self.filing.paths
            for path in self._garbage:
                if path not in used:
                    disk.remove(path)
        except OSError as error:
            self.error = error


class Snapshots:
    """When and of what a broker makes checkpoints."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        #: Shards of partitions changed since they were copied last.
        self.dirty: set[int] = set()
        #: The partitions in each shard: copying one does not walk through all.
        self._shards: list[dict[int, Partition]] = [{} for _ in range(state.SHARDS)]
        #: (checkpoint number after which it is unused, file) of replaced consume logs and finished buckets.
        self._garbage: list[tuple[int, str]] = []
        self._last_message_end = 0
        self._last_time = broker.clock.monotonic()
        #: The checkpoint that is being made.
        self.work: CheckpointWork | None = None
        #: Consume logs whose last records are in files, and which do not know it yet.
        self._unsettled: deque[tuple[ConsumeLog, int, bytes]] = deque()
        #: Segments of the message log have expired and are there only because the oldest checkpoint begins in them.
        self.wanted = False

    def add(self, partition: Partition) -> None:
        """A partition is known."""
        self._shards[state.shard_of(partition.id)][partition.id] = partition

    def remove(self, partition: Partition) -> None:
        """A partition is gone; its consume log's file goes once no kept checkpoint needs it."""
        self._shards[state.shard_of(partition.id)].pop(partition.id, None)
        self.replaced(partition.consume_log.path)

    def partitions_of(self, shard: int) -> Iterable[Partition]:
        """The partitions in a shard."""
        return self._shards[shard].values()

    @property
    def running(self) -> bool:
        """A checkpoint is being made."""
        return self.work is not None or bool(self._unsettled)

    @property
    def due(self) -> bool:
        """Enough has happened since the last one, or long enough ago."""
        if self.running:
            return False
        broker, config = self._broker, self._broker.config
        if broker.message_log.end - self._last_message_end >= config.checkpoint_bytes:
            return True
        if self.wanted and broker.clock.monotonic() - self._last_time >= WANTED_SECONDS:
            return True
        if not self.dirty and not broker.producers.dirty:
            return False
        return broker.clock.monotonic() - self._last_time >= config.checkpoint_seconds

    def make(self, *, clean: bool) -> None:
        """Make a checkpoint here and now. Blocks; raises OSError when it could not be written."""
        work = self.begin(clean=clean, waited_for=True).copy_all()
        work.run()
        self.end(work)
        while self.settle_some():
            pass
        if work.error is not None:
            raise work.error

    def begin(self, *, clean: bool, waited_for: bool) -> CheckpointWork:
        """A checkpoint of everything that is committed now, and of some that follows."""
        broker = self._broker
        if self.work is not None:
            # It was given up: its end was never reported, and no commit waits for its sync.
            if self.work.sync is not None:
                self._broker.syncs.pop(self.work.sync, None)
            self._finish(self.work)
        while self.settle_some():
            pass
        position = broker.settled_position()
        last = broker.checkpoints.last
        number = last.number + 1 if last else 1
        message_end, kept_end, action_end = (log.written for log in broker.logs)
        self._last_message_end = message_end
        self._last_time = broker.clock.monotonic()
        filing = broker.schedules.filed.begin(number, FILE_NOW_MAX if waited_for else FILE_MAX)
        manifest = CheckpointManifest(
            number=number,
            message_offset=message_end,
            action_offset=action_end,
            kept_offset=kept_end,
            message_end=message_end,
            action_end=action_end,
            kept_end=kept_end,
            epoch=broker.epoch,
            action_index=position.action,
            clean=clean,
            time=broker.clock.now(),
            next_partition=broker.next_partition,
            next_group=broker.next_group,
            next_consumer=broker.next_consumer,
            unfiled_offset=filing.unfiled_offset,
            shards={},
        )
        # A file that a failed checkpoint left behind may have been written to again under its name: it is in use.
        used = {bucket.path for bucket in broker.schedules.buckets.values()}
        used.update(log.path for log in self._consume_logs(path for _, path in self._garbage))
        self._garbage = [(after, path) for after, path in self._garbage if path not in used]
        garbage = [path for after, path in self._garbage if number > after + KEEP]
        self._garbage = [(after, path) for after, path in self._garbage if number <= after + KEEP]
        self.work = CheckpointWork(broker, manifest, filing, garbage)
        return self.work

    def end(self, work: CheckpointWork) -> None:
        """The work was run."""
        if work.sync is not None:
            self._broker.end_sync(work.sync)
        if work is self.work:
            self._finish(work)

    def _finish(self, work: CheckpointWork) -> None:
        self.work = None
        self._broker.schedules.filed.end(work.filing, written=work.written)
        if work.written:
            self._unsettled.extend(work.consume)
        else:
            self.dirty |= work.copied_partitions
            self._broker.producers.dirty |= work.copied_producers

    def settle_some(self) -> bool:
        """Tell some consume logs that the checkpoint has written their records; False: all know it."""
        for _ in range(min(len(self._unsettled), SETTLE_LOGS)):
            log, at, data = self._unsettled.popleft()
            log.flushed_to(at, data)
        return bool(self._unsettled)

    def drop_unknown_consume_logs(self) -> None:
        """Files that belong to no partition, or to an older life of one: the process that would remove them is gone."""
        names = [f"{CONSUME_DIRECTORY}/{name}" for name in self._broker.disk.list(CONSUME_DIRECTORY)]
        known = {log.path for log in self._consume_logs(names)}
        for path in names:
            if path not in known:
                self.replaced(path)

    def _consume_logs(self, paths: Iterable[str]) -> Iterator[ConsumeLog]:
        """The consume logs of the partitions whose files these are."""
        for path in paths:
            number = partition_of(path)
            partition = self._broker.partitions.get(number) if number is not None else None
            if partition is not None:
                yield partition.consume_log

    def replaced(self, path: str) -> None:
        """A file goes once no kept checkpoint needs it."""
        last = self._broker.checkpoints.last
        self._garbage.append((last.number if last else 0, path))
