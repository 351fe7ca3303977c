"""The columns of a frame, their layout, and the checks that every row of a column can be read by any consumer.

Columns are stored in the order of their numbers, each padded to 8 bytes. A fixed column is ``count`` little-endian
values. A variable column is ``count + 1`` int32 offsets, then the data, whose first byte has the offset ``offsets[0]``:
a slice of rows keeps its offsets unchanged.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from plait.errors import FrameError
from plait.frame.header import HEADER_SIZE, TIME_MAX, pad
from plait.limits import (
    BODY_SIZE_MAX,
    FRAME_COUNT_MAX,
    FRAME_SIZE_MAX,
    HEADERS_SIZE_MAX,
    KEY_SIZE_MAX,
    NAME_LENGTH_MAX,
    TAG_LENGTH_MAX,
    TAGS_MAX,
)


class Column(IntEnum):
    """Column numbers. A reader refuses a frame with an unknown column below 16, and skips other unknown columns."""

    RUNS = 0
    SELECTION = 1
    KEY_HASH = 2
    SEND_TIME = 3
    DELIVER_AT = 4
    KEY = 5
    BODY = 6
    PRIORITY = 7
    #: The only group that gets the row; empty: every group.
    TO_GROUP = 8
    TAGS = 16
    HEADERS = 17
    #: The number of each row in the schedule of its subject. The frame settles these numbers: the rows no longer wait.
    SCHEDULE = 18
    #: Not a column of rows: the broker's note about a frame of the retained log; the producer group of half messages.
    NOTE = 19


class Codec(IntEnum):
    """How a column's bytes are stored."""

    RAW = 0
    #: Fixed columns: one value that holds for every row.
    CONST = 1
    #: A u32 raw size, then the raw column as one Zstandard or LZ4 frame (RFC 8878, LZ4 frame format).
    ZSTD = 2
    LZ4 = 3


#: The NumPy types of the columns with one value per row.
FIXED_TYPES: Final[dict[int, np.dtype[Any]]] = {
    Column.KEY_HASH: np.dtype("<u8"),
    Column.SEND_TIME: np.dtype("<i8"),
    Column.DELIVER_AT: np.dtype("<i8"),
    Column.PRIORITY: np.dtype("u1"),
    Column.SCHEDULE: np.dtype("<u8"),
}
#: The width in bytes of these values.
FIXED_WIDTHS: Final = {column: kind.itemsize for column, kind in FIXED_TYPES.items()}
#: Columns with times, in microseconds since 1970.
TIMES: Final[frozenset[int]] = frozenset({Column.SEND_TIME, Column.DELIVER_AT})
#: Columns with rows of any length, and the largest size of a row.
ROW_SIZES_MAX: Final[dict[int, int]] = {
    Column.KEY: KEY_SIZE_MAX,
    Column.BODY: BODY_SIZE_MAX,
    Column.TO_GROUP: NAME_LENGTH_MAX,
    # A separator before each tag and one at the end; a character is at most four bytes.
    Column.TAGS: TAGS_MAX * (4 * TAG_LENGTH_MAX + 1) + 1,
    Column.HEADERS: HEADERS_SIZE_MAX,
}
VARIABLE: Final[frozenset[int]] = frozenset(ROW_SIZES_MAX)
#: Columns whose rows are UTF-8.
TEXTS: Final[frozenset[int]] = frozenset({Column.KEY, Column.TO_GROUP, Column.TAGS})
#: Columns that a producer may compress. Columns that a broker reads to route and filter are always raw.
COMPRESSIBLE: Final[frozenset[int]] = frozenset({Column.BODY, Column.HEADERS})

KNOWN_BITS: Final = sum(1 << column for column in Column)
SELECTION_BIT: Final = 1 << Column.SELECTION
MANDATORY_BITS: Final = 0xFFFF
#: Set in the columns of a frame that has rows for one group only.
ADDRESSED_BIT: Final = 1 << Column.TO_GROUP

#: A directory entry: the size in the low bits, the codec in the high bits.
ENTRY_SIZE: Final = 4
ENTRY_SIZE_BITS: Final = 28
ENTRY_SIZE_MASK: Final = (1 << ENTRY_SIZE_BITS) - 1

#: RUNS: producer u64, first sequence u64, rows u32, checksum u32, previous sequence u64 (``run_tables.RUN``).
RUN_SIZE: Final = 32
#: SELECTION: rows of the original frame u32, first selected row u32; a bitmap of the original rows may follow.
SELECTION_SIZE: Final = 8
#: The largest frame that a producer may send: a slice of it, with the largest selection, is within ``FRAME_SIZE_MAX``.
ORIGINAL_SIZE_MAX: Final = FRAME_SIZE_MAX - (2 * ENTRY_SIZE + SELECTION_SIZE + FRAME_COUNT_MAX // 8)

#: Joins the tags of a row, and is also at both ends: one substring search finds a tag.
TAG_SEPARATOR: Final = "\x1f"


def label(column: int) -> str:
    """The name of a column, for error texts."""
    return Column(column).name.lower().replace("_", " ") if KNOWN_BITS >> column & 1 else f"unknown {column}"


#: Column numbers, the layout of the directory, and the position of the first column.
Layout = tuple[tuple[int, ...], Struct, int]
LAYOUTS: Final[dict[int, Layout]] = {}


def layout_of(bits: int) -> Layout:
    """The layout of a bit set of columns; cached, because a log has few different ones."""
    numbers = tuple(n for n in range(32) if bits >> n & 1)
    end = HEADER_SIZE + ENTRY_SIZE * len(numbers)
    layout = (numbers, Struct(f"<{len(numbers)}I"), end + pad(end))
    if len(LAYOUTS) < 256:
        LAYOUTS[bits] = layout
    return layout


_STRING: Final = pa.string()


#: Up to this many rows, plain integers are faster than arrays.
SMALL_COUNT: Final = 16


def check_row_sizes(offsets: npt.NDArray[np.integer[Any]], size: int, column: int) -> None:
    """Check that no row of a column with ``size`` bytes of data is longer than the column allows."""
    limit = ROW_SIZES_MAX[column]
    if size > limit and int(np.diff(offsets).max()) > limit:
        raise FrameError(f"{label(column)} column has a row longer than {limit} bytes")


def check_text(offsets: npt.NDArray[np.int32], data: memoryview, column: int) -> None:
    """Check that every row is UTF-8."""
    if bytes(data).isascii():
        return
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    try:
        pa.Array.from_buffers(_STRING, len(offsets) - 1, buffers, 0).validate(full=True)
    except pa.ArrowInvalid:
        raise FrameError(f"{label(column)} column has a row that is not UTF-8") from None


def check_times(values: npt.NDArray[Any], column: int) -> None:
    """Check that every time is a date."""
    if not 0 <= int(values.min()) <= int(values.max()) <= TIME_MAX:
        raise FrameError(f"{label(column)} column has a time that is not a date")
