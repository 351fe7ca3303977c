"""A shared consumer group: any consumer may get any row, returned rows before new ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from plait.broker.groups.group import (
    FAILURE,
    LOST_ATTEMPTS_MIN,
    AttachedConsumer,
    EpochRanges,
    Group,
    Journal,
    NackOutcome,
)
from plait.broker.groups.shared_delivery import SharedDelivery
from plait.broker.partitions.partition import Delivery, Partition
from plait.broker.partitions.suspended import Waiter
from plait.limits import ServerLimits
from plait.model.reason import Reason
from plait.storage.cursor import ALL, Cursor, CursorState
from plait.storage.logs.action_events import (
    Acked,
    Buried,
    Event,
    Nacked,
    Pulled,
    Purged,
    Revived,
    RowEvent,
    Skipped,
    WasReset,
    WentOffline,
)
from plait.storage.logs.action_log import GroupDefinition
from plait.storage.ranges import Range


class SharedGroup(Group):
    """A group with one cursor that all its consumers take rows from."""

    __slots__ = ("cursor", "delivery")

    def __init__(
        self, definition: GroupDefinition, partition: Partition, limits: ServerLimits, journal: Journal
    ) -> None:
        super().__init__(definition, partition, limits, journal)
        self.cursor = Cursor(0, ALL, definition.start)
        self.delivery = SharedDelivery(self)
        self.take = self.delivery.take

    def dump(self) -> list[CursorState]:
        return [self.cursor.dump(durable_holds=self.logs_pulls)]

    def load(self, cursors: list[CursorState]) -> None:
        self.cursor = Cursor.load(cursors[0])

    def holds(self, consumer: int) -> bool:
        return consumer in self.cursor.held

    @property
    def logs_pulls(self) -> bool:
        """A broadcast group records no pulls: it has one consumer, which needs its unacked rows."""
        return not self.definition.broadcast

    @property
    def has_more(self) -> bool:
        cursor = self.cursor
        if cursor.next < self.partition.visible or cursor.returned.length:
            return True
        return cursor.waiting.length > 0 and cursor.ready

    # --- delivery -------------------------------------------------------------------------------

    def record(self, consumer: AttachedConsumer, start: int, end: int, attempt: int) -> None:
        """Record that the consumer holds the rows."""
        if not self.definition.broadcast:
            self.journal.event(self, Pulled(attempt, consumer.id, start, end))
        if self.failures.dead.length:
            self._deliver_dead(start, end)
        self.cursor.pulled(consumer.id, start, end, attempt)

    def skip(self, start: int, end: int) -> None:
        self.journal.event(self, Skipped(estimated=False, cursor=0, start=start, end=end, lost=0))
        self._skipped(start, end)

    def serve(self, send: Callable[[Waiter, Delivery], None]) -> None:
        self.delivery.serve(send)

    # --- events from consumers ------------------------------------------------------------------

    def ack(self, consumer: AttachedConsumer, ranges: EpochRanges, tags: Sequence[int] = ()) -> int:
        count, cursor, journal = 0, self.cursor, self.journal
        for first, last, epoch in ranges:
            # After a power loss, an ack of rows of an earlier epoch may be the only trace of their pull, so rows past
            # ``next`` may be acked. Not while returned ranges are scattered: acks of rows that were never delivered
            # could use memory without limit.
            scattered = cursor.returned.length >= self.limits.consumer_ranges
            pulled_until = cursor.next if scattered or epoch == journal.epoch else self.partition.visible
            start, end = self.partition.clip_to_epoch(first, min(last, pulled_until), epoch)
            if start < end:
                journal.event(self, Acked(0, consumer.id, start, end))
                if self.retained.offsets:
                    self.retained.settled()
                count += self._acked(consumer.id, start, end)
        return count

    def nack(
        self,
        consumer: AttachedConsumer,
        ranges: EpochRanges,
        now: int,
        failure: NackOutcome = FAILURE,
        tags: Sequence[int] = (),
    ) -> int:
        over: list[Range] = []
        count = 0
        for first, last, epoch in ranges:
            for piece in self.cursor.held_in(consumer.id, *self.partition.clip_to_epoch(first, last, epoch)):
                count += piece.end - piece.start
                for part, dead in self.split_dead(piece, failure, now):
                    if dead:
                        over.append(part)
                    else:
                        self._wait(consumer, part, now, failure)
        if over:
            for piece in self.journal.bury(self, consumer.id, over, failure.reason):
                # The retained log had no room for it, or it is damaged.
                self._wait(consumer, piece, now, FAILURE)
        return count

    def _wait(self, consumer: AttachedConsumer, piece: Range, now: int, failure: NackOutcome) -> None:
        due = self.retry_time(piece, failure, now)
        start, end, attempt = piece
        if self.logs_pulls:
            self.journal.event(self, Nacked(attempt, not failure.counted, consumer.id, start, end, due))
        self._nacked(consumer.id, start, end, due, now, counted=failure.counted)

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
        if consumer.id in self.cursor.held and self.logs_pulls:
            self.journal.event(self, WentOffline(consumer.id))
        return self._release(consumer.id, now)

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
        new = [(max(start, cursor.next), end) for start, end in claimed if end > cursor.next]
        self.offline(consumer, now)
        for start, end, attempt in [*still_held, *free]:
            self.record(consumer, start, end, max(attempt, 1))
        for start, end in new:
            self.record(consumer, start, end, 1)

    def reset(self, sequence: int) -> None:
        self.journal.event(self, WasReset(0, sequence))
        self.begin(sequence)
        self.retained.settled()

    def revived(self, start: int, end: int) -> int:
        self.journal.event(self, Revived(0, start, end))
        return self._revive(start, end)

    def expire(self, lost: list[Range], start: int) -> None:
        for first, last in [*((piece.start, piece.end) for piece in lost), (self.cursor.next, start)]:
            if first < last:
                self.skip(first, last)

    # --- state ----------------------------------------------------------------------------------

    @property
    def floor(self) -> int:
        return self.cursor.floor

    def begun(self, start: int, end: int) -> list[Range]:
        return self.cursor.begun(start, end)

    @property
    def next_due(self) -> int | None:
        return self.cursor.waiting.next_due

    def return_due(self, now: int) -> bool:
        self.cursor.waiting.release(now)
        return self.cursor.ready

    # --- events, when they happen and in replay -------------------------------------------------

    def begin(self, sequence: int) -> None:
        self.cursor.reset(sequence)
        self.failures.reset()

    def _deliver_dead(self, start: int, end: int) -> None:
        """Forget dead letters that ``next`` passes again after a reset to an earlier sequence."""
        self.failures.dead.remove(min(start, self.cursor.next), end)

    def _acked(self, consumer: int, start: int, end: int) -> int:
        """Ack [start, end), whether or not the consumer still holds it. Returns how many sequences were not done."""
        failures, count = self.failures, 0
        if failures.dead.length:
            # A late ack: the row ran out of attempts because the broker considered its consumer lost.
            count = sum(last - first for first, last, _ in failures.dead.remove(start, end))
            self._deliver_dead(start, end)
        if failures.failing.length:
            failures.forget(start, end)
        return count + self.cursor.settled(start, end, consumer)

    def _nacked(self, consumer: int, start: int, end: int, due: int, time: int, *, counted: bool) -> None:
        """Take [start, end) back from the consumer. Not ``counted``: handling had not begun, so it was no attempt."""
        for first, last, attempt in self.cursor.let_go(consumer, start, end):
            self.cursor.given_back(first, last, attempt - (not counted), due)
            if counted:
                self.failures.note(first, last, time)

    def _release(self, consumer: int, time: int) -> int:
        """Return all ranges of a consumer that is gone. Returns how many sequences."""
        held = self.cursor.held.pop(consumer, None)
        if held is None:
            return 0
        for piece in held:
            self.cursor.returned.add(*piece)
            self.failures.note(piece.start, piece.end, time)
        return held.count

    def _skipped(self, start: int, end: int) -> None:
        pieces, count = self.cursor.skipped(start, end)
        self.lost_count += count
        for piece in pieces if self.failures.failing else ():
            self.failures.forget(piece.start, piece.end)

    def buried(self, holder: int, start: int, end: int, attempt: int, now: int) -> None:
        self._deliver_dead(start, end)
        self.cursor.settled(start, end, holder)
        self.failures.bury(start, end, attempt, now)

    def _revive(self, start: int, end: int) -> int:
        pieces, count = self.failures.revive(start, end, self.cursor.next)
        for piece in pieces:
            self.cursor.returned.add(*piece)
        return count

    def forget(self, consumer: int, time: int) -> None:
        self._release(consumer, time)

    def release_unknown_consumers(self, now: int) -> None:
        for consumer in self.cursor.held.keys() - {consumer.id for consumer in self.consumers.values()}:
            self._release(consumer, now)

    def replay(self, event: Event, time: int) -> None:
        if isinstance(event, WentOffline):
            self._release(event.consumer, time)
        elif isinstance(event, WasReset):
            self.begin(event.sequence)
        elif isinstance(event, RowEvent) and event.start < event.end:
            self._replay_rows(event, time)

    def _replay_rows(self, event: RowEvent, time: int) -> None:
        start, end = event.start, event.end
        match event:
            case Pulled():
                self._deliver_dead(start, end)
                self.cursor.pulled(event.consumer, start, end, event.attempt)
            case Acked():
                self._acked(event.holder, start, end)
            case Nacked():
                self._nacked(event.holder, start, end, event.due, time, counted=not event.uncounted)
            case Skipped():
                self._skipped(start, end)
            case Buried():
                self.buried(event.holder, start, end, event.attempt, time)
            case Revived():
                self._revive(start, end)
            case Purged():
                self.failures.purge(start, end)
