"""The fields of a frame's rows as values for conditions; each is read once, and only if a condition uses it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from plait.filter.evaluation import Flags, Number, Text, Values
from plait.frame.arrow import keys
from plait.frame.columns import TAG_SEPARATOR, Column
from plait.frame.header_block import TEXT, HeaderMap, read_headers
from plait.frame.view import FrameView

_NOTHING = Values()


class FrameFields:
    """The fields of one frame."""

    def __init__(self, frame: FrameView) -> None:
        self._frame = frame
        self._block = frame.header_block()
        self._values: dict[str, Values] = {}
        self._maps: list[HeaderMap | None] | None = None
        self._tags: pa.Array | None = None

    def field(self, name: str) -> Values:
        """A field that is not a header; times are microseconds since 1970."""
        frame = self._frame
        if name == "key":
            return _texts(keys(frame)) if frame.has(Column.KEY) else _NOTHING
        if name == "store_time":
            return Values(number=Number(frame.store_time, True))
        if not frame.has(Column.SEND_TIME):
            return _NOTHING
        return Values(number=Number(frame.fixed(Column.SEND_TIME), True))

    def header(self, name: str) -> Values:
        values = self._values.get(name)
        if values is None:
            values = self._values[name] = self._header(name)
        return values

    def _header(self, name: str) -> Values:
        if not self._frame.has(Column.HEADERS):
            return _NOTHING
        if self._block is not None:
            for column in self._block.columns:
                if column.name == name:
                    array: Any = self._block.array(name)
                    return _texts(array) if column.kind == TEXT else _numbers(array)
            if self._block.rest is None:
                return _NOTHING
        if self._maps is None:
            self._maps = self._decoded()
        return _mixed([None if each is None else each.get(name) for each in self._maps])

    def _decoded(self) -> list[HeaderMap | None]:
        """The headers of each row, of a frame that has not all of them as columns."""
        if self._block is not None:
            return self._block.maps()  # type: ignore[return-value]
        return [read_headers(row) if row else None for row in self._frame.binary(Column.HEADERS).to_pylist()]

    def tagged(self, tag: str) -> Flags:
        """Whether each row has the tag."""
        if not self._frame.has(Column.TAGS):
            return False
        import pyarrow.compute as pc

        if self._tags is None:
            self._tags = self._frame.binary(Column.TAGS)
        found = pc.match_substring(self._tags, f"{TAG_SEPARATOR}{tag}{TAG_SEPARATOR}")
        flags: npt.NDArray[np.bool_] = found.to_numpy(zero_copy_only=False)
        return flags


def _texts(array: pa.Array) -> Values:
    return Values(text=Text(array, _valid(array)))


def _valid(array: pa.Array) -> Flags:
    return True if not array.null_count else array.is_valid().to_numpy(zero_copy_only=False)


def _numbers(array: pa.Array) -> Values:
    valid = _valid(array)
    filled = array if valid is True else array.fill_null(False if pa.types.is_boolean(array.type) else 0)
    data: npt.NDArray[Any] = filled.to_numpy(zero_copy_only=False)
    return Values(number=Number(_signed(data), valid))


def _signed(data: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Numbers as int64 or double; unsigned numbers that int64 does not have become doubles."""
    if data.dtype == bool:
        return data.astype(np.int64)
    if data.dtype == np.uint64:
        return data.astype(np.float64 if len(data) and int(data.max()) >> 63 else np.int64)
    return data


def _mixed(values: list[Any]) -> Values:
    """Values of any kinds, one for each row; None: null."""
    is_text = np.fromiter((type(value) is str for value in values), bool, len(values))
    is_number = np.fromiter((value is not None and type(value) is not str for value in values), bool, len(values))
    text = number = None
    if is_text.any():
        text = Text(pa.array([value if type(value) is str else None for value in values], pa.string()), is_text)
    if is_number.any():
        plain = [0 if value is None or type(value) is str else value for value in values]
        kind = np.int64 if all(type(value) is not float and value >> 63 <= 0 for value in plain) else np.float64
        number = Number(np.array(plain, kind), is_number)
    return Values(text, number)
