"""Events of the action log, and deaths of messages from the retained log, as Arrow tables (docs/archive.md).

Numbers are replaced by names. One row for each event, in log order, and one for each group and consumer where the log
first defines it; one row for each death: a message that was resent and died again has two. Nothing here needs Spark.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from plait.errors import FrameError
from plait.frame.view import FrameView
from plait.storage.catalog import PartitionRow
from plait.storage.logs.action_events import EVENT, Action, actions_with
from plait.storage.logs.action_log import (
    DEFINITIONS,
    EVENTS,
    ConsumerDefinition,
    Definition,
    GroupDefinition,
    read_definitions,
    read_events,
)
from plait.storage.logs.retained_log import DeathRecord, is_header, note_of
from plait.storage.reading.log_chunks import WantedRows

#: A batch is complete when it has this many events.
BATCH_COUNT: Final = 65_536

_TIME: Final = pa.timestamp("us", tz="UTC")
_TEXT: Final = pa.string()

ACTION_SCHEMA: Final = pa.schema(
    [
        # The time of the event, by the broker's clock.
        pa.field("time", _TIME, nullable=False),
        # "pull", "ack", ... (``Action``), and "group" and "consumer" for definitions.
        pa.field("action", _TEXT, nullable=False),
        # Null where the log no longer has the definition of the partition.
        pa.field("subject", _TEXT),
        pa.field("partition", _TEXT),
        pa.field("consumer_group", _TEXT),
        # The client's name; null where an event is about no consumer.
        pa.field("consumer", _TEXT),
        # The number of the consumer; in most events of an ordered group, the number of the cursor.
        pa.field("number", pa.int64(), nullable=False),
        pa.field("attempt", pa.int32(), nullable=False),
        pa.field("epoch", pa.int64(), nullable=False),
        # Sequences [start, end). docs/formats.md says what they are for an action that is not about rows.
        pa.field("start", pa.int64(), nullable=False),
        pa.field("end", pa.int64(), nullable=False),
        pa.field("flags", pa.int32(), nullable=False),
        # When the rows are redelivered, or would have been due.
        pa.field("due", _TIME),
        # The same field where it is not a time: lost rows, the epoch of a lock, a cursor, the hash of a key.
        pa.field("value", pa.int64()),
        # The offset of the frame in the action log, and the row's index in the frame.
        pa.field("log_offset", pa.int64(), nullable=False),
        pa.field("log_row", pa.int32(), nullable=False),
        # The whole definition as JSON; null for events.
        pa.field("detail", _TEXT),
    ]
)

DEATH_SCHEMA: Final = pa.schema(
    [
        # The time of the last failure, by the broker's clock.
        pa.field("time", _TIME, nullable=False),
        # Null where the log no longer has the definition of the partition.
        pa.field("subject", _TEXT),
        pa.field("partition", _TEXT),
        pa.field("consumer_group", _TEXT),
        # The group's number in its data directory: it distinguishes two groups that had the same name.
        pa.field("group_number", pa.int64(), nullable=False),
        # Epoch and sequence of the message, as in the messages of the archive.
        pa.field("epoch", pa.int64(), nullable=False),
        pa.field("sequence", pa.int64(), nullable=False),
        pa.field("attempts", pa.int32(), nullable=False),
        pa.field("first_failure", _TIME, nullable=False),
        # Type and text of the exception, and the handler that raised it; null where the consumer did not report them.
        pa.field("type", _TEXT),
        pa.field("text", _TEXT),
        pa.field("handler", _TEXT),
        # An offset in the retained log.
        pa.field("log_offset", pa.int64(), nullable=False),
        # When the message was stored.
        pa.field("store_time", _TIME, nullable=False),
    ]
)

#: Action number → name. An action of a later version is named after its number.
_KNOWN: Final = {int(action): action.name.lower() for action in Action}
_HAS_DUE: Final = np.isin(np.arange(256), actions_with("due"))
_HAS_VALUE: Final = np.isin(np.arange(256), actions_with("lost", "lock_epoch", "to", "key_hash", "rows"))
#: In an ordered group these actions name a consumer; all others name a cursor.
_OF_CONSUMERS: Final = np.isin(np.arange(256), actions_with("consumer"))


@cache
def _names() -> pa.Array:
    """Names by action number. Built on first use: the first array of a process imports pandas, which lookups avoid."""
    return pa.array([_KNOWN.get(number, f"action_{number}") for number in range(256)], _TEXT)


class Names:
    """The names that the numbers of events stand for, from the definitions read up to now."""

    def __init__(
        self, partitions: Mapping[int, PartitionRow], group: str, groups: Mapping[int, GroupDefinition] | None = None
    ) -> None:
        self._partitions = partitions
        self._broker_group = group
        self.groups = dict(groups or {})
        self.consumers: dict[int, ConsumerDefinition] = {}
        self._reported: dict[tuple[type[Definition], int], Definition] = {}

    def learn(self, definitions: list[Definition], *, header: bool = False) -> list[Definition]:
        """Add definitions and return the new ones. A segment ``header`` has no new ones: it repeats definitions.

        Each definition of a header also has its own frame. That frame may directly follow the header, since a header
        has all definitions that exist when it is written.
        """
        new = []
        for definition in definitions:
            if isinstance(definition, GroupDefinition):
                self.groups[definition.id] = definition
            else:
                self.consumers[definition.id] = definition
            key = (type(definition), definition.id)
            if not header and self._reported.get(key) != definition:
                self._reported[key] = definition
                new.append(definition)
        return new

    def of_partition(self, partition: int) -> tuple[str | None, str | None]:
        """Subject and printed name of a partition."""
        row = self._partitions.get(partition)
        return (None, None) if row is None else (row.subject, f"{row.name}@{self._broker_group}")

    def of_group(self, number: int) -> tuple[str | None, str | None, str | None, bool]:
        """Subject, partition and name of a group, and whether it is ordered."""
        group = self.groups.get(number)
        if group is None:
            return None, None, None, False
        return *self.of_partition(group.partition), group.name, group.ordered or group.affinity


def action_batches(
    frames: Iterable[tuple[int, FrameView]], names: Names, *, start: int = 0, first: bool = True
) -> Iterator[pa.RecordBatch]:
    """Batches of ``ACTION_SCHEMA`` for (log offset, frame) in log order.

    Frames before ``start`` and segment headers only supply names. ``first``: no earlier part of the log was read, so
    the definitions in the first segment header are new.
    """
    events: list[tuple[int, FrameView, npt.NDArray[Any]]] = []
    count = 0
    for offset, frame in frames:
        # Only the header of a segment records where the segment before it ended.
        first = first and frame.partition == DEFINITIONS
        if frame.partition == DEFINITIONS:
            new = names.learn(_definitions(frame), header=frame.previous != 0 and not first)
            if new and offset >= start:
                yield from _batch(events, names)
                events, count = [], 0
                yield _defined(new, names, offset, frame)
        elif frame.partition == EVENTS:
            if offset < start:
                continue
            events.append((offset, frame, read_events(frame)))
            count += frame.count
            if count >= BATCH_COUNT:
                yield from _batch(events, names)
                events, count = [], 0
        else:
            raise FrameError(f"unknown frame kind {frame.partition} in the action log")
    yield from _batch(events, names)


def _definitions(frame: FrameView) -> list[Definition]:
    try:
        return read_definitions(frame)
    except msgspec.MsgspecError as error:
        raise FrameError(f"a definition does not decode: {error}") from None


def _batch(frames: list[tuple[int, FrameView, npt.NDArray[Any]]], names: Names) -> Iterator[pa.RecordBatch]:
    if not frames:
        return
    counts = np.array([len(rows) for _, _, rows in frames])
    events = np.concatenate([rows for _, _, rows in frames])
    assert events.dtype == EVENT
    starts = np.cumsum(counts) - counts
    written = np.repeat([frame.store_time for _, frame, _ in frames], counts)
    action = events["action"]
    value = events["value"]
    subject, partition, group, consumer = _names_of(events, names)
    columns = {
        "time": pa.array(written, pa.int64()).cast(_TIME),
        "action": _names().take(pa.array(action)),
        "subject": subject,
        "partition": partition,
        "consumer_group": group,
        "consumer": consumer,
        "number": pa.array(events["holder"].astype(np.int64)),
        "attempt": pa.array(events["attempt"].astype(np.int32)),
        "epoch": pa.array(events["epoch"].astype(np.int64)),
        "start": pa.array(events["start"].astype(np.int64)),
        "end": pa.array(events["end"].astype(np.int64)),
        "flags": pa.array(events["flag"].astype(np.int32)),
        "due": pa.array(value, pa.int64(), mask=~_HAS_DUE[action] | (value == 0)).cast(_TIME),
        "value": pa.array(value, pa.int64(), mask=~_HAS_VALUE[action]),
        "log_offset": pa.array(np.repeat([offset for offset, _, _ in frames], counts), pa.int64()),
        "log_row": pa.array((np.arange(len(events)) - np.repeat(starts, counts)).astype(np.int32)),
        "detail": pa.nulls(len(events), _TEXT),
    }
    yield pa.RecordBatch.from_arrays([columns[name] for name in ACTION_SCHEMA.names], schema=ACTION_SCHEMA)


def _names_of(events: npt.NDArray[Any], names: Names) -> tuple[pa.Array, pa.Array, pa.Array, pa.Array]:
    """Subject, partition, group and consumer of events; each distinct number is looked up once."""
    group_ids, by_group = np.unique(events["group"], return_inverse=True)
    found = [names.of_group(int(number)) for number in group_ids]
    is_ordered = np.array([ordered for *_, ordered in found])[by_group]
    columns = [pa.array([facts[index] for facts in found], _TEXT) for index in range(3)]
    rows = pa.array(by_group)
    subject, partition, group = (column.take(rows) for column in columns)
    consumer_ids, by_consumer = np.unique(events["holder"], return_inverse=True)
    clients = [names.consumers.get(int(number)) for number in consumer_ids]
    known = pa.array([None if client is None else client.client for client in clients], _TEXT)
    is_cursor = is_ordered & ~_OF_CONSUMERS[events["action"]]
    has_no_consumer = (events["group"] == 0) | is_cursor
    consumer = known.take(pa.array(by_consumer, mask=has_no_consumer))
    cancelled = np.flatnonzero(events["group"] == 0)
    if len(cancelled):
        # Delayed rows belong to no group yet: the event names their schedule partition.
        partitions = [names.of_partition(int(number)) for number in consumer_ids]
        mask = pa.array(events["group"] == 0)
        chosen = pa.array(by_consumer[cancelled])
        subject = pc.replace_with_mask(subject, mask, pa.array([p[0] for p in partitions], _TEXT).take(chosen))
        partition = pc.replace_with_mask(partition, mask, pa.array([p[1] for p in partitions], _TEXT).take(chosen))
    return subject, partition, group, consumer


def _defined(definitions: list[Definition], names: Names, offset: int, frame: FrameView) -> pa.RecordBatch:
    """Rows of definitions, one by one: there are few."""
    rows = []
    for number, definition in enumerate(definitions):
        if isinstance(definition, GroupDefinition):
            action, group, start, client = "group", definition.id, definition.start, None
        else:
            action, group, start, client = "consumer", definition.group, 0, definition.client
        subject, partition, group_name, _ = names.of_group(group)
        rows.append(
            {
                "time": frame.store_time,
                "action": action,
                "subject": subject,
                "partition": partition,
                "consumer_group": group_name,
                "consumer": client,
                "number": definition.id,
                "attempt": 0,
                "epoch": frame.epoch,
                "start": start,
                "end": start,
                "flags": 0,
                "log_offset": offset,
                "log_row": number,
                "detail": msgspec.json.encode(definition).decode(),
            }
        )
    return pa.RecordBatch.from_pylist(rows, schema=ACTION_SCHEMA)


def death_table(frames: Iterable[tuple[int, FrameView]], names: Names, wanted: WantedRows) -> pa.Table:
    """The deaths of wanted subjects in the (log offset, frame) pairs of a retained log.

    Raises ``FrameError`` where a note does not decode. A message that is retained for another attempt has not died.
    """
    deaths: list[tuple[int, FrameView, int, DeathRecord]] = []
    for offset, frame in frames:
        if is_header(frame):
            continue
        note = note_of(frame)
        # Deaths of a partition whose name is not known belong to an archive of all subjects.
        if note.death is not None and wanted.names(names.of_partition(frame.partition)[0] or ""):
            deaths.append((offset, frame, note.group, note.death))
    if not deaths:
        return DEATH_SCHEMA.empty_table()
    sequences = [frame.sequences() for _, frame, _, _ in deaths]
    # All rows of a frame died together, for one reason.
    frame_of_row = pa.array(np.repeat(np.arange(len(deaths)), [len(each) for each in sequences]))
    partitions = [names.of_partition(frame.partition) for _, frame, _, _ in deaths]
    columns = {
        "time": [death.last_time for *_, death in deaths],
        "subject": [subject for subject, _ in partitions],
        "partition": [partition for _, partition in partitions],
        "consumer_group": [names.of_group(group)[2] for _, _, group, _ in deaths],
        "group_number": [group for _, _, group, _ in deaths],
        "epoch": [frame.epoch for _, frame, _, _ in deaths],
        "attempts": [death.attempts for *_, death in deaths],
        "first_failure": [death.first_time for *_, death in deaths],
        "type": [death.reason.type or None for *_, death in deaths],
        "text": [death.reason.text or None for *_, death in deaths],
        "handler": [death.reason.handler or None for *_, death in deaths],
        "log_offset": [offset for offset, *_ in deaths],
        "store_time": [frame.store_time for _, frame, _, _ in deaths],
    }
    arrays = {
        name: pa.array(values, DEATH_SCHEMA.field(name).type).take(frame_of_row) for name, values in columns.items()
    }
    arrays["sequence"] = pa.array(np.concatenate(sequences))
    return pa.Table.from_arrays([arrays[name] for name in DEATH_SCHEMA.names], schema=DEATH_SCHEMA)
