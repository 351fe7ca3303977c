"""The fields of a frame's rows as values for conditions; each is read only if a condition uses it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from plait.filter.values import Flags, Number, Text, Values, as_flags, text_array
from plait.frame.arrow import keys
from plait.frame.columns import TAG_SEPARATOR, Column
from plait.frame.header_block import BOOL, TEXT, HeaderColumn, part_of, read_headers
from plait.frame.view import FrameView

_NOTHING = Values()
_WHOLE_END = 1 << 63
#: To decode a byte of a map takes as long as to examine this many bytes of text.
_MAP_COST = 8


class UsedFields(NamedTuple):
    """What a filter reads of each row."""

    headers: frozenset[str] = frozenset()
    tags: bool = False
    key: bool = False
    #: ``send_time``, ``store_time``.
    times: frozenset[str] = frozenset()
    #: The group that a row is addressed to.
    group: bool = False


class FrameFields:
    """The fields of one frame that a filter uses."""

    def __init__(self, frame: FrameView, used: UsedFields) -> None:
        self.frame = frame
        self.keys: pa.Array | None = keys(frame) if used.key and frame.has(Column.KEY) else None
        self.tags: pa.Array | None = frame.binary(Column.TAGS) if used.tags and frame.has(Column.TAGS) else None
        self.groups: pa.Array | None = (
            frame.binary(Column.TO_GROUP) if used.group and frame.has(Column.TO_GROUP) else None
        )
        #: Headers that have a column.
        self.columns: dict[str, HeaderColumn] = {}
        #: The maps of each row with the other headers, and their names that are used.
        self.maps: pa.Array | None = None
        self.mapped = used.headers
        if used.headers and frame.has(Column.HEADERS):
            block = frame.header_block()
            if block is None:
                self.maps = frame.binary(Column.HEADERS)
            else:
                self.columns = {each.name: each for each in block.columns if each.name in used.headers}
                self.mapped = used.headers - self.columns.keys()
                self.maps = block.rest_maps() if self.mapped else None

    def end_of(self, first: int, count_max: int, size_max: int) -> int:
        """The end of the rows from ``first`` that have at most this count and this size; at least one row."""
        last = min(first + max(count_max, 1), self.frame.count)
        if (self.frame.size + self.frame.inflated_size) * _MAP_COST <= size_max:
            return last
        texts = [(each.values, 1) for each in self.columns.values() if each.kind == TEXT]
        texts += [(_offsets(each), 1) for each in (self.keys, self.tags, self.groups) if each is not None]
        if self.maps is not None:
            texts.append((_offsets(self.maps), _MAP_COST))
        sizes = np.zeros(last - first, np.int64)
        for offsets, cost in texts:
            sizes += (offsets[first + 1 : last + 1] - offsets[first]) * cost
        return max(first + int(np.searchsorted(sizes, size_max, "right")), first + 1)

    def part(self, first: int, last: int) -> PartFields:
        return PartFields(self, first, last)


class PartFields:
    """The fields of the rows [first, last) of a frame."""

    def __init__(self, whole: FrameFields, first: int, last: int) -> None:
        self._whole = whole
        self._first, self._count = first, last - first
        self._values: dict[str, Values] = {}

    def field(self, name: str) -> Values:
        """A field that is not a header; times are microseconds since 1970."""
        whole = self._whole
        if name == "key":
            return _NOTHING if whole.keys is None else _texts(whole.keys.slice(self._first, self._count))
        if name == "store_time":
            return Values(whole=Number(whole.frame.store_time, True))
        if not whole.frame.has(Column.SEND_TIME):
            return _NOTHING
        times = whole.frame.fixed(Column.SEND_TIME)[self._first : self._first + self._count]
        return Values(whole=Number(times, True))

    def header(self, name: str) -> Values:
        values = self._values.get(name)
        if values is None:
            column = self._whole.columns.get(name)
            if column is None:
                self._read_maps()
                return self._values.setdefault(name, _NOTHING)
            first, last = self._first, self._first + self._count
            text = column.kind == TEXT
            values = _texts(part_of(column, first, last)) if text else _numbers(column, first, last)
            self._values[name] = values
        return values

    def _read_maps(self) -> None:
        """Decode the headers that have no column. Of each map only the values that are used are kept."""
        if self._whole.maps is None:
            return
        lists: dict[str, list[Any]] = {name: [] for name in self._whole.mapped}
        nothing: dict[str, Any] = {}
        for row in self._whole.maps.slice(self._first, self._count).to_pylist():
            found = (read_headers(row) or nothing) if row else nothing
            for name, values in lists.items():
                values.append(found.get(name))
        for name, values in lists.items():
            self._values[name] = _mixed(values)

    def tagged(self, tag: str) -> Flags:
        """Whether each row has the tag."""
        tags = self._whole.tags
        if tags is None:
            return False
        import pyarrow.compute as pc

        found = pc.match_substring(tags.slice(self._first, self._count), f"{TAG_SEPARATOR}{tag}{TAG_SEPARATOR}")
        flags: Flags = as_flags(found)
        return flags

    def addressed(self, group: str) -> Flags:
        """Whether each row is addressed to this group or to none."""
        groups = self._whole.groups
        if groups is None:
            return True
        import pyarrow.compute as pc

        flags: Flags = as_flags(pc.is_in(groups.slice(self._first, self._count), pa.array([b"", group.encode()])))
        return flags


def _offsets(array: pa.Array) -> npt.NDArray[np.int32]:
    offsets: npt.NDArray[np.int32] = np.frombuffer(array.buffers()[1], np.int32, len(array) + 1)
    return offsets


def _texts(array: pa.Array) -> Values:
    return Values(text=Text(array, True if not array.null_count else as_flags(array.is_valid())))


def _numbers(column: HeaderColumn, first: int, last: int) -> Values:
    valid: Flags = True if column.present is None else column.present[first:last].view(np.bool_)
    data = column.values[first:last]
    if column.kind == BOOL:
        return Values(whole=Number(data.view(np.bool_), valid))
    if data.dtype == np.float64:
        return Values(real=_without_nan(data, valid))
    return _unsigned(data, valid) if data.dtype == np.uint64 else Values(whole=Number(data.astype(np.int64), valid))


def _without_nan(data: npt.NDArray[np.float64], valid: Flags) -> Number:
    """NaN is null, as in SQLite."""
    return Number(data, np.logical_and(valid, ~np.isnan(data)) if np.isnan(data).any() else valid)


def _unsigned(data: npt.NDArray[np.uint64], valid: Flags) -> Values:
    """Unsigned numbers that int64 does not have are doubles."""
    high = data >= _WHOLE_END
    if not high.any():
        return Values(whole=Number(data.view(np.int64), valid))
    real = Number(data.astype(np.float64), np.logical_and(valid, high))
    return Values(whole=Number(data.view(np.int64), np.logical_and(valid, ~high)), real=real)


def _mixed(values: list[Any]) -> Values:
    """Values of any kinds, one for each row; None: null."""
    types = set(map(type, values))
    if types == _ONLY_TEXT:
        return Values(text=Text(text_array(values), True))
    if types == _ONLY_WHOLE and max(values) < _WHOLE_END:
        return Values(whole=Number(np.array(values, np.int64), True))
    kinds = [_kind(value) for value in values]
    if not any(kinds):
        return _NOTHING
    is_text, is_whole, is_real = (np.fromiter((each is kind for each in kinds), bool, len(kinds)) for kind in _KINDS)
    text = whole = real = None
    if is_text.any():
        text = Text(text_array(_chosen(values, is_text, "")), is_text)
    if is_whole.any():
        whole = Number(np.array(_chosen(values, is_whole, 0), np.int64), is_whole)
    if is_real.any():
        real = _without_nan(np.array(_chosen(values, is_real, 0.0), np.float64), is_real)
    return Values(text, whole, real)


_KINDS = (str, int, float)
_ONLY_TEXT = {str}
_ONLY_WHOLE = {int}


def _kind(value: Any) -> type | None:
    if value is None:
        return None
    kind = type(value)
    if kind is str or kind is float:
        return kind
    return int if value < _WHOLE_END else float


def _chosen(values: Iterable[Any], flags: Iterable[Any], other: Any) -> list[Any]:
    return [value if chosen else other for value, chosen in zip(values, flags, strict=True)]
