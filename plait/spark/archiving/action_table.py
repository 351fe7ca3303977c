"""Events of the action log as Arrow record batches, with names in place of numbers; built from arrays, not row by row.

One row for each event, in log order, and one for each group and consumer when the log first names it. Nothing here
needs Spark. docs/archive.md describes the columns to users.
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
from plait.storage.logs.action_log import (
    DEFINITIONS,
    EVENT,
    EVENTS,
    FLAG_DUE,
    NOT_OF_ROWS,
    Action,
    ConsumerDefinition,
    Definition,
    GroupDefinition,
    read_definitions,
    read_events,
)

#: Events of this many rows become one batch.
BATCH_COUNT: Final = 65_536

_TIME: Final = pa.timestamp("us", tz="UTC")
_TEXT: Final = pa.string()

ACTION_SCHEMA: Final = pa.schema(
    [
        # When it happened, by the broker's clock.
        pa.field("time", _TIME, nullable=False),
        # "pull", "ack", ... (``Action``), and "group" and "consumer" for definitions.
        pa.field("action", _TEXT, nullable=False),
        # Null where the log does not say any more which partition it was.
        pa.field("subject", _TEXT),
        pa.field("partition", _TEXT),
        pa.field("consumer_group", _TEXT),
        # The client's name; null where an event is about no consumer.
        pa.field("consumer", _TEXT),
        # What the event names in the consumer's place: his number; of an ordered group the strand's.
        pa.field("number", pa.int64(), nullable=False),
        pa.field("attempt", pa.int32(), nullable=False),
        pa.field("epoch", pa.int64(), nullable=False),
        # Sequences [start, end); of ``NOT_OF_ROWS`` what docs/formats.md says.
        pa.field("start", pa.int64(), nullable=False),
        pa.field("end", pa.int64(), nullable=False),
        pa.field("flags", pa.int32(), nullable=False),
        # When the rows come again, or would have been due.
        pa.field("due", _TIME),
        # The same field, where it is no time: a lock's epoch, a strand's number, a key's hash.
        pa.field("value", pa.int64()),
        # The frame's place in the action log, and the row's in the frame.
        pa.field("log_offset", pa.int64(), nullable=False),
        pa.field("log_row", pa.int32(), nullable=False),
        # Of definitions: all of it, as JSON.
        pa.field("detail", _TEXT),
    ]
)

#: Action numbers → how they are called; what a later version writes has its number for a name.
_KNOWN: Final = {int(action): action.name.lower() for action in Action}
_NOT_OF_ROWS: Final = np.isin(np.arange(256), list(NOT_OF_ROWS))
#: Of an ordered group these are about a consumer, all others about a strand.
_OF_CONSUMERS: Final = np.isin(np.arange(256), [Action.LOCK, Action.OFFLINE, Action.FORGET_CONSUMER])


@cache
def _names() -> pa.Array:
    """By action number. Made when needed: the first array of a process brings pandas in, which lookups do without."""
    return pa.array([_KNOWN.get(number, f"action_{number}") for number in range(256)], _TEXT)


class Names:
    """What the numbers of events stand for, as far as the log was read."""

    def __init__(self, partitions: Mapping[int, PartitionRow], group: str) -> None:
        self._partitions = partitions
        self._broker_group = group
        self.groups: dict[int, GroupDefinition] = {}
        self.consumers: dict[int, ConsumerDefinition] = {}
        self._told: dict[tuple[type[Definition], int], Definition] = {}

    def learn(self, definitions: list[Definition], *, head: bool = False) -> list[Definition]:
        """Take definitions; those that are news. At the ``head`` of a segment none is: their own frame tells of them.

        That frame may come right behind, since a head has all names that there are when it is made.
        """
        news = []
        for definition in definitions:
            if isinstance(definition, GroupDefinition):
                self.groups[definition.id] = definition
            else:
                self.consumers[definition.id] = definition
            place = (type(definition), definition.id)
            if not head and self._told.get(place) != definition:
                self._told[place] = definition
                news.append(definition)
        return news

    def place(self, partition: int) -> tuple[str | None, str | None]:
        """Subject and printed name of a partition."""
        row = self._partitions.get(partition)
        return (None, None) if row is None else (row.subject, f"{row.name}@{self._broker_group}")

    def of_group(self, number: int) -> tuple[str | None, str | None, str | None, bool]:
        """Subject, partition and name of a group, and whether it is ordered."""
        group = self.groups.get(number)
        if group is None:
            return None, None, None, False
        return *self.place(group.partition), group.name, group.ordered or group.affinity


def action_batches(
    frames: Iterable[tuple[int, FrameView]], names: Names, *, start: int = 0, first: bool = True
) -> Iterator[pa.RecordBatch]:
    """Batches of ``ACTION_SCHEMA`` for (log offset, frame) in log order.

    What stands before ``start`` is read for its names alone, as are the names that each segment begins with again.
    ``first``: nobody has read what stood before, so the names that the first segment begins with are news.
    """
    events: list[tuple[int, FrameView, npt.NDArray[Any]]] = []
    count = 0
    for offset, frame in frames:
        # The head of a segment says where the one before ended, and nothing else does.
        first = first and frame.partition == DEFINITIONS
        if frame.partition == DEFINITIONS:
            news = names.learn(_definitions(frame), head=frame.previous != 0 and not first)
            if news and offset >= start:
                yield from _batch(events, names)
                events, count = [], 0
                yield _defined(news, names, offset, frame)
        elif frame.partition == EVENTS:
            if offset < start:
                continue
            events.append((offset, frame, read_events(frame)))
            count += frame.count
            if count >= BATCH_COUNT:
                yield from _batch(events, names)
                events, count = [], 0
        else:
            raise FrameError(f"frame kind {frame.partition} of the action log is not known")
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
    is_due = (events["flags"] & FLAG_DUE) != 0
    is_value = is_due & (_NOT_OF_ROWS[action] | (action == Action.SKIP))
    subject, partition, group, consumer = _names_of(events, names)
    columns = {
        "time": pa.array(np.where(is_due, written, events["time"]), pa.int64()).cast(_TIME),
        "action": _names().take(pa.array(action)),
        "subject": subject,
        "partition": partition,
        "consumer_group": group,
        "consumer": consumer,
        "number": pa.array(events["consumer"].astype(np.int64)),
        "attempt": pa.array(events["attempt"].astype(np.int32)),
        "epoch": pa.array(events["epoch"].astype(np.int64)),
        "start": pa.array(events["start"].astype(np.int64)),
        "end": pa.array(events["end"].astype(np.int64)),
        "flags": pa.array(events["flags"].astype(np.int32)),
        "due": pa.array(events["time"], pa.int64(), mask=~(is_due & ~is_value)).cast(_TIME),
        "value": pa.array(events["time"], pa.int64(), mask=~is_value),
        "log_offset": pa.array(np.repeat([offset for offset, _, _ in frames], counts), pa.int64()),
        "log_row": pa.array((np.arange(len(events)) - np.repeat(starts, counts)).astype(np.int32)),
        "detail": pa.nulls(len(events), _TEXT),
    }
    yield pa.RecordBatch.from_arrays([columns[name] for name in ACTION_SCHEMA.names], schema=ACTION_SCHEMA)


def _names_of(events: npt.NDArray[Any], names: Names) -> tuple[pa.Array, pa.Array, pa.Array, pa.Array]:
    """Subject, partition, group and consumer of events: looked up once for each number there is."""
    group_ids, by_group = np.unique(events["group"], return_inverse=True)
    found = [names.of_group(int(number)) for number in group_ids]
    is_ordered = np.array([ordered for *_, ordered in found])[by_group]
    columns = [pa.array([facts[place] for facts in found], _TEXT) for place in range(3)]
    rows = pa.array(by_group)
    subject, partition, group = (column.take(rows) for column in columns)
    consumer_ids, by_consumer = np.unique(events["consumer"], return_inverse=True)
    clients = [names.consumers.get(int(number)) for number in consumer_ids]
    known = pa.array([None if client is None else client.client for client in clients], _TEXT)
    is_strand = is_ordered & ~_OF_CONSUMERS[events["action"]]
    of_nobody = (events["group"] == 0) | is_strand
    consumer = known.take(pa.array(by_consumer, mask=of_nobody))
    cancelled = np.flatnonzero(events["group"] == 0)
    if len(cancelled):
        # Delayed rows are nobody's yet: the event names their schedule partition.
        places = [names.place(int(number)) for number in consumer_ids]
        mask = pa.array(events["group"] == 0)
        chosen = pa.array(by_consumer[cancelled])
        subject = pc.replace_with_mask(subject, mask, pa.array([p[0] for p in places], _TEXT).take(chosen))
        partition = pc.replace_with_mask(partition, mask, pa.array([p[1] for p in places], _TEXT).take(chosen))
    return subject, partition, group, consumer


def _defined(definitions: list[Definition], names: Names, offset: int, frame: FrameView) -> pa.RecordBatch:
    """Rows of definitions; a start brings few."""
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
