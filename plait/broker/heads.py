"""The first frames of a log segment: all names that the frames after them use as numbers.

Each segment can so be read alone, after those before it have expired.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.frame.builder import FrameParts
from plait.storage.action_log import ConsumerDefinition, Definition, head_frames
from plait.storage.catalog import PartitionRow, catalog_frame
from plait.storage.kept import head_frame

if TYPE_CHECKING:
    from plait.broker.broker import Broker

#: Rows of one catalog frame at the head of a segment.
HEAD_ROWS = 5_000


class Heads:
    """Makes them from the broker's present state (``Log.on_segment``)."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def catalog(self, rows: list[PartitionRow], previous_end: int = 0) -> FrameParts:
        """A frame that defines partitions."""
        broker = self._broker
        return catalog_frame(
            rows,
            time=broker.clock.now(),
            durable=broker.message_log.durable,
            epoch=broker.epoch,
            previous_end=previous_end,
        )

    def define(self, rows: list[PartitionRow]) -> None:
        """Write catalog rows to the message log, in two equal frames.

        Frames name their partition by its number: if the one that defines it were damaged before a checkpoint has the
        definition, intact rows could not be reached.
        """
        self._broker.append_own(self.catalog(rows), copies=2)

    def of_message_segment(self, previous_end: int) -> list[FrameParts]:
        """All partitions."""
        rows = [partition.row for partition in self._broker.partitions.values()]
        starts = range(0, len(rows), HEAD_ROWS)
        return [self.catalog(rows[start : start + HEAD_ROWS], previous_end) for start in starts]

    def of_kept_segment(self, previous_end: int) -> list[FrameParts]:
        """Nothing but where the segment before ended: groups go by their numbers here."""
        broker = self._broker
        return [head_frame(broker.clock.now(), broker.message_log.durable, broker.epoch, previous_end)]

    def of_action_segment(self, previous_end: int) -> list[FrameParts]:
        """All groups and consumers."""
        broker = self._broker
        definitions: list[Definition] = []
        for partition in broker.partitions.values():
            for group in partition.groups.values():
                definitions.append(group.definition)
                definitions.extend(
                    ConsumerDefinition(consumer.id, group.id, consumer.client, consumer.proof)
                    for consumer in group.consumers.values()
                )
        frames = head_frames(
            definitions,
            index=broker.action_index,
            presumed=broker.message_log.end,
            epoch=broker.epoch,
            time=broker.clock.now(),
            previous_end=previous_end,
        )
        broker.action_index += len(frames)
        return frames
