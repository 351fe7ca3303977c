"""The checksum of a file's rows: it shows that an archived file still has the content that was written.

Each column has a CRC-32C over the validity, lengths and values of its rows, in file order. The result does not depend
on how the rows are split into batches.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from crc32c import crc32c


class Digest:
    """Checksums of the columns of some rows, fed in order."""

    def __init__(self) -> None:
        self.count = 0
        self._crcs: dict[str, int] = {}

    def feed(self, batch: pa.RecordBatch) -> None:
        """Add the next rows."""
        self.count += batch.num_rows
        for name, array in zip(batch.schema.names, batch.columns, strict=True):
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
            # The bytes of a null value are undefined: replace them by zeros.
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
