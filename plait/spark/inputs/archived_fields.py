"""The fields of archived rows, as values for conditions and as columns. No row is decoded."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from plait.filter.frame_fields import UsedFields
from plait.filter.values import Flags, Number, Text, Values, as_flags
from plait.spark.source.header_columns import TYPES
from plait.spark.source.typed_headers import BOOL, REAL, TEXT, WHOLE

#: The columns of an archive that have the headers.
HEADER_COLUMNS: Final = ("headers", TYPES)

_WHOLE_END: Final = 1 << 63
_TEXT_LETTER, _WHOLE_LETTER, _REAL_LETTER, _BOOL_LETTER = b"sifb"

Numbers = npt.NDArray[Any]


def columns_of(used: UsedFields) -> list[str]:
    """The columns of an archive that a condition reads."""
    columns = [*(HEADER_COLUMNS if used.headers else ()), *(["tags"] if used.tags else [])]
    # A condition on nothing still needs the number of rows.
    return [*columns, *(["key"] if used.key else []), *sorted(used.times)] or ["sequence"]


class _Found(NamedTuple):
    """The values of one header: their rows, their text, and the letters of their types."""

    rows: npt.NDArray[np.int64]
    texts: pa.Array
    letters: npt.NDArray[np.uint8]

    def of(self, letter: int) -> tuple[npt.NDArray[np.int64], pa.Array]:
        """The rows and texts of the values of one type."""
        chosen = np.flatnonzero(self.letters == letter)
        return self.rows[chosen], self.texts.take(pa.array(chosen))


class ArchivedFields:
    """The fields of the rows of a table or batch with the columns of an archive."""

    def __init__(self, rows: pa.Table | pa.RecordBatch) -> None:
        self._rows = rows
        self._count: int = rows.num_rows

    def _column(self, name: str) -> Any:
        column = self._rows.column(name)
        if not isinstance(column, pa.ChunkedArray):
            return column
        return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)

    # --- conditions -----------------------------------------------------------------------------

    def field(self, name: str) -> Values:
        """A field that is not a header; times are microseconds since 1970."""
        column = self._column(name)
        valid: Flags = True if not column.null_count else as_flags(column.is_valid())
        if name == "key":
            return Values(text=Text(column.cast(TEXT), valid))
        return Values(whole=Number(_numbers(column.cast(WHOLE)), valid))

    def header(self, name: str) -> Values:
        """A header as the filter of a frame has it."""
        found = self._find(name)
        texts = self._texts(found)
        whole, is_whole = np.zeros(self._count, np.int64), np.zeros(self._count, bool)
        real, is_real = np.zeros(self._count, np.float64), np.zeros(self._count, bool)
        for letter in (_WHOLE_LETTER, _BOOL_LETTER):
            rows, some = found.of(letter)
            numbers = _whole(some) if letter == _WHOLE_LETTER else _numbers(pc.equal(some, "true").cast(WHOLE))
            high = np.asarray(numbers >= _WHOLE_END, bool)
            whole[rows], is_whole[rows] = np.where(high, 0, numbers).astype(np.int64), ~high
            real[rows[high]], is_real[rows[high]] = numbers[high], True
        rows, some = found.of(_REAL_LETTER)
        numbers = _numbers(some.cast(REAL))
        real[rows], is_real[rows] = numbers, ~np.isnan(numbers)
        return Values(
            None if texts.null_count == self._count else Text(texts, as_flags(texts.is_valid())),
            Number(whole, is_whole) if is_whole.any() else None,
            Number(real, is_real) if is_real.any() else None,
        )

    def tagged(self, tag: str) -> Flags:
        """Whether each row has the tag."""
        tags = self._column("tags")
        flags = np.zeros(self._count, bool)
        places = np.flatnonzero(as_flags(pc.equal(tags.values, tag))) if len(tags.values) else np.zeros(0, np.int64)
        flags[_rows_of(tags, places)[0]] = True
        return flags

    # --- columns --------------------------------------------------------------------------------

    def typed(self, name: str, kind: pa.DataType) -> pa.Array:
        """A header as a column of this type (``typed_headers``)."""
        found = self._find(name)
        if kind == TEXT:
            return self._texts(found)
        if kind == BOOL:
            rows, texts = found.of(_BOOL_LETTER)
            return self._spread(rows, pc.equal(texts, "true"))
        rows, texts = found.of(_WHOLE_LETTER)
        numbers = _whole(texts)
        if kind == WHOLE:
            fits = np.asarray(numbers < _WHOLE_END, bool)
            return self._spread(rows[fits], pa.array(numbers[fits].astype(np.int64)))
        real_rows, real_texts = found.of(_REAL_LETTER)
        real = _numbers(real_texts.cast(REAL))
        known = ~np.isnan(real)
        values = np.concatenate([numbers.astype(np.float64), real[known]])
        return self._spread(np.concatenate([rows, real_rows[known]]), pa.array(values))

    def _texts(self, found: _Found) -> pa.Array:
        return self._spread(*found.of(_TEXT_LETTER)).cast(TEXT)

    def _spread(self, rows: npt.NDArray[np.int64], values: pa.Array) -> pa.Array:
        """A column with the values in their rows, and null in the others."""
        places = np.full(self._count, -1, np.int64)
        places[rows] = np.arange(len(rows))
        return values.take(pa.array(places, mask=places < 0))

    def _find(self, name: str) -> _Found:
        maps, types = self._column("headers"), self._column(TYPES)
        names = maps.keys
        places = np.flatnonzero(as_flags(pc.equal(names, name))) if len(names) else np.zeros(0, np.int64)
        rows, first, places = _rows_of(maps, places)
        letters = np.full(len(rows), _TEXT_LETTER, np.uint8)
        if types.null_count < len(types):
            # A row without types has text only. A row with types has a letter for each header, in their order.
            own = types.cast(TEXT).take(pa.array(rows))
            typed = as_flags(own.is_valid())
            offsets = np.frombuffer(own.buffers()[1], np.int32, len(own) + 1, 4 * own.offset)
            data = np.frombuffer(own.buffers()[2] or b"", np.uint8)
            letters[typed] = data[(offsets[:-1] + places - first)[typed]]
        return _Found(rows, maps.items.take(pa.array(places)), letters)


def _rows_of(
    lists: Any, places: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The rows of some places in the values of lists, where these rows begin, and the places that are in a row."""
    offsets = _numbers(lists.offsets)
    places = places[(places >= offsets[0]) & (places < offsets[-1])]
    rows = np.searchsorted(offsets, places, "right") - 1
    return rows, offsets[rows], places


def _whole(texts: pa.Array) -> Numbers:
    """Integers as int64, or as uint64 or objects where one is greater."""
    try:
        return _numbers(texts.cast(WHOLE))
    except pa.ArrowInvalid:
        # Compared and converted exactly: neither int64 nor uint64 has them all.
        return np.array(list(map(int, texts.to_pylist())), object)


def _numbers(array: Any) -> Numbers:
    numbers: Numbers = array.fill_null(0).to_numpy(zero_copy_only=False)
    return numbers
