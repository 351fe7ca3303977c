"""An ordered consumer group: each row goes to the owner of its logical partition, each key in order.

The group is made of parts: ``Locks`` has the owner of each logical partition and ``LockHandover`` changes it,
``CursorSet`` has the positions, ``RowReader`` finds rows, ``OrderedDelivery`` delivers them, and ``FailurePolicy`` has
the rules for failed messages. Logical partitions that change their owner are split off as new cursors, which join the
new owner's cursor once both are at the same position.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import numpy as np

from plait.broker.groups.at_most_once import AtMostOnceGroup
from plait.broker.groups.group import (
    FAILURE,
    AttachedConsumer,
    EpochRanges,
    Group,
    Journal,
    NackOutcome,
)
from plait.broker.groups.ordered.cursor_set import CursorSet
from plait.broker.groups.ordered.failure_policy import FailurePolicy
from plait.broker.groups.ordered.in_flight import InFlightRows
from plait.broker.groups.ordered.lock_handover import LockHandover
from plait.broker.groups.ordered.locks import Locks
from plait.broker.groups.ordered.ordered_delivery import OrderedDelivery
from plait.broker.groups.ordered.row_reader import LOST_COUNTED_MAX, RowCounter, RowReader
from plait.broker.groups.shared_group import SharedGroup
from plait.broker.partitions.partition import Partition
from plait.limits import ServerLimits
from plait.model.logical_partitions import LpSet, runs_of
from plait.model.reason import Reason
from plait.model.retry_policy import LOST_ATTEMPTS_MIN
from plait.storage.cursor import Cursor, CursorState
from plait.storage.logs.action_events import (
    Acked,
    Buried,
    Event,
    Filtered,
    Held,
    Joined,
    Locked,
    Moved,
    Nacked,
    Parked,
    Purged,
    Resumed,
    Returned,
    Revived,
    Rewound,
    RowEvent,
    Skipped,
)
from plait.storage.logs.action_log import GroupDefinition
from plait.storage.ranges import Range, Ranges, joined


class OrderedGroup(Group):
    """An ordered group: deliveries, acks and nacks, replay."""

    __slots__ = ("cursors", "handover", "in_flight", "locks", "policy", "reader", "serve", "take")

    def __init__(
        self, definition: GroupDefinition, partition: Partition, limits: ServerLimits, journal: Journal
    ) -> None:
        super().__init__(definition, partition, limits, journal)
        self.cursors = CursorSet(self)
        self.locks = Locks()
        self.reader = RowReader(self)
        self.in_flight = InFlightRows(self, self.cursors, self.reader)
        self.policy = FailurePolicy(self, self.cursors, self.reader, self.in_flight)
        self.handover = LockHandover(self, self.cursors, self.locks, self.in_flight)
        delivery = OrderedDelivery(self, self.cursors, self.reader, self.in_flight)
        self.take, self.serve = delivery.take, delivery.serve

    def load(self, cursors: list[CursorState]) -> None:
        self.cursors.load(map(Cursor.load, cursors))

    def holds(self, consumer: int) -> bool:
        return consumer in self.locks.unconfirmed

    @property
    def has_more(self) -> bool:
        visible = self.partition.visible
        for cursor in self.positions.values():  # noqa: SIM110 - a generator is one more call
            if cursor.next < visible or cursor.returned.length:
                return True
        return False

    # --- events from consumers ------------------------------------------------------------------

    def _clipped(self, ranges: EpochRanges, tags: Sequence[int]) -> list[tuple[int, int, int]]:
        """(start, end, tag) of the visible rows that ranges refer to."""
        partition, clipped = self.partition, []
        for (start, end, epoch), tag in zip(ranges, tags or repeat(0), strict=False):
            clipped.append((*partition.clip_to_epoch(start, min(end, partition.visible), epoch), tag))
        return clipped

    def ack(self, consumer: AttachedConsumer, ranges: EpochRanges, tags: Sequence[int] = ()) -> None:
        """Ack rows. Each range covers only rows of the delivery whose number is at the same place in ``tags``."""
        clipped = self._clipped(ranges, tags)
        for cursor in self.positions.values():
            if cursor.held and cursor.owner == consumer.id:
                for start, end, tag in clipped:
                    for piece in cursor.let_go(tag, start, end):
                        self.journal.event(self, Acked(0, False, cursor.id, piece.start, piece.end))
        if self.retained.offsets:
            self.retained.settled()
        self._after_settled()

    def _after_settled(self) -> None:
        """Transfer the locks of leaving LPs that have no held rows left, after rows were done or returned."""
        for cursor in self.positions.values():
            if cursor.leaving and (cursor.lps & ~cursor.busy).any():
                self.handover.transfer(self.journal.clock.monotonic())
                return

    def give_back(self, consumer: AttachedConsumer, lps: LpSet, ranges: EpochRanges, tags: Sequence[int]) -> None:
        """Put back rows of some LPs that the consumer has not begun: those in ``ranges``, delivered under ``tags``.

        The LPs are split off as a cursor that returns whole ranges, so no row has to be read.
        """
        clipped = self._clipped(ranges, tags)
        for cursor in self.cursors.holding(consumer.id):
            pieces = [(tag, piece) for start, end, tag in clipped for piece in cursor.held_in(tag, start, end)]
            if not pieces:
                continue
            part, mine = cursor, cursor.lps & lps
            if not np.array_equal(mine, cursor.lps):
                # The held ranges still span rows of the returned LPs. No ack would ever remove those: trim the ranges.
                cursor.untrimmed_until = cursor.next
                if not mine.any():
                    continue
                part = self.cursors.split(cursor, mine)
            for tag, piece in pieces:
                part.let_go(tag, piece.start, piece.end)
                self.in_flight.return_piece(part, piece, 0, counted=False)
        self._after_settled()

    def nack(
        self,
        consumer: AttachedConsumer,
        ranges: EpochRanges,
        now: int,
        failure: NackOutcome = FAILURE,
        tags: Sequence[int] = (),
    ) -> None:
        clipped = self._clipped(ranges, tags)
        holding = self.cursors.holding(consumer.id)
        if not failure.counted and not failure.delay:
            self.in_flight.return_rows(holding, clipped)
            self._after_settled()
            return
        rows = self.reader.table([(start, end) for start, end, _ in clipped])
        for start, end, tag in clipped:
            for cursor, piece in [(each, piece) for each in holding for piece in each.held_in(tag, start, end)]:
                cursor.let_go(tag, piece.start, piece.end)
                found = rows.of(cursor, piece.start, piece.end)
                if found is not None:
                    keys = len(self.cursors.by_key)
                    self.policy.failed(cursor, *found, piece.attempt, now, failure)
                    if len(self.cursors.by_key) > keys:
                        holding = self.cursors.holding(consumer.id)
        self._after_settled()

    def lost(self, consumer: AttachedConsumer, now: int) -> int:
        """Put back the rows of a consumer whose lease ended, each with one more attempt, and release its locks.

        The result is the number of sequences in the held ranges.

        A row out of attempts becomes a dead letter.
        """
        reason = Reason("ConsumerLost", f"consumer {consumer.client} was lost while it held the message")
        for cursor in self.cursors.holding(consumer.id):
            for tag, held in list(cursor.held.items()):
                for piece in list(held):
                    if piece.attempt >= LOST_ATTEMPTS_MIN:
                        rows = list(self.reader.rows(cursor, piece.start, piece.end))
                        cursor.let_go(tag, piece.start, piece.end)
                        for sequences, keys in rows:
                            self.policy.failed(cursor, sequences, keys, piece.attempt, now, NackOutcome(0.0, reason))
        return self.offline(consumer, now)

    def offline(self, consumer: AttachedConsumer, now: int) -> int:
        """Release the locks of a consumer that left, and put back the rows that it held; returns their sequences."""
        consumer.online = False
        count = 0
        for cursor in self.cursors.holding(consumer.id):
            for piece in cursor.all_held():
                count += piece.end - piece.start
                self.in_flight.return_piece(cursor, piece, 0)
            cursor.drop()
        self.locks.confirm(consumer.id)
        self.locks.forget(consumer.id)
        self.handover.wanted_until.pop(consumer.id, None)
        self.handover.release(runs_of(self.locks.owner == consumer.id))
        self.handover.transfer(self.journal.clock.monotonic())
        return count

    def reclaim(self, consumer: AttachedConsumer, holds: EpochRanges, now: int) -> None:
        self.locks.confirm(consumer.id)
        claimed = Ranges()
        for first, last, epoch in holds:
            claimed.add(*self.partition.clip_to_epoch(first, min(last, self.partition.visible), epoch), 0)
        for cursor in [each for each in self.cursors if each.owner == consumer.id]:
            held = cursor.all_held()
            cursor.drop()
            for piece in held:
                self.in_flight.return_piece(cursor, piece, 0, counted=False)
            for start, end, _ in claimed:
                for sequences, _ in self.reader.rows(cursor, start, end):
                    for first, last in joined(sequences):
                        known = [*cursor.returned.overlap(first, last), *cursor.waiting.overlap(first, last)]
                        new = [Range(max(first, cursor.next), last, 0)] if last > cursor.next else []
                        for piece in [*known, *new]:
                            cursor.pulled(0, piece.start, piece.end, piece.attempt + 1)
        self.in_flight.look_up_held()

    def rewind(self, sequence: int, *, skipping: bool) -> None:
        """Release all locks, and deliver every row from ``sequence`` on.

        A key that a failed or dead row below ``sequence`` holds back stays held back, unless rows are skipped.
        """
        for consumer in list(self.consumers.values()):
            self.offline(consumer, self.journal.clock.now())
        self.handover.release(runs_of(self.locks.owner > 0))
        number = self.cursors.next_number if skipping else 0
        event = Rewound(skipping, number, sequence)
        self.journal.event(self, event)
        self._rewound(event)
        self.retained.settled()

    def _rewound(self, event: Rewound) -> None:
        self.failures.rewound(event.sequence, skipping=event.skipping)
        if event.skipping:
            self.cursors.begin(event.sequence, event.cursor)
            return
        for cursor in self.cursors:
            if cursor.letter >= event.sequence:
                cursor.parked, cursor.letter = False, -1
            cursor.rewound(event.sequence)

    # --- dead letters, retention ----------------------------------------------------------------

    def buried(self, holder: int, start: int, end: int, attempt: int, now: int) -> None:
        cursor = self.positions.get(holder)
        if cursor is not None:
            cursor.settled(start, end)
        self.failures.bury(start, end, attempt, now)

    def revived(self, start: int, end: int) -> None:
        self.policy.revived(start, end)

    def begun(self, start: int, end: int) -> list[Range]:
        pieces = []
        for cursor in self.cursors:
            for first, last, attempt in cursor.begun(start, end):
                for sequences, _ in self.reader.rows(cursor, first, last):
                    pieces += [Range(low, high, attempt) for low, high in joined(sequences)]
        return pieces

    def mark_begun_below(self, end: int) -> None:
        """Mark undelivered rows below ``end`` of keys that have a cursor as begun, so that retention keeps them."""
        for cursor in self.cursors.by_key.values():
            if cursor.next < end:
                cursor.returned.add(cursor.next, end, 0)
                cursor.next = end

    def expire(self, lost: list[Range], start: int) -> None:
        counter = RowCounter(self.partition, self.reader, LOST_COUNTED_MAX)
        for cursor in self.cursors:
            for first, last in [*((piece.start, piece.end) for piece in lost), (cursor.next, start)]:
                if first < last:
                    self.in_flight.skip_rows(counter, cursor, first, last)

    # --- replay ---------------------------------------------------------------------------------

    def begin(self, sequence: int) -> None:
        self.cursors.begin(sequence, 1)

    def forget(self, consumer: int, time: int) -> int:
        """Do nothing: earlier events have returned the rows of the removed consumer and released its locks."""
        return 0

    def release_unknown_consumers(self, now: int) -> None:
        """Release locks of unknown consumers, and set the owner of each cursor from the locks."""
        self.locks.keep([consumer.id for consumer in self.consumers.values()])
        owners = self.locks.owner
        for owner in np.unique(owners).tolist():
            for cursor in self.cursors.take_out(owners == owner):
                cursor.owner = owner

    def replay(self, event: Event, time: int) -> None:
        match event:
            case Locked():
                self.locks.set([(event.start, event.end, event.consumer, event.lock_epoch)])
            case Moved() | Held() | Joined():
                self.cursors.replay(event)
            case Rewound():
                self._rewound(event)
            case Purged():
                self.failures.purge(event.start, event.end)
            case Parked() | Resumed():
                if (cursor := self.positions.get(event.cursor)) is not None:
                    cursor.parked = isinstance(event, Parked)
                    cursor.letter = event.start if isinstance(event, Parked) and event.start < event.end else -1
            case Acked() | Nacked() | Buried():
                self._replay_rows(event, event.holder, time)
            case Skipped() | Revived() | Returned() | Filtered():
                self._replay_rows(event, event.cursor, time)

    def _replay_rows(self, event: RowEvent, number: int, time: int) -> None:
        """Apply an event about rows of the cursor with this number."""
        cursor, start, end = self.positions.get(number), event.start, event.end
        if cursor is None or start >= end:
            return
        match event:
            case Acked():
                cursor.settled(start, end)
            case Filtered():
                self.filtered_count += event.rows
                cursor.settled(start, end)
            case Returned():
                cursor.given_back(start, end, event.attempt, event.due)
            case Nacked():
                cursor.given_back(start, end, event.attempt - event.uncounted, event.due)
                if not event.uncounted:
                    self.failures.note(start, end, time)
            case Skipped():
                self.in_flight.count_lost(event.lost, estimated=event.estimated)
                cursor.skipped(start, end)
            case Buried():
                self.buried(number, start, end, event.attempt, time)
            case Revived():
                self.policy.revive(cursor, start, end)


def new_group(definition: GroupDefinition, partition: Partition, limits: ServerLimits, journal: Journal) -> Group:
    """Make the kind of group that the definition describes."""
    if definition.ordered:
        return OrderedGroup(definition, partition, limits, journal)
    if definition.delivery == "at_most_once":
        return AtMostOnceGroup(definition, partition, limits, journal)
    return SharedGroup(definition, partition, limits, journal)
