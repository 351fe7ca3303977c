"""Turns filters that Spark pushes down into bounds on the frames and rows that are read.

A bound may pass more rows than the filter: Spark applies the filter again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

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

from plait.frame.header import SEQUENCE_MAX
from plait.storage.reading.log_chunks import WantedRows

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
    column = condition.attribute
    if column == ("subject",):
        return replace(wanted, subjects_only=_both(wanted.subjects_only, values))
    if column == ("partition",):
        partitions = [value.rpartition("@") for value in values if isinstance(value, str)]
        own = [name for name, _, broker_group in partitions if group is None or broker_group == group]
        return replace(wanted, partitions_only=_both(wanted.partitions_only, own))
    if column == ("key",):
        # Rows without a key match a null-safe comparison with null, and the index by key hash does not find them.
        null_safe = isinstance(condition, EqualNullSafe) and None in values
        return wanted if null_safe else replace(wanted, keys=_both(wanted.keys, values))
    if column == ("message_id",):
        ids = frozenset(found for value in values if (found := _message_id(value)) is not None)
        return replace(wanted, message_ids=ids if wanted.message_ids is None else ids & wanted.message_ids)
    bounds = _bounds(column, values)
    return wanted if bounds is None else _within(wanted, column, min(bounds), max(bounds))


def _message_id(value: Any) -> tuple[int, int] | None:
    """(producer, number) of a printed id; None: no message has that id."""
    match = _MESSAGE_ID.fullmatch(value) if isinstance(value, str) else None
    if match is None or int(match[2]) >= SEQUENCE_MAX:
        return None
    return int(match[1], 16), int(match[2])


def _narrow_range(
    wanted: WantedRows, condition: GreaterThan | GreaterThanOrEqual | LessThan | LessThanOrEqual
) -> WantedRows:
    column = condition.attribute
    bounds = _bounds(column, [condition.value])
    if bounds is None:
        return wanted
    if isinstance(condition, GreaterThan | GreaterThanOrEqual):
        return _within(wanted, column, bounds[0] + isinstance(condition, GreaterThan), None)
    return _within(wanted, column, None, bounds[0] - isinstance(condition, LessThan))


def _bounds(column: tuple[str, ...], values: Iterable[Any]) -> list[int] | None:
    """The values as numbers of frame headers; None where a value is not such a number."""
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


def _within(wanted: WantedRows, column: tuple[str, ...], low: int | None, high: int | None) -> WantedRows:
    bound = "sequence" if column == ("sequence",) else "time"
    bounds = {}
    if low is not None:
        bounds[f"{bound}_min"] = max(low, getattr(wanted, f"{bound}_min"))
    if high is not None:
        bounds[f"{bound}_max"] = min(high, getattr(wanted, f"{bound}_max"))
    return replace(wanted, **bounds)


def _both(before: frozenset[str] | None, values: Iterable[Any]) -> frozenset[str]:
    texts = frozenset(value for value in values if isinstance(value, str))
    return texts if before is None else texts & before
