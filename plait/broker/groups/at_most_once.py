"""A group at most once: what is handed out counts as done from then on, whatever happens to its consumer.

The ack is the event of the hand-out, and is durable before the rows leave (R12). A consumer that closes may give back
what it pulled ahead and never began with: for each consumer the group keeps what it was handed, in memory alone. After
a restart of the broker there is nothing to give back, and those rows are lost, as they are when their consumer dies.
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
    """See the module."""

    __slots__ = ("handed",)

    def __init__(self, definition: GroupDefinition, partition: Partition, limits: ServerLimits) -> None:
        super().__init__(definition, partition, limits)
        #: Consumer id → what it was handed since the start of the broker, and may give back.
        self.handed: dict[int, Ranges] = {}

    def _frame_apart(self, log: Log, kept_log: Log, sequence: int) -> FrameView | None:
        return None

    def _record(self, consumer: AttachedConsumer, start: int, end: int, attempt: int, journal: Journal) -> None:
        journal.event(Action.ACK, self, consumer.id, start, end, attempt)
        self.pull_log.acked(consumer.id, start, end)
        handed = self.handed.get(consumer.id)
        if handed is None:
            handed = self.handed[consumer.id] = Ranges()
        handed.add(start, end, attempt)
        if len(handed) > HANDED_RANGES_MAX:
            # What was handed out long ago is begun with by now.
            oldest = next(iter(handed))
            handed.remove(oldest.start, oldest.end)

    def nack(
        self,
        consumer: AttachedConsumer,
        ranges: list[tuple[int, int, int]],
        journal: Journal,
        now: int,
        failure: NackOutcome = FAILURE,
        tags: Sequence[int] = (),
    ) -> int:
        """(start, end, epoch) ranges are for others if their consumer did not begin with them; how many sequences.

        A failure changes nothing: the message was handed out.
        """
        handed = self.handed.get(consumer.id)
        if failure.counted or handed is None:
            return 0
        count = 0
        for first, last, epoch in ranges:
            for start, end, attempt in handed.overlap(*self.partition.clip_to_epoch(first, last, epoch)):
                journal.event(Action.NACK, self, consumer.id, start, end, attempt, 0, FLAG_UNCOUNTED)
                handed.remove(start, end)
                self.pull_log.untaken(start, end, attempt - 1)
                count += end - start
        return count

    def reset(self, sequence: int, journal: Journal) -> None:
        self.handed.clear()
        super().reset(sequence, journal)

    def offline(self, consumer: AttachedConsumer, journal: Journal, now: int) -> int:
        self.handed.pop(consumer.id, None)
        return super().offline(consumer, journal, now)

    def reclaim(
        self, consumer: AttachedConsumer, holds: list[tuple[int, int, int]], journal: Journal, now: int
    ) -> None:
        """A consumer whose connection was lost has what it was handed before."""
        handed = self.handed.get(consumer.id)
        super().reclaim(consumer, holds, journal, now)
        if handed is not None:
            self.handed[consumer.id] = handed

    def begun(self, start: int, end: int, journal: Journal) -> list[Range]:
        """What was given back was not begun with: retention keeps no copy of it."""
        return []

    def replay(self, action: int, flags: int, consumer: int, piece: Range, due: int, time: int) -> None:
        if action == Action.NACK:
            self.pull_log.untaken(piece.start, piece.end, piece.attempt - 1)
        else:
            super().replay(action, flags, consumer, piece, due, time)
