"""A frame as a record batch: shared memory, the right types, and nulls for missing values."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given

from plait.errors import FrameError
from plait.frame import FrameView, coalesce, slice_mask, slice_rows
from plait.frame import arrow as frame_arrow
from plait.frame.arrow import SCHEMA, nulls, record_batch
from plait.frame.columns import TAG_SEPARATOR, Codec, Column
from plait.frame.header import TIME_MAX
from tests.frame.samples import NOW, Draft, drafts, full_draft, in_order, relaxed, rows_of, with_column

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def expected(frame: FrameView) -> list[dict[str, object]]:
    """The rows of the batch, built one by one."""

    def moment(time: int | None) -> datetime | None:
        return None if time is None else EPOCH + timedelta(microseconds=time)

    return [
        {
            "sequence": row.sequence,
            "key": row.key.decode() if row.key else None,
            "body": row.body,
            "tags": row.tags.decode().strip(TAG_SEPARATOR).split(TAG_SEPARATOR) if row.tags else None,
            "headers": row.headers or None,
            "send_time": moment(row.send_time),
            "store_time": moment(frame.store_time),
            "producer": row.producer,
            "producer_sequence": row.number,
        }
        for row in rows_of(frame)
    ]


def check(frame: FrameView) -> None:
    batch = record_batch(frame)
    batch.validate(full=True)
    assert batch.schema == SCHEMA
    rows = batch.to_pylist()
    assert [row | {"headers": (row["headers"] and in_order(row["headers"])) or None} for row in rows] == expected(frame)


@relaxed
@given(drafts())
def test_a_batch_has_the_rows_of_the_frame(draft: Draft):
    check(draft.view())


@pytest.mark.parametrize("compression", [None, "zstd", "lz4"])
def test_slices_and_joined_frames_become_batches(compression: str | None):
    frame = full_draft(60, compression).view()
    check(frame)
    check(FrameView(slice_rows(frame, 10, 33).tobytes()))
    check(FrameView(slice_mask(frame, np.arange(60) % 7 == 1).tobytes()))
    if compression is None:
        joined = FrameView(coalesce([frame, full_draft(3).view()]).tobytes())
        check(joined)
        check(FrameView(slice_mask(joined, np.arange(63) % 5 == 1).tobytes()))


def test_columns_share_the_memory_of_the_frame():
    draft = Draft(
        [b"body %d" % i for i in range(500)],
        keys=[b"key %d" % i if i % 2 else b"" for i in range(500)],
        key_hashes=list(range(500)),
        headers=[b"\x80"] * 500,
        send_time=[NOW + i for i in range(500)],
    )
    memory = np.frombuffer(draft.build().tobytes(), np.uint8)
    frame = FrameView(memoryview(memory))
    begin, end = memory.ctypes.data, memory.ctypes.data + len(memory)
    batch = record_batch(frame)
    for name in ("key", "body", "headers"):
        _, offsets, data = batch.column(name).buffers()
        assert begin <= offsets.address <= offsets.address + offsets.size <= end
        assert begin <= data.address <= data.address + data.size <= end
    _, times = batch.column("send_time").buffers()
    assert begin <= times.address <= times.address + times.size <= end
    assert begin <= frame.fixed(Column.KEY_HASH).ctypes.data < end


def test_a_batch_keeps_the_memory_of_the_frame_alive():
    draft = full_draft(20)
    batch = record_batch(FrameView(bytearray(draft.build().tobytes())))
    assert batch.column("body").to_pylist() == draft.bodies


def test_the_largest_null_columns_are_not_cached():
    large = nulls(pa.string(), 20_000)
    assert (len(large), large.null_count) == (20_000, 20_000)
    small, other = nulls(pa.string(), 10), nulls(pa.string(), 11)
    assert (len(small), small.null_count, len(other)) == (10, 10, 11)
    assert frame_arrow._shared_nulls.cache_info().currsize <= len(SCHEMA)
    assert small.buffers()[1].address == other.buffers()[1].address


@pytest.mark.parametrize("column", [Column.KEY, Column.TAGS])
def test_text_that_is_not_utf8_is_a_frame_error(column: Column):
    draft = Draft([b"a"], keys=[b"k"], key_hashes=[1])
    frame = with_column(draft.build(), column, Codec.RAW, b"\0\0\0\0\2\0\0\0\xff\xfe")
    with pytest.raises(FrameError, match="not UTF-8"):
        record_batch(FrameView(frame.tobytes()))


@pytest.mark.parametrize("time", [-(1 << 63), TIME_MAX + 1])
def test_a_time_that_is_not_a_date_is_a_frame_error(time: int):
    frame = with_column(
        Draft([b"a"] * 3).build(), Column.SEND_TIME, Codec.CONST, time.to_bytes(8, "little", signed=True)
    )
    with pytest.raises(FrameError, match="not a date"):
        record_batch(FrameView(frame.tobytes()))
