"""The schedules of a broker: which delayed messages wait.

A delayed row is appended to the *schedule partition* of its subject in the message log, and then its receipt is sent;
the number of the row is its sequence there. A checkpoint moves the rows that still wait to buckets
(``storage.schedule``). A due row is appended to the subject's own partition, in a frame that names the numbers that it
settles: delivery and its record are one write, so a crash cannot make a row be delivered twice or not at all.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from plait.broker.catalog import Catalog
from plait.broker.commit import Commit
from plait.broker.partitions.partition import Partition
from plait.broker.schedule.upcoming import Schedule, Upcoming
from plait.broker.turn import Turn
from plait.storage.catalog import SCHEDULE, PartitionRow
from plait.storage.checkpoint import Checkpoints
from plait.storage.schedule.bucket import Bucket
from plait.storage.schedule.bucket_writer import BucketWriter
from plait.storage.schedule.unbucketed import UnbucketedRows

#: The most notices that wait to be logged; further ones are dropped.
NOTICES_MAX: Final = 1_000


class Schedules:
    """All delayed rows of a broker."""

    def __init__(self, turn: Turn, catalog: Catalog, checkpoints: Checkpoints) -> None:
        self._turn = turn
        self._catalog = catalog
        self._checkpoints = checkpoints
        #: Partition name → its schedule.
        self.by_name: dict[str, Schedule] = {}
        #: Number of the schedule partition → its schedule. During recovery, deleted schedules are here too.
        self.by_partition: dict[int, Schedule] = {}
        self.buckets: dict[int, Bucket] = {}
        #: Adds rows to buckets while a checkpoint runs; None: no checkpoint runs.
        self.writer: BucketWriter | None = None
        self.upcoming = Upcoming(self.buckets)
        self.window = self.upcoming.window
        #: Delayed rows that were lost to damage.
        self.lost_count = 0
        #: Texts about damage and postponed rows that the server has not logged yet.
        self.notices: list[str] = []
        catalog.kinds[SCHEDULE] = self
        catalog.on_subject = self.enters

    def add(self, partition: Partition) -> None:
        schedule = Schedule(partition)
        partition.main = self._catalog.subjects.get(partition.row.name)
        self.by_partition[partition.id] = schedule
        self.by_name[partition.row.name] = schedule

    def enters(self, partition: Partition) -> None:
        """Connect a new partition with its schedule, if it has one."""
        schedule = self.by_name.get(partition.row.name)
        if schedule is not None:
            schedule.partition.main = partition
            self.release([schedule] if schedule.postponed else [])

    def remove(self, partition: Partition) -> None:
        """Remove the delayed rows of a deleted subject."""
        schedule = self.by_partition.pop(partition.id, None)
        if schedule is not None:
            schedule.unbucketed = UnbucketedRows(partition.next)
            if self.by_name.get(partition.row.name) is schedule:
                del self.by_name[partition.row.name]
        self.window.remove_partition(partition.id)
        for bucket in self.buckets.values():
            for run in np.flatnonzero(bucket.of(partition.id)).tolist():
                bucket.drop_run(run)
        self.drop_finished()

    def partition_of(self, subject: str) -> Partition:
        """The schedule partition of a partition. Both are created if they are missing and ``auto_create`` allows it."""
        target = self._catalog.partition_of(subject).row
        schedule = self.by_name.get(subject)
        if schedule is not None:
            return schedule.partition
        number, now = self._catalog.next_partition, self._turn.clock.now()
        return self._catalog.create(PartitionRow(number, target.subject, target.name, now, kind=SCHEDULE))

    def of(self, name: str) -> list[Partition]:
        return [self.by_name[name].partition] if name in self.by_name else []

    @property
    def count(self) -> int:
        bucketed = sum(bucket.waiting for bucket in self.buckets.values())
        return bucketed + sum(schedule.unbucketed.waiting for schedule in self.by_name.values())

    def waits(self, schedule: Schedule) -> bool:
        return schedule.unbucketed.waiting > 0 or any(
            bucket.of(schedule.partition.id).any() for bucket in self.buckets.values()
        )

    def postponed(self, subject: str) -> list[Schedule]:
        """The schedules whose due rows wait for the route of the subject."""
        return [each for each in self.by_name.values() if each.postponed and each.partition.row.subject == subject]

    def report(self, file: str, reason: str, rows: int) -> None:
        self.lost_count += rows
        self.notice(f"{file}: {rows} delayed messages are lost: {reason}")

    def notice(self, text: str) -> None:
        """Queue a notice for the server's log."""
        if len(self.notices) < NOTICES_MAX:
            self.notices.append(text)

    def take_in(self, commit: Commit) -> None:
        """Add the delayed rows that a commit wrote."""
        for partition, frame, offset, base in commit.delayed:
            schedule = self.by_partition.get(partition.id)
            if schedule is not None:
                self.upcoming.append(schedule, frame, offset, base)

    def release(self, held: list[Schedule]) -> None:
        """Move the due rows of postponed schedules into the window."""
        for schedule in held:
            schedule.postponed = False
        if held:
            self.upcoming.begin_again(self.by_name.values())

    def drop_finished(self) -> None:
        """Delete empty buckets, unless a checkpoint is running that may add rows to them."""
        if self.writer is None:
            for key in [key for key, bucket in self.buckets.items() if bucket.waiting == 0]:
                self._checkpoints.replaced(self.buckets.pop(key).path)
