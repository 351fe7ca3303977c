"""Segment headers: the definitions of all names that later frames of the segment use as numbers.

With its header, each segment can be read alone, after the segments before it have expired.

A header is as large as all definitions together, and a segment begins in the middle of a loop turn. So definitions are
encoded ahead, in chunks of some partitions. When a segment begins, only changed chunks are encoded again; the others
get a new stamp.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from plait.frame.builder import FrameParts, pack_stamp
from plait.limits import KIB
from plait.storage.catalog import CATALOG, PartitionRow, catalog_frame, encode_catalog
from plait.storage.logs.action_log import (
    DEFINITIONS,
    DEFINITIONS_MAX,
    ConsumerDefinition,
    Definition,
    encode_definitions,
)
from plait.storage.logs.retained_log import header_frame
from plait.storage.logs.segment import HeaderRows

if TYPE_CHECKING:
    from plait.broker.partitions.partition import Partition
    from plait.broker.turn import Turn

#: Bytes between the two frames that define a partition: the size of the largest disk sector, so that one bad sector
#: damages at most one of the frames.
APART = 4 * KIB
#: Partitions of one chunk: encoding a chunk takes about a millisecond, and 100,000 partitions are some 1,600 frames.
CHUNK_PARTITIONS = 64
#: Chunks that are encoded ahead in one loop turn.
STEP_CHUNKS = 4


#: The two kinds of definitions: catalog rows, and groups with their consumers. A kind is the name of the attribute of
#: a partition that changes when its definitions change.
ROWS = "row"
NAMES = "definitions"


class HeaderChunk:
    """Some partitions, and their encoded definitions of each kind as of the last ``refresh``."""

    __slots__ = ("_states", "partitions", "rows")

    def __init__(self) -> None:
        self.partitions: list[Partition] = []
        self._states: dict[str, list[object]] = {}
        self.rows: dict[str, list[HeaderRows]] = {ROWS: [], NAMES: []}

    def refresh(self, kind: str) -> bool:
        """Encode the definitions of a kind again if any has changed. Returns whether one has."""
        states = [getattr(partition, kind) for partition in self.partitions]
        if states == self._states.get(kind):
            return False
        self._states[kind] = states
        self.rows[kind] = (_encode_rows if kind == ROWS else _encode_definitions)(self.partitions)
        return True


class SegmentHeaders:
    """Makes segment headers from the broker's current state (``Log.on_segment``)."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._chunks: dict[HeaderChunk, None] = {}
        #: Chunks with room for more partitions.
        self._open: dict[HeaderChunk, None] = {}
        #: Partition id → its chunk.
        self._chunk_of: dict[int, HeaderChunk] = {}

    # --- which partitions there are -------------------------------------------------------------

    def add(self, partition: Partition) -> None:
        """Add a partition. Prefers a chunk from which a partition was removed, so that chunks stay full."""
        chunk = next(reversed(self._open), None)
        if chunk is None:
            chunk = HeaderChunk()
            self._chunks[chunk] = self._open[chunk] = None
        chunk.partitions.append(partition)
        self._chunk_of[partition.id] = chunk
        if len(chunk.partitions) >= CHUNK_PARTITIONS:
            del self._open[chunk]

    def remove(self, partition: Partition) -> None:
        chunk = self._chunk_of.pop(partition.id)
        chunk.partitions.remove(partition)
        if chunk.partitions:
            self._open[chunk] = None
        else:
            del self._chunks[chunk]
            self._open.pop(chunk, None)

    # --- ahead of need --------------------------------------------------------------------------

    def refresh_steps(self) -> Iterator[None]:
        """Encode ahead for the logs whose next segment is near, in steps of one loop turn each."""
        if self._turn.message_log.half_full:
            yield from self.refresh_kind(ROWS)
        if self._turn.action_log.half_full:
            yield from self.refresh_kind(NAMES)

    def refresh(self) -> None:
        """Encode ahead for the logs whose next segment is near, all at once."""
        for _ in self.refresh_steps():
            pass

    def refresh_kind(self, kind: str) -> Iterator[None]:
        """Encode the changed definitions of a kind, in steps."""
        encoded = 0
        for chunk in list(self._chunks):
            # A chunk with very many consumers is encoded only when the segment begins, not after each change.
            if sum(rows.count for rows in chunk.rows[kind]) <= DEFINITIONS_MAX and chunk.refresh(kind):
                encoded += 1
                if encoded % STEP_CHUNKS == 0:
                    yield

    def _rows(self, kind: str) -> Iterator[HeaderRows]:
        for chunk in self._chunks:
            chunk.refresh(kind)
            yield from chunk.rows[kind]

    # --- frames ---------------------------------------------------------------------------------

    def catalog(self, rows: list[PartitionRow], padding: int = 0) -> FrameParts:
        turn = self._turn
        durable = turn.message_log.durable
        return catalog_frame(rows, time=turn.clock.now(), durable=durable, epoch=turn.epoch, padding=padding)

    def define(self, rows: list[PartitionRow]) -> None:
        """Write catalog rows to the message log, in two equal frames that are ``APART`` bytes apart.

        A frame has only the number of its partition. If the only definition were damaged before a checkpoint includes
        it, intact rows could not be read. Both copies precede the first row, because a scan after damage accepts only
        frames of known partitions. The padded frame between the copies repeats one row.
        """
        # Small segments have less space for the broker's own frames.
        apart = min(APART, self._turn.message_log.margin)
        frame = self.catalog(rows)
        self._turn.append_own(frame, self.catalog(rows[:1], padding=apart), frame)

    def of_message_segment(self, previous_end: int) -> list[FrameParts]:
        turn = self._turn
        stamp = pack_stamp(CATALOG, 0, turn.clock.now(), turn.message_log.durable, turn.epoch)
        return [rows.frame(1, previous_end, stamp) for rows in self._rows(ROWS)]

    def of_retained_segment(self, previous_end: int) -> list[FrameParts]:
        """The header of a retained log segment: the end of the previous one. The action log defines its group ids."""
        turn = self._turn
        return [header_frame(turn.clock.now(), turn.message_log.durable, turn.epoch, previous_end)]

    def of_action_segment(self, previous_end: int) -> list[FrameParts]:
        """The header of an action log segment: all groups and consumers."""
        turn = self._turn
        time, presumed = turn.clock.now(), turn.message_log.end
        frames = []
        for rows in self._rows(NAMES):
            stamp = pack_stamp(DEFINITIONS, turn.action_index, time, presumed, turn.epoch)
            frames.append(rows.frame(turn.action_index, previous_end, stamp))
            turn.action_index += 1
        return frames


def _encode_rows(partitions: Iterable[Partition]) -> list[HeaderRows]:
    return encode_catalog([partition.row for partition in partitions])


def _encode_definitions(partitions: Iterable[Partition]) -> list[HeaderRows]:
    definitions: list[Definition] = []
    for partition in partitions:
        for group in partition.groups.values():
            definitions.append(group.definition)
            definitions.extend(
                ConsumerDefinition(consumer.id, group.id, consumer.client, consumer.proof)
                for consumer in group.consumers.values()
            )
    return encode_definitions(definitions)
