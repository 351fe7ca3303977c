"""An ordered consumer group: each row goes to the owner of its logical partition, each key in order.

``Locks`` has the owner of each logical partition, ``Cursor`` the position of the group in it. An owner receives the
rows of its cursors; cursors at the same position are read together. Logical partitions that change their owner are
split off as new cursors, which join the new owner's cursor once both are at the same position.

``FailurePolicy`` has the rules for failed messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

import numpy as np

from plait.broker.groups.at_most_once import AtMostOnceGroup
from plait.broker.groups.failure_policy import FailurePolicy
from plait.broker.groups.locks import NONE, Locks, LockState, Want, epochs_of
from plait.broker.groups.row_counts import LOST_COUNTED_MAX, RowCounter
from plait.broker.groups.row_reader import LOOK_MAX, Chooser, RowTake, select
from plait.broker.groups.shared_group import (
    FAILURE,
    LOST_ATTEMPTS_MIN,
    AttachedConsumer,
    Delivery,
    Group,
    Journal,
    NackOutcome,
)
from plait.broker.partitions.partition import Partition
from plait.broker.partitions.suspended import Waiter
from plait.errors import FrameError
from plait.frame.header import SEQUENCE_MAX
from plait.limits import LOGICAL_PARTITIONS, ServerLimits
from plait.model.logical_partitions import LpSet, lp_set, runs_of
from plait.model.reason import Reason
from plait.storage.cursor import Cursor
from plait.storage.logs.action_log import FLAG_ESTIMATED, FLAG_UNCOUNTED, Action, GroupDefinition
from plait.storage.logs.log import Log
from plait.storage.ranges import Range, Ranges, joined

#: Each pull tries to join at most ``JOIN_ALWAYS`` cursors of the owner; every ``JOIN_EVERY``-th pull tries more.
JOIN_ALWAYS = 16
JOIN_EVERY = 8
#: After every sequence.
LAST = SEQUENCE_MAX
#: Rows of a key that is behind that one pull delivers at most.
KEY_ROWS_MAX = 100


class OrderedGroup(FailurePolicy):
    """An ordered group: locks, deliveries, acks and nacks, replay."""

    __slots__ = ("_tag", "_turn", "frozen_until", "locks")

    def __init__(
        self, definition: GroupDefinition, partition: Partition, limits: ServerLimits, journal: Journal
    ) -> None:
        super().__init__(definition, partition, limits, journal)
        self.locks = Locks()
        #: On the monotonic clock. After a restart no new lock is granted before this time (R15).
        self.frozen_until = 0.0
        #: Counts pulls; decides which of an owner's cursors is served first.
        self._turn = 0
        #: The last tag for redelivered rows and for several keys, counting down; other tags are cursor numbers.
        self._tag = 0

    @property
    def has_more(self) -> bool:
        visible = self.partition.visible
        return any(cursor.next < visible or cursor.returned for cursor in self.cursors)

    # --- locks ----------------------------------------------------------------------------------

    def lease(self, consumer: AttachedConsumer, wants: list[Want], journal: Journal, now: float) -> None:
        """Set the locks that a consumer wants; grant and release locks accordingly."""
        self.locks.confirm(consumer.id)
        if self.locks.wants(consumer.id, epochs_of((first, end, epoch) for first, end, epoch, _ in wants)):
            self._split_leaving(journal)
        self._set_wanted_until(consumer.id, [(first, end, until) for first, end, _, until in wants])
        self.transfer_locks(journal, now)
        self._trim_all_held(consumer, journal)
        self._limit(consumer.id)

    def notify(self, owner: int) -> None:
        """An owner's locks changed: end its suspended pulls, so that it asks for its locks."""
        for consumer in self.consumers.values():
            if consumer.id == owner:
                consumer.news += 1
                for waiter in [each for each in self.waiters if each.consumer is consumer]:
                    waiter.time_out()

    def lock_state(self, consumer: AttachedConsumer) -> LockState:
        """The locks that a consumer owns, is to give up, or was refused."""
        return self.locks.state(consumer.id)

    def drained(self, wants: list[Want]) -> LpSet:
        """The LPs that are wanted up to a sequence and are done up to it, parked keys aside."""
        done = np.zeros(LOGICAL_PARTITIONS, bool)
        if not any(limit for _, _, _, limit in wants):
            return done
        until = np.zeros(LOGICAL_PARTITIONS, np.int64)
        for first, end, _, limit in wants:
            until[first:end] = limit
        for cursor in self.cursors:
            if cursor.key is None:
                done |= cursor.lps & (until > 0) & (until <= cursor.floor)
        for cursor in self.cursors.by_key.values():
            if not cursor.parked:
                done &= ~cursor.lps | (until <= cursor.floor)
        return done

    def sealed_unfinished(self) -> LpSet:
        """Sealed LPs that still have unfinished rows. Consumers that know them as drained must consume them again.

        A drained LP has unfinished rows again when a dead letter is resent, or when a crash loses events.
        """
        found = np.zeros(LOGICAL_PARTITIONS, bool)
        fences = self.partition.fences
        if fences is not None:
            for cursor in self.cursors:
                if not cursor.parked:
                    found |= cursor.lps & (fences > cursor.floor)
        return found

    def _split_leaving(self, journal: Journal) -> None:
        """Split off LPs that are to change their owner and find their held rows, so that each LP can go by itself."""
        leaving = self.locks.leaving
        owners = set(np.unique(self.locks.owner[leaving]).tolist())
        for cursor in list(self.cursors):
            if cursor.owner not in owners:
                continue
            lps = cursor.lps & leaving
            if lps.any() and not np.array_equal(lps, cursor.lps):
                self.cursors.split(cursor, lps)
        for cursor in self.cursors:
            cursor.leaving = cursor.owner in owners and bool((cursor.lps & leaving).any())
        self._look_up_held(journal)

    def transfer_locks(self, journal: Journal, now: float) -> None:
        """Release the locks of leaving LPs without held rows; grant free locks to the consumers that want them."""
        leaving = self.locks.leaving
        if leaving.any():
            busy = np.zeros(LOGICAL_PARTITIONS, bool)
            for cursor in self.cursors:
                busy |= cursor.busy
            self._set_locks(runs_of(leaving & ~busy), journal)
        grant = self.locks.to_grant
        if (
            grant is NONE
            or now < self.frozen_until
            or (floor := journal.floors.of(self.partition.row.subject, self.name)) is None
        ):
            return
        grant = grant & (self.locks.wanted >= floor.array())
        if grant.any():
            self._granted(self.locks.granted(grant), journal)

    def _set_locks(self, runs: list[tuple[int, int]], journal: Journal) -> None:
        """Release the locks of these LPs."""
        if not runs:
            return
        lps = lp_set(runs)
        owners = np.unique(self.locks.owner[lps]).tolist()
        for first, end in runs:
            journal.event(Action.LOCK, self, 0, first, end, 0)
        self.locks.give_up(runs)
        for cursor in self.cursors.take_out(lps):
            cursor.owner, cursor.leaving, cursor.limit = 0, False, 0
            cursor.drop()
        for owner in owners:
            self.notify(owner)

    def _granted(self, runs: list[tuple[int, int, int, int]], journal: Journal) -> None:
        for owner in {owner for _, _, owner, _ in runs}:
            mine = [(first, end, epoch) for first, end, each, epoch in runs if each == owner]
            for first, end, epoch in mine:
                journal.event(Action.LOCK, self, owner, first, end, 0, epoch)
            for cursor in self.cursors.take_out(lp_set([(first, end) for first, end, _ in mine])):
                cursor.owner, cursor.leaving = owner, False
                self._compact_returned(journal, cursor)
            self._limit(owner)
            self.cursors.join_alike(self.cursors.of(owner))
            self.notify(owner)

    # --- delivery -------------------------------------------------------------------------------

    def take(self, log: Log, consumer: AttachedConsumer, count: int, size: int, journal: Journal) -> Delivery | None:
        """Rows for a consumer from the LPs that it owns; None if there are none. An empty delivery: pull again."""
        taking = RowTake(count, size)
        lps = [each for each in self.cursors.of(consumer.id) if not each.leaving]
        keys = [each for each in self.cursors.keys_of(consumer.id) if not (each.leaving or each.parked)]
        self._turn += 1
        if self._turn % JOIN_EVERY == 0:
            self._trim_all_held(consumer, journal)
        if len(lps) > 1 and (len(lps) <= JOIN_ALWAYS or self._turn % JOIN_EVERY == 0):
            self.cursors.join_alike(lps)
            lps = [each for each in lps if self.cursors.get(each.id) is each]
        if keys:
            keys = self._rejoin(keys, journal)
        abreast: list[Cursor] = []
        for cursor in keys:
            if troubled := self._is_behind(cursor):
                # Nothing of a key that is behind is delivered before its last delivery is done.
                if not cursor.held and not cursor.waiting:
                    self._take_key(cursor, taking, journal)
                troubled = bool(cursor.held) or self._is_behind(cursor)
            if not troubled:
                abreast.append(cursor)
        while taking.more and self._serve_again(lps, taking, journal):
            pass
        by_next: dict[tuple[int, int], list[Cursor]] = {}
        for cursor in [*lps, *abreast]:
            if not self._at_limit_of(cursor):
                by_next.setdefault((cursor.next, cursor.limit), []).append(cursor)
        places = sorted(by_next)
        turn = self._turn % len(places) if places else 0
        for place in [*places[turn:], *places[:turn]]:
            start = place[0]
            above = min((each for each, _ in places if each > start), default=self.partition.visible)
            end = by_next[place][0].until(min(above, self.partition.visible))
            if start < end and taking.more:
                self._serve(by_next[place], start, end, 0, taking, journal)
        delivery = taking.delivery
        return delivery if delivery.count or taking.looked >= LOOK_MAX else None

    def serve(self, log: Log, journal: Journal, send: Callable[[Waiter, Delivery], None]) -> None:
        """Answer suspended pulls. Each gets rows of its own LPs, so one without rows does not end the others."""
        # A cheap test: most owners have no rows.
        ready = {
            cursor.owner
            for cursor in self.cursors
            if not cursor.leaving and (cursor.returned or cursor.next < cursor.until(self.partition.visible))
        }
        for waiter in [each for each in self.waiters if each.consumer.id in ready]:
            delivery = self.take(log, waiter.consumer, waiter.count, waiter.size, journal)
            if delivery is not None and waiter.leave():
                send(waiter, delivery)

    def _take_key(self, cursor: Cursor, taking: RowTake, journal: Journal) -> None:
        rows, before = taking.rows, -1
        taking.limit(KEY_ROWS_MAX)
        while taking.more:
            if cursor.returned:
                start, end, attempt = cursor.returned.head()
            else:
                start, end, attempt = cursor.next, self._parent(cursor).next, 0
            end = cursor.until(end)
            if attempt:
                # A failed row is delivered alone.
                taking.limit(0 if cursor.held else 1)
            # Each piece starts after the previous one. No progress means that there are no rows.
            if not before < start < end or not taking.more:
                break
            self._serve([cursor], start, end, attempt, taking, journal)
            before = start
        taking.rows = rows

    def _at_limit_of(self, cursor: Cursor) -> bool:
        limits = self.limits
        return (
            sum(map(len, cursor.held.values())) >= limits.consumer_ranges
            or cursor.waiting.length >= limits.retry_ranges
            or len(self.retained.offsets) >= limits.retained_messages
            or len(self.cursors.by_key) >= limits.held_keys
        )

    def _serve_again(self, cursors: list[Cursor], taking: RowTake, journal: Journal) -> bool:
        """Deliver returned rows that lie in the frame of the lowest returned row; False: there are none, or no room.

        Rows of many cursors in one frame are delivered as one piece under a new tag, because rows between them may
        already be held.
        """
        ready = [
            cursor
            for cursor in cursors
            if cursor.returned and cursor.returned.first < cursor.until(LAST) and not self._at_limit_of(cursor)
        ]
        if not ready:
            return False
        lead = min(ready, key=lambda cursor: cursor.returned.first)
        start, end, attempt = lead.returned.head()
        found = next(self._walk(journal, start, lead.until(end), again=attempt > 0), None)
        taking.looked += 1
        if found is None or found.first > start:
            # The rows were in the retained log, and are no longer there.
            lead.settled(start, lead.until(end) if found is None else found.first)
            return True
        first, last, frame = found
        if frame is None:
            self._skip_rows(RowCounter(self, None, 0), lead, first, last, journal)
            return True
        frame_end = frame.end if first >= self.partition.start else last
        # In the order of each cursor: a row with another attempt ends its cursor's part of the piece.
        pieces = [
            (index, piece)
            for index, cursor in enumerate(ready)
            for piece in takewhile(
                lambda piece: piece.attempt == attempt, cursor.returned.overlap(first, cursor.until(frame_end))
            )
        ]
        keys, sequences = self.partition.keys.of(frame), frame.sequences()
        owners = np.full(LOGICAL_PARTITIONS, -1, np.int64)
        for index, cursor in enumerate(ready):
            owners[cursor.lps] = index
        whose = owners[keys.lps]
        if self.cursors.by_key and keys.hashes is not None:
            whose[np.isin(keys.hashes, np.fromiter(self.cursors.by_key, np.uint64, len(self.cursors.by_key)))] = -1
        wanted = np.zeros(frame.count, bool)
        for index, piece in pieces:
            low, high = np.searchsorted(sequences, (piece.start, piece.end)).tolist()
            wanted[low:high] |= whose[low:high] == index
        rows = np.flatnonzero(wanted)
        taking.looked += len(pieces)
        cut = LAST
        if len(rows) > taking.room:
            rows = rows[: taking.room]
            cut = int(sequences[rows[-1]]) + 1
        delivery = taking.delivery
        if len(rows):
            try:
                parts, size = select(frame, rows)
            except FrameError:
                rows = rows[:0]
            else:
                if not taking.takes(size + frame.inflated_size):
                    return False
                self._tag -= 1
                delivery.parts.extend(parts)
                delivery.ranges.append((int(sequences[rows[0]]), int(sequences[rows[-1]]) + 1, attempt + 1))
                delivery.tags.append(self._tag)
                delivery.count += len(rows)
                delivery.size += size
                delivery.weight += size + frame.inflated_size
                self.redelivered_count += len(rows) if attempt else 0
        for index, piece in pieces:
            if piece.start >= cut:
                continue
            cursor, stop = ready[index], min(piece.end, cut)
            low, high = np.searchsorted(sequences[rows], (piece.start, stop)).tolist()
            mine = rows[low:high][whose[rows[low:high]] == index]
            cursor.settled(piece.start, stop)
            if len(mine):
                # From the first row to the last: no ack covers what lies outside.
                cursor.pulled(int(sequences[mine[0]]), int(sequences[mine[-1]]) + 1, attempt + 1, self._tag)
        return True

    def _serve(
        self, cursors: list[Cursor], start: int, end: int, attempt: int, taking: RowTake, journal: Journal
    ) -> None:
        """Deliver the rows of these cursors in [start, end). All of them are at ``start``, or got [start, end) back."""
        tag = cursors[0].id
        if cursors[0].key is not None:
            # A delivery for several keys gets a new tag: the number of one key would also tag its later deliveries.
            tag = self._tag = self._tag - 1
        delivery = taking.delivery
        chooser = Chooser(cursors)
        for first, last, frame in self._walk(journal, start, end, again=attempt > 0):
            if frame is None:
                for cursor in cursors:
                    self._skip_rows(RowCounter(self, None, 0), cursor, first, last, journal)
                continue
            piece = self._cut(frame, chooser, first, last, taking)
            if piece is None:
                return
            # Ranges without a row of these cursors are passed, and not held.
            for cursor in cursors:
                cursor.settled(start, piece.end)
            start = piece.end
            if piece.parts:
                for cursor in cursors:
                    if cursor.key is None or len(cursors) == 1:
                        cursor.pulled(piece.first, piece.last, attempt + 1, tag)
                        continue
                    # Only the key's own rows are in flight for it: it can rejoin as soon as these are done.
                    for low, high in self._of_key(frame, piece, cursor.key):
                        cursor.pulled(low, high, attempt + 1, tag)
                delivery.parts.extend(piece.parts)
                delivery.ranges.append((piece.first, piece.last, attempt + 1))
                delivery.tags.append(tag)
                delivery.count += piece.rows
                delivery.size += piece.size
                delivery.weight += piece.size + piece.inflated
                if attempt:
                    self.redelivered_count += piece.rows
            if piece.end < last or not taking.more:
                return
        for cursor in cursors:
            cursor.settled(start, end)

    # --- events from consumers ------------------------------------------------------------------

    def ack(
        self, consumer: AttachedConsumer, ranges: list[tuple[int, int, int]], journal: Journal, tags: Sequence[int] = ()
    ) -> int:
        """Rows in a range that were delivered under its tag are done; how many sequences."""
        count = 0
        holding = self._holding(consumer.id)
        for start, end, tag in self._clipped(ranges, tags):
            for cursor, piece in self._reached(holding, tag, start, end):
                journal.event(Action.ACK, self, cursor.id, piece.start, piece.end, 0)
                cursor.let_go(tag, piece.start, piece.end)
                count += piece.end - piece.start
        if self.retained.offsets:
            self.retained.settled()
        self._after_settled(journal)
        return count

    def _after_settled(self, journal: Journal) -> None:
        """After rows were settled or returned: transfer locks of leaving LPs that have no held rows left."""
        if any(cursor.leaving and (cursor.lps & ~cursor.busy).any() for cursor in self.cursors):
            self.transfer_locks(journal, journal.clock.monotonic())

    def give_back(
        self,
        consumer: AttachedConsumer,
        lps: LpSet,
        ranges: list[tuple[int, int, int]],
        tags: Sequence[int],
        journal: Journal,
    ) -> None:
        """Return rows of some LPs that were delivered under tags, lie in ranges and were not started.

        The LPs are split off as a cursor that returns whole ranges, so no row has to be read.
        """
        clipped = self._clipped(ranges, tags)
        for cursor in self._holding(consumer.id):
            pieces = [(tag, piece) for start, end, tag in clipped for piece in cursor.held_in(tag, start, end)]
            if not pieces:
                continue
            part, mine = cursor, cursor.lps & lps
            if not np.array_equal(mine, cursor.lps):
                # No ack will cover what lies between the remaining rows, so the held ranges need trimming.
                cursor.untrimmed_until = cursor.next
                if not mine.any():
                    continue
                part = self.cursors.split(cursor, mine)
            for tag, piece in pieces:
                part.let_go(tag, piece.start, piece.end)
                self._return_piece(part, piece, 0, journal, counted=False)
        self._after_settled(journal)

    def nack(
        self,
        consumer: AttachedConsumer,
        ranges: list[tuple[int, int, int]],
        journal: Journal,
        now: int,
        failure: NackOutcome = FAILURE,
        tags: Sequence[int] = (),
    ) -> int:
        """(start, end, epoch) ranges failed: rows wait, hold back keys or become dead letters; how many sequences."""
        clipped = self._clipped(ranges, tags)
        holding = self._holding(consumer.id)
        if not failure.counted and not failure.delay:
            count = self._return_rows(holding, clipped, journal)
            self._after_settled(journal)
            return count
        count = 0
        rows = self._table(journal, [(start, end) for start, end, _ in clipped])
        for start, end, tag in clipped:
            for cursor, piece in self._reached(holding, tag, start, end):
                cursor.let_go(tag, piece.start, piece.end)
                count += piece.end - piece.start
                found = rows.of(cursor, piece.start, piece.end)
                if found is not None:
                    keys = len(self.cursors.by_key)
                    self._failed(cursor, *found, piece.attempt, journal, now, failure)
                    if len(self.cursors.by_key) > keys:
                        holding = self._holding(consumer.id)
        self._after_settled(journal)
        return count

    def lost(self, consumer: AttachedConsumer, journal: Journal, now: int) -> int:
        """The consumer's lease ended: each row that it held counts an attempt; how many sequences.

        A row out of attempts becomes a dead letter.
        """
        reason = Reason("ConsumerLost", f"consumer {consumer.client} was lost while it held the message")
        for cursor in self._holding(consumer.id):
            for tag, held in list(cursor.held.items()):
                for piece in list(held):
                    if piece.attempt >= LOST_ATTEMPTS_MIN:
                        rows = list(self._rows(journal, cursor, piece.start, piece.end))
                        cursor.let_go(tag, piece.start, piece.end)
                        for sequences, keys in rows:
                            self._failed(cursor, sequences, keys, piece.attempt, journal, now, NackOutcome(0.0, reason))
        return self.offline(consumer, journal, now)

    def offline(self, consumer: AttachedConsumer, journal: Journal, now: int) -> int:
        """The consumer left: release its locks and return the rows that it held; how many sequences."""
        consumer.online = False
        count = 0
        for cursor in self._holding(consumer.id):
            for piece in cursor.all_held():
                count += piece.end - piece.start
                self._return_piece(cursor, piece, 0, journal)
            cursor.drop()
        self.locks.confirm(consumer.id)
        self.locks.forget(consumer.id)
        self.wanted_until.pop(consumer.id, None)
        self._set_locks(runs_of(self.locks.owner == consumer.id), journal)
        self.transfer_locks(journal, journal.clock.monotonic())
        return count

    def reclaim(
        self, consumer: AttachedConsumer, holds: list[tuple[int, int, int]], journal: Journal, now: int
    ) -> None:
        """An attaching consumer names the rows that it still holds (R13) and keeps; its other rows are returned."""
        self.locks.confirm(consumer.id)
        claimed = Ranges()
        for first, last, epoch in holds:
            claimed.add(*self.partition.clip_to_epoch(first, min(last, self.partition.visible), epoch), 0)
        for cursor in [each for each in self.cursors if each.owner == consumer.id]:
            held = cursor.all_held()
            cursor.drop()
            for piece in held:
                self._return_piece(cursor, piece, 0, journal, counted=False)
            for start, end, _ in claimed:
                for sequences, _ in self._rows(journal, cursor, start, end):
                    for first, last in joined(sequences):
                        known = [*cursor.returned.overlap(first, last), *cursor.waiting.overlap(first, last)]
                        new = [Range(max(first, cursor.next), last, 0)] if last > cursor.next else []
                        for piece in [*known, *new]:
                            cursor.pulled(piece.start, piece.end, piece.attempt + 1, 0)
        self._look_up_held(journal)

    def reset(self, sequence: int, journal: Journal) -> None:
        """Set the group's position to ``sequence`` and release all locks."""
        self._set_locks(runs_of(self.locks.owner > 0), journal)
        number = self.cursors.begin(sequence)
        journal.event(Action.RESET, self, number, sequence, sequence, 0)
        self.pull_log.reset(sequence)
        self.retained.settled()

    # --- dead letters, retention ----------------------------------------------------------------

    @property
    def floor(self) -> int:
        return min(cursor.floor for cursor in self.cursors)

    def begun(self, start: int, end: int, journal: Journal) -> list[Range]:
        pieces = []
        for cursor in self.cursors:
            for first, last, attempt in cursor.begun(start, end):
                for sequences, _ in self._rows(journal, cursor, first, last):
                    pieces += [Range(low, high, attempt) for low, high in joined(sequences)]
        return pieces

    def mark_begun_below(self, end: int) -> None:
        """Count undelivered rows below ``end`` of keys with their own cursor as begun: retention keeps them."""
        for cursor in self.cursors.by_key.values():
            if cursor.next < end:
                cursor.returned.add(cursor.next, end, 0)
                cursor.next = end

    def expire(self, lost: list[Range], start: int, journal: Journal) -> None:
        counter = RowCounter(self, journal, LOST_COUNTED_MAX)
        for cursor in self.cursors:
            for first, last in [*((piece.start, piece.end) for piece in lost), (cursor.next, start)]:
                if first < last:
                    self._skip_rows(counter, cursor, first, last, journal)

    # --- replay ---------------------------------------------------------------------------------

    def begin(self, sequence: int) -> None:
        self.cursors.begin(sequence, 1)

    def forget(self, consumer: int, time: int) -> None:
        """A consumer was removed. Earlier events have returned its rows and released its locks."""

    def release_unknown_consumers(self, now: int) -> None:
        """Release locks of unknown consumers, and set the owner of each cursor from the locks."""
        self.locks.keep([consumer.id for consumer in self.consumers.values()])
        owners = self.locks.owner
        for owner in np.unique(owners).tolist():
            for cursor in self.cursors.take_out(owners == owner):
                cursor.owner = owner

    def replay(self, action: int, flags: int, consumer: int, piece: Range, due: int, time: int) -> None:
        """Apply an event of the action log. ``consumer`` is a cursor number, except for LOCK."""
        start, end, attempt = piece
        if action == Action.LOCK:
            self.locks.set(start, end, consumer, due)
            return
        if action in (Action.MOVE, Action.HOLD, Action.JOIN):
            self.cursors.replay(action, consumer, start, end, due)
            return
        if action == Action.RESET:
            self.cursors.begin(start, consumer)
            self.pull_log.reset(start)
            return
        cursor = self.cursors.get(consumer)
        if action == Action.PURGE:
            self.pull_log.purged(start, end)
        elif cursor is None:
            return
        elif action in (Action.PARK, Action.RESUME):
            cursor.parked = action == Action.PARK
            cursor.letter = start if cursor.parked and start < end else -1
        elif start >= end:
            return
        elif action == Action.ACK:
            cursor.settled(start, end)
        elif action == Action.RETURN:
            cursor.given_back(start, end, attempt, due)
        elif action == Action.NACK:
            uncounted = bool(flags & FLAG_UNCOUNTED)
            cursor.given_back(start, end, attempt - uncounted, due)
            if not uncounted:
                self.pull_log.note_failure(start, end, time)
        elif action == Action.SKIP:
            self._lost(due, estimated=bool(flags & FLAG_ESTIMATED))
            cursor.skipped(start, end)
        elif action == Action.BURY:
            self.buried(consumer, start, end, attempt, time)
        elif action == Action.REVIVE:
            self._revive(cursor, start, end)


def new_group(definition: GroupDefinition, partition: Partition, limits: ServerLimits, journal: Journal) -> Group:
    """Make the kind of group that the definition describes."""
    if definition.ordered:
        return OrderedGroup(definition, partition, limits, journal)
    if definition.delivery == "at_most_once":
        return AtMostOnceGroup(definition, partition, limits)
    return Group(definition, partition, limits)
