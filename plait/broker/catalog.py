"""The catalog of a broker: creates, changes and deletes partitions, and knows their groups.

Each change of a partition is a catalog row in the message log before it takes effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import msgspec

from plait.broker.groups.group import AttachedConsumer, Group
from plait.broker.groups.ordered.lease_grants import LeaseGrants
from plait.broker.groups.waking import pause_changed, wake_group
from plait.broker.partitions.frame_search import KnownRows
from plait.broker.partitions.partition import SHARDS, Partition
from plait.broker.recovery.segment_headers import SegmentHeaders
from plait.broker.turn import Turn
from plait.errors import LimitExceeded, StaleRoute, SubjectExists, SubjectNotFound
from plait.frame.view import FrameView
from plait.model.settings import SubjectSettings
from plait.storage.catalog import FORWARD, HALF, STAGE, PartitionRow
from plait.storage.checkpoint import Checkpoints
from plait.storage.logs.consume_log import ConsumeLog, OpenMaps
from plait.storage.producers import ProducerTable

#: Rows of one catalog frame.
CATALOG_FRAME_ROWS = 5_000


class PartitionKind(Protocol):
    """The partitions of one kind: schedules, stages, forwards or half messages."""

    def add(self, partition: Partition) -> None: ...

    def remove(self, partition: Partition) -> None: ...

    def of(self, name: str) -> list[Partition]:
        """The partitions that are deleted together with the partition ``name``."""


class Catalog:
    """The partitions and groups of a broker."""

    #: Called with each new partition that has no kind.
    on_subject: Callable[[Partition], None]

    def __init__(
        self,
        turn: Turn,
        headers: SegmentHeaders,
        checkpoints: Checkpoints,
        producers: ProducerTable,
        leases: LeaseGrants,
        sessions: dict[int, AttachedConsumer],
    ) -> None:
        self._turn = turn
        self._headers = headers
        self._checkpoints = checkpoints
        self._producers = producers
        self._leases = leases
        self._sessions = sessions
        self._maps = OpenMaps(turn.limits.open_maps)
        self.known_rows = KnownRows(turn.limits.key_rows)
        self._partitions: dict[int, Partition] = {}
        #: Changed only by ``add`` and ``drop``: a segment header defines every partition.
        self.partitions: Mapping[int, Partition] = self._partitions
        #: The partitions of each checkpoint shard.
        self.shards: list[dict[int, Partition]] = [{} for _ in range(SHARDS)]
        #: By partition name. The partition of a subject without a route has the name of the subject.
        self.subjects: dict[str, Partition] = {}
        self.kinds: dict[str, PartitionKind] = {}
        self.groups: dict[int, Group] = {}
        self.next_partition = 1
        self.next_group = 1
        self.next_consumer = 1
        #: True if only meta servers create partitions; False: the first use of a name creates one.
        self.routed = False
        #: True if retention should run now, because a subject was deleted or its retention was shortened.
        self.retention_wanted = False

    # --- subjects -------------------------------------------------------------------------------

    def partition_of(self, subject: str, *, create: bool = True) -> Partition:
        """The partition of a subject, created on first use; ``SubjectNotFound`` where that is not allowed.

        Where meta servers create partitions, a client that names an unknown partition gets ``StaleRoute`` and asks a
        meta server again.
        """
        known = self.subjects.get(subject)
        if known is not None:
            return known
        if create and self.routed:
            # The meta servers could not create it here either.
            self._turn.refuse_when_full()
            raise StaleRoute(
                f"this broker has no partition {subject!r}; get the route of its subject from a meta server"
            )
        if not (create and self._turn.config.auto_create):
            raise SubjectNotFound(
                f"subject {subject!r} does not exist; create it with 'plait subject create {subject}'", subject=subject
            )
        return self.create_subject(subject)

    def create_subject(self, subject: str, settings: SubjectSettings | None = None) -> Partition:
        """Create a subject. Its definition is in the message log before its first row."""
        if subject in self.subjects:
            raise SubjectExists(f"subject {subject!r} exists already", subject=subject)
        self.refuse_more()
        self._turn.refuse_when_full()
        now = self._turn.clock.now()
        return self.create(PartitionRow(self.next_partition, subject, subject, now, settings or SubjectSettings()))

    def refuse_more(self) -> None:
        """Raise when the broker is at its limit of subjects."""
        limit = self._turn.limits.subjects
        if len(self.subjects) >= limit:
            raise LimitExceeded(
                f"subject limit reached ({limit} per broker, limit `subjects`); delete some or raise it",
                limit="subjects",
                value=limit,
            )

    def update_subject(self, subject: str, settings: SubjectSettings) -> None:
        """Change the settings of a subject."""
        row = self.partition_of(subject, create=False).row
        self.change([msgspec.structs.replace(row, settings=settings)])
        self.retention_wanted = True

    def delete_subject(self, subject: str) -> Partition:
        """Delete a subject with its messages, delayed messages and groups. Returns its partition."""
        # Frames of this turn must precede the deletion in the log: recovery treats frames after it as damage.
        self._turn.commit()
        if self._turn.failed is not None:
            raise self._turn.failed
        partition = self.partition_of(subject, create=False)
        self.delete([partition, *(each for kind in self.kinds.values() for each in kind.of(subject))])
        for waiter in [*partition.readers, *(w for group in partition.groups.values() for w in group.waiters)]:
            waiter.time_out()
        self.retention_wanted = True
        return partition

    # --- partitions -----------------------------------------------------------------------------

    def create(self, row: PartitionRow) -> Partition:
        """Create a partition with the next number."""
        self._headers.define([row])
        self.next_partition += 1
        partition = self.make(row)
        self.add(partition)
        self._turn.touch(partition)
        return partition

    def make(self, row: PartitionRow) -> Partition:
        """A partition without rows, which is not registered."""
        return Partition(row, ConsumeLog(self._turn.disk, row.id, self._maps), self.known_rows)

    def add(self, partition: Partition) -> None:
        """Register a partition that the log or a checkpoint defines."""
        row = partition.row
        self._partitions[row.id] = self.shards[partition.shard][row.id] = partition
        self._headers.add(partition)
        if row.kind:
            self.kinds[row.kind].add(partition)
        else:
            self.subjects[row.name] = partition
            self.on_subject(partition)

    def change(self, rows: list[PartitionRow]) -> None:
        """Replace the rows of partitions. If the disk fills up, the pages of rows written so far are in effect."""
        for page in _pages(rows):
            self._headers.define(page)
            for row in page:
                partition = self.partitions[row.id]
                before, after = partition.row.settings, row.settings
                partition.redefine(row)
                self._turn.touch(partition)
                for name in before.paused.keys() ^ after.paused.keys():
                    if name in partition.groups:
                        pause_changed(partition.groups[name])
                for name in before.group_rates.keys() | after.group_rates.keys():
                    # The limit has changed, or the partition's share of it.
                    if name in partition.groups:
                        wake_group(partition.groups[name])

    def spend_rate(self, partition: Partition, frame: FrameView) -> None:
        """Count rows of a hidden partition against the limit of its subject; raises ``RateLimited`` at the limit."""
        target = self.subjects.get(partition.row.name)
        rate = None if target is None else target.send_rate
        if rate is not None:
            refusal = rate.refusal(partition.row.subject, self._turn.clock.monotonic())
            if refusal is not None:
                raise refusal
            rate.spend(frame.count, frame.size)

    def delete(self, partitions: Iterable[Partition]) -> None:
        """Delete partitions. If the disk fills up, the pages of rows written so far are in effect."""
        for page in _pages([msgspec.structs.replace(partition.row, deleted=True) for partition in partitions]):
            self._headers.define(page)
            for row in page:
                self.drop(self.partitions[row.id])

    def drop(self, partition: Partition) -> None:
        """Unregister a partition that the log marks as deleted."""
        self._turn.touch(partition)
        row = partition.row
        del self._partitions[row.id]
        self.shards[partition.shard].pop(row.id)
        self._headers.remove(partition)
        if row.kind:
            self.kinds[row.kind].remove(partition)
        elif self.subjects.get(row.name) is partition:
            del self.subjects[row.name]
        if row.kind not in (STAGE, FORWARD, HALF):
            self._producers.forget_partition(row.id)
        for group in partition.groups.values():
            self._forget(group)
            for consumer in group.consumers.values():
                self._sessions.pop(consumer.session, None)
        self._checkpoints.replaced(partition.consume_log.path)

    # --- groups ---------------------------------------------------------------------------------

    def add_group(self, group: Group) -> None:
        """Register a group with its partition."""
        group.partition.add_group(group)
        self.groups[group.id] = group
        self._leases.add(group)

    def remove_group(self, group: Group) -> None:
        """Unregister a group from its partition."""
        group.partition.remove_group(group)
        group.partition.waiting.pop(group, None)
        self._forget(group)

    def _forget(self, group: Group) -> None:
        group.expected = 0
        self._leases.remove(group)
        del self.groups[group.id]


def _pages(rows: list[PartitionRow]) -> Iterator[list[PartitionRow]]:
    return (rows[start : start + CATALOG_FRAME_ROWS] for start in range(0, len(rows), CATALOG_FRAME_ROWS))
