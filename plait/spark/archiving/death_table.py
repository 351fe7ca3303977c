"""Why messages died, as an Arrow table: what stands beside the dead letters of a kept log, without their bodies.

One row for each death of a message, in log order: one that was resent and died again has two. Nothing here needs Spark.
docs/archive.md describes the columns to users.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import pyarrow as pa

from plait.frame.view import FrameView
from plait.spark.archiving.action_table import Names
from plait.storage.logs.retained_log import DeathRecord, is_head, note_of
from plait.storage.reading.log_chunks import WantedRows

_TIME: Final = pa.timestamp("us", tz="UTC")
_TEXT: Final = pa.string()

DEATH_SCHEMA: Final = pa.schema(
    [
        # The failure that it died of, by the broker's clock.
        pa.field("time", _TIME, nullable=False),
        # Null where the log does not say any more which partition it was.
        pa.field("subject", _TEXT),
        pa.field("partition", _TEXT),
        pa.field("consumer_group", _TEXT),
        # The group's, in its data directory: what tells apart two that had the same name.
        pa.field("group_number", pa.int64(), nullable=False),
        # The message's, as the messages of an archive have them.
        pa.field("epoch", pa.int64(), nullable=False),
        pa.field("sequence", pa.int64(), nullable=False),
        pa.field("attempts", pa.int32(), nullable=False),
        pa.field("first_failure", _TIME, nullable=False),
        # Of the exception, and who raised it; null where nobody said.
        pa.field("type", _TEXT),
        pa.field("text", _TEXT),
        pa.field("handler", _TEXT),
        # Of the kept log.
        pa.field("log_offset", pa.int64(), nullable=False),
        # When the message was stored; an earlier Plait did not say.
        pa.field("store_time", _TIME),
    ]
)


def death_table(frames: Iterable[tuple[int, FrameView]], names: Names, wanted: WantedRows) -> pa.Table:
    """The deaths that (log offset, frame) of a kept log tell of, as far as their subjects are wanted.

    ``FrameError`` where a note does not decode. What is kept for another attempt has not died.
    """
    told: list[tuple[int, FrameView, int, DeathRecord]] = []
    for offset, frame in frames:
        if is_head(frame):
            continue
        note = note_of(frame)
        # One that nobody knows any more belongs to an archive of all subjects.
        if note.death is not None and wanted.names(names.place(frame.partition)[0] or ""):
            told.append((offset, frame, note.group, note.death))
    if not told:
        return DEATH_SCHEMA.empty_table()
    sequences = [frame.sequences() for _, frame, _, _ in told]
    # All rows of a frame died together, of one thing.
    of = pa.array(np.repeat(np.arange(len(told)), [len(each) for each in sequences]))
    places = [names.place(frame.partition) for _, frame, _, _ in told]
    columns = {
        "time": [death.last_time for *_, death in told],
        "subject": [subject for subject, _ in places],
        "partition": [partition for _, partition in places],
        "consumer_group": [names.of_group(group)[2] for _, _, group, _ in told],
        "group_number": [group for _, _, group, _ in told],
        "epoch": [frame.epoch for _, frame, _, _ in told],
        "attempts": [death.attempts for *_, death in told],
        "first_failure": [death.first_time for *_, death in told],
        "type": [death.reason.type or None for *_, death in told],
        "text": [death.reason.text or None for *_, death in told],
        "handler": [death.reason.handler or None for *_, death in told],
        "log_offset": [offset for offset, *_ in told],
        "store_time": [frame.store_time for _, frame, _, _ in told],
    }
    arrays = {name: pa.array(values, DEATH_SCHEMA.field(name).type).take(of) for name, values in columns.items()}
    arrays["sequence"] = pa.array(np.concatenate(sequences))
    return pa.Table.from_arrays([arrays[name] for name in DEATH_SCHEMA.names], schema=DEATH_SCHEMA)
