"""Turns filters that Spark pushes down into bounds on the frames and rows that are read.

A bound may pass more rows than the filter: Spark applies the filter again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

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
