"""An at-most-once group: a row is done as soon as it is delivered.

The group records the ack when it delivers the rows, and the ack is durable before the rows leave the broker (R12). A
consumer that closes may return rows that it pulled ahead and did not start to handle. For this the group remembers, in
memory only, which rows it delivered to each consumer. A restart of the broker loses this memory: rows that a consumer
had not started then can no longer be returned and are lost, as when the consumer crashes.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.broker.groups.shared_group import FAILURE, AttachedConsumer, Group, Journal, NackOutcome
from plait.broker.partitions.partition import Partition
from plait.frame.view import FrameView
from plait.limits import HANDED_RANGES_MAX, ServerLimits
from plait.storage.logs.action_log import FLAG_UNCOUNTED, Action, GroupDefinition
from plait.storage.logs.log import Log
from plait.storage.ranges import Range, Ranges


class AtMostOnceGroup(Group):
    """A group that acks rows when it delivers them."""

    __slots__ = ("delivered",)

    def __init__(self, definition: GroupDefinition, partition: Partition, limits: ServerLimits) -> None:
        super().__init__(definition, partition, limits)
        #: Consumer id → rows that it received since the start of the broker and may return.
        self.delivered: dict[int, Ranges] = {}

    def _frame_apart(self, log: Log, retained_log: Log, sequence: int) -> FrameView | None:
        return None

    def _record(self, consumer: AttachedConsumer, start: int, end: int, attempt: int, journal: Journal) -> None:
        journal.event(Action.ACK, self, consumer.id, start, end, attempt)
        self.pull_log.acked(consumer.id, start, end)
        delivered = self.delivered.get(consumer.id)
        if delivered is None:
            delivered = self.delivered[consumer.id] = Ranges()
        delivered.add(start, end, attempt)
        if len(delivered) > HANDED_RANGES_MAX:
            # The consumer has started the rows that it received first.
            oldest = next(iter(delivered))
            delivered.remove(oldest.start, oldest.end)

    def nack(
        self,
        consumer: AttachedConsumer,
        ranges: list[tuple[int, int, int]],
        journal: Journal,
        now: int,
        failure: NackOutcome = FAILURE,
        tags: Sequence[int] = (),
    ) -> int:
        """Return rows of (start, end, epoch) ranges that the consumer did not start, for other consumers.

        Returns how many sequences. A failed row stays done.
        """
        delivered = self.delivered.get(consumer.id)
        if failure.counted or delivered is None:
            return 0
        count = 0
        for first, last, epoch in ranges:
            for start, end, attempt in delivered.overlap(*self.partition.clip_to_epoch(first, last, epoch)):
                journal.event(Action.NACK, self, consumer.id, start, end, attempt, 0, FLAG_UNCOUNTED)
                delivered.remove(start, end)
                self.pull_log.untaken(start, end, attempt - 1)
                count += end - start
        return count

    def reset(self, sequence: int, journal: Journal) -> None:
        self.delivered.clear()
        super().reset(sequence, journal)

    def offline(self, consumer: AttachedConsumer, journal: Journal, now: int) -> int:
        self.delivered.pop(consumer.id, None)
        return super().offline(consumer, journal, now)

    def reclaim(
        self, consumer: AttachedConsumer, holds: list[tuple[int, int, int]], journal: Journal, now: int
    ) -> None:
        """A consumer that reconnects keeps the rows that it received before."""
        delivered = self.delivered.get(consumer.id)
        super().reclaim(consumer, holds, journal, now)
        if delivered is not None:
            self.delivered[consumer.id] = delivered

    def begun(self, start: int, end: int, journal: Journal) -> list[Range]:
        """Returned rows were never started, so retention copies none of them to the retained log."""
        return []

    def replay(self, action: int, flags: int, consumer: int, piece: Range, due: int, time: int) -> None:
        if action == Action.NACK:
            self.pull_log.untaken(piece.start, piece.end, piece.attempt - 1)
        else:
            super().replay(action, flags, consumer, piece, due, time)
