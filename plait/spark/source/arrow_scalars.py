"""Makes Arrow scalars and arrays from their bytes.

``pa.array`` and ``pa.scalar`` import pandas where it is installed, which takes longer than a lookup. Lookups use the
functions here instead.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Number = TypeVar("Number", np.int32, np.int64)

_MICROS: Final = Struct("<q")
_TIME: Final = pa.timestamp("us", tz="UTC")


def text(value: str) -> pa.Scalar:
    """A string scalar."""
    return repeated(value, 1)[0]


def moment(micros: int) -> pa.Scalar:
    """A UTC timestamp scalar, from microseconds since 1970."""
    return pa.Array.from_buffers(_TIME, 1, [None, pa.py_buffer(_MICROS.pack(micros))])[0]


def repeated(value: str, count: int) -> pa.Array:
    """An array with ``count`` times the same text."""
    data = value.encode()
    offsets = np.arange(count + 1, dtype=np.int32) * np.int32(len(data))
    return pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data * count)])


def integers(values: npt.NDArray[np.int64]) -> pa.Array:
    """A NumPy array as an Arrow array, without a copy."""
    return pa.Array.from_buffers(pa.int64(), len(values), [None, pa.py_buffer(np.ascontiguousarray(values, np.int64))])


def values(array: pa.Array | pa.ChunkedArray, kind: type[Number]) -> npt.NDArray[Number]:
    """The numbers of a column without nulls, without a copy if they are in one chunk."""
    whole = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
    buffer = whole.buffers()[1]
    if buffer is None:
        return np.zeros(0, kind)
    return np.frombuffer(buffer, kind, len(whole), whole.offset * np.dtype(kind).itemsize)
