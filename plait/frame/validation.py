"""Checks of whole columns, as arrays: every row can be read by any consumer. ``FrameView.validate`` calls them."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from plait.errors import FrameError
from plait.frame.columns import ROW_SIZES_MAX, label
from plait.frame.header import TIME_MAX

_STRING: Final = pa.string()


def row_sizes(offsets: npt.NDArray[np.integer[Any]], size: int, column: int) -> None:
    """Check that no row of a column with ``size`` bytes of data is longer than the column allows."""
    limit = ROW_SIZES_MAX[column]
    if size > limit and int(np.diff(offsets).max()) > limit:
        raise FrameError(f"{label(column)} column has a row longer than {limit} bytes")


def text(offsets: npt.NDArray[np.int32], data: memoryview, column: int) -> None:
    """Check that every row is UTF-8."""
    if bytes(data).isascii():
        return
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    try:
        pa.Array.from_buffers(_STRING, len(offsets) - 1, buffers, 0).validate(full=True)
    except pa.ArrowInvalid:
        raise FrameError(f"{label(column)} column has a row that is not UTF-8") from None


def times(values: npt.NDArray[Any], column: int) -> None:
    """Check that every time is a date."""
    if not 0 <= int(values.min()) <= int(values.max()) <= TIME_MAX:
        raise FrameError(f"{label(column)} column has a time that is not a date")
