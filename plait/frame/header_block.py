"""Headers of many rows as typed columns by name, so that a reader decodes only the names that it uses.

A headers column has one of two forms. The *row form* is a variable column with one msgpack map for each row. The *block
form* begins with ``MARK``, which no offset can be. It has an entry for each name: the kind and width of its values, and
whether all rows have one. Names that few rows have, that are long, or whose values are of several kinds, stay in one
*rest* column of msgpack maps. A row has each name once, and the order of its names is that of the entries.

Delayed frames and compressed headers have the row form only. A slice of a block takes the same rows of each column and
changes no value. A block never stands for much more than its own bytes: ``parse`` bounds the size of its row form.
``header_packing`` makes blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from struct import Struct
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from plait.errors import FrameError
from plait.frame.header import pad
from plait.frame.run_tables import I32, Offsets, select_rows, wrap_binary
from plait.limits import COLUMN_SIZE_MAX, HEADER_COLUMNS_MAX, HEADERS_SIZE_MAX

HeaderValue = str | bool | int | float
HeaderMap = dict[str, HeaderValue]
#: Rows to take from a block: a range, or ascending row numbers.
Pick = slice | npt.NDArray[np.int64]

#: The first four bytes of a block: -1, as an offset is never negative.
MARK: Final = b"\xff\xff\xff\xff"
#: The largest name of a column.
NAME_SIZE_MAX: Final = 128
#: The header that replaces headers which cannot be decoded. Its value is their first ``UNREADABLE_SHOWN`` bytes, as
#: hexadecimal text.
UNREADABLE: Final = "plait-unreadable"
UNREADABLE_SHOWN: Final = 256

_HEAD: Final = Struct("<4sI")
#: Size of the name, kind, 1 if some rows have no value, size of the column.
_ENTRY: Final = Struct("<HBBI")
#: At most these bytes of a msgpack map are neither names nor text: heads of the map, of a name and of a value.
_MAP_HEAD: Final = 3
_PAIR_HEADS: Final = 3 + 9

#: What a column has: text, or numbers of this NumPy type. ``REST``: msgpack maps of further names.
TEXT: Final = 0
REST: Final = 1
BOOL: Final = 2
FLOAT: Final = 8
NUMBERS: Final[dict[int, np.dtype[Any]]] = {
    BOOL: np.dtype("u1"),
    3: np.dtype("<i1"),
    4: np.dtype("<i2"),
    5: np.dtype("<i4"),
    6: np.dtype("<i8"),
    7: np.dtype("<u8"),
    FLOAT: np.dtype("<f8"),
}

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(HeaderMap).decode

_ARROW_TEXT: Final = pa.string()
NO_DATA: Final = memoryview(b"")


def read_headers(encoded: bytes) -> HeaderMap | None:
    """The headers of a row in the row form; None if no client encodes headers so."""
    try:
        headers = _decode(encoded)
    except ValueError:
        # From msgspec, or because text is not UTF-8.
        return None
    return None if "" in headers else headers


def decode_headers(encoded: bytes) -> HeaderMap:
    """The headers of a row in the row form; headers that do not decode are shown as ``UNREADABLE``."""
    if not encoded:
        return {}
    headers = read_headers(encoded)
    return {UNREADABLE: encoded[:UNREADABLE_SHOWN].hex()} if headers is None else headers


class HeaderColumn(NamedTuple):
    """One column of a block. ``present`` has a byte for each row, 0: it has no value; None: all rows have one."""

    name: str
    kind: int
    present: npt.NDArray[np.uint8] | None
    #: Numbers, or the offsets of text and maps.
    values: npt.NDArray[Any]
    #: The bytes of text and maps.
    data: memoryview


def is_block(stored: memoryview) -> bool:
    """True if the raw bytes of a headers column are a block."""
    return bytes(stored[:4]) == MARK


def row_form_size(stored: memoryview, count: int) -> int:
    """At most so many bytes has the row form of a block; ``FrameError`` if the head is wrong."""
    entries, _ = _entries(stored)
    return _MAP_HEAD * count + sum(
        size if kind == REST else size + count * (name_size + _PAIR_HEADS) for name_size, kind, _, size in entries
    )


def _entries(stored: memoryview) -> tuple[list[tuple[int, int, int, int]], int]:
    """The entries of a block, and where the names begin."""
    if len(stored) < _HEAD.size:
        raise FrameError(f"a header block of {len(stored)} bytes has no room for its head")
    mark, number = _HEAD.unpack_from(stored)
    at = _HEAD.size + number * _ENTRY.size
    if mark != MARK or not 0 < number <= HEADER_COLUMNS_MAX + 1 or at > len(stored):
        raise FrameError(f"a header block of {len(stored)} bytes cannot have {number} columns")
    return list(_ENTRY.iter_unpack(stored[_HEAD.size : at])), at


class HeaderBlock:
    """The block of ``count`` rows. Keeps the buffer alive and copies nothing."""

    __slots__ = ("columns", "count", "rest")

    def __init__(self, count: int, columns: list[HeaderColumn], rest: HeaderColumn | None) -> None:
        self.count = count
        self.columns = columns
        #: The maps of the names that have no column.
        self.rest = rest

    @classmethod
    def parse(cls, stored: memoryview, count: int) -> HeaderBlock:
        """Check the structure of a block; ``FrameError`` if a reader could not find every value."""
        entries, at = _entries(stored)
        size = row_form_size(stored, count)
        if size > COLUMN_SIZE_MAX:
            raise FrameError(f"the headers of a block take up to {size} bytes; the limit is {COLUMN_SIZE_MAX}")
        names_at = at
        at += sum(entry[0] for entry in entries)
        at += pad(at)
        found: dict[str, HeaderColumn] = {}
        for name_size, kind, some, size in entries:
            name = _text(stored[names_at : names_at + name_size])
            names_at += name_size
            if name in found or (not name) != (kind == REST) or name_size > NAME_SIZE_MAX:
                raise FrameError(f"a header block has the name {name[:40]!r} twice, or a name of {name_size} bytes")
            found[name] = _column(name, kind, some, stored[at : at + size], size, count)
            at += size + pad(size)
        if at != len(stored):
            raise FrameError(f"the columns of a header block end at {at}, the block at {len(stored)}")
        rest = found.pop("", None)
        if len(found) > HEADER_COLUMNS_MAX:
            raise FrameError(f"a header block has more than {HEADER_COLUMNS_MAX} names")
        return cls(count, list(found.values()), rest)

    def check(self) -> HeaderBlock:
        """Check that all text is UTF-8, and that no row has more bytes than headers may have."""
        sizes = np.full(self.count, _MAP_HEAD, np.int64)
        for column in self.columns:
            if column.kind == TEXT and not bytes(column.data).isascii():
                try:
                    _array(column, self.count).validate(full=True)
                except pa.ArrowInvalid as error:
                    raise FrameError(f"header {column.name!r} is not UTF-8: {error}") from None
            pair = _text_sizes(np.array([len(column.name.encode())])) + _value_sizes(column)
            sizes += pair if column.present is None else pair * column.present
        if self.rest is not None:
            sizes += np.diff(self.rest.values)
        if self.count and int(sizes.max()) > HEADERS_SIZE_MAX:
            raise FrameError(f"the headers of a row have more than {HEADERS_SIZE_MAX} bytes")
        return self

    # --- rows -----------------------------------------------------------------------------------

    def take(self, pick: Pick) -> HeaderBlock:
        """The block of some of the rows."""
        count = len(range(*pick.indices(self.count))) if isinstance(pick, slice) else len(pick)
        rest = None if self.rest is None else _picked(self.rest, pick)
        return HeaderBlock(count, [_picked(column, pick) for column in self.columns], rest)

    def tobytes(self) -> bytes:
        """The stored form."""
        entries, names, pieces = [], [], []
        for column in self.columns if self.rest is None else [*self.columns, self.rest]:
            name = column.name.encode()
            piece = _stored(column)
            entries.append(_ENTRY.pack(len(name), column.kind, column.present is not None, len(piece)))
            names.append(name)
            pieces += [piece, bytes(pad(len(piece)))]
        head = b"".join((_HEAD.pack(MARK, len(entries)), *entries, *names))
        return b"".join((head, bytes(pad(len(head))), *pieces))

    # --- values ---------------------------------------------------------------------------------

    def array(self, name: str) -> pa.Array | None:
        """The values of a name as text, int64, uint64, double or bool; null where a row has none.

        None: the name has no column; the rest may have it.
        """
        return next((_array(column, self.count) for column in self.columns if column.name == name), None)

    def rest_maps(self) -> pa.Array | None:
        """For each row the msgpack map of the names that have no column; None if no row has such names."""
        return None if self.rest is None else wrap_binary(self.rest.values, self.rest.data)

    def map(self, row: int) -> HeaderMap:
        """The headers of a row; only its values are decoded."""
        found: HeaderMap = {}
        for name, kind, present, values, data in self.columns:
            if present is not None and not present[row]:
                continue
            if kind == TEXT:
                found[name] = _text(data[values[row] : values[row + 1]])
            else:
                value = values[row].item()
                found[name] = bool(value) if kind == BOOL else value
        if self.rest is not None:
            self._add_rest(row, found, {column.name for column in self.columns})
        return found

    def _add_rest(self, row: int, found: HeaderMap, names: set[str]) -> None:
        """Add the headers of a row that have no column. A name that has a column has its value there."""
        assert self.rest is not None
        encoded = bytes(self.rest.data[self.rest.values[row] : self.rest.values[row + 1]])
        others = decode_headers(encoded)
        found |= others if names.isdisjoint(others) else {n: others[n] for n in others if n not in names}

    def maps(self) -> list[HeaderMap]:
        """The headers of each row; empty for a row without headers. ``FrameError`` if text is not UTF-8."""
        names = [column.name for column in self.columns]
        try:
            lists = [_array(column, self.count).to_pylist() for column in self.columns]
        except UnicodeDecodeError as error:
            raise FrameError(f"a header is not UTF-8: {error}") from None
        rows: list[HeaderMap]
        if all(column.present is None for column in self.columns) and lists:
            rows = [dict(zip(names, values, strict=True)) for values in zip(*lists, strict=True)]
        elif lists:
            rows = [
                {name: value for name, value in zip(names, values, strict=True) if value is not None}
                for values in zip(*lists, strict=True)
            ]
        else:
            rows = [{} for _ in range(self.count)]
        if self.rest is not None:
            known = set(names)
            for row, found in enumerate(rows):
                self._add_rest(row, found, known)
        return rows

    def rows(self) -> tuple[Offsets, memoryview]:
        """The row form: offsets and data of a column of msgpack maps, empty for rows without headers."""
        encoded = [_encode(row) if row else b"" for row in self.maps()]
        return ends_of(encoded), memoryview(b"".join(encoded))


def ends_of(rows: Sequence[bytes]) -> Offsets:
    return np.fromiter(accumulate(map(len, rows), initial=0), I32, len(rows) + 1)


def part_of(column: HeaderColumn, first: int, last: int) -> pa.Array:
    """The values of a column in the rows [first, last), as ``HeaderBlock.array`` has them."""
    return _array(_picked(column, slice(first, last)), last - first)


def _array(column: HeaderColumn, count: int) -> pa.Array:
    validity = None if column.present is None else _bits(column.present)
    if column.kind == TEXT:
        buffers = [validity, pa.py_buffer(column.values), pa.py_buffer(column.data)]
        return pa.Array.from_buffers(_ARROW_TEXT, count, buffers)
    values = column.values
    if column.kind == BOOL:
        return pa.Array.from_buffers(pa.bool_(), count, [validity, _bits(values)])
    wide = values.astype("<i8") if values.dtype.kind == "i" else np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(wide.dtype), count, [validity, pa.py_buffer(wide)])


def _column(name: str, kind: int, some: int, stored: memoryview, size: int, count: int) -> HeaderColumn:
    """A column of a block, checked."""
    if len(stored) != size:
        raise FrameError(f"a header block has {len(stored)} of the {size} bytes of header {name!r}")
    if some > 1 or (some and kind == REST):
        raise FrameError(f"presence {some} of header {name!r} is not known; a newer Plait wrote it")
    present = None
    if some:
        present, stored = np.frombuffer(stored[:count], np.uint8), stored[count + pad(count) :]
        if len(present) != count or int(present.max(initial=0)) > 1:
            raise FrameError(f"header {name!r} does not say which of {count} rows have it")
    if kind in (TEXT, REST):
        split = 4 * (count + 1)
        if len(stored) < split:
            raise FrameError(f"header {name!r} has no room for {count} offsets")
        offsets, data = np.frombuffer(stored[:split], I32), stored[split:]
        if offsets[0] or int(offsets[-1]) != len(data) or bool((offsets[1:] < offsets[:-1]).any()):
            raise FrameError(f"header {name!r} has offsets that do not fit its {len(data)} bytes")
        return HeaderColumn(name, kind, present, offsets, data)
    numbers = NUMBERS.get(kind)
    if numbers is None:
        raise FrameError(f"header {name!r} is of kind {kind}, which is not known; a newer Plait wrote it")
    if len(stored) != numbers.itemsize * count:
        raise FrameError(f"header {name!r} has {len(stored)} bytes for {count} rows")
    values = np.frombuffer(stored, numbers)
    if kind == BOOL and int(values.max(initial=0)) > 1:
        raise FrameError(f"header {name!r} has a bool that is neither 0 nor 1")
    return HeaderColumn(name, kind, present, values, NO_DATA)


def _picked(column: HeaderColumn, pick: Pick) -> HeaderColumn:
    present = None if column.present is None else column.present[pick]
    if column.kind not in (TEXT, REST):
        return column._replace(present=present, values=column.values[pick])
    offsets, data = column.values, column.data
    if isinstance(pick, slice):
        start, end = int(offsets[pick.start]), int(offsets[pick.stop])
        offsets, data = offsets[pick.start : pick.stop + 1] - I32.type(start), data[start:end]
    else:
        offsets, data = select_rows(offsets, data, pick)
    return column._replace(present=present, values=offsets, data=data)


def _stored(column: HeaderColumn) -> bytes:
    values = b"".join((column.values.tobytes(), column.data))
    if column.present is None:
        return values
    return b"".join((column.present.tobytes(), bytes(pad(len(column.present))), values))


# --- sizes in the row form ------------------------------------------------------------------------


def _text_sizes(lengths: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """The bytes of texts with these lengths, encoded as msgpack."""
    heads = np.searchsorted([31, 255, 65_535], lengths, "left")
    sizes: npt.NDArray[np.int64] = lengths + np.array([1, 2, 3, 5])[heads]
    return sizes


def _value_sizes(column: HeaderColumn) -> npt.NDArray[np.int64] | int:
    """The bytes of the values of a column, encoded as msgpack."""
    if column.kind == TEXT:
        return _text_sizes(np.diff(column.values))
    if column.kind in (BOOL, FLOAT):
        return 1 if column.kind == BOOL else 9
    values = column.values
    sizes: npt.NDArray[np.int64] = np.array([9, 5, 3, 2, 1, 2, 3, 5, 9])[
        np.searchsorted([-(1 << 31), -(1 << 15), -128, -32, 128, 256, 1 << 16, 1 << 32], values, "right")
    ]
    return sizes


def _text(data: memoryview) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise FrameError(f"a header is not UTF-8: {error}") from None


def _bits(flags: npt.NDArray[Any]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(flags, bitorder="little"))
