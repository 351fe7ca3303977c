"""Turns filters that Spark pushes down into bounds on the frames and rows that are read, and into a message filter.

A bound or a filter may pass more rows than the filter: Spark applies the filter again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)

from plait.errors import InvalidArgument
from plait.filter.message_filter import compile_filter
from plait.frame.header import SEQUENCE_MAX
from plait.model.filter_terms import FilterTerms
from plait.spark.source.typed_headers import BOOL, PREFIX, REAL, TEXT, WHOLE, is_header
from plait.storage.reading.log_chunks import WantedRows

T = TypeVar("T")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
#: The printed form of a message id.
_MESSAGE_ID: Final = re.compile(r"([0-9a-f]{16})-(0|[1-9][0-9]{0,18})")


def narrow(wanted: WantedRows, condition: Filter, group: str | None) -> WantedRows:
    """``wanted`` without frames that cannot match the condition; unchanged where the condition gives no bound.

    ``group`` is the broker group of all partitions; None: the partitions are of several groups.
    """
    if isinstance(condition, EqualTo | EqualNullSafe):
        values: list[Any] = [condition.value]
    elif isinstance(condition, In):
        values = list(condition.value)
    elif isinstance(condition, GreaterThan | GreaterThanOrEqual | LessThan | LessThanOrEqual):
        return _narrow_range(wanted, condition)
    else:
        return wanted
    column, texts = condition.attribute, frozenset(value for value in values if isinstance(value, str))
    if column == ("subject",):
        return replace(wanted, subjects_only=_both(wanted.subjects_only, texts))
    if column == ("partition",):
        named = (text.rpartition("@") for text in texts)
        partitions = frozenset(name for name, _, broker_group in named if group in (None, broker_group))
        return replace(wanted, partitions_only=_both(wanted.partitions_only, partitions))
    if column == ("key",):
        # Rows without a key match a null-safe comparison with null, and the index by key hash does not find them.
        null_safe = isinstance(condition, EqualNullSafe) and None in values
        return wanted if null_safe else replace(wanted, keys=_both(wanted.keys, texts))
    if column == ("message_id",):
        matches = (match for text in texts if (match := _MESSAGE_ID.fullmatch(text)) and int(match[2]) < SEQUENCE_MAX)
        ids = frozenset((int(match[1], 16), int(match[2])) for match in matches)
        return replace(wanted, message_ids=_both(wanted.message_ids, ids))
    bounds = _bounds(column, values)
    return wanted if bounds is None else _within(wanted, column, min(bounds), max(bounds))


def _narrow_range(
    wanted: WantedRows, condition: GreaterThan | GreaterThanOrEqual | LessThan | LessThanOrEqual
) -> WantedRows:
    bounds = _bounds(condition.attribute, [condition.value])
    if bounds is None:
        return wanted
    if isinstance(condition, GreaterThan | GreaterThanOrEqual):
        return _within(wanted, condition.attribute, low=bounds[0] + isinstance(condition, GreaterThan))
    return _within(wanted, condition.attribute, high=bounds[0] - isinstance(condition, LessThan))


def _bounds(column: tuple[str, ...], values: Iterable[Any]) -> list[int] | None:
    """The values as numbers of frame headers; None where a value is not such a number."""
    numbers = []
    for value in values:
        if column == ("sequence",) and isinstance(value, int) and not isinstance(value, bool):
            numbers.append(value)
        elif column == ("store_time",) and isinstance(value, datetime) and value.tzinfo is not None:
            numbers.append((value - _EPOCH) // timedelta(microseconds=1))
        else:
            return None
    return numbers or None


def _within(wanted: WantedRows, column: tuple[str, ...], low: int = 0, high: int = SEQUENCE_MAX) -> WantedRows:
    if column == ("sequence",):
        return replace(wanted, sequence_min=max(low, wanted.sequence_min), sequence_max=min(high, wanted.sequence_max))
    return replace(wanted, time_min=max(low, wanted.time_min), time_max=min(high, wanted.time_max))


def _both(before: frozenset[T] | None, values: frozenset[T]) -> frozenset[T]:
    return values if before is None else values & before


# --- conditions ---------------------------------------------------------------------------------

_COMPARISONS: Final[dict[type[Filter], str]] = {
    EqualTo: "=",
    EqualNullSafe: "=",
    GreaterThan: ">",
    GreaterThanOrEqual: ">=",
    LessThan: "<",
    LessThanOrEqual: "<=",
}
_PATTERNS: Final[dict[type[Filter], str]] = {
    StringStartsWith: "{}%",
    StringEndsWith: "%{}",
    StringContains: "%{}%",
}
#: Below this, an integer compares with a double as the double of that integer does.
_EXACT_END: Final = 1 << 53
_WHOLE_END: Final = 1 << 63


def joined_filter(known: FilterTerms | None, pushed: Iterable[Filter], schema: pa.Schema) -> FilterTerms | None:
    """The filter, and the pushed filters on keys and on headers that are columns, as one filter.

    A pushed filter that no condition expresses, or that exceeds the limits of conditions, is left out.
    """
    terms = known or FilterTerms()
    for each in pushed:
        condition = condition_of(each, schema)
        if condition is not None:
            where = f"({terms.where}) AND {condition}" if terms.where else condition
            with suppress(InvalidArgument):
                terms = compile_filter(FilterTerms(terms.tags, where)).terms
    return None if terms == FilterTerms() else terms


def condition_of(pushed: Filter, schema: pa.Schema) -> str | None:
    """A condition (docs/filters.md) that all rows match that match the filter; None: there is none.

    In rows where the column has a value, both have the same result, so the condition may be negated. The column of a
    header is null where the header has another type; then the filter matches no row, and the condition may match it.
    """
    if isinstance(pushed, Not):
        child = None if isinstance(pushed.child, EqualNullSafe | IsNotNull) else condition_of(pushed.child, schema)
        return None if child is None else f"NOT ({child})"
    column: tuple[str, ...] = getattr(pushed, "attribute", ())
    if len(column) != 1 or column[0] not in schema.names:
        return None
    name, kind = column[0], schema.field(column[0]).type
    if name != "key" and not is_header(name, kind):
        return None
    field = name if name == "key" else '"{}"'.format(name.removeprefix(PREFIX).replace('"', '""'))
    if isinstance(pushed, IsNotNull):
        return f"{field} IS NOT NULL"
    if isinstance(pushed, In):
        literals = [_literal(value, kind) for value in pushed.value]
        return f"{field} IN ({', '.join(map(str, literals))})" if literals and None not in literals else None
    pattern, value = _PATTERNS.get(type(pushed)), getattr(pushed, "value", None)
    if pattern is not None:
        escaped = re.sub("[!%_]", r"!\g<0>", str(value))
        return f"{field} LIKE {_text(pattern.format(escaped))} ESCAPE '!'"
    comparison, literal = _COMPARISONS.get(type(pushed)), _literal(value, kind)
    return None if comparison is None or literal is None else f"{field} {comparison} {literal}"


def _literal(value: Any, kind: pa.DataType) -> str | None:
    """The value of a column of this type in a condition; None if it cannot be compared exactly there."""
    if kind == TEXT and isinstance(value, str):
        return _text(value)
    if kind == BOOL and isinstance(value, bool):
        return str(value).upper()
    whole = kind == WHOLE and isinstance(value, int) and -_WHOLE_END <= value < _WHOLE_END
    real = kind == REAL and isinstance(value, int | float) and abs(value) < _EXACT_END
    return repr(value) if (whole or real) and not isinstance(value, bool) else None


def _text(value: str) -> str:
    return "'{}'".format(value.replace("'", "''"))
