"""Retention (R21): a subject's age and size limits move its logical start; a segment goes when every partition allows.

The first-hand logs are kept from the oldest checkpoint on, whatever the limits say, and on request until an archive
has them: a disk that fills up meanwhile refuses sends. What a group has begun with and
not finished is copied to the kept log first. Groups that had not come to what expired get a recorded event, and their
``lost`` count shows it.
"""

from __future__ import annotations

import logging
from collections.abc import Generator

import numpy as np

from plait.broker.broker import Broker
from plait.broker.groups.shared_group import Group
from plait.broker.partitions.partition import Partition
from plait.errors import DiskFull, FlowControl
from plait.limits import MIB
from plait.storage.archive_mark import ArchiveMark, read_archived
from plait.storage.ranges import Range

log = logging.getLogger("plait.broker")

#: The active segment is closed when all of it has expired and it holds this much: less is not worth a file.
ROLL_SIZE = 1 * MIB
#: A consume log is rewritten when more than this many of its records, and more than half, are expired.
COMPACT_FROM = 4096
#: Partitions that one step of a pass visits. Most have nothing to expire, and cost a few microseconds each; the first
#: visit after a checkpoint maps the file of a consume log, and costs some 50.
STEP_COST = 128
#: A visit that moves a start, rewrites a consume log, or looks at what a group keeps costs as much as so many others.
CHANGE_COST = 15


class _Needed:
    """From where on the logs are needed, as far as a pass has come."""

    __slots__ = ("kept", "message")

    def __init__(self, message: int, kept: int) -> None:
        self.message = message
        self.kept = kept


class Retention:
    """Decides what may go; called by a timer."""

    def __init__(self, broker: Broker, *, step_cost: int = STEP_COST) -> None:
        self._broker = broker
        self._step_cost = step_cost
        #: The message log is needed from here on, once the kept log and itself are durable up to there.
        self._waiting = (0, 0, 0)
        self._needed = 0
        #: The kept log is needed from here on; the next one is not certain yet.
        self._kept_needed = self._kept_next = 0

    def run(self) -> list[int]:
        """Expire and delete in one turn; the bases of the deleted message-log segments."""
        steps = self.steps()
        while True:
            try:
                next(steps)
            except StopIteration as ended:
                removed: list[int] = ended.value
                return removed

    def steps(self) -> Generator[None, None, list[int]]:
        """The same pass in steps of one loop turn each; requests are served between them.

        What comes during the pass lies behind the ends that the logs have now, and a start never moves back: what was
        visited before it came is needed from no earlier offset than the visit found.
        """
        broker = self._broker
        # A wish that comes during the pass may be about what was visited already: another pass looks at it.
        broker.retention_wanted = False
        try:
            broker.stages.expire()
            broker.forwards.expire()
        except (DiskFull, FlowControl) as error:
            # What goes below makes room for saying it the next time.
            log.warning("stages that nobody asked for cannot be given up yet: %s", error)
        now = broker.clock.now()
        needed = _Needed(broker.message_log.end, broker.kept_log.end)
        cost = 0
        for partition in list(broker.partitions.values()):
            if cost >= self._step_cost:
                yield
                cost = 0
            if broker.failed is not None:
                return []
            if broker.partitions.get(partition.id) is partition:
                cost += self._visit(partition, now, needed)
        if needed.message >= broker.message_log.end:
            # The active segment may be closed: the next one begins with all partitions.
            yield from broker.heads.refresh_catalog()
        # The files are deleted in a turn of their own.
        yield
        return [] if broker.failed is not None else self._delete(needed)

    def _visit(self, partition: Partition, now: int, needed: _Needed) -> int:
        """Expire what is too old of one partition, and take account of the rest; what it cost, in partitions."""
        cost = 1
        if self._expire(partition, now):
            cost += CHANGE_COST
        if len(partition.consume_log) > COMPACT_FROM:
            cost += CHANGE_COST
            self._compact(partition)
        head = partition.head
        if head is not None:
            needed.message = min(needed.message, head.offset)
        for group in partition.groups.values():
            if group.kept:
                cost += CHANGE_COST
                self._look_at_kept(group, now, needed)
        return cost

    def _delete(self, needed: _Needed) -> list[int]:
        """Delete the segments that no partition needs."""
        broker = self._broker
        oldest = broker.checkpoints.oldest
        if oldest is None:
            return []
        unneeded = needed.message >= broker.message_log.end
        archived = self._archived()
        message_needed = min(self._certain(needed.message), archived.message_offset)
        removed = broker.message_log.remove_before(min(message_needed, broker.checkpoints.message_needed))
        # What is left of them is there for checkpoints alone: newer ones let it go.
        broker.snapshots.wanted = broker.message_log.removable(message_needed) and not self._held_by_schedule()
        if unneeded:
            self._roll()
        broker.action_log.remove_before(min(oldest.action_offset, archived.action_offset))
        self._let_go_of_kept(needed.kept)
        broker.kept_log.remove_before(min(self._kept_needed, oldest.kept_offset, archived.kept_offset))
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

    def _archived(self) -> ArchiveMark:
        """The first-hand logs may go up to here, as far as archives are waited for."""
        broker = self._broker
        if broker.config.archive_before_delete:
            return read_archived(broker.disk)
        message, kept, action = (log.end for log in broker.logs)
        return ArchiveMark(message, action, kept_offset=kept)

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

    def _look_at_kept(self, group: Group, now: int, needed: _Needed) -> None:
        """What a group needs of the kept log; dead letters that are too old go first."""
        dead_letters, seconds = self._broker.dead_letters, self._broker.config.dead_seconds
        if seconds is not None:
            dead_letters.expire(group, now - int(seconds * 1_000_000))
        dead_letters.tidy(group)
        first = group.kept.first_offset
        if first is not None:
            needed.kept = min(needed.kept, first)

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

    def _expire(self, partition: Partition, now: int) -> bool:
        """Move the start of one partition as its limits say; whether there was anything to move."""
        if partition.row.kind:
            # Bodies that wait outlive the limits; the start moves when they are filed, published or given up.
            return False
        partition.expire_deleted(self._broker.message_log)
        if partition.start >= partition.visible:
            return False
        start = max(self._by_time(partition, now), self._by_size(partition))
        start = min(start, partition.visible)
        if start <= partition.start:
            return False
        behind = [group for group in partition.groups.values() if group.floor < start]
        lost: list[tuple[Group, list[Range]]] = []
        for group in behind:
            # What was begun with before that is kept already.
            group.begin_with(start)
            rest = self._broker.dead_letters.keep(group, group.begun(partition.start, start, self._broker))
            if rest is None:
                # There is no room to keep them: nothing goes until there is.
                return True
            lost.append((group, rest))
        for group, pieces in lost:
            # Before the rows are out of reach: those that are lost are counted.
            group.expire(pieces, start, self._broker)
        partition.start = start
        self._broker.touch(partition)
        return True

    def _by_time(self, partition: Partition, now: int) -> int:
        seconds = partition.row.settings.retention_seconds
        if seconds is None:
            seconds = self._broker.config.retention_seconds
        if seconds is None:
            return 0
        oldest = now - int(seconds * 1_000_000)
        head = partition.head
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
