"""Sorts rows into the orders of archived files, without losing, duplicating or changing a row.

Text and binary columns are Arrow views: 16 bytes per row point to its value, so that sorting copies no value. The body
of an archived message stays in the mapped segment file until Parquet encodes it. Views and plain columns give the same
Parquet file.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from plait.errors import ArchiveError

Order = npt.NDArray[np.int64]

#: Plain type → view type.
_VIEWS: Final = {pa.string(): pa.string_view(), pa.binary(): pa.binary_view()}
#: One view as a NumPy item; it begins with the length of the value.
_VIEW: Final = np.dtype("V16")


def viewed(array: pa.Array) -> pa.Array:
    """The array with text and binary values as views; any other array as it is."""
    kind = _VIEWS.get(array.type)
    return array if kind is None else array.cast(kind)


def viewed_schema(schema: pa.Schema) -> pa.Schema:
    """The schema with text and binary columns as views."""
    return pa.schema([field.with_type(_VIEWS.get(field.type, field.type)) for field in schema])


def viewed_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with text and binary columns as views."""
    return pa.RecordBatch.from_arrays([viewed(array) for array in batch.columns], schema=viewed_schema(batch.schema))


def joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """The rows of all batches (one at least), with text and binary columns as views."""
    parts = [viewed_batch(batch) for batch in batches]
    if len(parts) == 1:
        return parts[0]
    columns = [pa.concat_arrays(arrays) for arrays in zip(*(part.columns for part in parts), strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=parts[0].schema)


def raw_size(batch: pa.RecordBatch) -> int:
    """The size of the rows as plain columns."""
    size = 0
    for array in batch.columns:
        if array.type in _VIEWS.values():
            lengths = _records(array).view(np.int32)[::4]
            size += int(lengths.sum(where=_valid(array), dtype=np.int64)) + 4 * len(array)
        else:
            size += array.nbytes
    return size


def moved(batch: pa.RecordBatch, order: Order) -> pa.RecordBatch:
    """Rows in another order."""
    columns = [_moved(array, order) for array in batch.columns]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def is_moved(batch: pa.RecordBatch, order: Order, result: pa.RecordBatch) -> bool:
    """Whether ``result`` has each row of ``batch`` once, in ``order``: sorted back, it equals ``batch``."""
    if len(order) != batch.num_rows or result.num_rows != batch.num_rows:
        return False
    places = np.full(len(order), -1)
    places[order] = np.arange(len(order))
    if places.min() < 0:
        # A row is missing from the order, and another one is in it twice.
        return False
    return all(_is_same(_moved(mine, places), was) for mine, was in zip(result.columns, batch.columns, strict=True))


def _moved(array: pa.Array, order: Order) -> pa.Array:
    if array.null_count == len(array):
        return pa.nulls(len(order), array.type)
    if array.type not in _VIEWS.values():
        return array.take(pa.array(order))
    validity = None
    if array.null_count:
        validity = pa.py_buffer(np.packbits(_valid(array)[order], bitorder="little"))
    views = pa.py_buffer(_records(array)[order])
    return pa.Array.from_buffers(array.type, len(order), [validity, views, *array.buffers()[2:]])


def _is_same(array: pa.Array, other: pa.Array) -> bool:
    """Whether the values are equal. Equal views of the same buffers are equal without reading their values."""
    if array.type in _VIEWS.values() and not array.null_count and not other.null_count:
        mine, others = (_records(each).view(np.uint64) for each in (array, other))
        are_same = _places(array) == _places(other) and np.array_equal(mine, others)
    else:
        are_same = False
    return are_same or bool(array.equals(other))


def _places(array: pa.Array) -> list[tuple[int, int] | None]:
    """Address and size of the buffers that views point into."""
    return [None if buffer is None else (buffer.address, buffer.size) for buffer in array.buffers()[2:]]


def _records(array: pa.Array) -> npt.NDArray[Any]:
    if not len(array):
        return np.empty(0, _VIEW)
    return np.frombuffer(array.buffers()[1], _VIEW)[array.offset : array.offset + len(array)]


def _valid(array: pa.Array) -> npt.NDArray[np.bool_]:
    return array.is_valid().to_numpy(zero_copy_only=False) if array.null_count else np.ones(len(array), bool)


# --- the row orders of archived files -----------------------------------------------------------


def arranged(rows: pa.RecordBatch, order: Order) -> pa.RecordBatch:
    """Rows in another order. The result is sorted back and compared: ``ArchiveError`` where it differs."""
    if np.array_equal(order, np.arange(rows.num_rows)):
        return rows
    result = moved(rows, order)
    if not is_moved(rows, order, result):
        raise ArchiveError(
            "sorted rows differ from the rows that were read; nothing was committed. Check the memory of this machine, "
            "then run again"
        )
    return result


def lookup_order(rows: pa.RecordBatch) -> Order:
    """Indices that sort rows by key (rows without a key last), then partition. The rows must be in log order."""
    keys = rows.column("key")
    partitions = rows.column("partition").dictionary_encode()
    ranks = _ranks(partitions)
    if keys.null_count < len(keys):
        ranks = _ranks(keys.dictionary_encode()) * len(partitions.dictionary) + ranks
    # Stable: rows of one key and one partition stay in log order.
    return np.argsort(ranks, kind="stable")


def _ranks(encoded: pa.DictionaryArray) -> Order:
    """The rank of each row's value among the sorted distinct values; nulls rank last."""
    # Arrow cannot sort views.
    order = pc.array_sort_indices(encoded.dictionary.cast(pa.string())).to_numpy()
    ranks = np.empty(len(order) + 1, np.int64)
    ranks[order] = np.arange(len(order))
    ranks[-1] = len(order)
    codes = encoded.indices.fill_null(len(order)) if encoded.indices.null_count else encoded.indices
    found: Order = ranks[codes.to_numpy()]
    return found


def log_order(rows: pa.RecordBatch) -> Order:
    """Indices that sort rows into log order, for each partition by epoch and sequence."""
    sequence, epoch = (rows.column(column).to_numpy() for column in ("sequence", "epoch"))
    # A subject that was deleted and created again may repeat its sequences: the store time orders these rows.
    return np.lexsort([rows.column("store_time").cast(pa.int64()).to_numpy(), sequence, epoch])
