"""A shared consumer group: which consumer gets which rows next.

Rows that came back go out before new ones; nobody is bound to a part of the log. Every decision becomes an event of
the action log and a change of the group's ``PullLog``, in that order, so that replay reaches the same state.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from xxhash import xxh3_64_intdigest

from plait.broker.groups.definitions import GroupDefinitions
from plait.broker.partitions.partition import Partition
from plait.broker.partitions.suspended import Waiter
from plait.errors import FrameError
from plait.frame.builder import Buffer
from plait.frame.columns import Column
from plait.frame.slicing import slice_mask
from plait.frame.view import FrameView
from plait.limits import ServerLimits
from plait.model.reason import Reason
from plait.model.retry_policy import Retry, due_time
from plait.storage.logs.action_log import FLAG_UNCOUNTED, Action, GroupDefinition
from plait.storage.logs.log import Log
from plait.storage.logs.retained_log import RetainedRows, rows_of
from plait.storage.pull_log import PullLog
from plait.storage.ranges import Range

if TYPE_CHECKING:
    from plait.broker.groups.lease_grants import LeaseGrants

#: Pieces of returned ranges that one pull gathers: bounds the work of a pull on a scattered group.
PIECES_MAX = 64

#: The same for rows of one frame that lie apart, which cost less.
APART_MAX = 4_096

#: A message dies with its consumers after so many deliveries at the earliest, however few attempts it has: most of what
#: a lost consumer held it had not begun with.
LOST_ATTEMPTS_MIN = 16

#: Stands between the client id and the number of a consumer whose name another process has taken over; in no client id.
AFTER_CLIENT = "#"

#: The policy of groups that name none.
USUAL = Retry()

#: Looked up once: Python 3.11 runs a function for each look at a member.
_PULL, _ACK = Action.PULL, Action.ACK


class Delivery:
    """What one pull hands out."""

    __slots__ = ("count", "inflated", "parts", "ranges", "size", "tags")

    def __init__(self) -> None:
        self.parts: list[Buffer] = []
        #: (start, end, attempt) in the order of the parts.
        self.ranges: list[tuple[int, int, int]] = []
        #: For ordered consumers: of each range.
        self.tags: list[int] = []
        self.count = 0
        self.size = 0
        #: Bytes that its compressed columns inflate to.
        self.inflated = 0

    @property
    def weight(self) -> int:
        """Bytes that its reader needs memory for."""
        return self.size + self.inflated


class AttachedConsumer:
    """One member of a group. ``session`` changes with every attach; requests of an older one are refused."""

    __slots__ = ("_client", "_proof", "connected", "group", "heard", "id", "leased_until", "news", "online", "session")

    def __init__(self, consumer_id: int, group: Group, client: str, heard: float, proof: int = 0) -> None:
        self.id = consumer_id
        self.group = group
        self._client = client
        #: Of an ordered group: what is kept of the secret token with which it continues its session and renews its
        #: lease; 0: none.
        self._proof = proof
        self.session = 0
        #: Attached and not lost.
        self.online = False
        #: Its connection is open.
        self.connected = False
        self.heard = heard
        #: Of an ordered group: on the monotonic clock, until when its locks are certain.
        self.leased_until = 0.0
        #: Goes up whenever there is something new about its locks.
        self.news = 0

    @property
    def client(self) -> str:
        """What it calls itself; ``GroupDefinitions.redefine_consumer`` changes it."""
        return self._client

    @property
    def proof(self) -> int:
        return self._proof


class NackOutcome(NamedTuple):
    """What a consumer says of messages that it gives back."""

    #: Seconds to wait; None: as the group retries.
    delay: float | None = None
    reason: Reason = Reason()
    #: They are dead letters at once.
    reject: bool = False
    #: It was an attempt.
    counted: bool = True


FAILURE = NackOutcome()


class Journal(Protocol):
    """Where events go before they count, and messages that are to outlive the log."""

    @property
    def message_log(self) -> Log: ...

    @property
    def kept_log(self) -> Log: ...

    def event(
        self,
        action: Action,
        group: Group,
        consumer: int,
        start: int,
        end: int,
        attempt: int,
        due: int = 0,
        flags: int = 0,
    ) -> None: ...

    def bury(self, group: Group, consumer: int, pieces: list[Range], reason: Reason) -> list[Range]: ...

    @property
    def leases(self) -> LeaseGrants: ...

    @property
    def epoch(self) -> int: ...


class Group(GroupDefinitions):
    """A group of one subject on this broker."""

    __slots__ = (
        "died_count",
        "expected",
        "kept",
        "limits",
        "lost_count",
        "lost_estimated",
        "pull_log",
        "redelivered_count",
        "used",
        "waiters",
    )

    def __init__(self, definition: GroupDefinition, partition: Partition, limits: ServerLimits) -> None:
        super().__init__(definition, partition)
        self.pull_log = PullLog(definition.start)
        #: Where those are that it needs though the message log need not have them.
        self.kept = RetainedRows()
        #: Suspended pulls, the longest waiting first.
        self.waiters: dict[Waiter, None] = {}
        self.limits = limits
        #: When waiting rows are looked at next (``Retries``); 0: there is no need to.
        self.expected = 0
        #: Messages handed out again, and messages that retention or damage took first.
        self.redelivered_count = 0
        #: Messages that became dead letters since the start of the broker.
        self.died_count = 0
        self.lost_count = 0
        #: Not all of them could be counted.
        self.lost_estimated = False
        #: Wall time of the last attach or pull.
        self.used = definition.created

    @property
    def retry(self) -> Retry:
        """How long what failed waits."""
        return self.definition.retry or USUAL

    @property
    def logs_pulls(self) -> bool:
        """A broadcast group is one consumer: what it has not acked is what it needs, and no pull log is kept."""
        return not self.definition.broadcast

    @property
    def has_more(self) -> bool:
        """A pull would find rows now."""
        return self.pull_log.ready or self.pull_log.next < self.partition.visible

    # --- handing out ----------------------------------------------------------------------------

    def take(self, log: Log, consumer: AttachedConsumer, count: int, size: int, journal: Journal) -> Delivery | None:
        """Rows for a consumer, recorded as held by it; None when there are none."""
        delivery = Delivery()
        self.partition.expire_deleted(log)
        while len(delivery.ranges) < PIECES_MAX:
            if delivery.count >= count or (delivery.count and delivery.weight >= size):
                break
            if self.pull_log.ready:
                start, end, attempt = self.pull_log.returned.head()
                frame = self._frame_apart(log, journal.kept_log, start)
                if frame is not None:
                    gathered = self._take_apart(frame, consumer, count, size, journal, delivery)
                    if gathered:
                        continue
                    if gathered is None:
                        break
            elif not self._at_limit(consumer):
                start, end, attempt = self.pull_log.next, self.partition.visible, 0
            else:
                break
            if start < self.partition.start:
                end = min(self.partition.start, max(end, start + 1))
                # What is kept comes in its turn.
                self._skip(start, self.kept.elsewhere_after(start, end) if self.pull_log.returned else end, journal)
                continue
            if start >= self.partition.visible or start >= end:
                break
            # At most once there is no second delivery in which to look closer.
            again = attempt > 0 or self.definition.delivery == "at_most_once"
            # What came first goes out whatever its size; what is added must leave the reply in its limit.
            some = not delivery.count
            room = size - delivery.weight
            batch = self.partition.read(log, start, end, count - delivery.count, room, some=some, again=again)
            if batch.full and not batch.count:
                break
            if not batch.ranges:
                # A hole where damage was, or rows that do not read back.
                self._skip(start, batch.end if batch.end > start else self._after_hole(start, end), journal)
                continue
            if batch.ranges[0][0] > start:
                self._skip(start, batch.ranges[0][0], journal)
            for first, last in batch.ranges:
                self._hand(consumer, first, last, attempt + 1, journal)
                delivery.ranges.append((first, last, attempt + 1))
            for first, last in batch.damaged:
                self._skip(first, last, journal)
            delivery.parts.extend(batch.parts)
            delivery.count += batch.count
            delivery.size += batch.size
            delivery.inflated += batch.inflated
            if batch.end < end:
                # There was no more room; asking again would get one frame whatever its size.
                break
        return delivery if delivery.count else None

    def frame_of(self, log: Log, kept_log: Log, sequence: int) -> FrameView | None:
        """The frame that has a message that was handed out; None: it cannot be found.

        A copy was verified, as it is small; the original was not.
        """
        copy = self.kept.frame(kept_log, sequence) if self.kept else None
        try:
            if copy is not None:
                return copy.verify()
        except FrameError:
            # The original may be there still.
            pass
        return self.partition.whole_frame(log, sequence) if sequence >= self.partition.start else None

    def _frame_apart(self, log: Log, kept_log: Log, sequence: int) -> FrameView | None:
        """The frame in which rows that came back lie apart from others, or from where they were."""
        if self.kept and self.kept.offset(sequence) is not None:
            return self.frame_of(log, kept_log, sequence)
        return self.partition.whole_frame(log, sequence) if len(self.pull_log.returned) > 1 else None

    def _take_apart(
        self, frame: FrameView, consumer: AttachedConsumer, count: int, size: int, journal: Journal, delivery: Delivery
    ) -> bool | None:
        """Rows that came back and lie apart in one frame, as one piece; None: there is no room. False: not so."""
        room = count - delivery.count
        heads: list[Range] = []
        rows = 0
        mask = np.zeros(frame.count, bool)
        for start, end, attempt in self.pull_log.returned.heads(frame.end, min(room, APART_MAX)):
            # All rows of a piece are on the same attempt.
            if rows >= room or (heads and attempt != heads[0].attempt):
                break
            first, last = rows_of(frame, start, min(end, start + room - rows))
            if first == last:
                break
            mask[first:last] = True
            heads.append(Range(start, start + last - first, attempt))
            rows += last - first
            if heads[-1].end < end:
                break
        if not heads or (len(heads) < 2 and not frame.has(Column.SELECTION)):
            return False
        try:
            piece = slice_mask(frame, mask)
        except FrameError:
            # What is damaged takes the long way.
            return False
        if delivery.count and delivery.weight + piece.size + frame.inflated_size > size:
            return None
        for start, end, attempt in heads:
            if self.logs_pulls:
                journal.event(_PULL, self, consumer.id, start, end, attempt + 1)
            delivery.ranges.append((start, end, attempt + 1))
        self.pull_log.pulled_heads(consumer.id, heads)
        if heads[0].attempt:
            self.redelivered_count += rows
        delivery.parts.extend(piece.parts)
        delivery.count += rows
        delivery.size += piece.size
        delivery.inflated += frame.inflated_size
        return True

    def _at_limit(self, consumer: AttachedConsumer) -> bool:
        limits, pull_log = self.limits, self.pull_log
        return (
            pull_log.ranges_of(consumer.id) >= limits.consumer_ranges
            or len(pull_log.waiting) >= limits.retry_ranges
            or len(self.kept) >= limits.kept_messages
        )

    def _after_hole(self, start: int, end: int) -> int:
        index = self.partition.consume_log.find(start)
        if index >= len(self.partition.consume_log):
            return end
        return max(start + 1, min(end, self.partition.consume_log.record(index).base))

    def _hand(self, consumer: AttachedConsumer, start: int, end: int, attempt: int, journal: Journal) -> None:
        self._record(consumer, start, end, attempt, journal)
        if attempt > 1:
            self.redelivered_count += end - start

    def _record(self, consumer: AttachedConsumer, start: int, end: int, attempt: int, journal: Journal) -> None:
        """The rows are in the consumer's hands."""
        if self.logs_pulls:
            journal.event(_PULL, self, consumer.id, start, end, attempt)
        self.pull_log.pulled(consumer.id, start, end, attempt)

    def _skip(self, start: int, end: int, journal: Journal) -> None:
        journal.event(Action.SKIP, self, 0, start, end, 0)
        self.lost_count += self.pull_log.skipped(start, end)

    # --- events from consumers ------------------------------------------------------------------

    def ack(
        self, consumer: AttachedConsumer, ranges: list[tuple[int, int, int]], journal: Journal, tags: Sequence[int] = ()
    ) -> int:
        """(start, end, epoch) ranges are done; how many sequences that settled."""
        count = 0
        for first, last, epoch in ranges:
            # An ack may be all that is left of a pull that a power loss took, if its rows are of an earlier epoch. But
            # many that lie apart, of rows that no consumer was handed, would take memory without end.
            scattered = len(self.pull_log.returned) >= self.limits.consumer_ranges
            handed = self.pull_log.next if scattered or epoch == journal.epoch else self.partition.visible
            start, end = self.partition.clip_to_epoch(first, min(last, handed), epoch)
            if start < end:
                journal.event(_ACK, self, consumer.id, start, end, 0)
                if self.kept:
                    self.kept.settled()
                count += self.pull_log.acked(consumer.id, start, end)
        return count

    def nack(
        self,
        consumer: AttachedConsumer,
        ranges: list[tuple[int, int, int]],
        journal: Journal,
        now: int,
        failure: NackOutcome = FAILURE,
        tags: Sequence[int] = (),
    ) -> int:
        """(start, end, epoch) ranges failed: they wait, or are dead letters; how many sequences it held."""
        held = self.pull_log.held.get(consumer.id)
        if held is None:
            return 0
        over: list[Range] = []
        count = 0
        for first, last, epoch in ranges:
            for piece in held.overlap(*self.partition.clip_to_epoch(first, last, epoch)):
                count += piece.end - piece.start
                for part, dies in self._fates(piece, failure, self._old_before(piece, now)):
                    if dies:
                        over.append(part)
                    else:
                        self._wait(consumer, part, now, failure, journal)
        if over:
            for piece in journal.bury(self, consumer.id, over, failure.reason):
                # There was no room for it.
                self._wait(consumer, piece, now, FAILURE, journal)
        return count

    def _wait(self, consumer: AttachedConsumer, piece: Range, now: int, failure: NackOutcome, journal: Journal) -> None:
        delay = failure.delay
        seconds = self.retry.wait(piece.attempt, self._chance(piece)) if delay is None else delay
        due = due_time(now, seconds)
        if self.logs_pulls:
            flags = 0 if failure.counted else FLAG_UNCOUNTED
            journal.event(Action.NACK, self, consumer.id, *piece, due, flags)
        self.pull_log.nacked(consumer.id, piece.start, piece.end, due, now, counted=failure.counted)

    def _old_before(self, piece: Range, now: int) -> int:
        """Below this what failed is too old to be tried again."""
        expires = self.retry.expires
        if expires is None:
            return 0
        log = self.partition.consume_log
        first, last = log.find(piece.start), log.find(piece.end - 1)
        if first >= len(log) or log.record(first).base > piece.start:
            # It has outlived retention; how old it is is not known here.
            return 0
        oldest = now - round(expires * 1_000_000)
        index = bisect_left(range(last + 1), oldest, first, key=lambda index: log.record(index).time)
        return log.record(index).base if index <= last else piece.end

    def _fates(
        self, piece: Range, failure: NackOutcome, old: int, attempts_min: int = 1
    ) -> Iterator[tuple[Range, bool]]:
        """The parts of what failed, and whether each is a dead letter."""
        if failure.reject or not failure.counted:
            yield piece, failure.reject
            return
        start, end, attempt = piece
        attempts = self.retry.attempts
        for first, last, before in [*self.pull_log.resent.overlap(start, end), Range(end, end, 0)]:
            # Those between were never dead; for those that were attempts count from then on, and their age does not.
            for low, high, made, limit in ((start, first, attempt, old), (first, last, attempt - before, 0)):
                over = attempts is not None and made >= max(attempts, attempts_min)
                middle = high if over else min(max(low, limit), high)
                if low < middle:
                    yield Range(low, middle, attempt), True
                if middle < high:
                    yield Range(middle, high, attempt), False
            start = last

    def _chance(self, piece: Range) -> float:
        """From 0 to 1, the same for the same failure of the same rows."""
        return float(xxh3_64_intdigest(b"%d-%d-%d" % (self.id, piece.start, piece.attempt))) / 2**64

    def lost(self, consumer: AttachedConsumer, journal: Journal, now: int) -> int:
        """Nobody heard from the consumer: what it held was an attempt, for some the last; how many sequences.

        What ends those who handle it must not go round for ever.
        """
        held = self.pull_log.held.get(consumer.id)
        count = 0
        if held is not None:
            count = held.count
            over = [part for piece in held for part, dies in self._fates(piece, FAILURE, 0, LOST_ATTEMPTS_MIN) if dies]
            if over:
                reason = Reason("ConsumerLost", f"consumer {consumer.client} was lost while it held the message")
                journal.bury(self, consumer.id, over, reason)
        self.offline(consumer, journal, now)
        return count

    def offline(self, consumer: AttachedConsumer, journal: Journal, now: int) -> int:
        """The consumer left: what it held waits for the others; how many sequences."""
        consumer.online = False
        if consumer.id in self.pull_log.held and self.logs_pulls:
            journal.event(Action.OFFLINE, self, consumer.id, 0, 0, 0)
        return self.pull_log.offline(consumer.id, now)

    def reclaim(
        self, consumer: AttachedConsumer, holds: list[tuple[int, int, int]], journal: Journal, now: int
    ) -> None:
        """An attaching consumer names what is in its hands (R13): that stays, what else it was handed comes back."""
        claimed = []
        for start, end, epoch in holds:
            # Of rows of this epoch every pull is known: what was never handed out is held by no consumer.
            handed = self.pull_log.next if epoch == journal.epoch else self.partition.visible
            start, end = self.partition.clip_to_epoch(start, min(end, handed), epoch)
            if start < end:
                claimed.append((start, end))
        recorded = self.pull_log.held.get(consumer.id)
        kept = [piece for start, end in claimed for piece in (recorded.overlap(start, end) if recorded else [])]
        free = [piece for start, end in claimed for piece in self.pull_log.returned.overlap(start, end)]
        fresh = [(max(start, self.pull_log.next), end) for start, end in claimed if end > self.pull_log.next]
        self.offline(consumer, journal, now)
        for start, end, attempt in [*kept, *free]:
            self._record(consumer, start, end, max(attempt, 1), journal)
        for start, end in fresh:
            self._record(consumer, start, end, 1, journal)

    def reset(self, sequence: int, journal: Journal) -> None:
        """The group goes on from ``sequence``."""
        journal.event(Action.RESET, self, 0, sequence, sequence, 0)
        self.pull_log.reset(sequence)
        self.kept.settled()

    # --- dead letters, retention, retries -------------------------------------------------------

    def buried(self, consumer: int, start: int, end: int, attempt: int, now: int) -> None:
        """[start, end), which a consumer held, is out of attempts."""
        self.pull_log.buried(consumer, start, end, attempt, now)

    def revived(self, start: int, end: int, journal: Journal) -> int:
        """What is dead in [start, end) is handed out again; how many sequences."""
        journal.event(Action.REVIVE, self, 0, start, end, 0)
        return self.pull_log.revived(start, end)

    @property
    def floor(self) -> int:
        """Everything below is done, or dead."""
        return self.pull_log.floor

    def begun(self, start: int, end: int, journal: Journal) -> list[Range]:
        """What was handed out and is neither done nor dead in [start, end); in no order."""
        return self.pull_log.begun(start, end)

    def begin_with(self, end: int) -> None:
        """Below ``end`` retention is about to take what is not begun with."""

    def expire(self, lost: list[Range], start: int, journal: Journal) -> None:
        """Retention took ``lost``, and all below ``start`` that was not begun with."""
        for first, last in [*((piece.start, piece.end) for piece in lost), (self.pull_log.next, start)]:
            if first < last:
                self._skip(first, last, journal)

    @property
    def next_due(self) -> int | None:
        """When the next of what waits is due."""
        return self.pull_log.waiting.next_due

    def return_due(self, now: int) -> bool:
        """What has waited long enough may be handed out; whether there is anything."""
        return self.pull_log.return_due(now)

    # --- replay ---------------------------------------------------------------------------------

    def begin(self, sequence: int) -> None:
        """A group that was just defined goes on from ``sequence``."""
        self.pull_log.reset(sequence)

    def forget(self, consumer: int, time: int) -> None:
        """A consumer is gone for good."""
        self.pull_log.offline(consumer, time)

    def forget_strangers(self, now: int) -> None:
        """What is in the hands of consumers that nobody knows any more goes back to the group."""
        known = {consumer.id for consumer in self.consumers.values()}
        for consumer_id in self.pull_log.held.keys() - known:
            self.pull_log.offline(consumer_id, now)

    def replay(self, action: int, flags: int, consumer: int, piece: Range, due: int, time: int) -> None:
        """Apply an event of the action log."""
        start, end, attempt = piece
        if start >= end and action not in (Action.OFFLINE, Action.RESET):
            return
        if action == Action.PULL:
            self.pull_log.pulled(consumer, start, end, attempt)
        elif action == Action.ACK:
            self.pull_log.acked(consumer, start, end)
        elif action == Action.NACK:
            self.pull_log.nacked(consumer, start, end, due, time, counted=not flags & FLAG_UNCOUNTED)
        elif action == Action.OFFLINE:
            self.pull_log.offline(consumer, time)
        elif action == Action.RESET:
            self.pull_log.reset(start)
        elif action == Action.SKIP:
            self.lost_count += self.pull_log.skipped(start, end)
        elif action == Action.BURY:
            self.pull_log.buried(consumer, start, end, attempt, time)
        elif action == Action.REVIVE:
            self.pull_log.revived(start, end)
        elif action == Action.PURGE:
            self.pull_log.purged(start, end)

    # --- waiting --------------------------------------------------------------------------------

    def serve(self, log: Log, journal: Journal, send: Callable[[Waiter, Delivery], None]) -> None:
        """Give rows to waiting pulls, the longest waiting first, until rows or pulls run out."""
        passed = 0
        while passed < len(self.waiters):
            waiter = next(islice(self.waiters, passed, None))
            delivery = self.take(log, waiter.consumer, waiter.count, waiter.size, journal)
            if delivery is not None:
                waiter.leave()
                send(waiter, delivery)
            elif self._at_limit(waiter.consumer):
                # There may be rows for the others.
                passed += 1
            else:
                return
