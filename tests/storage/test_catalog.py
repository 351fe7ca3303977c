"""The catalog: partitions as rows of the message log."""

from __future__ import annotations

import msgspec

from plait.frame.view import FrameView
from plait.storage.catalog import (
    CATALOG,
    SCHEDULE,
    STAGE,
    PartitionRow,
    Stage,
    SubjectSettings,
    catalog_frame,
    read_rows,
)
from plait.storage.reading.log_chunks import WantedRows

ROWS = [
    PartitionRow(1, "orders", "orders", 5, SubjectSettings(retention_seconds=60.0, retention_bytes=1 << 30)),
    PartitionRow(2, "müll", "müll", 6, deleted=True),
    PartitionRow(3, "plain", "plain", 7),
    PartitionRow(
        4, "orders", "orders", 8, kind=STAGE, stage=Stage((1 << 63) - 1, "q", 7, delayed=True, state="expired")
    ),
]


def test_rows_read_back_unchanged():
    frame = FrameView(catalog_frame(ROWS, time=11, durable=22, epoch=33, previous_end=44).tobytes()).verify()
    assert read_rows(frame) == ROWS
    assert (frame.partition, frame.producer, frame.previous) == (CATALOG, 0, 44)
    assert (frame.store_time, frame.durable, frame.epoch) == (11, 22, 33)


def test_a_row_of_a_later_version_with_more_fields_can_be_read():
    class Later(PartitionRow, frozen=True):
        colour: str = "red"

    row = Later(1, "orders", "orders", 5, colour="blue")
    data = msgspec.msgpack.encode(row)
    assert msgspec.msgpack.decode(data, type=PartitionRow) == PartitionRow(1, "orders", "orders", 5)


def test_file_readers_do_not_see_delayed_or_staged_rows():
    wanted = WantedRows(frozenset({"orders"}))
    assert wanted.covers(ROWS[0])
    for kind in (SCHEDULE, STAGE):
        assert not wanted.covers(PartitionRow(5, "orders", "orders", 9, kind=kind))
