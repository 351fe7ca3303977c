"""A consumer group of one subject: what shared and ordered groups have in common.

A group records each decision as an event of the action log and then applies it to its cursors, so that replay reaches
the same state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec
from xxhash import xxh3_64_intdigest

from plait.clock import Clock
from plait.errors import FrameError
from plait.filter.message_filter import Filter, filter_of
from plait.filter.scan_budget import ScanBudget
from plait.frame.view import FrameView
from plait.limits import ServerLimits
from plait.model.reason import Reason
from plait.model.retry_policy import Retry, due_time
from plait.storage.cursor import Cursor, CursorState
from plait.storage.logs.action_events import Event
from plait.storage.logs.action_log import GroupDefinition
from plait.storage.logs.log import Log
from plait.storage.logs.retained_log import RetainedRows
from plait.storage.ranges import Failures, Range

if TYPE_CHECKING:
    from plait.broker.groups.ordered.locks import LockFloors
    from plait.broker.groups.waking import Waiter
    from plait.broker.partition_rate import PartitionRate, RateTimers
    from plait.broker.partitions.partition import Delivery, Partition

#: Separates client id and number in the name of a consumer whose client id another process took; no client id has it.
AFTER_CLIENT = "#"

#: The policy of groups without one.
DEFAULT_RETRY = Retry()


class AttachedConsumer(msgspec.Struct, eq=False):
    """One consumer of a group. Each attach gives it a new ``session``; requests of an earlier session are refused."""

    id: int
    group: Group
    #: Its client id; only ``Group.redefine_consumer`` changes it.
    client: str
    #: On the monotonic clock: when its last request came.
    last_contact: float
    #: Of an ordered group: the proof of the secret token that continues its session and renews its lease; 0: none. Only
    #: ``Group.redefine_consumer`` changes it.
    proof: int = 0
    session: int = 0
    #: True if the consumer is attached and not lost.
    online: bool = False
    #: True if its connection is open.
    connected: bool = False
    #: Of an ordered group: the end of its lease, on the monotonic clock.
    leased_until: float = 0.0
    #: Incremented whenever its locks change.
    news: int = 0

    def proved_by(self, token: int) -> bool:
        """Whether this is the token of its session. No token proves nothing."""
        return self.proof != 0 and proof_of(token) == self.proof


def proof_of(token: int) -> int:
    """The one-way hash of a session token that the broker stores in memory and in its logs; 0 for no token.

    A session token is a secret that identifies an ordered consumer (R28). A client id proves nothing: a user chooses
    it, and two processes can have the same one.
    """
    return int.from_bytes(blake2b(b"%d" % token, digest_size=7).digest(), "little") if token else 0


class NackOutcome(NamedTuple):
    """The outcome that a consumer reports for messages that it did not ack."""

    #: Seconds until the retry; None: as the group's policy says.
    delay: float | None = None
    reason: Reason = Reason()
    #: True if the messages become dead letters at once.
    reject: bool = False
    #: True if the delivery counts as an attempt.
    counted: bool = True


FAILURE = NackOutcome()


#: (start, end, epoch) ranges that a request names.
EpochRanges = list[tuple[int, int, int]]
#: Makes dead letters of ranges of a group that a consumer (or cursor) holds; returns the ranges that must wait.
Bury = Callable[["Group", int, list[Range], Reason], list[Range]]


class ScanTurns(Protocol):
    """What the filters of a broker may examine in one turn of its loop, and work for a later turn."""

    budget: ScanBudget

    def later(self, owner: object, work: Callable[[], None]) -> None: ...


class Journal(Protocol):
    """Records the events of groups, and makes dead letters. The broker's turn implements it."""

    message_log: Log
    retained_log: Log
    clock: Clock
    floors: LockFloors
    epoch: int
    bury: Bury

    @property
    def scans(self) -> ScanTurns: ...

    @property
    def rates(self) -> RateTimers: ...

    def event(self, group: Group, event: Event) -> None: ...


class Group(ABC):
    """The settings, consumers, failed rows, retained rows and suspended pulls of a group.

    Each change of the definition or of the consumers calls ``Partition.redefined``: the header of the next segment of
    the action log must include it.
    """

    #: True if the group is at-most-once.
    once = False
    #: The cursors by number; a shared group has one.
    positions: dict[int, Cursor]
    #: Rows for a consumer (at most a count and a size), which then holds them; None: there are none. An empty delivery:
    #: pull again.
    take: Callable[[AttachedConsumer, int, int], Delivery | None]
    #: Answers suspended pulls for which there are rows.
    serve: Callable[[], None]

    __slots__ = (
        "_consumers",
        "consumers",
        "definition",
        "died_count",
        "expected",
        "failures",
        "filtered_count",
        "id",
        "journal",
        "limits",
        "lost_count",
        "lost_estimated",
        "name",
        "partition",
        "paused",
        "positions",
        "rate",
        "redelivered_count",
        "retained",
        "used",
        "waiters",
        "wanted",
    )

    def __init__(
        self, definition: GroupDefinition, partition: Partition, limits: ServerLimits, journal: Journal
    ) -> None:
        #: The group's id, name and settings; only ``redefine`` changes it.
        self.definition = definition
        self.id = definition.id
        self.name = definition.name
        self.partition = partition
        self.choose_rows()
        #: Since when it is paused, in microseconds since 1970 (0: not), and its limit. ``apply_to_group`` sets both.
        self.paused = 0
        self.rate: PartitionRate | None = None
        self.limits = limits
        self.journal = journal
        self._consumers: dict[str, AttachedConsumer] = {}
        #: Client id → consumer. Only the methods of this class change it.
        self.consumers: Mapping[str, AttachedConsumer] = self._consumers
        self.failures = Failures()
        #: Where the retained log has the rows that this group needs.
        self.retained = RetainedRows()
        #: Suspended pulls, the longest waiting first.
        self.waiters: dict[Waiter, None] = {}
        #: When ``Retries`` examines waiting rows next, in microseconds; 0: it need not.
        self.expected = 0
        #: Messages that the filter left out; messages delivered again.
        self.filtered_count = self.redelivered_count = 0
        #: Messages that became dead letters since the start of the broker.
        self.died_count = 0
        #: Messages that retention or damage removed before they were done.
        self.lost_count = 0
        #: True if ``lost_count`` includes estimates.
        self.lost_estimated = False
        #: Wall time of the last attach or pull.
        self.used = definition.created

    def redefine(self, definition: GroupDefinition) -> None:
        """Change the group's settings."""
        self.definition = definition
        self.choose_rows()
        self.partition.redefined()

    def choose_rows(self) -> None:
        """Choose rows by the filter, and by their groups if the partition has rows for one group only."""
        #: None: every row is delivered.
        self.wanted: Filter | None = filter_of(self.definition.filter, self.name if self.partition.addressed else None)

    def add(self, consumer: AttachedConsumer) -> None:
        """Add a consumer; it replaces an earlier one with the same client id."""
        self._consumers[consumer.client] = consumer
        self.partition.redefined()

    def remove(self, consumer: AttachedConsumer) -> None:
        """Remove a consumer, if it is in the group."""
        if self._consumers.get(consumer.client) is consumer:
            del self._consumers[consumer.client]
            self.partition.redefined()

    def redefine_consumer(self, consumer: AttachedConsumer, client: str, proof: int) -> None:
        """Set the consumer's client id and proof, and add it if it is not in the group."""
        self.remove(consumer)
        consumer.client, consumer.proof = client, proof
        self.add(consumer)

    @property
    def retry(self) -> Retry:
        """The retry policy."""
        return self.definition.retry or DEFAULT_RETRY

    def retry_time(self, piece: Range, failure: NackOutcome, now: int) -> int:
        """When rows that failed are delivered again."""
        delay = failure.delay
        if delay is None:
            # A number from 0 to 1, always the same for the same attempt of the same rows.
            chance = float(xxh3_64_intdigest(b"%d-%d-%d" % (self.id, piece.start, piece.attempt))) / 2**64
            delay = self.retry.wait(piece.attempt, chance)
        return due_time(now, delay)

    def split_dead(
        self, piece: Range, failure: NackOutcome, now: int, attempts_min: int = 1
    ) -> Iterator[tuple[Range, bool]]:
        """The parts of a failed piece, and whether each becomes a dead letter. ``now`` 0: whatever their age."""
        if failure.reject or not failure.counted:
            yield piece, failure.reject
            return
        start, end, attempt = piece
        attempts, old = self.retry.attempts, self._old_before(piece, now) if now else 0
        for first, last, before in [*self.failures.resent.overlap(start, end), Range(end, end, 0)]:
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

    def _old_before(self, piece: Range, now: int) -> int:
        """The sequence below which failed rows of the piece are too old for a retry."""
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

    def frame_of(self, sequence: int) -> FrameView | None:
        """The frame of a message that was delivered before; None: it cannot be found.

        A copy from the retained log is verified, as it is small. A frame of the message log is not.
        """
        copy = self.retained.frame(self.journal.retained_log, sequence) if self.retained.offsets else None
        try:
            if copy is not None:
                return copy.verify()
        except FrameError:
            # The message log may still have the original.
            pass
        partition = self.partition
        return partition.whole_frame(self.journal.message_log, sequence) if sequence >= partition.start else None

    def mark_begun_below(self, end: int) -> None:  # noqa: B027 (many groups have nothing to prepare)
        """Prepare for retention, which is about to remove rows below ``end`` that are not begun."""

    def dump(self) -> list[CursorState]:
        """The cursors, for a checkpoint. Where deliveries are not logged, held rows are delivered again."""
        logged = not (self.definition.ordered or self.definition.broadcast)
        return [cursor.dump(durable_holds=logged) for cursor in self.positions.values()]

    @property
    def floor(self) -> int:
        """Every row below this sequence is done or a dead letter."""
        return min(cursor.floor for cursor in self.positions.values())

    @property
    def next_due(self) -> int | None:
        """When the next waiting row is due; None: no row waits."""
        waiting = [cursor.waiting for cursor in self.positions.values() if cursor.waiting]
        return min((due for each in waiting if (due := each.next_due) is not None), default=None)

    def return_due(self, now: int) -> bool:
        """Make waiting rows that are due ready for delivery. Returns whether there are any."""
        ready = [cursor.return_due(now) for cursor in self.positions.values() if cursor.waiting]
        return any(ready)

    @abstractmethod
    def load(self, cursors: list[CursorState]) -> None:
        """Restore the cursors of a checkpoint."""

    @abstractmethod
    def holds(self, consumer: int) -> bool:
        """Whether a consumer held rows or locks when the broker stopped."""

    @property
    @abstractmethod
    def has_more(self) -> bool:
        """Whether a pull would find rows now."""

    @abstractmethod
    def ack(self, consumer: AttachedConsumer, ranges: EpochRanges, tags: Sequence[int] = ()) -> None:
        """Ack ranges. ``tags``: the deliveries of an ordered group."""

    @abstractmethod
    def nack(
        self,
        consumer: AttachedConsumer,
        ranges: EpochRanges,
        now: int,
        failure: NackOutcome = FAILURE,
        tags: Sequence[int] = (),
    ) -> None:
        """Nack ranges: they wait, hold back keys or become dead letters."""

    @abstractmethod
    def lost(self, consumer: AttachedConsumer, now: int) -> int:
        """Return the rows of a lost consumer, each with one more attempt. Returns how many sequences.

        A message that crashes its consumer must not be redelivered without limit.
        """

    @abstractmethod
    def offline(self, consumer: AttachedConsumer, now: int) -> int:
        """Return the rows of a consumer that left. Returns how many sequences."""

    @abstractmethod
    def reclaim(self, consumer: AttachedConsumer, holds: EpochRanges, now: int) -> None:
        """Keep the rows that an attaching consumer names, because it still holds them (R13); return its other rows."""

    @abstractmethod
    def rewind(self, sequence: int, *, skipping: bool) -> None:
        """Deliver every row from ``sequence`` on, done or not; ``skipping``: no row below it is delivered any more."""

    @abstractmethod
    def buried(self, holder: int, start: int, end: int, attempt: int, now: int) -> None:
        """Record that [start, end), which a consumer (or cursor) held, became dead letters."""

    @abstractmethod
    def revived(self, start: int, end: int) -> None:
        """Deliver dead letters in [start, end) again."""

    @abstractmethod
    def begun(self, start: int, end: int) -> list[Range]:
        """Ranges in [start, end) that were delivered and are neither done nor dead letters; in no order."""

    @abstractmethod
    def expire(self, lost: list[Range], start: int) -> None:
        """Record that retention removed ``lost``, and every row below ``start`` that was not begun."""

    @abstractmethod
    def begin(self, sequence: int) -> None:
        """Set the position of a newly defined group, in replay."""

    @abstractmethod
    def forget(self, consumer: int, time: int) -> int:
        """Return the rows of a consumer that is gone. Returns how many sequences."""

    @abstractmethod
    def release_unknown_consumers(self, now: int) -> None:
        """Return rows and release locks of unknown consumers, after replay."""

    @abstractmethod
    def replay(self, event: Event, time: int) -> None:
        """Apply an event of the action log, which was recorded at ``time``."""
