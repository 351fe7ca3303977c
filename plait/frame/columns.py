"""Which columns a frame may have and how each is laid out.

Columns stand in the order of their numbers, each padded to 8 bytes. A fixed column is ``count`` little-endian
values; a variable one is ``count + 1`` int32 offsets and then the data, which starts at ``offsets[0]``: a slice
of rows keeps its offsets as they were.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final

import numpy as np

from plait.limits import (
    BODY_SIZE_MAX,
    FRAME_COUNT_MAX,
    FRAME_SIZE_MAX,
    HEADERS_SIZE_MAX,
    KEY_SIZE_MAX,
    TAG_LENGTH_MAX,
    TAGS_MAX,
)


class Column(IntEnum):
    """Column numbers. Below 16 a reader that does not know one must refuse the frame, above it skips it."""

    RUNS = 0
    SELECTION = 1
    KEY_HASH = 2
    SEND_TIME = 3
    DELIVER_AT = 4
    KEY = 5
    BODY = 6
    PRIORITY = 7
    TAGS = 16
    HEADERS = 17
    #: Each row's number in its subject's schedule, which is settled by this frame.
    SCHEDULE = 18
    #: Not of rows: what a broker notes about a frame in its kept log.
    NOTE = 19


class Codec(IntEnum):
    """How a column's bytes are stored."""

    RAW = 0
    #: Fixed columns: one value that holds for every row.
    CONST = 1
    #: A u32 raw size, then the raw column as one Zstandard or LZ4 frame (RFC 8878, LZ4 frame format).
    ZSTD = 2
    LZ4 = 3


#: Width in bytes of the columns with one value a row.
FIXED_WIDTHS: Final[dict[int, int]] = {
    Column.KEY_HASH: 8,
    Column.SEND_TIME: 8,
    Column.DELIVER_AT: 8,
    Column.PRIORITY: 1,
    Column.SCHEDULE: 8,
}
#: NumPy type of the same.
FIXED_TYPES: Final[dict[int, np.dtype[Any]]] = {
    Column.KEY_HASH: np.dtype("<u8"),
    Column.SEND_TIME: np.dtype("<i8"),
    Column.DELIVER_AT: np.dtype("<i8"),
    Column.PRIORITY: np.dtype("u1"),
    Column.SCHEDULE: np.dtype("<u8"),
}
#: Microseconds since 1970.
TIMES: Final[frozenset[int]] = frozenset({Column.SEND_TIME, Column.DELIVER_AT})
#: Columns with bytes of any length a row, and the most bytes one row may have.
ROW_SIZES_MAX: Final[dict[int, int]] = {
    Column.KEY: KEY_SIZE_MAX,
    Column.BODY: BODY_SIZE_MAX,
    # A separator before each tag and one at the end; a character is at most four bytes.
    Column.TAGS: TAGS_MAX * (4 * TAG_LENGTH_MAX + 1) + 1,
    Column.HEADERS: HEADERS_SIZE_MAX,
}
VARIABLE: Final[frozenset[int]] = frozenset(ROW_SIZES_MAX)
#: Every row is UTF-8.
TEXTS: Final[frozenset[int]] = frozenset({Column.KEY, Column.TAGS})
#: What a broker reads to route and filter stays raw whatever the producer compresses.
COMPRESSIBLE: Final[frozenset[int]] = frozenset({Column.BODY, Column.HEADERS})

KNOWN_BITS: Final = sum(1 << column for column in Column)
MANDATORY_BITS: Final = 0xFFFF

#: A directory entry: size in the low bits, codec in the high ones.
ENTRY_SIZE: Final = 4
ENTRY_SIZE_BITS: Final = 28
ENTRY_SIZE_MASK: Final = (1 << ENTRY_SIZE_BITS) - 1

#: RUNS: producer u64, first sequence u64, rows u32, checksum u32, previous sequence u64 (``frame.tables.RUN``).
RUN_SIZE: Final = 32
#: SELECTION: rows of the original frame u32, first selected row u32; a bitmap of the original rows may follow.
SELECTION_SIZE: Final = 8
#: What a producer may send: with the largest selection added to it, any slice is still a frame that readers take.
ORIGINAL_SIZE_MAX: Final = FRAME_SIZE_MAX - (2 * ENTRY_SIZE + SELECTION_SIZE + FRAME_COUNT_MAX // 8)

#: Tags of a row are joined by this and have one at each end: a tag is found by one substring search.
TAG_SEPARATOR: Final = "\x1f"


def label(column: int) -> str:
    """A column's name for messages."""
    return Column(column).name.lower().replace("_", " ") if KNOWN_BITS >> column & 1 else f"unknown {column}"
