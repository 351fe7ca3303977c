"""An ordered consumer group: each row goes to the owner of its logical partition, each key in order.

``Locks`` says who owns what, ``Strand`` how far the group has come with it. An owner is handed the rows of its strands;
those that stand at the same place are read together. When logical partitions change hands they are split off as strands
of their own, which join their new owner's once they have come equally far.

A failed message of a strict subject gets its key a strand of its own, which waits alone; out of attempts it is *parked*
until somebody resumes it or skips the message. Otherwise what failed waits by itself and the key goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, repeat
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plait.broker.group import FAILURE, LOST_ATTEMPTS_MIN, Consumer, Delivery, Failure, Group, Journal
from plait.broker.keys import FrameKeys
from plait.broker.locks import Locks, Standing, Want, epochs_of
from plait.broker.partition import Partition
from plait.broker.strands import Strands
from plait.errors import FrameError
from plait.frame.builder import Buffer
from plait.frame.columns import Column
from plait.frame.lp import NO_KEY_HASH, LpSet, lp_set, runs_of
from plait.frame.slicing import slice_mask, slice_rows
from plait.frame.view import FrameView
from plait.limits import LOGICAL_PARTITIONS, ServerLimits
from plait.reason import Reason
from plait.retry import due_time
from plait.storage.action_log import FLAG_UNCOUNTED, Action, GroupDefinition
from plait.storage.log import Log
from plait.storage.pull_log import count_of
from plait.storage.ranges import Range, Ranges, joined
from plait.storage.strand import Strand
from plait.storage.waiting import Waiting

STRICT = "strict"
#: Rows that one pull looks at without finding one of its own; it is answered then, and asks again.
LOOK_MAX = 1 << 20
#: Rows of a key that failed before that are handed out at a time.
KEY_ROWS_MAX = 100

Sequences = npt.NDArray[np.int64]


class Found(NamedTuple):
    """Rows [first, last) of a frame, by sequence; no frame: they cannot be read back."""

    first: int
    last: int
    frame: FrameView | None


class _Piece(NamedTuple):
    """Rows from ``first`` to ``last`` of a frame, which was looked at up to ``end``."""

    first: int
    last: int
    end: int
    rows: int
    size: int
    parts: list[Buffer]


class _Taking:
    """One pull, while it is served."""

    __slots__ = ("delivery", "looked", "rows", "size")

    def __init__(self, count: int, size: int) -> None:
        self.delivery = Delivery()
        #: It ends with so many rows, and about so many bytes.
        self.rows = count
        self.size = size
        self.looked = 0

    @property
    def room(self) -> int:
        return self.rows - self.delivery.count

    @property
    def more(self) -> bool:
        """There is room for more, and time to look for it."""
        delivery = self.delivery
        return self.room > 0 and (not delivery.count or delivery.size < self.size) and self.looked < LOOK_MAX

    def limit(self, count: int) -> None:
        """At most so many more."""
        self.rows = min(self.rows, self.delivery.count + count)


class OrderedGroup(Group):
    """See the module."""

    __slots__ = ("_turn", "frozen_until", "locks", "strands")

    def __init__(
        self, definition: GroupDefinition, partition: Partition, limits: ServerLimits, journal: Journal
    ) -> None:
        super().__init__(definition, partition, limits)
        self.locks = Locks()
        self.strands = Strands(
            definition.start,
            lambda action, strand, start, end, value, attempt: journal.event(
                action, self, strand, start, end, attempt, value
            ),
        )
        #: On the monotonic clock: until then nobody gets a lock that it did not have before a restart (R15).
        self.frozen_until = 0.0
        #: Which of an owner's strands is served first.
        self._turn = 0

    @property
    def logs_pulls(self) -> bool:
        """What an owner has not acked is what it needs."""
        return False

    @property
    def strict(self) -> bool:
        """A failed message holds its key."""
        return self.partition.row.settings.order == STRICT

    @property
    def has_more(self) -> bool:
        visible = self.partition.visible
        return any(strand.next < visible or strand.returned for strand in self.strands)

    # --- locks ----------------------------------------------------------------------------------

    def lease(self, consumer: Consumer, wants: list[Want], journal: Journal, now: float) -> None:
        """All that a consumer wants from now on, and what it has for another lease."""
        self.locks.unheard.discard(consumer.id)
        if self.locks.wants(consumer.id, epochs_of((first, end, epoch) for first, end, epoch, _ in wants)):
            self._leave(journal)
        self.pass_on(journal, now)
        self._limit(consumer, wants)

    def _limit(self, consumer: Consumer, wants: list[Want]) -> None:
        """What a consumer owns is handed out as far as it is wanted."""
        limits = np.zeros(LOGICAL_PARTITIONS, np.int64)
        for first, end, _, until in wants:
            limits[first:end] = until
        mine = self.locks.owner == consumer.id
        present = np.array([strand.limit for strand in self.strands.by_lp])
        changed = mine & (present != limits)
        for limit in np.unique(limits[changed]).tolist():
            for strand in self.strands.take_out(changed & (limits == limit)):
                strand.limit = limit

    def inherit(self, parked: Iterable[int], resumed: Iterable[int], journal: Journal) -> None:
        """Keys that are parked where their rows were before are parked here; those that went on there go on."""
        for key in parked:
            lp = key % LOGICAL_PARTITIONS
            strand = self.strands.for_row(lp, key)
            if strand.key is None:
                strand = self.strands.hold(strand, lp, key)
                strand.held = {}
                self._park(strand, -1, journal)
        for key in resumed:
            self.resume(key, journal, skip=True)

    def _park(self, strand: Strand, letter: int, journal: Journal) -> None:
        strand.parked, strand.letter = True, letter
        journal.event(Action.PARK, self, strand.id, max(letter, 0), letter + 1, 0)

    def standing(self, consumer: Consumer) -> Standing:
        """What it has of that."""
        return self.locks.standing(consumer.id)

    def drained(self, wants: list[Want]) -> LpSet:
        """Those that are wanted up to a place and are done up to there, but for parked keys."""
        done = np.zeros(LOGICAL_PARTITIONS, bool)
        until = np.zeros(LOGICAL_PARTITIONS, np.int64)
        for first, end, _, limit in wants:
            if limit:
                until[first:end] = limit
                for lp in range(first, end):
                    done[lp] = self.strands.by_lp[lp].floor >= limit
        for strand in self.strands.by_key.values():
            lp = int(np.flatnonzero(strand.lps)[0])
            done[lp] &= strand.parked or strand.floor >= until[lp]
        return done

    def _leave(self, journal: Journal) -> None:
        """Split off what is to change hands, as far as its owner has begun with it: each can then go by itself."""
        leaving = self.locks.leaving
        for strand in list(self.strands):
            lps = strand.lps & leaving
            if strand.key is not None or strand.leaving or not lps.any():
                continue
            whole = self.strands.take_out(lps)
            busy = self._in_hands(journal, [each for each in whole if each.key is None and each.held])
            for lp, rows in busy.items():
                alone = self.strands.take_out(_one(lp))[0]
                alone.held = rows
            for each in self.strands.take_out(lps & ~_set_of(busy)) if len(busy) < int(lps.sum()) else ():
                if each.key is None:
                    each.held = {}
        for strand in self.strands:
            strand.leaving = bool((strand.lps & leaving).any())

    def _in_hands(self, journal: Journal, strands: list[Strand]) -> dict[int, dict[int, Ranges]]:
        """The rows that are in their owner's hands, one by one: for each logical partition, by tag."""
        found: dict[int, dict[int, Ranges]] = {}
        for strand in strands:
            for tag, held in strand.held.items():
                for start, end, attempt in held:
                    for sequences, keys in self._rows(journal, strand, start, end):
                        for lp, sequence in zip(keys.lps.tolist(), sequences.tolist(), strict=True):
                            rows = found.setdefault(lp, {}).setdefault(tag, Ranges())
                            rows.add(sequence, sequence + 1, attempt)
        return found

    def pass_on(self, journal: Journal, now: float) -> None:
        """Give up what is leaving and in nobody's hands; grant what is free to who wants it."""
        leaving = self.locks.leaving
        if leaving.any():
            busy = np.zeros(LOGICAL_PARTITIONS, bool)
            for strand in self.strands:
                if strand.held:
                    busy |= strand.lps
            self._set_locks(runs_of(leaving & ~busy), journal)
        grant = self.locks.to_grant
        floor = journal.leases.floor(self)
        if floor is None or now < self.frozen_until:
            return
        grant &= self.locks.wanted >= floor
        if grant.any():
            self._granted(self.locks.granted(grant), journal)

    def _set_locks(self, runs: list[tuple[int, int]], journal: Journal) -> None:
        """These are nobody's any more."""
        for first, end in runs:
            owners = np.unique(self.locks.owner[first:end]).tolist()
            journal.event(Action.LOCK, self, 0, first, end, 0)
            self.locks.set(first, end, 0, 0)
            for strand in self.strands.take_out(lp_set([(first, end)])):
                strand.owner, strand.leaving, strand.held, strand.limit = 0, False, {}, 0
            for owner in owners:
                journal.leases.news(self, owner)

    def _granted(self, runs: list[tuple[int, int, int, int]], journal: Journal) -> None:
        owners = set()
        for first, end, owner, epoch in runs:
            journal.event(Action.LOCK, self, owner, first, end, 0, epoch)
            for strand in self.strands.take_out(lp_set([(first, end)])):
                strand.owner, strand.leaving = owner, False
            owners.add(owner)
        for owner in owners:
            self.strands.join_alike(self.strands.of(owner))
            journal.leases.news(self, owner)

    # --- handing out ----------------------------------------------------------------------------

    def take(self, log: Log, consumer: Consumer, count: int, size: int, journal: Journal) -> Delivery | None:
        """Rows for a consumer from what it owns; None when there are none. An empty delivery: ask again."""
        taking = _Taking(count, size)
        lps = [each for each in self.strands.of(consumer.id) if not each.leaving]
        keys = [each for each in self.strands.keys_of(consumer.id) if not (each.leaving or each.parked)]
        if len(lps) + len(keys) > 1:
            self.strands.join_alike([*lps, *keys])
            lps = [each for each in lps if self.strands.get(each.id) is each]
            keys = [each for each in keys if self.strands.get(each.id) is each]
        abreast: list[Strand] = []
        for strand in keys:
            if self._troubled(strand):
                # One after another: nothing of the key goes out before what went out last is done.
                if not strand.held and not strand.waiting:
                    self._take_key(strand, taking, journal)
            else:
                abreast.append(strand)
        for strand in lps:
            while strand.returned and taking.more and not self._at_limit_of(strand):
                start, end, attempt = strand.returned.head()
                if start >= strand.until(end):
                    break
                self._serve([strand], start, strand.until(end), attempt, taking, journal)
        self._turn += 1
        by_next: dict[tuple[int, int], list[Strand]] = {}
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

    def _troubled(self, strand: Strand) -> bool:
        """A key that has not caught up with its logical partition."""
        return bool(strand.returned or strand.waiting) or strand.next < self._parent(strand).next

    def _parent(self, strand: Strand) -> Strand:
        return self.strands.by_lp[int(np.flatnonzero(strand.lps)[0])]

    def _take_key(self, strand: Strand, taking: _Taking, journal: Journal) -> None:
        rows = taking.rows
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
            if start >= end or not taking.more:
                break
            looked = taking.looked
            self._serve([strand], start, end, attempt, taking, journal)
            if taking.looked == looked and strand.returned and strand.returned.head().start == start:
                break
        taking.rows = rows

    def _at_limit_of(self, strand: Strand) -> bool:
        limits = self.limits
        return (
            sum(map(len, strand.held.values())) >= limits.consumer_ranges
            or len(strand.waiting) >= limits.retry_ranges
            or len(self.kept) >= limits.kept_messages
            or len(self.strands.by_key) >= limits.held_keys
        )

    def _serve(
        self, strands: list[Strand], start: int, end: int, attempt: int, taking: _Taking, journal: Journal
    ) -> None:
        """Hand out the rows of these strands in [start, end), which all of them stand at or got back."""
        tag = strands[0].id
        delivery = taking.delivery
        for first, last, frame in self._walk(journal, start, end, again=attempt > 0):
            if frame is None:
                for strand in strands:
                    journal.event(Action.SKIP, self, strand.id, first, last, 0)
                    self.lost_count += strand.skipped(first, last)
                continue
            piece = self._cut(frame, strands, first, last, taking)
            if piece is None:
                return
            # What none of them has rows in is behind them, and in nobody's hands.
            for strand in strands:
                strand.settled(start, piece.end)
            start = piece.end
            if piece.parts:
                for strand in strands:
                    strand.pulled(piece.first, piece.last, attempt + 1, tag)
                delivery.parts.extend(piece.parts)
                delivery.ranges.append((piece.first, piece.last, attempt + 1))
                delivery.tags.append(tag)
                delivery.count += piece.rows
                delivery.size += piece.size
                if attempt:
                    self.redelivered_count += piece.rows
            if piece.end < last or not taking.more:
                return
        for strand in strands:
            strand.settled(start, end)

    def _cut(self, frame: FrameView, strands: list[Strand], first: int, last: int, taking: _Taking) -> _Piece | None:
        """The rows of the strands in [first, last) of a frame, as far as there is room; None: there is none."""
        delivery = taking.delivery
        sequences = frame.sequences()
        low, high = np.searchsorted(sequences, [first, last]).tolist()
        taking.looked += high - low
        if strands[0].whole:
            low, high = low, min(high, low + taking.room)
            rows = np.arange(low, high)
        else:
            keys = self.partition.keys.of(frame)
            chosen = strands[0].chooses(keys.lps, keys.hashes)
            for strand in strands[1:]:
                chosen |= strand.chooses(keys.lps, keys.hashes)
            rows = low + np.flatnonzero(chosen[low:high])
            rows = rows[: taking.room]
        if not len(rows):
            return _Piece(first, first, last, 0, 0, [])
        end = last if len(rows) < taking.room else int(sequences[rows[-1]]) + 1
        try:
            parts, size = _select(frame, rows)
        except FrameError:
            # Its rows cannot be told apart any more.
            return _Piece(first, first, last, 0, 0, [])
        if delivery.count and delivery.size + size > taking.size:
            return None
        return _Piece(int(sequences[rows[0]]), int(sequences[rows[-1]]) + 1, end, len(rows), size, parts)

    def _walk(self, journal: Journal, start: int, end: int, *, again: bool) -> Iterator[Found]:
        """The frames with [start, end), those that outlived retention first."""
        kept_until = min(end, self.partition.start)
        if start < kept_until:
            sequences = self.kept.within(start, kept_until)
            places = self.kept.places(sequences.tolist())
            edges = [0, *(np.flatnonzero(np.diff(places)) + 1).tolist(), len(places)] if len(places) else []
            for a, b in pairwise(edges):
                frame = self.frame_of(journal.message_log, journal.kept_log, int(sequences[a]))
                yield Found(int(sequences[a]), int(sequences[b - 1]) + 1, frame)
            start = kept_until
        if start < end:
            for found in self.partition.walk(journal.message_log, start, end, again=again):
                yield Found(*found)

    def _rows(self, journal: Journal, strand: Strand, start: int, end: int) -> Iterator[tuple[Sequences, FrameKeys]]:
        """The sequences of a strand's rows in [start, end), with their keys."""
        for first, last, frame in self._walk(journal, start, end, again=True):
            if frame is None:
                continue
            keys = self.partition.keys.of(frame)
            sequences = frame.sequences()
            chosen = strand.chooses(keys.lps, keys.hashes) & (sequences >= first) & (sequences < last)
            if chosen.any():
                hashes = None if keys.hashes is None else keys.hashes[chosen]
                yield sequences[chosen], FrameKeys(keys.lps[chosen], hashes)

    # --- events from consumers ------------------------------------------------------------------

    def ack(self, consumer: Consumer, start: int, end: int, epoch: int, journal: Journal, tag: int = 0) -> int:
        """Those rows that were handed out under ``tag`` and lie in [start, end) are done; how many sequences."""
        start, end = self.partition.clip_to_epoch(start, min(end, self.partition.visible), epoch)
        count = 0
        for strand in self._holding(consumer.id):
            for piece in strand.in_hands(tag, start, end):
                journal.event(Action.ACK, self, strand.id, piece.start, piece.end, 0)
                strand.let_go(tag, piece.start, piece.end)
                count += piece.end - piece.start
        if self.kept:
            self.kept.settled()
        self._after_hands(journal)
        return count

    def _after_hands(self, journal: Journal) -> None:
        """Some rows are not in somebody's hands any more: what is leaving may go."""
        if any(strand.leaving for strand in self.strands):
            self.pass_on(journal, journal.leases.now())

    def _holding(self, owner: int) -> list[Strand]:
        return [each for each in self.strands if each.owner == owner and each.held]

    def nack(
        self,
        consumer: Consumer,
        ranges: list[tuple[int, int, int]],
        journal: Journal,
        now: int,
        failure: Failure = FAILURE,
        tags: Sequence[int] = (),
    ) -> int:
        """(start, end, epoch) ranges failed: they wait, hold their keys, or are dead letters; how many sequences."""
        count = 0
        for (first, last, epoch), tag in zip(ranges, tags or repeat(0), strict=False):
            start, end = self.partition.clip_to_epoch(first, min(last, self.partition.visible), epoch)
            for strand in self._holding(consumer.id):
                for piece in strand.in_hands(tag, start, end):
                    rows = list(self._rows(journal, strand, piece.start, piece.end))
                    strand.let_go(tag, piece.start, piece.end)
                    count += piece.end - piece.start
                    for sequences, keys in rows:
                        self._failed(strand, sequences, keys, piece.attempt, journal, now, failure)
        self._after_hands(journal)
        return count

    def _failed(
        self,
        strand: Strand,
        sequences: Sequences,
        keys: FrameKeys,
        attempt: int,
        journal: Journal,
        now: int,
        failure: Failure,
    ) -> None:
        """Rows of a strand, which are in nobody's hands any more, failed."""
        hashes = keys.hashes
        for start, end in joined(sequences):
            whole = Range(start, end, attempt)
            if not failure.counted and not failure.delay:
                # Nobody began with it, nor with what comes behind it.
                self._give_back(strand, whole, 0, journal, counted=False)
                continue
            if not self.strict or hashes is None:
                self._retry(strand, whole, journal, now, failure)
                continue
            low = int(np.searchsorted(sequences, start))
            for offset in range(end - start):
                key, lp = int(hashes[low + offset]), int(keys.lps[low + offset])
                row = Range(start + offset, start + offset + 1, attempt)
                if key == NO_KEY_HASH:
                    # Keyless rows never hold.
                    self._retry(strand, row, journal, now, failure)
                else:
                    self._hold(self.strands.for_row(lp, key), row, lp, key, journal, now, failure)

    def _retry(self, strand: Strand, piece: Range, journal: Journal, now: int, failure: Failure) -> None:
        for part, dies in self._fates(piece, failure, self._old_before(piece, now)):
            left = journal.bury(self, strand.id, [part], failure.reason) if dies else [part]
            for each in left:
                self._wait_for(strand, each, journal, now, FAILURE if dies else failure)

    def _wait_for(self, strand: Strand, piece: Range, journal: Journal, now: int, failure: Failure) -> None:
        seconds = self.retry.wait(piece.attempt, self._chance(piece)) if failure.delay is None else failure.delay
        counted = failure.counted
        self._give_back(strand, piece, due_time(now, seconds), journal, counted=counted, now=now)

    def _hold(
        self, strand: Strand, row: Range, lp: int, key: int, journal: Journal, now: int, failure: Failure
    ) -> None:
        """A row of a strict subject failed: its key waits alone; without attempts it is parked."""
        if strand.key is None:
            strand = self.strands.hold(strand, lp, key)
            strand.held = self._in_hands(journal, [strand]).get(lp, {})
            waiting, strand.waiting = strand.waiting, Waiting()
            for due, pieces in waiting:
                for piece in pieces:
                    for sequences, _ in self._rows(journal, strand, piece.start, piece.end):
                        for first, last in joined(sequences):
                            strand.waiting.add(first, last, piece.attempt, due)
        # What comes behind it is not handled before it, whoever has it.
        behind = [(tag, piece) for tag, held in strand.held.items() for piece in held.overlap(row.end, strand.next)]
        for tag, piece in behind:
            strand.let_go(tag, piece.start, piece.end)
            self._give_back(strand, piece, 0, journal, counted=False)
        dies = any(dies for _, dies in self._fates(row, failure, self._old_before(row, now)))
        if dies and not journal.bury(self, strand.id, [row], failure.reason):
            self._park(strand, row.start, journal)
            return
        self._wait_for(strand, row, journal, now, FAILURE if dies else failure)

    def _give_back(
        self, strand: Strand, piece: Range, due: int, journal: Journal, *, counted: bool = True, now: int = 0
    ) -> None:
        flags = 0 if counted else FLAG_UNCOUNTED
        journal.event(Action.NACK, self, strand.id, *piece, due, flags)
        strand.given_back(piece.start, piece.end, piece.attempt - (not counted), due)
        if counted and now:
            self.pull_log.note_failure(piece.start, piece.end, now)

    def lost(self, consumer: Consumer, journal: Journal, now: int) -> int:
        """Its lease is over: what it held was an attempt, for some the last; how many sequences."""
        reason = Reason("ConsumerLost", f"consumer {consumer.client} was lost while it held the message")
        for strand in self._holding(consumer.id):
            for tag, held in list(strand.held.items()):
                for piece in list(held):
                    if piece.attempt >= LOST_ATTEMPTS_MIN:
                        rows = list(self._rows(journal, strand, piece.start, piece.end))
                        strand.let_go(tag, piece.start, piece.end)
                        for sequences, keys in rows:
                            self._failed(strand, sequences, keys, piece.attempt, journal, now, Failure(0.0, reason))
        return self.offline(consumer, journal, now)

    def offline(self, consumer: Consumer, journal: Journal, now: int) -> int:
        """The consumer is gone: what it held and owned is for the others; how many sequences."""
        consumer.online = False
        count = 0
        for strand in self._holding(consumer.id):
            for piece in strand.all_held():
                count += piece.end - piece.start
                self._give_back(strand, piece, 0, journal)
            strand.held = {}
        self.locks.unheard.discard(consumer.id)
        self.locks.forget(consumer.id)
        self._set_locks(runs_of(self.locks.owner == consumer.id), journal)
        self.pass_on(journal, journal.leases.now())
        return count

    def reclaim(self, consumer: Consumer, holds: list[tuple[int, int, int]], journal: Journal, now: int) -> None:
        """An attaching consumer names what is in its hands (R13), row by row: that stays, all else comes back."""
        self.locks.unheard.discard(consumer.id)
        claimed = Ranges()
        for first, last, epoch in holds:
            claimed.add(*self.partition.clip_to_epoch(first, min(last, self.partition.visible), epoch), 0)
        for strand in [each for each in self.strands if each.owner == consumer.id]:
            held, strand.held = strand.all_held(), {}
            for piece in held:
                self._give_back(strand, piece, 0, journal, counted=False)
            for start, end, _ in claimed:
                for sequences, _ in self._rows(journal, strand, start, end):
                    for first, last in joined(sequences):
                        known = [*strand.returned.overlap(first, last), *strand.waiting.overlap(first, last)]
                        fresh = [Range(max(first, strand.next), last, 0)] if last > strand.next else []
                        for piece in [*known, *fresh]:
                            strand.pulled(piece.start, piece.end, piece.attempt + 1, 0)

    def reset(self, sequence: int, journal: Journal) -> None:
        """The group goes on from ``sequence``."""
        self._set_locks(runs_of(self.locks.owner > 0), journal)
        number = self.strands.begin(sequence)
        journal.event(Action.RESET, self, number, sequence, sequence, 0)
        self.pull_log.reset(sequence)
        self.kept.settled()

    # --- dead letters, retention ----------------------------------------------------------------

    def buried(self, strand: int, start: int, end: int, attempt: int, now: int) -> None:
        """[start, end) of a strand is out of attempts."""
        found = self.strands.get(strand)
        if found is not None:
            found.settled(start, end)
        self.pull_log.buried(0, start, end, attempt, now)

    def revived(self, start: int, end: int, journal: Journal) -> int:
        """What is dead in [start, end) is handed out again, in its strand; how many sequences."""
        pieces = self.pull_log.dead.overlap(start, end)
        for strand in list(self.strands):
            for piece in pieces:
                for sequences, _ in self._rows(journal, strand, piece.start, piece.end):
                    for first, last in joined(sequences):
                        journal.event(Action.REVIVE, self, strand.id, first, last, 0)
                        self._revive(strand, first, last)
        return count_of(pieces)

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
        for strand in self.strands:
            for first, last in [*((piece.start, piece.end) for piece in lost), (strand.next, start)]:
                if first < last:
                    journal.event(Action.SKIP, self, strand.id, first, last, 0)
                    self.lost_count += strand.skipped(first, last)

    # --- retries --------------------------------------------------------------------------------

    @property
    def next_due(self) -> int | None:
        """When the next of what waits is due."""
        dues = [due for strand in self.strands if strand.waiting and (due := strand.waiting.next_due) is not None]
        return min(dues, default=None)

    def return_due(self, now: int) -> bool:
        """What has waited long enough may be handed out; whether there is anything."""
        ready = [strand for strand in self.strands if strand.waiting and strand.return_due(now)]
        return bool(ready)

    # --- parked keys ----------------------------------------------------------------------------

    def parked(self) -> list[Strand]:
        """The keys that wait for somebody's decision."""
        return [strand for strand in self.strands.by_key.values() if strand.parked]

    def resume(self, key: int, journal: Journal, *, skip: bool) -> bool:
        """Go on with a parked key: with the message that failed, or behind it (``skip``). False: it is not parked."""
        strand = self.strands.by_key.get(key)
        if strand is None or not strand.parked:
            return False
        strand.parked = False
        journal.event(Action.RESUME, self, strand.id, 0, 0, 0)
        # Letters of the key that were skipped before stay what they are, and one that was purged is not there any more.
        if not skip and self.pull_log.dead.overlap(strand.letter, strand.letter + 1):
            journal.event(Action.REVIVE, self, strand.id, strand.letter, strand.letter + 1, 0)
            self._revive(strand, strand.letter, strand.letter + 1)
        return True

    def _revive(self, strand: Strand, start: int, end: int) -> None:
        for first, last, attempt in self.pull_log.dead.remove(start, end):
            self.pull_log.resent.add(first, last, attempt)
            strand.given_back(first, last, attempt)

    # --- replay ---------------------------------------------------------------------------------

    def begin(self, sequence: int) -> None:
        self.strands.begin(sequence, 1)

    def forget(self, consumer: int, time: int) -> None:
        """A consumer is gone for good; what it had was told."""

    def forget_strangers(self, now: int) -> None:
        """Locks of consumers that nobody knows any more are free; each strand is its owner's."""
        known = [consumer.id for consumer in self.consumers.values()]
        self.locks.owner[~np.isin(self.locks.owner, known)] = 0
        self.locks.unheard = set(np.unique(self.locks.owner).tolist()) - {0}
        for owner in np.unique(self.locks.owner).tolist():
            for strand in self.strands.take_out(self.locks.owner == owner):
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
            strand.given_back(start, end, attempt)
        elif action == Action.NACK:
            uncounted = bool(flags & FLAG_UNCOUNTED)
            strand.given_back(start, end, attempt - uncounted, due)
            if not uncounted:
                self.pull_log.note_failure(start, end, time)
        elif action == Action.SKIP:
            self.lost_count += strand.skipped(start, end)
        elif action == Action.BURY:
            self.buried(consumer, start, end, attempt, time)
        elif action == Action.REVIVE:
            self._revive(strand, start, end)


def _select(frame: FrameView, rows: npt.NDArray[np.int64]) -> tuple[list[Buffer], int]:
    """Rows of a frame, ascending, as a frame of its own."""
    first, last = int(rows[0]), int(rows[-1]) + 1
    if last - first == len(rows):
        if len(rows) == frame.count:
            return [frame.buffer], frame.size
        if not frame.has(Column.SELECTION):
            piece = slice_rows(frame, first, last)
            return piece.parts, piece.size
    mask = np.zeros(frame.count, bool)
    mask[rows] = True
    piece = slice_mask(frame, mask)
    return piece.parts, piece.size


def _one(lp: int) -> LpSet:
    return lp_set([(lp, lp + 1)])


def _set_of(lps: Iterable[int]) -> LpSet:
    chosen = np.zeros(LOGICAL_PARTITIONS, bool)
    chosen[list(lps)] = True
    return chosen


def new_group(definition: GroupDefinition, partition: Partition, limits: ServerLimits, journal: Journal) -> Group:
    """A group as its definition says."""
    if definition.ordered:
        return OrderedGroup(definition, partition, limits, journal)
    return Group(definition, partition, limits)
