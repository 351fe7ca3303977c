"""Checksums of rows by columns: what tells that an archive holds what the log does.

Each column has a CRC-32C over validity, lengths and values of its rows, in one of two orders. *Log order*, for each
partition by epoch and sequence, does not depend on how rows are sorted: it is the same for batches as they come from
the frames and for the table that is written. *File order* is that of the rows in a file: it is the same for that table
and for what is read back, a row group at a time, at once or years later.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from crc32c import crc32c

#: The column whose values tell whose digest it is.
PARTITION: Final = frozenset(("partition",))


class Digest:
    """Checksums of the columns of some rows, fed in order."""

    def __init__(self) -> None:
        self.count = 0
        self._crcs: dict[str, int] = {}

    def feed(self, batch: pa.RecordBatch, without: frozenset[str] = frozenset()) -> None:
        """More rows."""
        self.count += batch.num_rows
        for name, array in zip(batch.schema.names, batch.columns, strict=True):
            if name not in without:
                self._array(name, array)

    @property
    def value(self) -> tuple[int, int]:
        """(count, checksum)."""
        crc = 0
        for name in sorted(self._crcs):
            crc = crc32c(f"{name}={self._crcs[name]:08x};".encode(), crc)
        return self.count, crc

    def _add(self, name: str, data: Any) -> None:
        self._crcs[name] = crc32c(data, self._crcs.get(name, 0))

    def _array(self, name: str, array: pa.Array) -> None:
        if array.null_count:
            valid = array.is_valid().to_numpy(zero_copy_only=False)
        else:
            valid = np.ones(len(array), bool)
        self._add(f"{name}?", valid.view(np.uint8))
        kind = array.type
        if pa.types.is_binary(kind) or pa.types.is_string(kind):
            offsets, data = _offsets(array), array.buffers()[2]
            self._add(f"{name}#", np.diff(offsets))
            if data is not None:
                self._add(name, memoryview(data)[int(offsets[0]) : int(offsets[-1])])
        elif pa.types.is_map(kind):
            self._items(name, array, [("key", array.keys), ("item", array.items)])
        elif pa.types.is_list(kind):
            self._items(name, array, [("element", array.values)])
        else:
            # What stands where a value is missing is nobody's.
            filled = array.fill_null(pa.scalar(0, pa.int64()).cast(kind)) if array.null_count else array
            width = kind.bit_width // 8
            values = memoryview(filled.buffers()[1])
            self._add(name, values[filled.offset * width : (filled.offset + len(filled)) * width])

    def _items(self, name: str, array: pa.Array, children: list[tuple[str, pa.Array]]) -> None:
        offsets = _offsets(array)
        self._add(f"{name}#", np.diff(offsets))
        for child, values in children:
            self._array(f"{name}.{child}", values.slice(int(offsets[0]), int(offsets[-1] - offsets[0])))


def _offsets(array: pa.Array) -> npt.NDArray[np.int32]:
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.zeros(1, np.int32)
    return np.frombuffer(buffer, np.int32)[array.offset : array.offset + len(array) + 1]


def message_digests(table: pa.Table) -> dict[str, Digest]:
    """Partition → the digest of its rows in log order, however ``table`` has them sorted."""
    digests: dict[str, Digest] = {}
    if not table.num_rows:
        return digests
    names = table.column("partition").combine_chunks().dictionary_encode()
    codes = names.indices.to_numpy(zero_copy_only=False)
    table = taken(table.drop_columns("partition"), log_order(table, codes))
    ends = np.cumsum(np.bincount(codes, minlength=len(names.dictionary)))
    for name, start, end in zip(names.dictionary.to_pylist(), [0, *ends[:-1]], ends, strict=True):
        digest = digests[name] = Digest()
        for batch in table.slice(start, end - start).to_batches():
            digest.feed(batch)
    return digests


def log_order(table: pa.Table, codes: npt.NDArray[Any] | None = None) -> npt.NDArray[np.int64]:
    """The places of the rows of ``table`` in the order of the log: by partition (``codes``), epoch and sequence."""
    sequence, epoch = (table.column(column).to_numpy() for column in ("sequence", "epoch"))
    is_one = epoch.min() == epoch.max() and (codes is None or codes.min() == codes.max())
    first = sequence.min()
    if is_one and sequence.max() - first == len(sequence) - 1:
        # The usual case: every sequence once. Anything else leaves a place empty.
        order = np.full(len(sequence), -1)
        order[sequence - first] = np.arange(len(sequence))
        if order.min() >= 0:
            return order
    # A subject that was deleted and made again counts from 0 again: the later one comes later.
    keys = [table.column("store_time").cast(pa.int64()).to_numpy(), sequence, epoch]
    return np.lexsort(keys if codes is None else [*keys, codes])


def taken(table: pa.Table, order: npt.NDArray[Any], same: frozenset[str] = frozenset()) -> pa.Table:
    """Rows in another order; columns without a value, and those that are the ``same`` in all rows, stay as they are."""
    if np.array_equal(order, np.arange(len(order))):
        return table
    indices = pa.array(order)
    columns = [
        column if name in same or column.null_count == len(column) else column.take(indices)
        for name, column in zip(table.schema.names, table.columns, strict=True)
    ]
    return pa.Table.from_arrays(columns, schema=table.schema)


def checksum_of(batches: Iterable[pa.RecordBatch]) -> int:
    """Of all rows, in the order in which they come."""
    digest = Digest()
    for batch in batches:
        digest.feed(batch)
    return digest.value[1]


def bounds(column: pa.ChunkedArray) -> tuple[Any, Any]:
    """The least and the greatest value; None where there is none."""
    found = pc.min_max(column)
    return found["min"].as_py(), found["max"].as_py()
