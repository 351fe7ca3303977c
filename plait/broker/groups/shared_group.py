"""A shared consumer group: any consumer may get any row, returned rows before new ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice

from plait.broker.groups.filtered_rows import ranges_left, take_matching
from plait.broker.groups.group import (
    FAILURE,
    AttachedConsumer,
    EpochRanges,
    Group,
    Journal,
    NackOutcome,
)
from plait.broker.groups.limited_delivery import take_limited
from plait.broker.groups.ranked_rows import RankedRows
from plait.broker.groups.scattered_rows import take_scattered
from plait.broker.partitions.partition import Delivery, Partition
from plait.limits import ServerLimits
from plait.model.reason import Reason
from plait.model.retry_policy import LOST_ATTEMPTS_MIN
from plait.storage.cursor import CursorState
from plait.storage.logs.action_events import (
    Acked,
    Buried,
    Event,
    Filtered,
    Nacked,
    Pulled,
    Purged,
    Revived,
    Rewound,
    RowEvent,
    Skipped,
    WentOffline,
)
from plait.storage.logs.action_log import GroupDefinition
from plait.storage.ranges import Range, Ranges
from plait.storage.shared_cursor import SharedCursor

#: Pieces that one pull collects at most: bounds its work where ranges are scattered.
PIECES_MAX = 64


def take(group: SharedGroup, consumer: AttachedConsumer, count: int, size: int) -> Delivery | None:
    """Rows for a consumer: at most this count and size; None: there are none now."""
    cursor, partition, log = group.cursor, group.partition, group.journal.message_log
    returned, passed = cursor.returned, cursor.passed
    if not (returned.length or passed.length or cursor.waiting.length or cursor.next < partition.visible):
        return None
    delivery = Delivery()
    if partition.log_start != log.start:
        partition.expire_deleted(log)
    while len(delivery.ranges) < PIECES_MAX:
        if delivery.count >= count or (delivery.count and delivery.weight >= size):
            break
        source: Ranges | None = None
        start, end, attempt = cursor.next, partition.visible, 0
        if cursor.returned.length or (cursor.waiting.length and cursor.ready):
            source = cursor.returned
        elif (start >= end and not passed.length) or group.at_limit(consumer):
            break
        elif partition.ranked or group.definition.fair_by is not None:
            group.ranked = group.ranked or RankedRows(group, cursor)
            source = group.ranked.next(count - delivery.count, ranges_left(group, consumer, delivery))
            if source is None:
                break
        elif passed.length:
            source = passed
        if source is not None:
            start, end, attempt = source.head()
            if not group.once and (source.length > 1 or start in group.retained.offsets):
                taken = take_scattered(group, consumer, source, count, size, delivery)
                if taken:
                    continue
                if taken is None:
                    break
        if start < partition.start:
            end = min(partition.start, max(end, start + 1))
            # Retained rows are delivered when their turn comes.
            group.skip(start, group.retained.elsewhere_after(start, end) if attempt else end)
            continue
        if start >= partition.visible or start >= end:
            break
        if group.wanted is not None and not attempt:
            if take_matching(group, consumer, (start, end), count, size, delivery):
                continue
            break
        if not _read(group, consumer, Range(start, end, attempt), count, size, delivery):
            break
    if group.ranked is not None:
        group.ranked.settle()
    return delivery if delivery.count else None


def _read(
    group: SharedGroup, consumer: AttachedConsumer, wanted: Range, count: int, size: int, delivery: Delivery
) -> bool:
    """Deliver the rows of a range. Returns False when the pull is to end."""
    start, end, attempt = wanted
    # The first frame is delivered whatever its size. An at-most-once group verifies rows at the first delivery.
    some, again = not delivery.count, attempt > 0 or group.once
    count, size = count - delivery.count, size - delivery.weight
    batch = group.partition.read(group.journal.message_log, start, end, count, size, some=some, again=again)
    if batch.full and not batch.count:
        return False
    if not batch.ranges:
        # A gap left by damage, or unreadable rows.
        group.skip(start, batch.end)
        return True
    if batch.ranges[0][0] > start:
        group.skip(start, batch.ranges[0][0])
    for first, last in batch.ranges:
        group.record(consumer, first, last, attempt + 1)
        delivery.ranges.append((first, last, attempt + 1))
        if attempt:
            group.redelivered_count += last - first
    for first, last in batch.damaged:
        group.skip(first, last)
    delivery.parts.extend(batch.parts)
    delivery.count += batch.count
    delivery.size += batch.size
    delivery.weight += batch.size + batch.inflated
    # Another read would return one frame whatever its size.
    return batch.end >= end


class SharedGroup(Group):
    """A group with one cursor that all its consumers take rows from."""

    __slots__ = ("cursor", "ranked")

    def __init__(
        self, definition: GroupDefinition, partition: Partition, limits: ServerLimits, journal: Journal
    ) -> None:
        super().__init__(definition, partition, limits, journal)
        self.cursor = SharedCursor(definition.start)
        self.positions = {0: self.cursor}
        #: The new rows in the order of their priorities and tenants, once the group has looked ahead.
        self.ranked: RankedRows | None = None

    def redefine(self, definition: GroupDefinition) -> None:
        super().redefine(definition)
        self.ranked = None

    def load(self, cursors: list[CursorState]) -> None:
        self.cursor.restore(cursors[0])

    def holds(self, consumer: int) -> bool:
        return consumer in self.cursor.held

    @property
    def has_more(self) -> bool:
        cursor = self.cursor
        if cursor.next < self.partition.visible or cursor.returned.length or cursor.passed.length:
            return True
        return cursor.waiting.length > 0 and cursor.ready

    # --- delivery -------------------------------------------------------------------------------

    take = take

    def at_limit(self, consumer: AttachedConsumer) -> bool:
        """Whether the consumer gets no new rows now."""
        limits, held = self.limits, self.cursor.held.get(consumer.id)
        return (
            (held is not None and held.length >= limits.consumer_ranges)
            or self.cursor.waiting.length >= limits.retry_ranges
            or len(self.retained.offsets) >= limits.retained_messages
        )

    def serve(self) -> None:
        """Answer suspended pulls, the longest waiting first, until there are no more rows or pulls."""
        passed, waiters = 0, self.waiters
        take = self.take if self.rate is None else partial(take_limited, self)
        while passed < len(waiters):
            waiter = next(islice(waiters, passed, None))
            delivery = take(waiter.consumer, waiter.count, waiter.size)
            if delivery is not None:
                waiter.leave()
                waiter.reply(delivery)
            elif self.at_limit(waiter.consumer):
                # This consumer is at its limit; there may be rows for others.
                passed += 1
            else:
                return

    def record(self, consumer: AttachedConsumer, start: int, end: int, attempt: int) -> None:
        """Record that the consumer holds the rows. A broadcast group has one consumer, so it records no pulls."""
        cursor = self.cursor
        if not self.definition.broadcast:
            overtaking = (start > cursor.next or cursor.passed.length > 0) and cursor.overtaken(start)
            self.journal.event(self, Pulled(attempt, overtaking, consumer.id, start, end))
        if self.failures.dead.length:
            self._deliver_dead(start, end)
        cursor.pulled(consumer.id, start, end, attempt)

    def skip(self, start: int, end: int) -> None:
        self._decide(Skipped(estimated=False, cursor=0, start=start, end=end, lost=0))

    def _decide(self, event: Event, time: int = 0) -> None:
        """Record an event and apply it as replay does."""
        self.journal.event(self, event)
        self.replay(event, time)

    # --- events from consumers ------------------------------------------------------------------

    def ack(self, consumer: AttachedConsumer, ranges: EpochRanges, tags: Sequence[int] = ()) -> None:
        cursor, journal = self.cursor, self.journal
        for first, last, epoch in ranges:
            # After a power loss, an ack of rows of an earlier epoch may be the only trace of their pull, so rows past
            # ``next`` may be acked. Not while passed ranges are scattered: acks of rows that were never delivered
            # could use memory without limit.
            scattered = cursor.passed.length >= self.limits.consumer_ranges
            pulled_until = cursor.next if scattered or epoch == journal.epoch else self.partition.visible
            start, end = self.partition.clip_to_epoch(first, min(last, pulled_until), epoch)
            if start < end:
                journal.event(self, Acked(0, False, consumer.id, start, end))
                if self.retained.offsets:
                    self.retained.settled()
                self._acked(consumer.id, start, end)

    def nack(
        self,
        consumer: AttachedConsumer,
        ranges: EpochRanges,
        now: int,
        failure: NackOutcome = FAILURE,
        tags: Sequence[int] = (),
    ) -> None:
        over: list[Range] = []
        for first, last, epoch in ranges:
            for piece in self.cursor.held_in(consumer.id, *self.partition.clip_to_epoch(first, last, epoch)):
                for part, dead in self.split_dead(piece, failure, now):
                    if dead:
                        over.append(part)
                    else:
                        self._wait(consumer, part, now, failure)
        if over:
            for piece in self.journal.bury(self, consumer.id, over, failure.reason):
                # The retained log had no room for it, or it is damaged.
                self._wait(consumer, piece, now, FAILURE)

    def _wait(self, consumer: AttachedConsumer, piece: Range, now: int, failure: NackOutcome) -> None:
        due = self.retry_time(piece, failure, now)
        event = Nacked(piece.attempt, not failure.counted, consumer.id, piece.start, piece.end, due)
        if self.definition.broadcast:
            self.replay(event, now)
        else:
            self._decide(event, now)

    def lost(self, consumer: AttachedConsumer, now: int) -> int:
        held = self.cursor.held.get(consumer.id, ())
        count = sum(piece.end - piece.start for piece in held)
        over = [part for piece in held for part, dead in self.split_dead(piece, FAILURE, 0, LOST_ATTEMPTS_MIN) if dead]
        if over:
            reason = Reason("ConsumerLost", f"consumer {consumer.client} was lost while it held the message")
            self.journal.bury(self, consumer.id, over, reason)
        self.offline(consumer, now)
        return count

    def offline(self, consumer: AttachedConsumer, now: int) -> int:
        consumer.online = False
        if consumer.id in self.cursor.held and not self.definition.broadcast:
            self.journal.event(self, WentOffline(consumer.id))
        return self.forget(consumer.id, now)

    def reclaim(self, consumer: AttachedConsumer, holds: EpochRanges, now: int) -> None:
        cursor, claimed = self.cursor, []
        for start, end, epoch in holds:
            # Every pull of this epoch is known, so no consumer holds rows of this epoch that were never delivered.
            pulled_until = cursor.next if epoch == self.journal.epoch else self.partition.visible
            start, end = self.partition.clip_to_epoch(start, min(end, pulled_until), epoch)
            if start < end:
                claimed.append((start, end))
        still_held = [piece for start, end in claimed for piece in cursor.held_in(consumer.id, start, end)]
        free = [piece for start, end in claimed for piece in cursor.returned.overlap(start, end)]
        free += [piece for start, end in claimed for piece in cursor.passed.overlap(start, end)]
        new = [(max(start, cursor.next), end) for start, end in claimed if end > cursor.next]
        self.offline(consumer, now)
        for start, end, attempt in [*still_held, *free]:
            self.record(consumer, start, end, max(attempt, 1))
        for start, end in new:
            self.record(consumer, start, end, 1)

    def rewind(self, sequence: int, *, skipping: bool) -> None:
        self._decide(Rewound(skipping, 0, sequence))
        self.retained.settled()

    def revived(self, start: int, end: int) -> None:
        self._decide(Revived(0, start, end))

    def expire(self, lost: list[Range], start: int) -> None:
        self.ranked = None
        for piece in lost:
            self.skip(piece.start, piece.end)
        # The other rows below ``start`` that are not done are retained: all of them were begun.
        for first, last in self.cursor.new_below(start):
            self.skip(first, last)

    def begun(self, start: int, end: int) -> list[Range]:
        return self.cursor.begun(start, end)

    def return_due(self, now: int) -> bool:
        self.cursor.waiting.release(now)
        return self.cursor.ready

    # --- events, when they happen and in replay -------------------------------------------------

    def begin(self, sequence: int) -> None:
        self.cursor.reset(sequence)
        self.failures.reset()

    def _deliver_dead(self, start: int, end: int) -> None:
        """Forget dead letters that ``next`` passes again after a rewind to an earlier sequence."""
        self.failures.dead.remove(min(start, self.cursor.next), end)

    def _acked(self, consumer: int, start: int, end: int) -> None:
        """Ack [start, end), whether or not the consumer still holds it."""
        if self.failures.dead.length:
            # A late ack: the row ran out of attempts because the broker considered its consumer lost.
            self._deliver_dead(start, end)
        if self.failures.failing.length:
            self.failures.forget(start, end)
        self.cursor.settled(start, end, consumer)

    def forget(self, consumer: int, time: int) -> int:
        held = self.cursor.held.pop(consumer, None)
        if held is None:
            return 0
        for piece in held:
            self.cursor.returned.add(*piece)
            self.failures.note(piece.start, piece.end, time)
        return held.count

    def buried(self, holder: int, start: int, end: int, attempt: int, now: int) -> None:
        self._deliver_dead(start, end)
        self.cursor.settled(start, end, holder)
        self.failures.bury(start, end, attempt, now)

    def release_unknown_consumers(self, now: int) -> None:
        for consumer in self.cursor.held.keys() - {consumer.id for consumer in self.consumers.values()}:
            self.forget(consumer, now)

    def replay(self, event: Event, time: int) -> None:
        if isinstance(event, WentOffline):
            self.forget(event.consumer, time)
        elif isinstance(event, Rewound):
            (self.cursor.reset if event.skipping else self.cursor.rewound)(event.sequence)
            self.ranked = None
            self.failures.rewound(event.sequence, skipping=event.skipping)
        if not isinstance(event, RowEvent) or event.start >= event.end:
            return
        cursor, failures, start, end = self.cursor, self.failures, event.start, event.end
        match event:
            case Pulled():
                self._deliver_dead(start, end)
                cursor.pulled(event.consumer, start, end, event.attempt)
            case Acked():
                self._acked(event.holder, start, end)
            case Nacked():
                # Not counted: handling had not begun, so it was no attempt.
                for first, last, attempt in cursor.let_go(event.holder, start, end):
                    cursor.given_back(first, last, attempt - event.uncounted, event.due)
                    if not event.uncounted:
                        failures.note(first, last, time)
                    elif self.ranked is not None:
                        self.ranked.returned(first, last)
            case Skipped():
                lost, count = cursor.skipped(start, end)
                self.lost_count += count
                for piece in lost:
                    failures.forget(piece.start, piece.end)
            case Filtered():
                cursor.settled(start, end)
                self.filtered_count += end - start
            case Buried():
                self.buried(event.holder, start, end, event.attempt, time)
            case Revived():
                for piece in failures.revive(start, end, cursor.next):
                    cursor.returned.add(*piece)
            case Purged():
                failures.purge(start, end)
