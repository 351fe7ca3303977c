"""A shared consumer group: which consumer gets which rows next.

Rows that came back go out before new ones; nobody is bound to a part of the log. Every decision becomes an event of
the action log and a change of the group's ``PullLog``, in that order, so that replay reaches the same state.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Protocol

import numpy as np
from xxhash import xxh3_64_intdigest

from plait.broker.partition import Partition
from plait.broker.waiting import Waiter
from plait.errors import FrameError
from plait.frame.builder import Buffer
from plait.frame.slicing import slice_mask
from plait.limits import ServerLimits
from plait.retry import Retry, due_time
from plait.storage.action_log import Action, GroupDefinition
from plait.storage.log import Log
from plait.storage.pull_log import PullLog
from plait.storage.ranges import Range

#: Pieces of returned ranges that one pull gathers: bounds the work of a pull on a scattered group.
PIECES_MAX = 64

#: The same for rows of one frame that lie apart, which cost less.
APART_MAX = 4_096

#: The policy of groups that name none.
USUAL = Retry()

#: Looked up once: Python 3.11 runs a function for each look at a member.
_PULL, _ACK = Action.PULL, Action.ACK


class Delivery:
    """What one pull hands out."""

    __slots__ = ("count", "parts", "ranges", "size")

    def __init__(self) -> None:
        self.parts: list[Buffer] = []
        #: (start, end, attempt) in the order of the parts.
        self.ranges: list[tuple[int, int, int]] = []
        self.count = 0
        self.size = 0


class Consumer:
    """One member of a group. ``session`` changes with every attach; requests of an older one are refused."""

    __slots__ = ("client", "connected", "group", "heard", "id", "online", "session")

    def __init__(self, consumer_id: int, group: Group, client: str, heard: float) -> None:
        self.id = consumer_id
        self.group = group
        self.client = client
        self.session = 0
        #: Attached and not lost.
        self.online = False
        #: Its connection is open.
        self.connected = False
        self.heard = heard


class Journal(Protocol):
    """Where events go before they count."""

    def event(
        self, action: Action, group: Group, consumer: int, start: int, end: int, attempt: int, due: int = 0
    ) -> None: ...


class Group:
    """A group of one subject on this broker."""

    __slots__ = (
        "consumers",
        "definition",
        "expected",
        "limits",
        "lost_count",
        "partition",
        "pull_log",
        "redelivered_count",
        "used",
        "waiters",
    )

    def __init__(self, definition: GroupDefinition, partition: Partition, limits: ServerLimits) -> None:
        self.definition = definition
        self.partition = partition
        self.pull_log = PullLog(definition.start)
        self.consumers: dict[str, Consumer] = {}
        #: Suspended pulls, the longest waiting first.
        self.waiters: dict[Waiter, None] = {}
        self.limits = limits
        #: When waiting rows are looked at next (``Retries``); 0: there is no need to.
        self.expected = 0
        #: Messages handed out again, and messages that retention or damage took first.
        self.redelivered_count = 0
        self.lost_count = 0
        #: Wall time of the last attach or pull.
        self.used = definition.created

    @property
    def id(self) -> int:
        return self.definition.id

    @property
    def name(self) -> str:
        return self.definition.name

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

    def take(self, log: Log, consumer: Consumer, count: int, size: int, journal: Journal) -> Delivery | None:
        """Rows for a consumer, recorded as held by it; None when there are none."""
        delivery = Delivery()
        while len(delivery.ranges) < PIECES_MAX:
            if delivery.count >= count or (delivery.count and delivery.size >= size):
                break
            if self.pull_log.ready:
                start, end, attempt = self.pull_log.returned.head()
                if start >= self.partition.start and len(self.pull_log.returned) > 1:
                    gathered = self._take_apart(log, consumer, count, size, journal, delivery)
                    if gathered:
                        continue
                    if gathered is None:
                        break
            elif not self._at_limit(consumer):
                start, end, attempt = self.pull_log.next, self.partition.visible, 0
            else:
                break
            if start < self.partition.start:
                self._skip(start, min(self.partition.start, max(end, start + 1)), journal)
                continue
            if start >= self.partition.visible or start >= end:
                break
            # At most once there is no second delivery in which to look closer.
            again = attempt > 0 or self.definition.delivery == "at_most_once"
            # What came first goes out whatever its size; what is added must leave the reply in its limit.
            some = not delivery.count
            room = size - delivery.size
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
            if batch.end < end:
                # There was no more room; asking again would get one frame whatever its size.
                break
        return delivery if delivery.count else None

    def _take_apart(
        self, log: Log, consumer: Consumer, count: int, size: int, journal: Journal, delivery: Delivery
    ) -> bool | None:
        """Rows that came back and lie apart in one frame, as one piece; None: there is no room. False: not so."""
        returned = self.pull_log.returned
        frame = self.partition.whole_frame(log, returned.first)
        if frame is None or self.definition.delivery == "at_most_once":
            return False
        room = count - delivery.count
        heads: list[Range] = []
        rows = 0
        mask = np.zeros(frame.count, bool)
        for start, end, attempt in returned.heads(frame.base + frame.count, min(room, APART_MAX)):
            # All rows of a piece are on the same attempt.
            if rows >= room or (heads and attempt != heads[0].attempt):
                break
            end = min(end, start + room - rows)
            mask[start - frame.base : end - frame.base] = True
            heads.append(Range(start, end, attempt))
            rows += end - start
        if len(heads) < 2:
            return False
        try:
            piece = slice_mask(frame, mask)
        except FrameError:
            # What is damaged takes the long way.
            return False
        if delivery.count and delivery.size + piece.size > size:
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
        return True

    def _at_limit(self, consumer: Consumer) -> bool:
        limits, pull_log = self.limits, self.pull_log
        return pull_log.ranges_of(consumer.id) >= limits.consumer_ranges or len(pull_log.waiting) >= limits.retry_ranges

    def _after_hole(self, start: int, end: int) -> int:
        index = self.partition.consume_log.find(start)
        if index >= len(self.partition.consume_log):
            return end
        return max(start + 1, min(end, self.partition.consume_log.record(index).base))

    def _hand(self, consumer: Consumer, start: int, end: int, attempt: int, journal: Journal) -> None:
        self._record(consumer, start, end, attempt, journal)
        if attempt > 1:
            self.redelivered_count += end - start

    def _record(self, consumer: Consumer, start: int, end: int, attempt: int, journal: Journal) -> None:
        """The rows are in the consumer's hands."""
        if self.definition.delivery == "at_most_once":
            journal.event(_ACK, self, consumer.id, start, end, attempt)
            self.pull_log.acked(consumer.id, start, end)
            return
        if self.logs_pulls:
            journal.event(_PULL, self, consumer.id, start, end, attempt)
        self.pull_log.pulled(consumer.id, start, end, attempt)

    def _skip(self, start: int, end: int, journal: Journal) -> None:
        journal.event(Action.SKIP, self, 0, start, end, 0)
        self.lost_count += self.pull_log.skipped(start, end)

    # --- events from consumers ------------------------------------------------------------------

    def ack(self, consumer: Consumer, start: int, end: int, epoch: int, journal: Journal) -> int:
        """[start, end) of ``epoch`` is done; how many sequences that settled."""
        # An ack may be all that is left of a pull that a power loss took. But many that lie apart, of rows that
        # nobody was handed, would take memory without end.
        handed = (
            self.pull_log.next if len(self.pull_log.returned) >= self.limits.consumer_ranges else self.partition.visible
        )
        start, end = self.partition.clip_to_epoch(start, min(end, handed), epoch)
        if start >= end:
            return 0
        journal.event(_ACK, self, consumer.id, start, end, 0)
        return self.pull_log.acked(consumer.id, start, end)

    def nack(
        self,
        consumer: Consumer,
        start: int,
        end: int,
        epoch: int,
        journal: Journal,
        now: int,
        delay: float | None,
    ) -> int:
        """[start, end) failed and waits ``delay`` seconds (None: as the group retries); how many it held."""
        start, end = self.partition.clip_to_epoch(start, end, epoch)
        held = self.pull_log.held.get(consumer.id)
        pieces = held.overlap(start, end) if held is not None else []
        for piece in pieces:
            seconds = self.retry.wait(piece.attempt, self._chance(piece)) if delay is None else delay
            due = due_time(now, seconds)
            if self.logs_pulls:
                journal.event(Action.NACK, self, consumer.id, piece.start, piece.end, piece.attempt, due)
            self.pull_log.nacked(consumer.id, piece.start, piece.end, due)
        return sum(piece.end - piece.start for piece in pieces)

    def _chance(self, piece: Range) -> float:
        """From 0 to 1, the same for the same failure of the same rows."""
        return float(xxh3_64_intdigest(b"%d-%d-%d" % (self.id, piece.start, piece.attempt))) / 2**64

    def offline(self, consumer: Consumer, journal: Journal) -> int:
        """The consumer is lost or left: what it held waits for the others; how many sequences."""
        consumer.online = False
        if consumer.id in self.pull_log.held and self.logs_pulls:
            journal.event(Action.OFFLINE, self, consumer.id, 0, 0, 0)
        return self.pull_log.offline(consumer.id)

    def reclaim(self, consumer: Consumer, holds: list[tuple[int, int, int]], journal: Journal) -> None:
        """An attaching consumer names what is in its hands (R13): that stays, what else it was handed comes back."""
        claimed = []
        for start, end, epoch in holds:
            start, end = self.partition.clip_to_epoch(start, min(end, self.partition.visible), epoch)
            if start < end:
                claimed.append((start, end))
        recorded = self.pull_log.held.get(consumer.id)
        kept = [piece for start, end in claimed for piece in (recorded.overlap(start, end) if recorded else [])]
        free = [piece for start, end in claimed for piece in self.pull_log.returned.overlap(start, end)]
        fresh = [(max(start, self.pull_log.next), end) for start, end in claimed if end > self.pull_log.next]
        self.offline(consumer, journal)
        for start, end, attempt in [*kept, *free]:
            self._record(consumer, start, end, max(attempt, 1), journal)
        for start, end in fresh:
            self._record(consumer, start, end, 1, journal)

    def reset(self, sequence: int, journal: Journal) -> None:
        """The group goes on from ``sequence``."""
        journal.event(Action.RESET, self, 0, sequence, sequence, 0)
        self.pull_log.reset(sequence)

    # --- replay ---------------------------------------------------------------------------------

    def forget_strangers(self) -> None:
        """What is in the hands of consumers that nobody knows any more goes back to the group."""
        known = {consumer.id for consumer in self.consumers.values()}
        for consumer_id in self.pull_log.held.keys() - known:
            self.pull_log.offline(consumer_id)

    def replay(self, action: int, consumer: int, start: int, end: int, attempt: int, due: int = 0) -> None:
        """Apply an event of the action log."""
        if start >= end and action in (Action.PULL, Action.ACK, Action.NACK, Action.SKIP):
            return
        if action == Action.PULL:
            self.pull_log.pulled(consumer, start, end, attempt)
        elif action == Action.ACK:
            self.pull_log.acked(consumer, start, end)
        elif action == Action.NACK:
            self.pull_log.nacked(consumer, start, end, due)
        elif action == Action.OFFLINE:
            self.pull_log.offline(consumer)
        elif action == Action.RESET:
            self.pull_log.reset(start)
        elif action == Action.SKIP:
            self.lost_count += self.pull_log.skipped(start, end)

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
