"""Frames as Arrow record batches: columns are wrapped, rows are never decoded one by one."""

from __future__ import annotations

from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from plait.frame.columns import TAG_SEPARATOR, Column
from plait.frame.view import FrameView

SCHEMA = pa.schema(
    [
        pa.field("sequence", pa.int64(), nullable=False),
        pa.field("key", pa.string()),
        pa.field("body", pa.binary(), nullable=False),
        pa.field("tags", pa.list_(pa.string())),
        pa.field("headers", pa.binary()),
        pa.field("send_time", pa.timestamp("us", tz="UTC")),
        pa.field("store_time", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("producer", pa.uint64(), nullable=False),
        pa.field("producer_sequence", pa.uint64(), nullable=False),
    ]
)


@cache
def _nulls(kind: pa.DataType, count: int) -> pa.Array:
    return pa.nulls(count, kind)


def nulls(kind: pa.DataType, count: int) -> pa.Array:
    """A column of nothing; common sizes are shared."""
    return _nulls(kind, count) if count <= 16_384 else pa.nulls(count, kind)


def keys(frame: FrameView) -> pa.Array:
    """Order keys as text, null where a row has none."""
    if not frame.has(Column.KEY):
        return nulls(pa.string(), frame.count)
    offsets, data = frame.variable(Column.KEY)
    empty = offsets[1:] == offsets[:-1]
    validity = None
    if empty.any():
        validity = pa.py_buffer(np.packbits(~empty, bitorder="little"))
    buffers = [validity, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.string(), frame.count, buffers)


def tags(frame: FrameView) -> pa.Array:
    """Tags as lists of text, null where a row has none."""
    if not frame.has(Column.TAGS):
        return nulls(SCHEMA.field("tags").type, frame.count)
    joined = frame.binary(Column.TAGS).cast(pa.string())
    split = pc.split_pattern(pc.utf8_trim(joined, characters=TAG_SEPARATOR), TAG_SEPARATOR)
    return pc.if_else(pc.equal(joined, ""), pa.scalar(None, split.type), split)


def headers(frame: FrameView) -> pa.Array:
    """Headers as encoded maps, null where a row has none."""
    if not frame.has(Column.HEADERS):
        return nulls(pa.binary(), frame.count)
    encoded = frame.binary(Column.HEADERS)
    return pc.if_else(pc.equal(pc.binary_length(encoded), 0), pa.scalar(None, pa.binary()), encoded)


def send_times(frame: FrameView) -> pa.Array:
    kind = SCHEMA.field("send_time").type
    if not frame.has(Column.SEND_TIME):
        return nulls(kind, frame.count)
    return pa.array(frame.fixed(Column.SEND_TIME).astype("datetime64[us]"), kind)


def record_batch(frame: FrameView) -> pa.RecordBatch:
    """All columns of a frame, in the order of ``SCHEMA``."""
    producers, numbers = frame.message_ids()
    store_times = np.full(frame.count, frame.store_time, "datetime64[us]")
    columns = [
        pa.array(frame.sequences()),
        keys(frame),
        frame.binary(Column.BODY),
        tags(frame),
        headers(frame),
        send_times(frame),
        pa.array(store_times, SCHEMA.field("store_time").type),
        pa.array(producers),
        pa.array(numbers),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
