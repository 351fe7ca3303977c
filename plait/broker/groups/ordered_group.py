"""An ordered consumer group: each row goes to the owner of its logical partition, each key in order.

``Locks`` says who owns what, ``Cursor`` how far the group has come with it. An owner is handed the rows of its strands;
those that stand at the same place are read together. When logical partitions change hands they are split off as strands
of their own, which join their new owner's once they have come equally far.

A failed message of a strict subject gets its key a strand of its own, which waits alone; out of attempts it is *parked*
until somebody resumes it or skips the message. Otherwise what failed waits by itself and the key goes on.
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

#: Up to so many strands of an owner are compared at each of its pulls, more at every so many-th.
JOIN_ALWAYS = 16
JOIN_EVERY = 8
#: Behind every sequence.
LAST = SEQUENCE_MAX
#: Rows of a key that failed before that are handed out at a time.
KEY_ROWS_MAX = 100


class OrderedGroup(FailurePolicy):
    """See the module."""

    __slots__ = ("_tag", "_turn", "frozen_until", "locks")

    def __init__(
        self, definition: GroupDefinition, partition: Partition, limits: ServerLimits, journal: Journal
    ) -> None:
        super().__init__(definition, partition, limits, journal)
        self.locks = Locks()
        #: On the monotonic clock: until then nobody gets a lock that it did not have before a restart (R15).
        self.frozen_until = 0.0
        #: Which of an owner's strands is served first.
        self._turn = 0
        #: The last tag of what came back; those of strands are their numbers.
        self._tag = 0

    @property
    def has_more(self) -> bool:
        visible = self.partition.visible
        return any(strand.next < visible or strand.returned for strand in self.strands)

    # --- locks ----------------------------------------------------------------------------------

    def lease(self, consumer: AttachedConsumer, wants: list[Want], journal: Journal, now: float) -> None:
        """All that a consumer wants from now on, and what it has for another lease."""
        self.locks.heard(consumer.id)
        if self.locks.wants(consumer.id, epochs_of((first, end, epoch) for first, end, epoch, _ in wants)):
            self._leave(journal)
        self._ask(consumer.id, [(first, end, until) for first, end, _, until in wants])
        self.pass_on(journal, now)
        self._tighten_all(consumer, journal)
        self._limit(consumer.id)

    def standing(self, consumer: AttachedConsumer) -> LockState:
        """What it has of that."""
        return self.locks.standing(consumer.id)

    def drained(self, wants: list[Want]) -> LpSet:
        """Those that are wanted up to a place and are done up to there, but for parked keys."""
        done = np.zeros(LOGICAL_PARTITIONS, bool)
        if not any(limit for _, _, _, limit in wants):
            return done
        until = np.zeros(LOGICAL_PARTITIONS, np.int64)
        for first, end, _, limit in wants:
            until[first:end] = limit
        for strand in self.strands:
            if strand.key is None:
                done |= strand.lps & (until > 0) & (until <= strand.floor)
        for strand in self.strands.by_key.values():
            if not strand.parked:
                done &= ~strand.lps | (until <= strand.floor)
        return done

    def again(self) -> LpSet:
        """Those that end here and have rows left, as far as is known: who has heard that they were done is to know.

        Letters that were sent again, or what a crash took back: what is handed out is not recorded.
        """
        found = np.zeros(LOGICAL_PARTITIONS, bool)
        fences = self.partition.fences
        if fences is not None:
            for strand in self.strands:
                if not strand.parked:
                    found |= strand.lps & (fences > strand.floor)
        return found

    def _leave(self, journal: Journal) -> None:
        """Split off what is to change hands, and look up what its owner has of it: each can then go by itself."""
        leaving = self.locks.leaving
        owners = set(np.unique(self.locks.owner[leaving]).tolist())
        for strand in list(self.strands):
            if strand.owner not in owners:
                continue
            lps = strand.lps & leaving
            if lps.any() and not np.array_equal(lps, strand.lps):
                self.strands.split(strand, lps)
        for strand in self.strands:
            strand.leaving = strand.owner in owners and bool((strand.lps & leaving).any())
        self._look_up(journal)

    def pass_on(self, journal: Journal, now: float) -> None:
        """Give up what is leaving and in nobody's hands; grant what is free to who wants it."""
        leaving = self.locks.leaving
        if leaving.any():
            busy = np.zeros(LOGICAL_PARTITIONS, bool)
            for strand in self.strands:
                busy |= strand.busy
            self._set_locks(runs_of(leaving & ~busy), journal)
        grant = self.locks.to_grant
        if grant is NONE or now < self.frozen_until or (floor := journal.leases.floor(self)) is None:
            return
        grant = grant & (self.locks.wanted >= floor.array())
        if grant.any():
            self._granted(self.locks.granted(grant), journal)

    def _set_locks(self, runs: list[tuple[int, int]], journal: Journal) -> None:
        """These are nobody's any more."""
        if not runs:
            return
        lps = lp_set(runs)
        owners = np.unique(self.locks.owner[lps]).tolist()
        for first, end in runs:
            journal.event(Action.LOCK, self, 0, first, end, 0)
        self.locks.give_up(runs)
        for strand in self.strands.take_out(lps):
            strand.owner, strand.leaving, strand.limit = 0, False, 0
            strand.drop()
        for owner in owners:
            journal.leases.news(self, owner)

    def _granted(self, runs: list[tuple[int, int, int, int]], journal: Journal) -> None:
        for owner in {owner for _, _, owner, _ in runs}:
            mine = [(first, end, epoch) for first, end, each, epoch in runs if each == owner]
            for first, end, epoch in mine:
                journal.event(Action.LOCK, self, owner, first, end, 0, epoch)
            for strand in self.strands.take_out(lp_set([(first, end) for first, end, _ in mine])):
                strand.owner, strand.leaving = owner, False
                self._sift(journal, strand)
            self._limit(owner)
            self.strands.join_alike(self.strands.of(owner))
            journal.leases.news(self, owner)

    # --- handing out ----------------------------------------------------------------------------

    def take(self, log: Log, consumer: AttachedConsumer, count: int, size: int, journal: Journal) -> Delivery | None:
        """Rows for a consumer from what it owns; None when there are none. An empty delivery: ask again."""
        taking = RowTake(count, size)
        lps = [each for each in self.strands.of(consumer.id) if not each.leaving]
        keys = [each for each in self.strands.keys_of(consumer.id) if not (each.leaving or each.parked)]
        self._turn += 1
        if self._turn % JOIN_EVERY == 0:
            self._tighten_all(consumer, journal)
        if len(lps) > 1 and (len(lps) <= JOIN_ALWAYS or self._turn % JOIN_EVERY == 0):
            self.strands.join_alike(lps)
            lps = [each for each in lps if self.strands.get(each.id) is each]
        if keys:
            keys = self._rejoin(keys, journal)
        abreast: list[Cursor] = []
        for strand in keys:
            if troubled := self._troubled(strand):
                # One after another: nothing of the key goes out before what went out last is done.
                if not strand.held and not strand.waiting:
                    self._take_key(strand, taking, journal)
                troubled = bool(strand.held) or self._troubled(strand)
            if not troubled:
                abreast.append(strand)
        while taking.more and self._serve_again(lps, taking, journal):
            pass
        by_next: dict[tuple[int, int], list[Cursor]] = {}
        for strand in [*lps, *abreast]:
            if not self._at_limit_of(strand):
                by_next.setdefault((strand.next, strand.limit), []).append(strand)
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
        """Give rows to waiting pulls: each gets its own, so that there are none for one says nothing of the others."""
        # Of most owners there is nothing, which is quickly seen.
        ready = {
            strand.owner
            for strand in self.strands
            if not strand.leaving and (strand.returned or strand.next < strand.until(self.partition.visible))
        }
        for waiter in [each for each in self.waiters if each.consumer.id in ready]:
            delivery = self.take(log, waiter.consumer, waiter.count, waiter.size, journal)
            if delivery is not None and waiter.leave():
                send(waiter, delivery)

    def _take_key(self, strand: Cursor, taking: RowTake, journal: Journal) -> None:
        rows, before = taking.rows, -1
        taking.limit(KEY_ROWS_MAX)
        while taking.more:
            if strand.returned:
                start, end, attempt = strand.returned.head()
            else:
                start, end, attempt = strand.next, self._parent(strand).next, 0
            end = strand.until(end)
            if attempt:
                # What failed goes alone.
                taking.limit(0 if strand.held else 1)
            # Each piece begins behind the one before: where nothing was taken there is nothing to be had.
            if not before < start < end or not taking.more:
                break
            self._serve([strand], start, end, attempt, taking, journal)
            before = start
        taking.rows = rows

    def _at_limit_of(self, strand: Cursor) -> bool:
        limits = self.limits
        return (
            sum(map(len, strand.held.values())) >= limits.consumer_ranges
            or len(strand.waiting) >= limits.retry_ranges
            or len(self.kept) >= limits.kept_messages
            or len(self.strands.by_key) >= limits.held_keys
        )

    def _serve_again(self, strands: list[Cursor], taking: RowTake, journal: Journal) -> bool:
        """Hand out what came back to strands, as far as it lies in the frame of the lowest row; False: none went out.

        Rows of many strands that lie in one frame go out as one piece, under a tag of its own: others may lie between
        them that are in hands already.
        """
        ready = [
            strand
            for strand in strands
            if strand.returned and strand.returned.first < strand.until(LAST) and not self._at_limit_of(strand)
        ]
        if not ready:
            return False
        lead = min(ready, key=lambda strand: strand.returned.first)
        start, end, attempt = lead.returned.head()
        found = next(self._walk(journal, start, lead.until(end), again=attempt > 0), None)
        taking.looked += 1
        if found is None or found.first > start:
            # It was kept, and is not any more.
            lead.settled(start, lead.until(end) if found is None else found.first)
            return True
        first, last, frame = found
        if frame is None:
            self._skip_rows(RowCounter(self, None, 0), lead, first, last, journal)
            return True
        frame_end = frame.end if first >= self.partition.start else last
        # Those of a strand in their order: what is on another attempt holds back what is behind it.
        pieces = [
            (index, piece)
            for index, strand in enumerate(ready)
            for piece in takewhile(
                lambda piece: piece.attempt == attempt, strand.returned.overlap(first, strand.until(frame_end))
            )
        ]
        keys, sequences = self.partition.keys.of(frame), frame.sequences()
        owners = np.full(LOGICAL_PARTITIONS, -1, np.int64)
        for index, strand in enumerate(ready):
            owners[strand.lps] = index
        whose = owners[keys.lps]
        if self.strands.by_key and keys.hashes is not None:
            whose[np.isin(keys.hashes, np.fromiter(self.strands.by_key, np.uint64, len(self.strands.by_key)))] = -1
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
                delivery.inflated += frame.inflated_size
                self.redelivered_count += len(rows) if attempt else 0
        for index, piece in pieces:
            if piece.start >= cut:
                continue
            strand, stop = ready[index], min(piece.end, cut)
            low, high = np.searchsorted(sequences[rows], (piece.start, stop)).tolist()
            mine = rows[low:high][whose[rows[low:high]] == index]
            strand.settled(piece.start, stop)
            if len(mine):
                # From its first row to its last: nobody speaks of what is beside them.
                strand.pulled(int(sequences[mine[0]]), int(sequences[mine[-1]]) + 1, attempt + 1, self._tag)
        return True

    def _serve(
        self, strands: list[Cursor], start: int, end: int, attempt: int, taking: RowTake, journal: Journal
    ) -> None:
        """Hand out the rows of these strands in [start, end), which all of them stand at or got back."""
        tag = strands[0].id
        if strands[0].key is not None:
            # What several keys share goes under none of their numbers: it would be that of what one gets later.
            tag = self._tag = self._tag - 1
        delivery = taking.delivery
        chooser = Chooser(strands)
        for first, last, frame in self._walk(journal, start, end, again=attempt > 0):
            if frame is None:
                for strand in strands:
                    self._skip_rows(RowCounter(self, None, 0), strand, first, last, journal)
                continue
            piece = self._cut(frame, chooser, first, last, taking)
            if piece is None:
                return
            # What none of them has rows in is behind them, and in nobody's hands.
            for strand in strands:
                strand.settled(start, piece.end)
            start = piece.end
            if piece.parts:
                for strand in strands:
                    if strand.key is None or len(strands) == 1:
                        strand.pulled(piece.first, piece.last, attempt + 1, tag)
                        continue
                    # Beside others a key has just its rows in flight: it joins them again when those are done.
                    for low, high in self._of_key(frame, piece, strand.key):
                        strand.pulled(low, high, attempt + 1, tag)
                delivery.parts.extend(piece.parts)
                delivery.ranges.append((piece.first, piece.last, attempt + 1))
                delivery.tags.append(tag)
                delivery.count += piece.rows
                delivery.size += piece.size
                delivery.inflated += piece.inflated
                if attempt:
                    self.redelivered_count += piece.rows
            if piece.end < last or not taking.more:
                return
        for strand in strands:
            strand.settled(start, end)

    # --- events from consumers ------------------------------------------------------------------

    def ack(
        self, consumer: AttachedConsumer, ranges: list[tuple[int, int, int]], journal: Journal, tags: Sequence[int] = ()
    ) -> int:
        """Those rows that were handed out under the tag of a range and lie in it are done; how many sequences."""
        count = 0
        holding = self._holding(consumer.id)
        for start, end, tag in self._clipped(ranges, tags):
            for strand, piece in self._reached(holding, tag, start, end):
                journal.event(Action.ACK, self, strand.id, piece.start, piece.end, 0)
                strand.let_go(tag, piece.start, piece.end)
                count += piece.end - piece.start
        if self.kept:
            self.kept.settled()
        self._after_hands(journal)
        return count

    def _after_hands(self, journal: Journal) -> None:
        """Some rows are not in somebody's hands any more: what is leaving may go."""
        if any(strand.leaving and (strand.lps & ~strand.busy).any() for strand in self.strands):
            self.pass_on(journal, journal.leases.now())

    def give_back(
        self,
        consumer: AttachedConsumer,
        lps: LpSet,
        ranges: list[tuple[int, int, int]],
        tags: Sequence[int],
        journal: Journal,
    ) -> None:
        """Nobody began with the rows of some logical partitions that were handed out under tags and lie in ranges.

        They are split off as a strand, for which that is as many ranges: nothing is looked at row by row.
        """
        clipped = self._clipped(ranges, tags)
        for strand in self._holding(consumer.id):
            pieces = [(tag, piece) for start, end, tag in clipped for piece in strand.in_hands(tag, start, end)]
            if not pieces:
                continue
            part, mine = strand, strand.lps & lps
            if not np.array_equal(mine, strand.lps):
                # Nobody speaks of what lies between its rows there any more.
                strand.loose_until = strand.next
                if not mine.any():
                    continue
                part = self.strands.split(strand, mine)
            for tag, piece in pieces:
                part.let_go(tag, piece.start, piece.end)
                self._give_back(part, piece, 0, journal, counted=False)
        self._after_hands(journal)

    def nack(
        self,
        consumer: AttachedConsumer,
        ranges: list[tuple[int, int, int]],
        journal: Journal,
        now: int,
        failure: NackOutcome = FAILURE,
        tags: Sequence[int] = (),
    ) -> int:
        """(start, end, epoch) ranges failed: they wait, hold their keys, or are dead letters; how many sequences."""
        clipped = self._clipped(ranges, tags)
        holding = self._holding(consumer.id)
        if not failure.counted and not failure.delay:
            count = self._given_back(holding, clipped, journal)
            self._after_hands(journal)
            return count
        count = 0
        rows = self._table(journal, [(start, end) for start, end, _ in clipped])
        for start, end, tag in clipped:
            for strand, piece in self._reached(holding, tag, start, end):
                strand.let_go(tag, piece.start, piece.end)
                count += piece.end - piece.start
                found = rows.of(strand, piece.start, piece.end)
                if found is not None:
                    keys = len(self.strands.by_key)
                    self._failed(strand, *found, piece.attempt, journal, now, failure)
                    if len(self.strands.by_key) > keys:
                        holding = self._holding(consumer.id)
        self._after_hands(journal)
        return count

    def lost(self, consumer: AttachedConsumer, journal: Journal, now: int) -> int:
        """Its lease is over: what it held was an attempt, for some the last; how many sequences."""
        reason = Reason("ConsumerLost", f"consumer {consumer.client} was lost while it held the message")
        for strand in self._holding(consumer.id):
            for tag, held in list(strand.held.items()):
                for piece in list(held):
                    if piece.attempt >= LOST_ATTEMPTS_MIN:
                        rows = list(self._rows(journal, strand, piece.start, piece.end))
                        strand.let_go(tag, piece.start, piece.end)
                        for sequences, keys in rows:
                            self._failed(strand, sequences, keys, piece.attempt, journal, now, NackOutcome(0.0, reason))
        return self.offline(consumer, journal, now)

    def offline(self, consumer: AttachedConsumer, journal: Journal, now: int) -> int:
        """The consumer is gone: what it held and owned is for the others; how many sequences."""
        consumer.online = False
        count = 0
        for strand in self._holding(consumer.id):
            for piece in strand.all_held():
                count += piece.end - piece.start
                self._give_back(strand, piece, 0, journal)
            strand.drop()
        self.locks.heard(consumer.id)
        self.locks.forget(consumer.id)
        self.asked.pop(consumer.id, None)
        self._set_locks(runs_of(self.locks.owner == consumer.id), journal)
        self.pass_on(journal, journal.leases.now())
        return count

    def reclaim(
        self, consumer: AttachedConsumer, holds: list[tuple[int, int, int]], journal: Journal, now: int
    ) -> None:
        """An attaching consumer names what is in its hands (R13), row by row: that stays, all else comes back."""
        self.locks.heard(consumer.id)
        claimed = Ranges()
        for first, last, epoch in holds:
            claimed.add(*self.partition.clip_to_epoch(first, min(last, self.partition.visible), epoch), 0)
        for strand in [each for each in self.strands if each.owner == consumer.id]:
            held = strand.all_held()
            strand.drop()
            for piece in held:
                self._give_back(strand, piece, 0, journal, counted=False)
            for start, end, _ in claimed:
                for sequences, _ in self._rows(journal, strand, start, end):
                    for first, last in joined(sequences):
                        known = [*strand.returned.overlap(first, last), *strand.waiting.overlap(first, last)]
                        fresh = [Range(max(first, strand.next), last, 0)] if last > strand.next else []
                        for piece in [*known, *fresh]:
                            strand.pulled(piece.start, piece.end, piece.attempt + 1, 0)
        self._look_up(journal)

    def reset(self, sequence: int, journal: Journal) -> None:
        """The group goes on from ``sequence``."""
        self._set_locks(runs_of(self.locks.owner > 0), journal)
        number = self.strands.begin(sequence)
        journal.event(Action.RESET, self, number, sequence, sequence, 0)
        self.pull_log.reset(sequence)
        self.kept.settled()

    # --- dead letters, retention ----------------------------------------------------------------

    @property
    def floor(self) -> int:
        return min(strand.floor for strand in self.strands)

    def begun(self, start: int, end: int, journal: Journal) -> list[Range]:
        pieces = []
        for strand in self.strands:
            for first, last, attempt in strand.begun(start, end):
                for sequences, _ in self._rows(journal, strand, first, last):
                    pieces += [Range(low, high, attempt) for low, high in joined(sequences)]
        return pieces

    def begin_with(self, end: int) -> None:
        """What a key that waits has not come to yet is to outlive retention, as if it had."""
        for strand in self.strands.by_key.values():
            if strand.next < end:
                strand.returned.add(strand.next, end, 0)
                strand.next = end

    def expire(self, lost: list[Range], start: int, journal: Journal) -> None:
        counter = RowCounter(self, journal, LOST_COUNTED_MAX)
        for strand in self.strands:
            for first, last in [*((piece.start, piece.end) for piece in lost), (strand.next, start)]:
                if first < last:
                    self._skip_rows(counter, strand, first, last, journal)

    # --- replay ---------------------------------------------------------------------------------

    def begin(self, sequence: int) -> None:
        self.strands.begin(sequence, 1)

    def forget(self, consumer: int, time: int) -> None:
        """A consumer is gone for good; what it had was told."""

    def forget_strangers(self, now: int) -> None:
        """Locks of consumers that nobody knows any more are free; each strand is its owner's."""
        self.locks.keep([consumer.id for consumer in self.consumers.values()])
        owners = self.locks.owner
        for owner in np.unique(owners).tolist():
            for strand in self.strands.take_out(owners == owner):
                strand.owner = owner

    def replay(self, action: int, flags: int, consumer: int, piece: Range, due: int, time: int) -> None:
        """Apply an event of the action log; most are of the strand with the number ``consumer``."""
        start, end, attempt = piece
        if action == Action.LOCK:
            self.locks.set(start, end, consumer, due)
            return
        if action in (Action.MOVE, Action.HOLD, Action.JOIN):
            self.strands.replay(action, consumer, start, end, due)
            return
        if action == Action.RESET:
            self.strands.begin(start, consumer)
            self.pull_log.reset(start)
            return
        strand = self.strands.get(consumer)
        if action == Action.PURGE:
            self.pull_log.purged(start, end)
        elif strand is None:
            return
        elif action in (Action.PARK, Action.RESUME):
            strand.parked = action == Action.PARK
            strand.letter = start if strand.parked and start < end else -1
        elif start >= end:
            return
        elif action == Action.ACK:
            strand.settled(start, end)
        elif action == Action.RETURN:
            strand.given_back(start, end, attempt, due)
        elif action == Action.NACK:
            uncounted = bool(flags & FLAG_UNCOUNTED)
            strand.given_back(start, end, attempt - uncounted, due)
            if not uncounted:
                self.pull_log.note_failure(start, end, time)
        elif action == Action.SKIP:
            self._lost(due, estimated=bool(flags & FLAG_ESTIMATED))
            strand.skipped(start, end)
        elif action == Action.BURY:
            self.buried(consumer, start, end, attempt, time)
        elif action == Action.REVIVE:
            self._revive(strand, start, end)


def new_group(definition: GroupDefinition, partition: Partition, limits: ServerLimits, journal: Journal) -> Group:
    """A group as its definition says."""
    if definition.ordered:
        return OrderedGroup(definition, partition, limits, journal)
    if definition.delivery == "at_most_once":
        return AtMostOnceGroup(definition, partition, limits)
    return Group(definition, partition, limits)
