"""Checkpoints of a running broker: what is dirty, the consistent copy, and the blocking work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from plait.broker import state
from plait.broker.filed import FILE_MAX, FILE_NOW_MAX
from plait.storage.checkpoint import KEEP, Checkpoints, Manifest
from plait.storage.consume_log import DIRECTORY as CONSUME_DIRECTORY
from plait.storage.consume_log import ConsumeLog, partition_of
from plait.storage.filing import Filing
from plait.storage.producers import shard_of

if TYPE_CHECKING:
    from plait.broker.broker import Broker
    from plait.broker.commit import SyncWork
    from plait.broker.partition import Partition


#: Time between checkpoints that are made only so that expired segments can go (``Snapshots.wanted``): ``KEEP`` of them
#: take a small part of the minute within which space is freed, and a broker that frees all the time is not kept busy.
WANTED_SECONDS = 2.0


class Changed(NamedTuple):
    """What a checkpoint has to write anew: ids of partitions and of producers."""

    partitions: set[int]
    producers: set[int]


class CheckpointWork:
    """Everything a checkpoint writes, copied from the state at one moment; ``run`` blocks."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        sync: SyncWork,
        manifest: Manifest,
        shards: dict[str, bytes],
        consume: list[tuple[ConsumeLog, int, bytes]],
        garbage: list[str],
        changed: Changed,
        filing: Filing,
    ) -> None:
        self._checkpoints = checkpoints
        self.sync = sync
        self.manifest = manifest
        self.shards = shards
        self.consume = consume
        self._garbage = garbage
        self.changed = changed
        self.filing = filing
        #: The checkpoint is durable.
        self.written = False
        #: Why it is not.
        self.error: OSError | None = None

    def run(self) -> None:
        """Logs first, then what is derived from them, then the manifest that says so.

        Raises OSError when the logs could not be synced. A checkpoint that cannot be written, as on a full disk, is
        no such failure: the one before still counts, and ``error`` says why.
        """
        self.sync.run()
        try:
            for log, at, data in self.consume:
                log.write_records(at, data)
            disk = self._checkpoints.disk
            if self.consume:
                disk.sync_directory(CONSUME_DIRECTORY)
            shards = self.shards | self.filing.run()
            self._checkpoints.write(self.manifest, shards, self.filing.dropped(self._checkpoints.last))
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
        #: Partitions changed since the last checkpoint.
        self.dirty: set[int] = set()
        #: (checkpoint number after which it is unused, file) of replaced consume logs and finished buckets.
        self._garbage: list[tuple[int, str]] = []
        self._last_message_end = 0
        self._last_time = broker.clock.monotonic()
        self._work: CheckpointWork | None = None
        #: Segments of the message log have expired and are there only because the oldest checkpoint begins in them.
        self.wanted = False

    @property
    def running(self) -> bool:
        """A checkpoint is being written."""
        return self._work is not None

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

    def begin(self, *, clean: bool, waited_for: bool = False) -> CheckpointWork:
        """Copy the state. Everything committed is in it; nothing after."""
        broker = self._broker
        if self._work is not None:
            # Whoever ran it did not come back to say so.
            self._finish(self._work)
        last = broker.checkpoints.last
        number = last.number + 1 if last else 1
        dirty, self.dirty = self.dirty, set()
        producers, broker.producers.dirty = broker.producers.dirty, set()
        consume: list[tuple[ConsumeLog, int, bytes]] = []
        flushed: dict[int, int] = {}
        for partition_id in dirty:
            partition = broker.partitions.get(partition_id)
            if partition is not None:
                at, data = partition.consume_log.flush()
                flushed[partition_id] = len(partition.consume_log)
                if data:
                    consume.append((partition.consume_log, at, data))
        shards: dict[str, bytes] = {}
        wanted = sorted({state.partition_shard(p) for p in dirty})
        members: dict[str, list[state.PartitionState]] = {shard: [] for shard in wanted}
        for partition in broker.partitions.values() if wanted else ():
            shard = state.partition_shard(partition.id)
            if shard in members:
                log = partition.consume_log
                count = flushed.get(partition.id, log.flushed)
                members[shard].append(state.dump_partition(partition, log.generation, count))
        for shard, states in members.items():
            shards[shard] = state.encode_partitions(states)
        for index in sorted({shard_of(p) for p in producers}):
            shards[state.producer_shard(index)] = state.encode_producers(broker.producers, index)
        message_end, kept_end, action_end = (log.written for log in broker.logs)
        self._last_message_end = message_end
        self._last_time = broker.clock.monotonic()
        filing = broker.schedules.filed.begin(number, FILE_NOW_MAX if waited_for else FILE_MAX)
        manifest = Manifest(
            number=number,
            message_offset=message_end,
            action_offset=action_end,
            kept_offset=kept_end,
            durable=message_end,
            epoch=broker.epoch,
            action_index=broker.action_index,
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
        changed = Changed(dirty, producers)
        self._work = CheckpointWork(
            broker.checkpoints, broker.begin_sync(), manifest, shards, consume, garbage, changed, filing
        )
        return self._work

    def end(self, work: CheckpointWork) -> None:
        """The work was run."""
        if work is self._work:
            self._finish(work)
        self._broker.end_sync(work.sync)

    def _finish(self, work: CheckpointWork) -> None:
        self._work = None
        self._broker.schedules.filed.end(work.filing, written=work.written)
        if work.written:
            for log, at, data in work.consume:
                log.flushed_to(at, data)
        else:
            self.dirty |= work.changed.partitions
            self._broker.producers.dirty |= work.changed.producers

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

    def drop_consume_log(self, partition: Partition) -> None:
        """The file goes once no kept checkpoint needs it."""
        self.replaced(partition.consume_log.path)

    def replaced(self, path: str) -> None:
        last = self._broker.checkpoints.last
        self._garbage.append((last.number if last else 0, path))
