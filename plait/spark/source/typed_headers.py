"""Single headers as columns with a type: ``header_city`` has the header ``city``.

A value of another type than the column's is null, as is NaN. A column of doubles has integers too. Only the named
headers of a frame with a header block are read; headers in maps are decoded row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from plait.errors import InvalidArgument
from plait.frame.columns import Column
from plait.frame.header_block import HeaderBlock
from plait.spark.source.header_columns import Headers
from plait.spark.source.joined_frames import Frames

#: What the names of these columns begin with.
PREFIX: Final = "header_"
TEXT: Final = pa.string()
WHOLE: Final = pa.int64()
REAL: Final = pa.float64()
BOOL: Final = pa.bool_()
#: The types of the option ``headers``, by the names that Spark has for them.
KINDS: Final = {"string": TEXT, "bigint": WHOLE, "long": WHOLE, "double": REAL, "boolean": BOOL}
_WHOLE_END: Final = 1 << 63


def parse_headers(given: str) -> dict[str, pa.DataType]:
    """Column → type, of the option ``headers``, such as ``city:string, amount:bigint``."""
    found: dict[str, pa.DataType] = {}
    for part in given.split(","):
        name, _, kind = (each.strip() for each in part.rpartition(":"))
        if not name or kind.lower() not in KINDS:
            raise InvalidArgument(
                f"headers {given!r} has {part.strip()!r}; write the name and the type of each header, as in "
                f"'city:string, amount:bigint', with the types {', '.join(KINDS)}"
            )
        if f"{PREFIX}{name}".lower() in map(str.lower, found):
            raise InvalidArgument(f"headers {given!r} names {name!r} twice, in Spark's reading; remove one")
        found[f"{PREFIX}{name}"] = KINDS[kind.lower()]
    return found


def is_header(column: str, kind: pa.DataType) -> bool:
    """Whether a column of this name and type has a header. No other column of the source begins with the prefix."""
    return column.startswith(PREFIX) and len(column) > len(PREFIX) and kind in KINDS.values()


def header_array(frames: Frames, name: str, kind: pa.DataType) -> pa.Array:
    """The values of one header that have the type; null for the other rows."""
    if not frames.has(Column.HEADERS):
        return pa.nulls(frames.count, kind)
    return pa.concat_arrays([_of_piece(frames, piece, name, kind) for piece in frames.headers()])


def _of_piece(frames: Frames, piece: HeaderBlock | Sequence[Headers | None], name: str, kind: pa.DataType) -> pa.Array:
    if not isinstance(piece, HeaderBlock):
        return _of_rows(piece, name, kind)
    values = piece.array(name)
    if values is not None:
        return of_type(values, kind)
    return pa.nulls(piece.count, kind) if piece.rest is None else _of_rows(frames.rest_of(piece), name, kind)


def of_type(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """The values as ``kind``; null where they are of another type."""
    if pa.types.is_unsigned_integer(values.type) and kind == WHOLE:
        fits = pc.less(values, pa.scalar(_WHOLE_END, pa.uint64()))
        return pc.if_else(fits, values, pa.scalar(None, values.type)).cast(WHOLE)
    if pa.types.is_integer(values.type) and kind == REAL:
        return values.cast(REAL, safe=False)
    if values.type != kind:
        return pa.nulls(len(values), kind)
    return pc.if_else(pc.is_nan(values), pa.scalar(None, REAL), values) if kind == REAL else values


def _of_rows(rows: Sequence[Headers | None], name: str, kind: pa.DataType) -> pa.Array:
    return pa.array([None if row is None else _value(row.get(name), kind) for row in rows], kind)


def _value(value: Any, kind: pa.DataType) -> Any:
    """The value, or None if a column of this type does not have it."""
    given = type(value)
    if kind == TEXT:
        return value if given is str else None
    if kind == BOOL:
        return value if given is bool else None
    if kind == WHOLE:
        return value if given is int and value < _WHOLE_END else None
    return float(value) if given is int or (given is float and value == value) else None
