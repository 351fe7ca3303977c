"""Filters that Spark pushes down, as bounds on which frames are read.

A bound may let more through than the filter: Spark applies the filter itself again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from plait.storage.chunks import Wanted

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def narrow(wanted: Wanted, condition: Filter, group: str) -> Wanted:
    """``wanted`` without the frames that cannot meet the condition; the same where that cannot be told."""
    if isinstance(condition, EqualTo | EqualNullSafe):
        values: list[Any] = [condition.value]
    elif isinstance(condition, In):
        values = list(condition.value)
    elif isinstance(condition, GreaterThan | GreaterThanOrEqual | LessThan | LessThanOrEqual):
        return _narrow_range(wanted, condition)
    else:
        return wanted
    column = condition.attribute
    if column == ("subject",):
        return replace(wanted, subjects_only=_both(wanted.subjects_only, values))
    if column == ("partition",):
        suffix = f"@{group}"
        here = [value.removesuffix(suffix) for value in values if isinstance(value, str) and value.endswith(suffix)]
        return replace(wanted, partitions_only=_both(wanted.partitions_only, here))
    bounds = _bounds(column, values)
    return wanted if bounds is None else _within(wanted, column, min(bounds), max(bounds))


def _narrow_range(wanted: Wanted, condition: GreaterThan | GreaterThanOrEqual | LessThan | LessThanOrEqual) -> Wanted:
    column = condition.attribute
    bounds = _bounds(column, [condition.value])
    if bounds is None:
        return wanted
    if isinstance(condition, GreaterThan | GreaterThanOrEqual):
        return _within(wanted, column, bounds[0] + isinstance(condition, GreaterThan), None)
    return _within(wanted, column, None, bounds[0] - isinstance(condition, LessThan))


def _bounds(column: tuple[str, ...], values: Iterable[Any]) -> list[int] | None:
    """The values as the numbers that headers hold; None where one is none of them."""
    read = _NUMBERS.get(column)
    numbers = [read(value) for value in values] if read is not None else []
    whole = [number for number in numbers if number is not None]
    return whole if whole and len(whole) == len(numbers) else None


def _sequence(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _micros(value: Any) -> int | None:
    if not isinstance(value, datetime) or value.tzinfo is None:
        return None
    return (value - _EPOCH) // timedelta(microseconds=1)


_NUMBERS: dict[tuple[str, ...], Callable[[Any], int | None]] = {("sequence",): _sequence, ("store_time",): _micros}


def _within(wanted: Wanted, column: tuple[str, ...], low: int | None, high: int | None) -> Wanted:
    if column == ("sequence",):
        return replace(
            wanted,
            sequence_min=wanted.sequence_min if low is None else max(low, wanted.sequence_min),
            sequence_max=wanted.sequence_max if high is None else min(high, wanted.sequence_max),
        )
    return replace(
        wanted,
        time_min=wanted.time_min if low is None else max(low, wanted.time_min),
        time_max=wanted.time_max if high is None else min(high, wanted.time_max),
    )


def _both(before: frozenset[str] | None, values: Iterable[Any]) -> frozenset[str]:
    texts = frozenset(value for value in values if isinstance(value, str))
    return texts if before is None else texts & before
