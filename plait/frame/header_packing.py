"""Makes header blocks: columns by name from the headers of many rows."""

from __future__ import annotations

from collections import Counter
from itertools import chain, pairwise
from typing import Any, Final

import msgspec
import numpy as np

from plait.frame.header_block import (
    BOOL,
    FLOAT,
    NAME_SIZE_MAX,
    NO_DATA,
    NUMBERS,
    REST,
    TEXT,
    HeaderBlock,
    HeaderColumn,
    HeaderMap,
    HeaderValue,
    ends_of,
    row_form_size,
)
from plait.frame.run_tables import I32
from plait.limits import COLUMN_SIZE_MAX, HEADER_COLUMNS_MAX, HEADERS_SIZE_MAX

Buffer = bytes | bytearray | memoryview

#: Frames of fewer rows use the row form, which costs less to make.
BLOCK_COUNT_MIN: Final = 64
#: A name gets a column of its own if at least one in this many rows has it.
SPARSE: Final = 4

_KIND_OF: Final[dict[np.dtype[Any], int]] = {kind: number for number, kind in NUMBERS.items() if number != BOOL}
_INTEGERS: Final[list[np.dtype[Any]]] = [np.dtype(name) for name in ("<i1", "<i2", "<i4", "<i8", "<u8")]

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(HeaderMap).decode


def pack(offsets: Buffer, data: Buffer) -> bytes | None:
    """The block of a column in the row form; None if that form is to stay."""
    size = len(data)
    if len(offsets) <= I32.itemsize * BLOCK_COUNT_MIN or not size:
        return None
    ends = np.frombuffer(offsets, I32)
    count = len(ends) - 1
    # The check of a block counts some bytes more than a row has.
    if int(np.diff(ends).max()) > HEADERS_SIZE_MAX - 16:
        return None
    stored = bytes(data)
    try:
        maps = [_decode(stored[a:b]) if a < b else {} for a, b in pairwise((ends - ends[0]).tolist())]
    except ValueError:
        return None
    columns: list[HeaderColumn] = []
    rest = []
    counts = Counter(chain.from_iterable(maps))
    if "" in counts:
        # Readers do not decode the headers of that row.
        return None
    for name, many in counts.items():
        column = None
        if SPARSE * many >= count and len(columns) < HEADER_COLUMNS_MAX and len(name.encode()) <= NAME_SIZE_MAX:
            column = _packed(name, [row.get(name) for row in maps], count)
        if column is None:
            rest.append(name)
        else:
            columns.append(column)
    if not columns:
        return None
    others = None
    if rest:
        other = [{name: row[name] for name in rest if name in row} for row in maps]
        encoded = [_encode(each) if each else b"" for each in other]
        others = HeaderColumn("", REST, None, ends_of(encoded), memoryview(b"".join(encoded)))
    block = HeaderBlock(count, columns, others).tobytes()
    return block if len(block) <= size and row_form_size(memoryview(block), count) <= COLUMN_SIZE_MAX else None


def _packed(name: str, values: list[HeaderValue | None], count: int) -> HeaderColumn | None:
    """The column of a name; None if its values are of several kinds, or integers of no common type."""
    kinds = set(map(type, values))
    present = None
    if type(None) in kinds:
        kinds.discard(type(None))
        present = np.fromiter((value is not None for value in values), np.uint8, count)
    if len(kinds) > 1:
        return None
    [kind] = kinds
    if kind is str:
        texts: Any = values
        encoded = [b"" if text is None else text.encode() for text in texts]
        return HeaderColumn(name, TEXT, present, ends_of(encoded), memoryview(b"".join(encoded)))
    numbers: Any = values if present is None else [0 if value is None else value for value in values]
    number_type = NUMBERS[BOOL] if kind is bool else NUMBERS[FLOAT]
    if kind is int:
        low, high = min(numbers), max(numbers)
        fitting = (each for each in _INTEGERS if np.iinfo(each).min <= low and high <= np.iinfo(each).max)
        integer = next(fitting, None)
        if integer is None:
            return None
        number_type = integer
    number = BOOL if kind is bool else _KIND_OF[number_type]
    return HeaderColumn(name, number, present, np.array(numbers, number_type), NO_DATA)
