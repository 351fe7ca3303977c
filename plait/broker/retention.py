"""Retention (R21): age and size limits move the start of each partition; a segment no partition needs is deleted.

Whatever the limits are, the first-hand logs stay from the oldest checkpoint on. If configured, they also stay until an
archive has them; the broker refuses sends if the disk fills up meanwhile. Rows that a group has begun and not finished
are copied to the retained log before they expire. Rows that a group has not reached yet are recorded as skipped and
added to the group's ``lost`` count.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator

import msgspec
import numpy as np

from plait.broker.broker import Broker
from plait.broker.groups.group import Group
from plait.broker.partitions.partition import Partition
from plait.broker.recovery.segment_headers import ROWS
from plait.errors import DiskFull, FlowControl
from plait.limits import MIB
from plait.storage.catalog import HALF
from plait.storage.marks import ArchiveMark, read_archived
from plait.storage.ranges import Range

log = logging.getLogger("plait.broker")

#: A fully expired active segment is closed when it holds this much: less is not worth a new file.
ROLL_SIZE = 1 * MIB
#: A consume log is rewritten when more than this many of its records, and more than half of them, have expired.
COMPACT_FROM = 4096
#: Partitions that one step of a pass visits. Most have nothing to expire and cost a few microseconds each; the first
#: visit after a checkpoint maps the file of a consume log and costs about 50 microseconds.
STEP_COST = 128
#: Cost of a visit that moves a start, rewrites a consume log or checks retained rows, in plain visits.
CHANGE_COST = 15


class _Needed(msgspec.Struct):
    """The offsets from which the visited partitions need the logs."""

    message: int
    retained: int
    #: Half messages are moved if they alone need a segment.
    half: int


class Retention:
    """Expires rows and deletes segments; called by a timer."""

    def __init__(self, broker: Broker, *, step_cost: int = STEP_COST) -> None:
        self._broker = broker
        self._step_cost = step_cost
        #: The offset from which the message log is needed, and the ends of the retained and the message log. The offset
        #: applies when both logs are durable up to their ends.
        self._waiting = (0, 0, 0)
        self._needed = 0
        #: The retained log is needed from the first offset. The second one replaces it when the events that forget the
        #: rows below the second one are durable.
        self._retained_needed = self._retained_next = 0

    def run(self) -> list[int]:
        """Run a whole pass in one turn. Returns the bases of the deleted message log segments."""
        steps = self.steps()
        while True:
            try:
                next(steps)
            except StopIteration as ended:
                removed: list[int] = ended.value
                return removed

    def steps(self) -> Generator[None, None, list[int]]:
        """Run a pass in steps of one loop turn each; requests are served between steps.

        Rows that arrive during the pass are appended after the present ends of the logs, and a start never moves back.
        So a partition never needs an earlier offset than its visit found.
        """
        broker = self._broker
        # A request during the pass may concern a partition that was visited already, so it starts another pass.
        broker.catalog.retention_wanted = False
        try:
            broker.stages.expire()
            broker.forwards.expire()
        except (DiskFull, FlowControl) as error:
            # This pass frees space, so the next one can record it.
            log.warning("idle stages and forward partitions cannot be expired yet: %s", error)
        now = broker.clock.now()
        broker.half_publisher.release()
        needed = _Needed(broker.message_log.end, broker.retained_log.end, broker.message_log.end)
        cost = 0
        for partition in list(broker.partitions.values()):
            if cost >= self._step_cost:
                yield
                cost = 0
            if broker.turn.failed is not None:
                return []
            if broker.partitions.get(partition.id) is partition:
                cost += self._visit(partition, now, needed)
        if needed.message >= broker.message_log.end:
            # ``_delete`` may close the active segment. The header of the next segment defines all partitions: encode
            # the definitions that have changed here, in steps.
            yield from broker.segment_headers.refresh_kind(ROWS)
        # The files are deleted in a separate turn.
        yield
        yield from self._move_half_messages(needed)
        return [] if broker.turn.failed is not None else self._delete(needed)

    def _visit(self, partition: Partition, now: int, needed: _Needed) -> int:
        """Expire rows of one partition and lower ``needed`` to what it still needs. Returns the cost, in visits."""
        cost = 1
        if self._expire(partition, now):
            cost += CHANGE_COST
        if len(partition.consume_log) > COMPACT_FROM:
            cost += CHANGE_COST
            self._compact(partition)
        first = partition.head
        if first is not None and partition.row.kind == HALF:
            needed.half = min(needed.half, first.offset)
        elif first is not None:
            needed.message = min(needed.message, first.offset)
        for group in partition.groups.values():
            if group.retained:
                cost += CHANGE_COST
                self._visit_retained(group, now, needed)
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
        # Ask for a checkpoint if only the present ones need the remaining expired segments.
        broker.snapshots.wanted = broker.message_log.removable(message_needed) and not self._held_by_schedule()
        if unneeded:
            self._roll()
        broker.action_log.remove_before(min(oldest.action_offset, archived.action_offset))
        self._release_retained(needed.retained)
        broker.retained_log.remove_before(min(self._retained_needed, oldest.retained_offset, archived.retained_offset))
        return removed

    def _move_half_messages(self, needed: _Needed) -> Iterator[None]:
        """Move half messages that alone need old segments to the end of the log: they may wait for an operator."""
        broker, log = self._broker, self._broker.message_log
        free = max((each.base for each in log.segments if each.base <= needed.message), default=0)
        needed.message = min(needed.message, needed.half)
        if needed.half < free and broker.checkpoints.oldest is not None:
            while broker.turn.failed is None and broker.half_publisher.move(free):
                broker.turn.answer_after_commit(None)
                yield

    def _held_by_schedule(self) -> bool:
        """True if the newest checkpoint needs the first segment for unbucketed rows: a newer one would need it too."""
        last, first = self._broker.checkpoints.last, self._broker.message_log.segments[0]
        return last is not None and last.message_offset >= first.end > last.message_needed

    def _roll(self) -> None:
        """Close the active segment, which no partition needs, because only closed segments can be deleted."""
        broker, messages = self._broker, self._broker.message_log
        if not messages.segments:
            return
        if messages.end - messages.segments[-1].header_end >= min(ROLL_SIZE, messages.segment_size // 2):
            try:
                messages.roll()
            except OSError as error:
                # On a full disk the next pass tries again.
                broker.turn.disk_error(error)
            else:
                broker.turn.answer_after_commit(None)
                broker.catalog.retention_wanted = True

    def _archived(self) -> ArchiveMark:
        """The offsets up to which archiving allows the first-hand logs to be deleted."""
        broker = self._broker
        if broker.config.archive_before_delete:
            return read_archived(broker.disk)
        message, retained, action = (log.end for log in broker.logs)
        return ArchiveMark(message, action, retained_offset=retained)

    def _certain(self, needed: int) -> int:
        """The offset from which the message log is needed. Copies of rows replace the originals once they are durable.

        Begun rows are copied to the retained log. Published stage rows, and the expiry of a stage, are written to the
        message log again.
        """
        retained, messages = self._broker.retained_log, self._broker.message_log
        now = (needed, retained.end, messages.end)
        for waiting in (self._waiting, now):
            self._waiting = waiting
            offset, retained_end, message_end = waiting
            if retained.durable < retained_end or messages.durable < message_end:
                # Keep this target until it is durable: the moving end of a busy log would never be durable.
                break
            self._needed = offset
        return self._needed

    def _visit_retained(self, group: Group, now: int, needed: _Needed) -> None:
        """Expire old dead letters of a group, then lower ``needed`` to the retained rows that are left."""
        dead_letters, seconds = self._broker.dead_letters, self._broker.config.dead_seconds
        if seconds is not None:
            dead_letters.expire(group, now - int(seconds * 1_000_000))
        dead_letters.tidy(group)
        first = min(group.retained.offsets.values(), default=None)
        if first is not None:
            needed.retained = min(needed.retained, first)

    def _release_retained(self, needed: int) -> None:
        """Record that the retained log is needed from ``needed`` on, once the events that forget its rows are durable.

        If the copy of a dead letter were deleted before that event is durable, a crash would bring the dead letter back
        without a body.
        """
        if needed > self._retained_next and self._broker.retained_log.removable(needed):
            self._retained_next = needed
            self._broker.turn.answer_when_durable(lambda: self._retained_certain(needed))

    def _retained_certain(self, needed: int) -> None:
        self._retained_needed = max(self._retained_needed, needed)
        self._broker.catalog.retention_wanted = True

    def _expire(self, partition: Partition, now: int) -> bool:
        """Move the start of one partition according to its limits. Returns whether rows had expired."""
        if partition.row.kind:
            # Delayed and staged rows outlive the limits; the start moves when they are bucketed, published or expired.
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
            group.mark_begun_below(start)
            # Begun rows below the old start were copied to the retained log by earlier passes.
            rest = self._broker.dead_letters.retain(group, group.begun(partition.start, start))
            if rest is None:
                # There is no space to retain them: nothing expires until there is.
                return True
            lost.append((group, rest))
        for group, pieces in lost:
            # Count the lost rows while they can still be read.
            group.expire(pieces, start)
        partition.start = start
        self._broker.turn.touch(partition)
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
        # Bytes from each record to the end: the first record within the limit stays.
        sizes = np.cumsum(records["size"][::-1].astype(np.int64))[::-1]
        over = int((sizes > size).sum())
        if over >= len(records):
            return int(records["base"][-1])
        return int(records["base"][over])

    def _compact(self, partition: Partition) -> None:
        """Drop expired records from a consume log."""
        log = partition.consume_log
        first = log.find(partition.start)
        if first > COMPACT_FROM and first * 2 > len(log) and not self._broker.snapshots.running:
            records = log.slice(first, len(log)).copy()
            self._broker.checkpoints.replaced(log.path)
            log.replace(records)
            self._broker.turn.touch(partition)
