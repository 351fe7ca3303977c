"""Encodes rows of a DataFrame as the columns of frames: whole Arrow arrays, never row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from plait.client.send.encoding import dues_of
from plait.client.send.row_columns import RowColumns
from plait.errors import InvalidArgument, TooLarge
from plait.frame.columns import TAG_SEPARATOR
from plait.frame.xxh3 import hash_rows
from plait.limits import BODY_SIZE_MAX, HEADERS_SIZE_MAX, KEY_SIZE_MAX, TAGS_MAX
from plait.model import names

_BINARY: Final = pa.binary()
_STRING: Final = pa.string()
_Int64s = npt.NDArray[np.int64]


def _is_delay(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind) or types.is_duration(kind))


#: The columns that a DataFrame may have, and their types.
COLUMNS: Final[dict[str, tuple[str, Callable[[pa.DataType], bool]]]] = {
    "subject": ("string", lambda kind: kind == _STRING),
    "body": ("binary or string", lambda kind: kind in (_BINARY, _STRING)),
    "key": ("string or a whole number", lambda kind: kind == _STRING or pa.types.is_integer(kind)),
    "tags": ("array<string>", lambda kind: pa.types.is_list(kind) and kind.value_type == _STRING),
    "headers": (
        "map<string,string>",
        lambda kind: pa.types.is_map(kind) and (kind.key_type, kind.item_type) == (_STRING, _STRING),
    ),
    "to_group": ("string", lambda kind: kind == _STRING),
    "delay": ("a number of seconds or an interval", _is_delay),
    "deliver_at": ("timestamp", lambda kind: pa.types.is_timestamp(kind) and kind.tz is not None),
}


def check_columns(schema: pa.Schema) -> None:
    """Raise ``InvalidArgument`` if a DataFrame of this schema cannot be written."""
    for field in schema:
        if schema.names.count(field.name) > 1:
            raise InvalidArgument(f"the DataFrame has several columns {field.name!r}: choose one with select()")
        if field.name not in COLUMNS:
            raise InvalidArgument(
                f"column {field.name!r} cannot be written; choose from {', '.join(COLUMNS)} with select()"
            )
        expected, fits = COLUMNS[field.name]
        if not fits(field.type):
            raise InvalidArgument(f"column {field.name!r} is {field.type}; it must be {expected}")
    if "body" not in schema.names:
        raise InvalidArgument("the DataFrame has no column 'body'; rename a column with withColumnRenamed()")
    if {"delay", "deliver_at"} <= set(schema.names):
        raise InvalidArgument("the DataFrame has the columns 'delay' and 'deliver_at'; drop one of them")


def encode(batch: pa.RecordBatch, subject: str | None, now: int) -> Iterator[tuple[str, RowColumns]]:
    """The rows of a batch by subject, delayed rows separately; each result keeps the order of its rows.

    ``subject`` is the subject of rows without one; delays count from ``now``, a time in microseconds.
    """
    if not batch.num_rows:
        return
    keys = None if "key" not in batch.schema.names else encode_keys(batch["key"])
    rows = RowColumns(
        encode_bodies(batch["body"]),
        keys,
        None if keys is None else hash_rows(keys),
        None if "tags" not in batch.schema.names else encode_tags(batch["tags"]),
        None if "headers" not in batch.schema.names else encode_headers(batch["headers"]),
        groups=None if "to_group" not in batch.schema.names else encode_groups(batch["to_group"]),
    )
    late = next((name for name in ("delay", "deliver_at") if name in batch.schema.names), None)
    times = None if late is None else batch[late]
    if times is not None and pa.types.is_decimal(times.type):
        # In Spark SQL a number such as 1.5 is a decimal. A double is precise to microseconds for many years.
        times = times.cast(pa.float64())
    for name, chosen in _subjects(batch, subject):
        chosen_rows = rows if chosen is None else rows.take(chosen)
        if late is None or times is None:
            yield name, chosen_rows
            continue
        given = times if chosen is None else times.take(pa.array(chosen))
        timed = given.is_valid().to_numpy(zero_copy_only=False)
        if not timed.all():
            yield name, chosen_rows.take(np.flatnonzero(~timed))
        if timed.any():
            index = np.flatnonzero(timed)
            some = given.take(pa.array(index))
            delay, deliver_at = (some, None) if late == "delay" else (None, some)
            dues = dues_of(delay, deliver_at, now, len(some))
            yield name, chosen_rows.take(index)._replace(dues=dues)


def _subjects(batch: pa.RecordBatch, subject: str | None) -> Iterator[tuple[str, _Int64s | None]]:
    """Each subject with the indices of its rows; None: all rows."""
    if "subject" not in batch.schema.names:
        assert subject is not None
        yield subject, None
        return
    column = batch["subject"]
    if column.null_count:
        if subject is None:
            raise InvalidArgument("column 'subject' has null values; fill them, or set option('subject', ...)")
        column = column.fill_null(subject)
    found = column.dictionary_encode()
    codes = found.indices.to_numpy()
    for code, name in enumerate(found.dictionary.to_pylist()):
        yield names.check("subject", name), None if len(found.dictionary) == 1 else np.flatnonzero(codes == code)


def encode_bodies(column: pa.Array) -> pa.Array:
    """Bodies; text becomes UTF-8."""
    _refuse_nulls("body", column)
    _check_size("body", column, BODY_SIZE_MAX)
    return column


def encode_keys(column: pa.Array) -> pa.Array:
    """Order keys as text: a whole number becomes its decimal text, and null becomes empty text, which means no key.
    Empty input is refused.
    """
    if column.type != _STRING:
        column = column.cast(_STRING)
    sizes = pc.binary_length(column)
    if pc.min(sizes).as_py() == 0:
        raise InvalidArgument("column 'key' has empty values; use null for a message without a key")
    _check_size("key", column, KEY_SIZE_MAX)
    return column.fill_null("")


def encode_tags(column: pa.Array) -> pa.Array:
    """Tags joined, with a separator at each end; empty: no tags."""
    values = column.flatten()
    _refuse_nulls("tags", values)
    for tag in values.unique().to_pylist():
        names.check_tag(tag)
    counts = pc.list_value_length(column).fill_null(0)
    if (most := pc.max(counts).as_py()) > TAGS_MAX:
        raise TooLarge(f"{most} tags are over the limit of {TAGS_MAX}")
    joined = pc.binary_join(column, TAG_SEPARATOR).fill_null("")
    wrapped = pc.binary_join_element_wise(TAG_SEPARATOR, joined, TAG_SEPARATOR, "")
    return pc.if_else(pc.greater(counts, 0), wrapped, "")


def encode_groups(column: pa.Array) -> pa.Array:
    """The groups that rows are addressed to; empty: every group."""
    for group in column.drop_null().unique().to_pylist():
        names.check_group(group)
    return column.fill_null("")


def encode_headers(column: pa.Array) -> pa.Array:
    """Headers as msgpack maps of texts; empty: no headers."""
    if column.null_count or column.offset:
        column = column.take(pa.array(np.arange(len(column))))
    offsets = column.offsets.to_numpy()
    first, last = int(offsets[0]), int(offsets[-1])
    texts = [part.slice(first, last - first) for part in (column.keys, column.items)]
    for part in texts:
        _refuse_nulls("headers", part)
    if last > first and pc.min(pc.binary_length(texts[0])).as_py() == 0:
        raise InvalidArgument("column 'headers' has a header without a name")
    pieces: list[pa.Array] = []
    for part in texts:
        lengths = pc.binary_length(part).to_numpy()
        if len(lengths) and int(lengths.max()) >= HEADERS_SIZE_MAX:
            raise TooLarge(
                f"a header name or value of {lengths.max()} bytes does not fit into the {HEADERS_SIZE_MAX} bytes that "
                "all headers of a message may take"
            )
        pieces += [_prefixes(lengths, _text_prefix), part.cast(_BINARY)]
    entries = pc.binary_join_element_wise(*pieces, b"")
    counts = np.diff(offsets)
    if int(counts.max()) * 2 > HEADERS_SIZE_MAX:
        raise TooLarge(
            f"a message has {counts.max()} headers, which encode to more than the limit of {HEADERS_SIZE_MAX} bytes"
        )
    lists = pa.ListArray.from_arrays(pa.array((offsets - first).astype(np.int32)), entries)
    encoded = pc.binary_join_element_wise(_prefixes(counts, _map_prefix), pc.binary_join(lists, b""), b"")
    _check_size("headers", encoded, HEADERS_SIZE_MAX)
    return encoded


def _prefixes(lengths: npt.NDArray[Any], prefix: Callable[[int], bytes]) -> pa.Array:
    """The msgpack prefix of each value, computed once for each distinct length."""
    known, which = np.unique(lengths, return_inverse=True)
    return pa.array([prefix(length) for length in known.tolist()], _BINARY).take(pa.array(which))


def _text_prefix(length: int) -> bytes:
    if length < 32:
        return bytes([0xA0 | length])
    return bytes([0xD9, length]) if length < 256 else b"\xda" + length.to_bytes(2, "big")


def _map_prefix(count: int) -> bytes:
    if not count:
        return b""
    return bytes([0x80 | count]) if count < 16 else b"\xde" + count.to_bytes(2, "big")


def _refuse_nulls(name: str, column: pa.Array) -> None:
    if column.null_count:
        raise InvalidArgument(f"column {name!r} has {column.null_count} null values; fill them, or leave the rows out")


def _check_size(name: str, column: pa.Array, limit: int) -> None:
    most = pc.max(pc.binary_length(column)).as_py() if len(column) else 0
    if most is not None and most > limit:
        raise TooLarge(f"column {name!r} has a value of {most} bytes, which is over the limit of {limit}")
