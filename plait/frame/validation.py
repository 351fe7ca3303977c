"""Checks that every row can be read by any consumer. ``FrameView.validate`` runs them before a broker stores a frame.

A frame is checked once, when a broker receives it. Whole columns are checked as arrays; frames with few rows are
checked row by row, which is faster for them.
"""

from __future__ import annotations

from itertools import pairwise
from struct import Struct
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from plait.errors import FrameError
from plait.frame.columns import ROW_SIZES_MAX, TEXTS, label
from plait.frame.header import TIME_MAX

#: Up to this many rows, plain integers are faster than arrays.
SMALL_COUNT: Final = 16
_OFFSETS: Final = [Struct(f"<{count + 1}i") for count in range(SMALL_COUNT + 1)]
_STRING: Final = pa.string()


def small_offsets(stored: memoryview, count: int, column: int) -> tuple[int, ...]:
    """The offsets of a raw variable column with at most ``SMALL_COUNT`` rows."""
    layout = _OFFSETS[count]
    size = len(stored) - layout.size
    if size < 0:
        raise FrameError(f"{label(column)} column has no room for {count} offsets")
    offsets: tuple[int, ...] = layout.unpack_from(stored)
    first = offsets[0]
    if first < 0 or offsets[-1] - first != size or (count > 1 and list(offsets) != sorted(offsets)):
        raise FrameError(f"{label(column)} column has offsets that do not fit its {size} bytes")
    return offsets


def small_rows(stored: memoryview, count: int, column: int) -> None:
    """Check a raw variable column with at most ``SMALL_COUNT`` rows."""
    offsets = small_offsets(stored, count, column)
    first, size = offsets[0], offsets[-1] - offsets[0]
    if size > ROW_SIZES_MAX[column] and max(b - a for a, b in pairwise(offsets)) > ROW_SIZES_MAX[column]:
        raise _too_long(column)
    if column in TEXTS:
        data = bytes(stored[len(stored) - size :])
        if not data.isascii():
            try:
                for start, end in pairwise(offsets):
                    data[start - first : end - first].decode()
            except UnicodeDecodeError:
                raise _not_text(column) from None


def row_sizes(offsets: npt.NDArray[np.int32], data: memoryview, column: int) -> None:
    """Check that no row is longer than its column allows."""
    limit = ROW_SIZES_MAX[column]
    if len(data) > limit and int(np.diff(offsets).max()) > limit:
        raise _too_long(column)


def text(offsets: npt.NDArray[np.int32], data: memoryview, column: int) -> None:
    """Check that every row is UTF-8."""
    if bytes(data).isascii():
        return
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    try:
        pa.Array.from_buffers(_STRING, len(offsets) - 1, buffers, 0).validate(full=True)
    except pa.ArrowInvalid:
        raise _not_text(column) from None


def times(values: npt.NDArray[Any], column: int) -> None:
    """Check that every time is a date."""
    time(int(values.min()), column)
    time(int(values.max()), column)


def time(value: int, column: int) -> None:
    """Check that a time is a date."""
    if not 0 <= value <= TIME_MAX:
        raise FrameError(f"{label(column)} column has a time that is not a date")


def _too_long(column: int) -> FrameError:
    return FrameError(f"{label(column)} column has a row longer than {ROW_SIZES_MAX[column]} bytes")


def _not_text(column: int) -> FrameError:
    return FrameError(f"{label(column)} column has a row that is not UTF-8")
