"""The reasons of dead letters as an Arrow table: the records of a retained log without the bodies.

One row for each death of a message, in log order: a message that was resent and died again has two rows. Nothing here
needs Spark. docs/archive.md describes the columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import pyarrow as pa

from plait.frame.view import FrameView
from plait.spark.archiving.action_table import Names
from plait.storage.logs.retained_log import DeathRecord, is_header, note_of
from plait.storage.reading.log_chunks import WantedRows

_TIME: Final = pa.timestamp("us", tz="UTC")
_TEXT: Final = pa.string()

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
