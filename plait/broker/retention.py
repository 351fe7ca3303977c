"""Retention (R21): a subject's age and size limits move its logical start; a segment goes when every partition allows.

The first-hand logs are kept from the oldest checkpoint on, whatever the limits say, and on request until an archive
has them: a disk that fills up meanwhile refuses sends. What a group has begun with and
not finished is copied to the kept log first. Groups that had not come to what expired get a recorded event, and their
``lost`` count shows it.
"""

from __future__ import annotations

import logging

import numpy as np

from plait.broker.broker import Broker
from plait.broker.group import Group
from plait.broker.partition import Partition
from plait.errors import DiskFull, FlowControl
from plait.limits import MIB
from plait.storage.archived import Archived, read_archived
from plait.storage.consume_log import Record
from plait.storage.ranges import Range

log = logging.getLogger("plait.broker")

#: The active segment is closed when all of it has expired and it holds this much: less is not worth a file.
ROLL_SIZE = 1 * MIB
#: A consume log is rewritten when more than this many of its records, and more than half, are expired.
COMPACT_FROM = 4096


class Retention:
    """Decides what may go; called by a timer."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        #: Partition id → (its start, the first record kept): most partitions need no look into their consume log.
        self._heads: dict[int, tuple[int, Record]] = {}
        #: The message log is needed from here on, once the kept log and itself are durable up to there.
        self._waiting = (0, 0, 0)
        self._needed = 0
        #: The kept log is needed from here on; the next one is not certain yet.
        self._kept_needed = self._kept_next = 0

    def run(self) -> list[int]:
        """Expire and delete; the bases of the deleted message-log segments."""
        broker = self._broker
        broker.retention_wanted = False
        try:
            broker.stages.expire()
            broker.forwards.expire()
        except (DiskFull, FlowControl) as error:
            # What goes below makes room for saying it the next time.
            log.warning("stages that nobody asked for cannot be given up yet: %s", error)
        needed = broker.message_log.end
        for partition in broker.partitions.values():
            self._expire(partition)
            head = self._head(partition)
            if head is not None:
                needed = min(needed, head.offset)
        self._heads = {number: head for number, head in self._heads.items() if number in broker.partitions}
        oldest = broker.checkpoints.oldest
        if oldest is None:
            return []
        unneeded = needed >= broker.message_log.end
        archived = self._archived()
        needed = min(self._certain(needed), archived.message_offset)
        removed = broker.message_log.remove_before(min(needed, broker.checkpoints.message_needed))
        # What is left of them is there for checkpoints alone: newer ones let it go.
        broker.snapshots.wanted = broker.message_log.removable(needed) and not self._held_by_schedule()
        if unneeded:
            self._roll()
        broker.action_log.remove_before(min(oldest.action_offset, archived.action_offset))
        self._let_go_of_kept(self._kept_from())
        broker.kept_log.remove_before(min(self._kept_needed, oldest.kept_offset, archived.kept_offset))
        if removed:
            for partition in broker.partitions.values():
                self._compact(partition)
        return removed

    def _held_by_schedule(self) -> bool:
        """The newest checkpoint itself needs the first segment, for delayed rows in it: others would not help."""
        last, first = self._broker.checkpoints.last, self._broker.message_log.segments[0]
        return last is not None and last.message_offset >= first.end > last.message_needed

    def _roll(self) -> None:
        """Nothing of the active segment is needed: close it, as only closed ones can go."""
        broker, messages = self._broker, self._broker.message_log
        if not messages.segments:
            return
        if messages.end - messages.segments[-1].head_end >= min(ROLL_SIZE, messages.segment_size // 2):
            try:
                messages.roll()
            except OSError as error:
                # On a full disk the next run tries again: by then there may be room.
                broker.disk_error(error)
            else:
                broker.answer_after_commit(None)
                broker.retention_wanted = True

    def _archived(self) -> Archived:
        """The first-hand logs may go up to here, as far as archives are waited for."""
        broker = self._broker
        if broker.config.archive_before_delete:
            return read_archived(broker.disk)
        message, kept, action = (log.end for log in broker.logs)
        return Archived(message, action, kept_offset=kept)

    def _certain(self, needed: int) -> int:
        """What the message log is needed from, as far as what was copied from it is durable where it is now.

        What is begun with goes to the kept log; what a stage held, or that it was given up, to the message log again.
        """
        kept, messages = self._broker.kept_log, self._broker.message_log
        now = (needed, kept.end, messages.end)
        for waiting in (self._waiting, now):
            self._waiting = waiting
            offset, kept_end, message_end = waiting
            if kept.durable < kept_end or messages.durable < message_end:
                # It stays until it is: the end of a busy log never would be.
                break
            self._needed = offset
        return self._needed

    def _kept_from(self) -> int:
        """The kept log is needed from here on; dead letters that are too old go first."""
        broker = self._broker
        needed, seconds = broker.kept_log.end, broker.config.dead_seconds
        for partition in broker.partitions.values():
            for group in partition.groups.values():
                if not group.kept:
                    continue
                if seconds is not None:
                    broker.dead_letters.expire(group, broker.clock.now() - int(seconds * 1_000_000))
                broker.dead_letters.tidy(group)
                first = group.kept.first_offset
                needed = needed if first is None else min(needed, first)
        return needed

    def _let_go_of_kept(self, needed: int) -> None:
        """The kept log is needed from ``needed`` on, once the events that say so are durable.

        A dead letter whose copy is deleted before the event that forgets it is durable comes back without a body.
        """
        if needed > self._kept_next and self._broker.kept_log.removable(needed):
            self._kept_next = needed
            self._broker.answer_when_durable(lambda: self._kept_certain(needed))

    def _kept_certain(self, needed: int) -> None:
        self._kept_needed = max(self._kept_needed, needed)
        self._broker.retention_wanted = True

    def _head(self, partition: Partition) -> Record | None:
        """The first record that is still needed."""
        if partition.start >= partition.next:
            return None
        known = self._heads.get(partition.id)
        if known is not None and known[0] == partition.start:
            return known[1]
        log = partition.consume_log
        index = log.find(partition.start)
        if index >= len(log):
            return None
        head = log.record(index)
        self._heads[partition.id] = (partition.start, head)
        return head

    def _expire(self, partition: Partition) -> None:
        if partition.row.kind:
            # Bodies that wait outlive the limits; the start moves when they are filed, published or given up.
            return
        partition.expire_deleted(self._broker.message_log)
        start = max(partition.start, self._by_time(partition), self._by_size(partition))
        start = min(start, partition.visible)
        if start <= partition.start:
            return
        behind = [group for group in partition.groups.values() if group.floor < start]
        lost: list[tuple[Group, list[Range]]] = []
        for group in behind:
            # What was begun with before that is kept already.
            group.begin_with(start)
            rest = self._broker.dead_letters.keep(group, group.begun(partition.start, start, self._broker))
            if rest is None:
                # There is no room to keep them: nothing goes until there is.
                return
            lost.append((group, rest))
        for group, pieces in lost:
            # Before the rows are out of reach: those that are lost are counted.
            group.expire(pieces, start, self._broker)
        partition.start = start
        self._broker.touch(partition)

    def _by_time(self, partition: Partition) -> int:
        seconds = partition.row.settings.retention_seconds
        if seconds is None:
            seconds = self._broker.config.retention_seconds
        if seconds is None:
            return 0
        oldest = self._broker.clock.now() - int(seconds * 1_000_000)
        head = self._head(partition)
        if head is None or head.time >= oldest:
            return 0
        return partition.sequence_at_time(oldest)

    def _by_size(self, partition: Partition) -> int:
        size = partition.row.settings.retention_bytes
        if size is None:
            size = self._broker.config.retention_bytes
        if size is None:
            return 0
        log = partition.consume_log
        records = log.slice(log.find(partition.start), len(log))
        if not len(records):
            return 0
        # Bytes from each record to the end: the first that is within the limit stays.
        kept = np.cumsum(records["size"][::-1].astype(np.int64))[::-1]
        over = int((kept > size).sum())
        if over >= len(records):
            return int(records["base"][-1])
        return int(records["base"][over])

    def _compact(self, partition: Partition) -> None:
        """Drop expired records from a consume log."""
        log = partition.consume_log
        first = log.find(partition.start)
        if first > COMPACT_FROM and first * 2 > len(log) and not self._broker.snapshots.running:
            records = log.slice(first, len(log)).copy()
            self._broker.snapshots.replaced(log.path)
            log.replace(records)
            self._broker.touch(partition)
