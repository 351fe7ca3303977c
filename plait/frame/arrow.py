"""Frames as Arrow record batches: columns are wrapped, rows are never decoded one by one."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from plait.frame.columns import TAG_SEPARATOR, Column, check_text, check_times
from plait.frame.view import FrameView

_TEXT: Final = pa.string()
_BYTES: Final = pa.binary()
_TEXTS: Final = pa.list_(_TEXT)
_TIME: Final = pa.timestamp("us", tz="UTC")
_SIGNED: Final = pa.int64()
_UNSIGNED: Final = pa.uint64()

SCHEMA: Final = pa.schema(
    [
        pa.field("sequence", _SIGNED, nullable=False),
        pa.field("key", _TEXT),
        pa.field("body", _BYTES, nullable=False),
        pa.field("tags", _TEXTS),
        pa.field("headers", _BYTES),
        pa.field("send_time", _TIME),
        pa.field("store_time", _TIME, nullable=False),
        pa.field("producer", _UNSIGNED, nullable=False),
        pa.field("producer_sequence", _UNSIGNED, nullable=False),
    ]
)

#: A message id (``plait.MessageId``).
MESSAGE_ID: Final = pa.struct(
    [pa.field("producer", _UNSIGNED, nullable=False), pa.field("sequence", _UNSIGNED, nullable=False)]
)
#: The type of a column with the same text in every row.
SAME_TEXT: Final = pa.dictionary(pa.int32(), _TEXT)

#: Columns of at most this many nulls are slices of a shared array.
_SHARED_COUNT: Final = 65_536


@lru_cache(64)
def _shared_nulls(kind: pa.DataType) -> pa.Array:
    return pa.nulls(_SHARED_COUNT, kind)


def nulls(kind: pa.DataType, count: int) -> pa.Array:
    """A column of nulls."""
    return _shared_nulls(kind).slice(0, count) if count <= _SHARED_COUNT else pa.nulls(count, kind)


def attempts(number: int, count: int) -> pa.Array:
    """A column with the same attempt in each row."""
    return _wrap(pa.int32(), np.full(count, number, np.int32))


@lru_cache(4096)
def _words(text: str) -> pa.Array:
    return pa.array([text])


def same_text(text: str, count: int) -> pa.Array:
    """A column with the same text in each row, as a dictionary with one entry."""
    return pa.DictionaryArray.from_arrays(_wrap(pa.int32(), np.zeros(count, np.int32)), _words(text))


def message_ids(producers: pa.Array, numbers: pa.Array) -> pa.Array:
    """Message ids, which share the memory of the two arrays."""
    return pa.StructArray.from_arrays([producers, numbers], fields=list(MESSAGE_ID))


def keys(frame: FrameView) -> pa.Array:
    """Order keys as text; null for rows without a key."""
    if not frame.has(Column.KEY):
        return nulls(_TEXT, frame.count)
    offsets, data = frame.variable(Column.KEY)
    check_text(offsets, data, Column.KEY)
    return _wrap_nullable(_TEXT, offsets, data)


def tags(frame: FrameView) -> pa.Array:
    """Tags as lists of text; null for rows without tags."""
    if not frame.has(Column.TAGS):
        return nulls(_TEXTS, frame.count)
    offsets, data = frame.variable(Column.TAGS)
    check_text(offsets, data, Column.TAGS)
    # Imported here: it would take a quarter of the time of importing plait.
    import pyarrow.compute as pc

    joined = _wrap_nullable(_TEXT, offsets, data)
    return pc.split_pattern(pc.utf8_trim(joined, characters=TAG_SEPARATOR), TAG_SEPARATOR)


def headers(frame: FrameView) -> pa.Array:
    """Headers as encoded maps; null for rows without headers."""
    if not frame.has(Column.HEADERS):
        return nulls(_BYTES, frame.count)
    return _wrap_nullable(_BYTES, *frame.variable(Column.HEADERS))


def send_times(frame: FrameView) -> pa.Array:
    """The send time of each row; null if the frame has none."""
    if not frame.has(Column.SEND_TIME):
        return nulls(_TIME, frame.count)
    values = frame.values(Column.SEND_TIME)
    check_times(values, Column.SEND_TIME)
    return _wrap(_TIME, values if len(values) == frame.count else np.full(frame.count, values[0]))


def record_batch(frame: FrameView) -> pa.RecordBatch:
    """All columns of a frame, in the order of ``SCHEMA``."""
    return pa.RecordBatch.from_arrays(arrays(frame), schema=SCHEMA)


def arrays(frame: FrameView) -> list[pa.Array]:
    """All columns of a frame, in the order of ``SCHEMA``."""
    producers, numbers = frame.message_ids()
    return [
        _wrap(_SIGNED, frame.sequences()),
        keys(frame),
        frame.binary(Column.BODY),
        tags(frame),
        headers(frame),
        send_times(frame),
        _wrap(_TIME, np.full(frame.count, frame.store_time, np.int64)),
        _wrap(_UNSIGNED, producers),
        _wrap(_UNSIGNED, numbers),
    ]


def _wrap(kind: pa.DataType, values: npt.NDArray[Any]) -> pa.Array:
    """An Arrow array that shares the memory of a contiguous NumPy array."""
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)], 0)


def _wrap_nullable(kind: pa.DataType, offsets: npt.NDArray[np.int32], data: memoryview) -> pa.Array:
    """An Arrow array that shares existing memory; empty rows are null."""
    filled = offsets[1:] != offsets[:-1]
    validity = None if filled.all() else pa.py_buffer(np.packbits(filled, bitorder="little"))
    return pa.Array.from_buffers(kind, len(filled), [validity, pa.py_buffer(offsets), pa.py_buffer(data)])
