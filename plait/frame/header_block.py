"""Headers of many rows as typed columns by name, so that a reader decodes only the names that it uses.

A headers column has one of two forms. The *row form* is a variable column with one msgpack map for each row. The *block
form* begins with ``MARK``, which no offset can be. It has an entry for each name: the kind and width of its values, and
which rows have one. Names that few rows have, or whose values are of several kinds, stay in one *rest* column of
msgpack maps. A row has each name once, and the order of its names is that of the entries.

A slice of a block takes the same rows of each column and changes no value. ``pack`` makes a block from the row form;
``HeaderBlock.maps`` and ``HeaderBlock.rows`` are the way back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain, pairwise
from struct import Struct
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from plait.errors import FrameError
from plait.frame.header import pad
from plait.frame.run_tables import I32, Offsets, select_rows
from plait.limits import HEADER_COLUMNS_MAX, HEADERS_SIZE_MAX

HeaderValue = str | bool | int | float
HeaderMap = dict[str, HeaderValue]
Buffer = bytes | bytearray | memoryview
#: Rows to take from a block: a range, or ascending row numbers.
Pick = slice | npt.NDArray[np.int64]

#: The first four bytes of a block: -1, as an offset is never negative.
MARK: Final = b"\xff\xff\xff\xff"
#: Frames of fewer rows use the row form, which costs less to make.
BLOCK_COUNT_MIN: Final = 16
#: A name gets a column of its own if at least one in this many rows has it.
SPARSE: Final = 4

_HEAD: Final = Struct("<4sI")
#: Size of the name, kind, presence, size of the column.
_ENTRY: Final = Struct("<HBBI")

#: What a column has: text, or numbers of this NumPy type. ``REST``: msgpack maps of further names.
TEXT: Final = 0
REST: Final = 1
_BOOL: Final = 2
_FLOAT: Final = 8
NUMBERS: Final[dict[int, np.dtype[Any]]] = {
    _BOOL: np.dtype("u1"),
    3: np.dtype("<i1"),
    4: np.dtype("<i2"),
    5: np.dtype("<i4"),
    6: np.dtype("<i8"),
    7: np.dtype("<u8"),
    _FLOAT: np.dtype("<f8"),
}
_KIND_OF: Final[dict[np.dtype[Any], int]] = {kind: number for number, kind in NUMBERS.items() if number != _BOOL}
_INTEGERS: Final[list[np.dtype[Any]]] = [np.dtype(name) for name in ("<i1", "<i2", "<i4", "<i8", "<u8")]
#: Which rows have a value: all; those with a 1 in a leading column of bytes; all, and it is stored once.
ALL: Final = 0
SOME: Final = 1
SAME: Final = 2

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(HeaderMap).decode

_ARROW_TEXT: Final = pa.string()


class HeaderColumn(NamedTuple):
    """One column of a block; ``present`` has a byte for each row if ``presence`` is ``SOME``."""

    name: str
    kind: int
    presence: int
    present: npt.NDArray[np.uint8] | None
    #: Numbers, or the offsets of text and maps (none if the text is stored once).
    values: npt.NDArray[Any]
    #: The bytes of text and maps.
    data: memoryview


def is_block(stored: memoryview) -> bool:
    """True if the raw bytes of a headers column are a block."""
    return bytes(stored[:4]) == MARK


class HeaderBlock:
    """The block of ``count`` rows. Keeps the buffer alive and copies nothing."""

    __slots__ = ("columns", "count")

    def __init__(self, count: int, columns: list[HeaderColumn]) -> None:
        self.count = count
        self.columns = columns

    @classmethod
    def parse(cls, stored: memoryview, count: int) -> HeaderBlock:
        """Check the structure of a block; ``FrameError`` if a reader could not read every row."""
        if len(stored) < _HEAD.size:
            raise FrameError(f"a header block of {len(stored)} bytes has no room for its head")
        mark, number = _HEAD.unpack_from(stored)
        at = _HEAD.size + number * _ENTRY.size
        if mark != MARK or not 0 < number <= HEADER_COLUMNS_MAX + 1 or at > len(stored):
            raise FrameError(f"a header block of {len(stored)} bytes cannot have {number} columns")
        entries = list(_ENTRY.iter_unpack(stored[_HEAD.size : at]))
        names_at = at
        at += sum(entry[0] for entry in entries)
        at += pad(at)
        columns, known = [], set()
        for name_size, kind, presence, size in entries:
            name = _text(stored[names_at : names_at + name_size])
            names_at += name_size
            if name in known or (not name) != (kind == REST):
                raise FrameError(f"a header block has the name {name!r} twice, or a column without a name")
            known.add(name)
            columns.append(_column(name, kind, presence, stored[at : at + size], size, count))
            at += size + pad(size)
        if at != len(stored):
            raise FrameError(f"the columns of a header block end at {at}, the block at {len(stored)}")
        return cls(count, columns)

    def check(self) -> HeaderBlock:
        """Check that every row can be decoded, and that none has more bytes than headers may have."""
        sizes = np.zeros(self.count, np.int64)
        for column in self.columns:
            if column.kind == TEXT and not bytes(column.data).isascii():
                try:
                    self._array(column).validate(full=True)
                except pa.ArrowInvalid as error:
                    raise FrameError(f"header {column.name!r} is not UTF-8: {error}") from None
            if column.kind == REST:
                decode_maps(self._array(column).to_pylist())
            if column.kind in (TEXT, REST) and len(column.values):
                sizes += np.diff(column.values)
            else:
                sizes += len(column.data) or column.values.itemsize
        if len(sizes) and int(sizes.max()) > HEADERS_SIZE_MAX:
            raise FrameError(f"the headers of a row have more than {HEADERS_SIZE_MAX} bytes")
        return self

    # --- rows -----------------------------------------------------------------------------------

    def take(self, pick: Pick) -> HeaderBlock:
        """The block of some of the rows."""
        count = len(range(*pick.indices(self.count))) if isinstance(pick, slice) else len(pick)
        return HeaderBlock(count, [_picked(column, pick) for column in self.columns])

    def tobytes(self) -> bytes:
        """The stored form."""
        entries, names, pieces = [], [], []
        for column in self.columns:
            name = column.name.encode()
            piece = _stored(column)
            entries.append(_ENTRY.pack(len(name), column.kind, column.presence, len(piece)))
            names.append(name)
            pieces += [piece, bytes(pad(len(piece)))]
        head = b"".join((_HEAD.pack(MARK, len(entries)), *entries, *names))
        return b"".join((head, bytes(pad(len(head))), *pieces))

    # --- values ---------------------------------------------------------------------------------

    def array(self, name: str) -> pa.Array | None:
        """The values of a name as text, int64, uint64, double or bool; null where a row has none.

        None: the name has no column; the rest may have it.
        """
        for column in self.columns:
            if column.name == name and name:
                return self._array(column)
        return None

    def _array(self, column: HeaderColumn) -> pa.Array:
        count = self.count
        validity = None if column.present is None else _bits(column.present)
        if column.kind in (TEXT, REST):
            offsets = column.values
            if column.presence == SAME:
                one = pa.Array.from_buffers(_ARROW_TEXT, 1, [None, _one_offset(column.data), pa.py_buffer(column.data)])
                return one.take(pa.Array.from_buffers(pa.int32(), count, [None, pa.py_buffer(np.zeros(count, "<i4"))]))
            kind = _ARROW_TEXT if column.kind == TEXT else pa.binary()
            buffers = [validity, pa.py_buffer(offsets), pa.py_buffer(column.data)]
            return pa.Array.from_buffers(kind, count, buffers)
        values = column.values if column.presence != SAME else np.repeat(column.values, count)
        if column.kind == _BOOL:
            return pa.Array.from_buffers(pa.bool_(), count, [validity, _bits(values)])
        wide = values.astype("<i8") if values.dtype.kind == "i" else values
        return pa.Array.from_buffers(pa.from_numpy_dtype(wide.dtype), count, [validity, pa.py_buffer(wide)])

    def maps(self) -> list[HeaderMap | None]:
        """The headers of each row; None: the row has none. ``FrameError`` if one cannot be decoded."""
        names = [column.name for column in self.columns if column.kind != REST]
        try:
            lists = [self._array(column).to_pylist() for column in self.columns if column.kind != REST]
        except UnicodeDecodeError as error:
            raise FrameError(f"a header is not UTF-8: {error}") from None
        rows: list[HeaderMap | None]
        if all(column.presence != SOME and column.kind != REST for column in self.columns):
            return [dict(zip(names, values, strict=True)) for values in zip(*lists, strict=True)]
        if lists:
            rows = [
                {name: value for name, value in zip(names, values, strict=True) if value is not None}
                for values in zip(*lists, strict=True)
            ]
        else:
            rows = [{} for _ in range(self.count)]
        for column in self.columns:
            if column.kind == REST:
                for row, more in zip(rows, decode_maps(self._array(column).to_pylist()), strict=True):
                    if more:
                        row |= more  # type: ignore[operator]
        return [row or None for row in rows]

    def rows(self) -> tuple[Offsets, memoryview]:
        """The row form: offsets and data of a column of msgpack maps, empty for rows without headers."""
        encoded = [b"" if row is None else _encode(row) for row in self.maps()]
        offsets = np.zeros(self.count + 1, I32)
        np.cumsum(np.fromiter(map(len, encoded), np.int64, self.count), out=offsets[1:])
        return offsets, memoryview(b"".join(encoded))


def decode_maps(rows: Sequence[bytes]) -> list[HeaderMap | None]:
    """The maps of rows in the row form; None: the row is empty. ``FrameError`` if one does not decode."""
    try:
        return [_decode(row) if row else None for row in rows]
    except ValueError as error:
        raise FrameError(f"the headers of a row cannot be decoded: {error}") from None


def pack(offsets: Buffer, data: Buffer) -> bytes | None:
    """The block of a column in the row form; None if that form is to stay."""
    ends = np.frombuffer(offsets, I32)
    count, size = len(ends) - 1, len(data)
    if count < BLOCK_COUNT_MIN or not size:
        return None
    stored = bytes(data)
    try:
        maps = [_decode(stored[a:b]) if a < b else {} for a, b in pairwise((ends - ends[0]).tolist())]
    except ValueError:
        return None
    columns: list[HeaderColumn] = []
    rest = []
    for name, many in Counter(chain.from_iterable(maps)).items():
        column = None
        if name and SPARSE * many >= count and len(columns) < HEADER_COLUMNS_MAX:
            column = _packed(name, [row.get(name) for row in maps], count)
        if column is None:
            rest.append(name)
        else:
            columns.append(column)
    if not columns:
        return None
    if rest:
        others = [{name: row[name] for name in rest if name in row} for row in maps]
        columns.append(_rest([_encode(other) if other else b"" for other in others]))
    block = HeaderBlock(count, columns).tobytes()
    return block if len(block) <= size else None


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
    presence = ALL if present is None else SOME
    # 0.0 equals -0.0, which is another value.
    if present is None and kind is not float and values.count(values[0]) == count:
        presence, values = SAME, values[:1]
    if kind is str:
        _, ends, text = pa.array(values, _ARROW_TEXT).buffers()
        offsets = np.frombuffer(ends, I32, len(values) + 1)
        data = memoryview(text or b"").cast("B")[: int(offsets[-1])]
        return HeaderColumn(name, TEXT, presence, present, offsets[:0] if presence == SAME else offsets, data)
    numbers: Any = values if present is None else [0 if value is None else value for value in values]
    number_type = NUMBERS[_BOOL] if kind is bool else NUMBERS[_FLOAT]
    if kind is int:
        low, high = min(numbers), max(numbers)
        fitting = (each for each in _INTEGERS if np.iinfo(each).min <= low and high <= np.iinfo(each).max)
        integer = next(fitting, None)
        if integer is None:
            return None
        number_type = integer
    number = _BOOL if kind is bool else _KIND_OF[number_type]
    return HeaderColumn(name, number, presence, present, np.array(numbers, number_type), memoryview(b""))


def _rest(rows: list[bytes]) -> HeaderColumn:
    offsets = np.zeros(len(rows) + 1, I32)
    np.cumsum(np.fromiter(map(len, rows), np.int64, len(rows)), out=offsets[1:])
    return HeaderColumn("", REST, ALL, None, offsets, memoryview(b"".join(rows)))


def _column(name: str, kind: int, presence: int, stored: memoryview, size: int, count: int) -> HeaderColumn:
    """A column of a block, checked."""
    present = None
    if presence == SOME:
        at = count + pad(count)
        present, stored, size = np.frombuffer(stored[:count], np.uint8), stored[at:], size - at
        if len(present) != count or size < 0 or (count and int(present.max()) > 1):
            raise FrameError(f"header {name!r} does not say which of {count} rows have it")
    if len(stored) != size:
        raise FrameError(f"a header block has {len(stored)} of the {size} bytes of header {name!r}")
    if presence not in (ALL, SOME, SAME) or (kind == REST and presence != ALL):
        raise FrameError(f"presence {presence} of header {name!r} is not known; a newer Plait wrote it")
    if kind in (TEXT, REST):
        if presence == SAME:
            return HeaderColumn(name, kind, presence, None, np.zeros(0, I32), stored)
        split = 4 * (count + 1)
        if size < split:
            raise FrameError(f"header {name!r} has no room for {count} offsets")
        offsets, data = np.frombuffer(stored[:split], I32), stored[split:]
        if offsets[0] or int(offsets[-1]) != len(data) or bool((offsets[1:] < offsets[:-1]).any()):
            raise FrameError(f"header {name!r} has offsets that do not fit its {len(data)} bytes")
        return HeaderColumn(name, kind, presence, present, offsets, data)
    numbers = NUMBERS.get(kind)
    if numbers is None:
        raise FrameError(f"header {name!r} is of kind {kind}, which is not known; a newer Plait wrote it")
    if size != numbers.itemsize * (1 if presence == SAME else count):
        raise FrameError(f"header {name!r} has {size} bytes for {count} rows")
    values = np.frombuffer(stored, numbers)
    if kind == _BOOL and len(values) and int(values.max()) > 1:
        raise FrameError(f"header {name!r} has a bool that is neither 0 nor 1")
    return HeaderColumn(name, kind, presence, present, values, memoryview(b""))


def _picked(column: HeaderColumn, pick: Pick) -> HeaderColumn:
    if column.presence == SAME:
        return column
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


def _text(data: memoryview) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise FrameError(f"a header name is not UTF-8: {error}") from None


def _bits(flags: npt.NDArray[Any]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(flags, bitorder="little"))


def _one_offset(data: memoryview) -> pa.Buffer:
    return pa.py_buffer(np.array([0, len(data)], I32))
