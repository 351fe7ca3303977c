"""A shared consumer group: which consumer gets which rows next.

The group delivers returned rows before new ones, and any consumer may get any row. It records each decision as an event
of the action log and then applies it to its ``PullLog``, so that replay reaches the same state.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np
from xxhash import xxh3_64_intdigest

from plait.broker.groups.definitions import GroupDefinitions
from plait.broker.groups.locks import LockFloors
from plait.broker.partitions.partition import Partition
from plait.broker.partitions.suspended import Waiter
from plait.clock import Clock
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

#: Pieces of returned ranges that one pull collects at most: bounds its work where returned ranges are scattered.
PIECES_MAX = 64

#: Returned ranges within one frame that one pull collects at most; they cost less.
APART_MAX = 4_096

#: A message becomes a dead letter by losing its consumers only after this many deliveries, even if its policy allows
#: fewer attempts: a lost consumer had not started most of the rows that it held.
LOST_ATTEMPTS_MIN = 16

#: Separates client id and number in the name of a consumer whose client id another process took; no client id has it.
AFTER_CLIENT = "#"

#: The policy of groups without one.
DEFAULT_RETRY = Retry()

#: Looked up once: Python 3.11 calls a function for each access to an enum member.
_PULL, _ACK = Action.PULL, Action.ACK


class Delivery:
    """The rows that one pull gets."""

    __slots__ = ("count", "parts", "ranges", "size", "tags", "weight")

    def __init__(self) -> None:
        self.parts: list[Buffer] = []
        #: (start, end, attempt) in the order of the parts.
        self.ranges: list[tuple[int, int, int]] = []
        #: For ordered consumers: the tag of each range.
        self.tags: list[int] = []
        self.count = 0
        self.size = 0
        #: Bytes of memory that the consumer needs for it: ``size``, and what its compressed columns inflate to.
        self.weight = 0


class AttachedConsumer:
    """One consumer of a group. Each attach gives it a new ``session``; requests of an earlier session are refused."""

    __slots__ = (
        "_client",
        "_proof",
        "connected",
        "group",
        "id",
        "last_contact",
        "leased_until",
        "news",
        "online",
        "session",
    )

    def __init__(self, consumer_id: int, group: Group, client: str, last_contact: float, proof: int = 0) -> None:
        self.id = consumer_id
        self.group = group
        self._client = client
        #: Of an ordered group: the proof of the secret token that continues its session and renews its lease; 0:
        #: none.
        self._proof = proof
        self.session = 0
        #: Attached and not lost.
        self.online = False
        #: Its connection is open.
        self.connected = False
        #: On the monotonic clock: when its last request came.
        self.last_contact = last_contact
        #: Of an ordered group: the end of its lease, on the monotonic clock.
        self.leased_until = 0.0
        #: Incremented whenever its locks change.
        self.news = 0

    @property
    def client(self) -> str:
        """Its client id; ``GroupDefinitions.redefine_consumer`` changes it."""
        return self._client

    @property
    def proof(self) -> int:
        return self._proof


class NackOutcome(NamedTuple):
    """The outcome that a consumer reports for messages that it did not ack."""

    #: Seconds until the retry; None: as the group's policy says.
    delay: float | None = None
    reason: Reason = Reason()
    #: The messages become dead letters at once.
    reject: bool = False
    #: The delivery counts as an attempt.
    counted: bool = True


FAILURE = NackOutcome()
#: Makes dead letters of ranges of a group that a consumer (or cursor) holds; returns the ranges that must wait.
Bury = Callable[["Group", int, list[Range], Reason], list[Range]]


class Journal(Protocol):
    """Records the events of groups, and makes dead letters. The broker's turn implements it."""

    @property
    def message_log(self) -> Log: ...

    @property
    def retained_log(self) -> Log: ...

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

    @property
    def bury(self) -> Bury: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def floors(self) -> LockFloors: ...

    @property
    def epoch(self) -> int: ...


class Group(GroupDefinitions):
    """A group of one subject on this broker."""

    __slots__ = (
        "died_count",
        "expected",
        "limits",
        "lost_count",
        "lost_estimated",
        "pull_log",
        "redelivered_count",
        "retained",
        "used",
        "waiters",
    )

    def __init__(self, definition: GroupDefinition, partition: Partition, limits: ServerLimits) -> None:
        super().__init__(definition, partition)
        self.pull_log = PullLog(definition.start)
        #: Where the retained log has the rows that this group needs.
        self.retained = RetainedRows()
        #: Suspended pulls, the longest waiting first.
        self.waiters: dict[Waiter, None] = {}
        self.limits = limits
        #: When ``Retries`` examines waiting rows next, in microseconds; 0: it need not.
        self.expected = 0
        #: Messages delivered again.
        self.redelivered_count = 0
        #: Messages that became dead letters since the start of the broker.
        self.died_count = 0
        #: Messages that retention or damage removed before they were done.
        self.lost_count = 0
        #: ``lost_count`` includes estimates.
        self.lost_estimated = False
        #: Wall time of the last attach or pull.
        self.used = definition.created

    @property
    def retry(self) -> Retry:
        """The retry policy."""
        return self.definition.retry or DEFAULT_RETRY

    @property
    def logs_pulls(self) -> bool:
        """Whether pulls are recorded. A broadcast group has one consumer, which needs its unacked rows."""
        return not self.definition.broadcast

    @property
    def has_more(self) -> bool:
        """Whether a pull would find rows now."""
        pull_log = self.pull_log
        if pull_log.next < self.partition.visible or pull_log.returned.length:
            return True
        return pull_log.waiting.length > 0 and pull_log.ready

    # --- delivery -------------------------------------------------------------------------------

    def take(self, log: Log, consumer: AttachedConsumer, count: int, size: int, journal: Journal) -> Delivery | None:
        """Rows for a consumer, recorded as held by it; None when there are none."""
        pull_log, partition = self.pull_log, self.partition
        if not (pull_log.returned.length or pull_log.waiting.length or pull_log.next < partition.visible):
            return None
        delivery = Delivery()
        if partition.log_start != log.start:
            partition.expire_deleted(log)
        while len(delivery.ranges) < PIECES_MAX:
            if delivery.count >= count or (delivery.count and delivery.weight >= size):
                break
            if pull_log.returned.length or (pull_log.waiting.length and pull_log.ready):
                start, end, attempt = pull_log.returned.head()
                frame = self._frame_apart(log, journal.retained_log, start)
                if frame is not None:
                    gathered = self._take_apart(frame, consumer, count, size, journal, delivery)
                    if gathered:
                        continue
                    if gathered is None:
                        break
            elif pull_log.next < partition.visible and not self._at_limit(consumer):
                start, end, attempt = pull_log.next, partition.visible, 0
            else:
                break
            if start < partition.start:
                end = min(partition.start, max(end, start + 1))
                # Retained rows are delivered when their turn comes.
                self._skip(start, self.retained.elsewhere_after(start, end) if pull_log.returned else end, journal)
                continue
            if start >= partition.visible or start >= end:
                break
            # An at-most-once group verifies at the first delivery, as there is no second one.
            again = attempt > 0 or self.definition.delivery == "at_most_once"
            # The first frame is delivered whatever its size; later ones must fit the size limit.
            some = not delivery.count
            room = size - delivery.weight
            batch = partition.read(log, start, end, count - delivery.count, room, some=some, again=again)
            if batch.full and not batch.count:
                break
            if not batch.ranges:
                # A gap left by damage, or unreadable rows.
                self._skip(start, batch.end if batch.end > start else self._after_hole(start, end), journal)
                continue
            if batch.ranges[0][0] > start:
                self._skip(start, batch.ranges[0][0], journal)
            for first, last in batch.ranges:
                self._record(consumer, first, last, attempt + 1, journal)
                delivery.ranges.append((first, last, attempt + 1))
                if attempt:
                    self.redelivered_count += last - first
            for first, last in batch.damaged:
                self._skip(first, last, journal)
            delivery.parts.extend(batch.parts)
            delivery.count += batch.count
            delivery.size += batch.size
            delivery.weight += batch.size + batch.inflated
            if batch.end < end:
                # The room is used up. Another read would return one frame whatever its size.
                break
        return delivery if delivery.count else None

    def frame_of(self, log: Log, retained_log: Log, sequence: int) -> FrameView | None:
        """The frame of a message that was delivered before; None: it cannot be found.

        A copy from the retained log is verified, as it is small. A frame of the message log is not.
        """
        copy = self.retained.frame(retained_log, sequence) if self.retained.offsets else None
        try:
            if copy is not None:
                return copy.verify()
        except FrameError:
            # The message log may still have the original.
            pass
        return self.partition.whole_frame(log, sequence) if sequence >= self.partition.start else None

    def _frame_apart(self, log: Log, retained_log: Log, sequence: int) -> FrameView | None:
        """The frame of a returned row, if its returned rows may be scattered or are in the retained log; else None."""
        if sequence in self.retained.offsets:
            return self.frame_of(log, retained_log, sequence)
        return self.partition.whole_frame(log, sequence) if self.pull_log.returned.length > 1 else None

    def _take_apart(
        self, frame: FrameView, consumer: AttachedConsumer, count: int, size: int, journal: Journal, delivery: Delivery
    ) -> bool | None:
        """Deliver scattered returned rows of one frame as one piece.

        Returns None if the piece does not fit, False if the rows are not scattered or the frame is damaged.
        """
        room = count - delivery.count
        heads: list[Range] = []
        rows = 0
        mask = np.zeros(frame.count, bool)
        for start, end, attempt in self.pull_log.returned.heads(frame.end, min(room, APART_MAX)):
            # All rows of a piece have the same attempt.
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
            # ``Partition.read`` deals with damage.
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
        delivery.weight += piece.size + frame.inflated_size
        return True

    def _at_limit(self, consumer: AttachedConsumer) -> bool:
        limits, held = self.limits, self.pull_log.held.get(consumer.id)
        return (
            (held is not None and held.length >= limits.consumer_ranges)
            or self.pull_log.waiting.length >= limits.retry_ranges
            or len(self.retained.offsets) >= limits.retained_messages
        )

    def _after_hole(self, start: int, end: int) -> int:
        index = self.partition.consume_log.find(start)
        if index >= len(self.partition.consume_log):
            return end
        return max(start + 1, min(end, self.partition.consume_log.record(index).base))

    def _record(self, consumer: AttachedConsumer, start: int, end: int, attempt: int, journal: Journal) -> None:
        """Record that the consumer holds the rows."""
        if not self.definition.broadcast:
            journal.event(_PULL, self, consumer.id, start, end, attempt)
        self.pull_log.pulled(consumer.id, start, end, attempt)

    def _skip(self, start: int, end: int, journal: Journal) -> None:
        journal.event(Action.SKIP, self, 0, start, end, 0)
        self.lost_count += self.pull_log.skipped(start, end)

    # --- events from consumers ------------------------------------------------------------------

    def ack(
        self, consumer: AttachedConsumer, ranges: list[tuple[int, int, int]], journal: Journal, tags: Sequence[int] = ()
    ) -> int:
        """(start, end, epoch) ranges are done; how many sequences this settled."""
        count = 0
        for first, last, epoch in ranges:
            # After a power loss, an ack of rows of an earlier epoch may be the only trace of their pull, so rows past
            # ``next`` may be acked. Not while returned ranges are scattered: acks of rows that were never delivered
            # could use memory without limit.
            scattered = self.pull_log.returned.length >= self.limits.consumer_ranges
            pulled_until = self.pull_log.next if scattered or epoch == journal.epoch else self.partition.visible
            start, end = self.partition.clip_to_epoch(first, min(last, pulled_until), epoch)
            if start < end:
                journal.event(_ACK, self, consumer.id, start, end, 0)
                if self.retained.offsets:
                    self.retained.settled()
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
        """(start, end, epoch) ranges failed: they wait or become dead letters; how many sequences the consumer held."""
        held = self.pull_log.held.get(consumer.id)
        if held is None:
            return 0
        over: list[Range] = []
        count = 0
        for first, last, epoch in ranges:
            for piece in held.overlap(*self.partition.clip_to_epoch(first, last, epoch)):
                count += piece.end - piece.start
                for part, dead in self._split_dead(piece, failure, self._old_before(piece, now)):
                    if dead:
                        over.append(part)
                    else:
                        self._wait(consumer, part, now, failure, journal)
        if over:
            for piece in journal.bury(self, consumer.id, over, failure.reason):
                # The retained log had no room for it, or it is damaged.
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
        """Failed rows of the piece below this sequence are too old for a retry."""
        expires = self.retry.expires
        if expires is None:
            return 0
        log = self.partition.consume_log
        first, last = log.find(piece.start), log.find(piece.end - 1)
        if first >= len(log) or log.record(first).base > piece.start:
            # Retention removed it from the consume log, so its age is not known.
            return 0
        oldest = now - round(expires * 1_000_000)
        index = bisect_left(range(last + 1), oldest, first, key=lambda index: log.record(index).time)
        return log.record(index).base if index <= last else piece.end

    def _split_dead(
        self, piece: Range, failure: NackOutcome, old: int, attempts_min: int = 1
    ) -> Iterator[tuple[Range, bool]]:
        """The parts of a failed piece, and whether each becomes a dead letter."""
        if failure.reject or not failure.counted:
            yield piece, failure.reject
            return
        start, end, attempt = piece
        attempts = self.retry.attempts
        for first, last, before in [*self.pull_log.resent.overlap(start, end), Range(end, end, 0)]:
            # Rows between resent letters were never dead. For resent letters the attempts before the resend and the age
            # do not count.
            for low, high, made, limit in ((start, first, attempt, old), (first, last, attempt - before, 0)):
                over = attempts is not None and made >= max(attempts, attempts_min)
                middle = high if over else min(max(low, limit), high)
                if low < middle:
                    yield Range(low, middle, attempt), True
                if middle < high:
                    yield Range(middle, high, attempt), False
            start = last

    def _chance(self, piece: Range) -> float:
        """A number from 0 to 1, always the same for the same attempt of the same rows."""
        return float(xxh3_64_intdigest(b"%d-%d-%d" % (self.id, piece.start, piece.attempt))) / 2**64

    def lost(self, consumer: AttachedConsumer, journal: Journal, now: int) -> int:
        """The consumer was lost: each row that it held counts an attempt; how many sequences.

        A message that crashes its consumer must not be redelivered without limit.
        """
        held = self.pull_log.held.get(consumer.id)
        count = 0
        if held is not None:
            count = held.count
            over = [
                part for piece in held for part, dead in self._split_dead(piece, FAILURE, 0, LOST_ATTEMPTS_MIN) if dead
            ]
            if over:
                reason = Reason("ConsumerLost", f"consumer {consumer.client} was lost while it held the message")
                journal.bury(self, consumer.id, over, reason)
        self.offline(consumer, journal, now)
        return count

    def offline(self, consumer: AttachedConsumer, journal: Journal, now: int) -> int:
        """The consumer left: return the rows that it held; how many sequences."""
        consumer.online = False
        if consumer.id in self.pull_log.held and self.logs_pulls:
            journal.event(Action.OFFLINE, self, consumer.id, 0, 0, 0)
        return self.pull_log.offline(consumer.id, now)

    def reclaim(
        self, consumer: AttachedConsumer, holds: list[tuple[int, int, int]], journal: Journal, now: int
    ) -> None:
        """An attaching consumer names the rows that it still holds (R13) and keeps; its other rows are returned."""
        claimed = []
        for start, end, epoch in holds:
            # Every pull of this epoch is known, so no consumer holds rows of this epoch that were never delivered.
            pulled_until = self.pull_log.next if epoch == journal.epoch else self.partition.visible
            start, end = self.partition.clip_to_epoch(start, min(end, pulled_until), epoch)
            if start < end:
                claimed.append((start, end))
        recorded = self.pull_log.held.get(consumer.id)
        still_held = [piece for start, end in claimed for piece in (recorded.overlap(start, end) if recorded else [])]
        free = [piece for start, end in claimed for piece in self.pull_log.returned.overlap(start, end)]
        new = [(max(start, self.pull_log.next), end) for start, end in claimed if end > self.pull_log.next]
        self.offline(consumer, journal, now)
        for start, end, attempt in [*still_held, *free]:
            self._record(consumer, start, end, max(attempt, 1), journal)
        for start, end in new:
            self._record(consumer, start, end, 1, journal)

    def reset(self, sequence: int, journal: Journal) -> None:
        """Set the group's position to ``sequence``."""
        journal.event(Action.RESET, self, 0, sequence, sequence, 0)
        self.pull_log.reset(sequence)
        self.retained.settled()

    # --- dead letters, retention, retries -------------------------------------------------------

    def buried(self, consumer: int, start: int, end: int, attempt: int, now: int) -> None:
        """[start, end), which a consumer held, became dead letters."""
        self.pull_log.buried(consumer, start, end, attempt, now)

    def revived(self, start: int, end: int, journal: Journal) -> int:
        """Deliver dead letters in [start, end) again; how many sequences."""
        journal.event(Action.REVIVE, self, 0, start, end, 0)
        return self.pull_log.revived(start, end)

    @property
    def floor(self) -> int:
        """Every row below this sequence is done or a dead letter."""
        return self.pull_log.floor

    def begun(self, start: int, end: int, journal: Journal) -> list[Range]:
        """Ranges in [start, end) that were delivered and are neither done nor dead letters; in no order."""
        return self.pull_log.begun(start, end)

    def mark_begun_below(self, end: int) -> None:
        """Retention is about to remove rows below ``end`` that are not begun."""

    def expire(self, lost: list[Range], start: int, journal: Journal) -> None:
        """Retention removed ``lost``, and every row below ``start`` that was not begun."""
        for first, last in [*((piece.start, piece.end) for piece in lost), (self.pull_log.next, start)]:
            if first < last:
                self._skip(first, last, journal)

    @property
    def next_due(self) -> int | None:
        """When the next waiting row is due; None: no row waits."""
        return self.pull_log.waiting.next_due

    def return_due(self, now: int) -> bool:
        """Make waiting rows that are due ready for delivery; whether there are any."""
        return self.pull_log.return_due(now)

    # --- replay ---------------------------------------------------------------------------------

    def begin(self, sequence: int) -> None:
        """Set the position of a newly defined group."""
        self.pull_log.reset(sequence)

    def forget(self, consumer: int, time: int) -> None:
        """A consumer was removed: return its rows."""
        self.pull_log.offline(consumer, time)

    def release_unknown_consumers(self, now: int) -> None:
        """Return rows that are held by unknown consumers."""
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

    # --- suspended pulls ------------------------------------------------------------------------

    def serve(self, log: Log, journal: Journal, send: Callable[[Waiter, Delivery], None]) -> None:
        """Answer suspended pulls, the longest waiting first, until there are no more rows or pulls."""
        passed = 0
        while passed < len(self.waiters):
            waiter = next(islice(self.waiters, passed, None))
            delivery = self.take(log, waiter.consumer, waiter.count, waiter.size, journal)
            if delivery is not None:
                waiter.leave()
                send(waiter, delivery)
            elif self._at_limit(waiter.consumer):
                # This consumer is at its limit; there may be rows for others.
                passed += 1
            else:
                return
