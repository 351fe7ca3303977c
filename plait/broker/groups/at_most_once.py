"""An at-most-once group: a row is done as soon as it is delivered.

The group records the ack when it delivers the rows, and the ack is durable before the rows leave the broker (R12). A
consumer that closes may return rows that it pulled ahead and did not start to handle. For this the group remembers, in
memory only, which rows it delivered to each consumer. A restart of the broker loses this memory. If a consumer closes
afterwards, the rows that it received before the restart and has not started cannot be returned: they are lost, as when
the consumer crashes.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.broker.groups.group import FAILURE, AttachedConsumer, EpochRanges, Journal, NackOutcome
from plait.broker.groups.shared_group import SharedGroup
from plait.broker.partitions.partition import Partition
from plait.limits import HANDED_RANGES_MAX, ServerLimits
from plait.storage.logs.action_events import Acked, Event, Nacked
from plait.storage.logs.action_log import GroupDefinition
from plait.storage.ranges import Ranges


class AtMostOnceGroup(SharedGroup):
    """A group that acks rows when it delivers them."""

    __slots__ = ("delivered",)
    once = True

    def __init__(
        self, definition: GroupDefinition, partition: Partition, limits: ServerLimits, journal: Journal
    ) -> None:
        super().__init__(definition, partition, limits, journal)
        #: Consumer id → rows that it received since the start of the broker and may return.
        self.delivered: dict[int, Ranges] = {}

    def record(self, consumer: AttachedConsumer, start: int, end: int, attempt: int) -> None:
        self.journal.event(self, Acked(attempt, self.cursor.overtaken(start), consumer.id, start, end))
        self._acked(consumer.id, start, end)
        delivered = self.delivered.get(consumer.id)
        if delivered is None:
            delivered = self.delivered[consumer.id] = Ranges()
        delivered.add(start, end, attempt)
        if len(delivered) > HANDED_RANGES_MAX:
            # The limit is far more than a consumer buffers, so it has started the oldest of these rows.
            oldest = next(iter(delivered))
            delivered.remove(oldest.start, oldest.end)

    def nack(
        self,
        consumer: AttachedConsumer,
        ranges: EpochRanges,
        now: int,
        failure: NackOutcome = FAILURE,
        tags: Sequence[int] = (),
    ) -> None:
        """Give rows that the consumer did not start back to the group. ``ranges`` has them as (start, end, epoch).

        A failed row stays done.
        """
        delivered = self.delivered.get(consumer.id)
        if failure.counted or delivered is None:
            return
        for first, last, epoch in ranges:
            for start, end, attempt in delivered.overlap(*self.partition.clip_to_epoch(first, last, epoch)):
                self.journal.event(self, Nacked(attempt, True, consumer.id, start, end, due=0))
                delivered.remove(start, end)
                self._untaken(start, end, attempt - 1)

    def _untaken(self, start: int, end: int, attempt: int) -> None:
        """Return [start, end), which was done on delivery, because its consumer never began to handle it."""
        # After a rewind to an earlier sequence, ``next`` will reach the rest anyway.
        self.cursor.given_back(start, min(end, self.cursor.next), attempt)
        if self.ranked is not None:
            self.ranked.returned(start, end)

    def rewind(self, sequence: int, *, skipping: bool) -> None:
        self.delivered.clear()
        super().rewind(sequence, skipping=skipping)

    def offline(self, consumer: AttachedConsumer, now: int) -> int:
        self.delivered.pop(consumer.id, None)
        return super().offline(consumer, now)

    def reclaim(self, consumer: AttachedConsumer, holds: EpochRanges, now: int) -> None:
        """Let a consumer that reconnects keep the rows that it received before."""
        delivered = self.delivered.get(consumer.id)
        super().reclaim(consumer, holds, now)
        if delivered is not None:
            self.delivered[consumer.id] = delivered

    def replay(self, event: Event, time: int) -> None:
        if isinstance(event, Nacked):
            self._untaken(event.start, event.end, event.attempt - 1)
        else:
            super().replay(event, time)
