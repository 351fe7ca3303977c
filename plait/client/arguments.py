"""Arguments that users may write in several ways: durations, times and start positions."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa

from plait.errors import InvalidArgument
from plait.frame.header import SEQUENCE_MAX, TIME_MAX
from plait.model.retry_policy import WAIT_SECONDS_MAX

#: Seconds, a timedelta, or text such as "5m".
Duration = float | timedelta | str
#: "earliest", "latest", a sequence, a time, or "-5m" before now.
Start = str | int | datetime | timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
#: Farther from now than any valid time.
_FAR_SECONDS = 1e12
#: Characters of a value that an error message shows.
_SHOWN_MAX = 80


def shown(value: Any) -> str:
    """The repr of any value, for an error message: cut to ``_SHOWN_MAX`` characters. Never raises ``ValueError``."""
    try:
        text = repr(value)
    except ValueError:
        # Python refuses to print an integer of more than 4300 digits.
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= _SHOWN_MAX else text[: _SHOWN_MAX - 3] + "..."


def index_of(value: Any, name: str) -> int:
    """The value as an int; takes the integers of Python and NumPy, and no bool."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise InvalidArgument(f"{name} {shown(value)} is a {type(value).__name__}; use a whole number")
    return number


def sequence_of(value: Any, name: str) -> int:
    """The sequence of a message, or its number in a schedule."""
    number = index_of(value, name)
    if not 0 <= number < SEQUENCE_MAX:
        raise InvalidArgument(f"{name} {shown(number)} is out of range; use 0 to {SEQUENCE_MAX - 1}")
    return number


def sequences_of(values: Any) -> list[int]:
    """Sequences from a list, a range, a NumPy or Arrow array, or any other iterable."""
    if isinstance(values, np.ndarray):
        values = values.tolist()
    elif isinstance(values, pa.Array | pa.ChunkedArray):
        values = values.to_pylist()
    if not isinstance(values, Iterable) or isinstance(values, str | bytes):
        raise InvalidArgument(f"sequences are {shown(values)}, a {type(values).__name__}; use a list of numbers")
    return [sequence_of(value, "sequence") for value in values]


def limit_of(value: Any, name: str = "limit") -> int:
    """The largest number of results that the caller wants, or of what is examined for them."""
    limit = index_of(value, name)
    if limit < 1:
        raise InvalidArgument(f"{name} must be 1 or more, not {shown(value)}")
    return limit


def to_datetime(micros: int) -> datetime:
    """Microseconds since 1970 as a time in UTC, exactly."""
    return _EPOCH + timedelta(microseconds=micros)


def micros_of(moment: Any, name: str) -> int:
    """A datetime with a time zone as microseconds since 1970."""
    if not isinstance(moment, datetime):
        raise InvalidArgument(f"{name} {shown(moment)} is a {type(moment).__name__}; use a datetime with a time zone")
    if moment.utcoffset() is None:
        raise InvalidArgument(f"{name} {moment} has no time zone; add one")
    return (moment - _EPOCH) // _MICROSECOND


def moment_of(value: Any, name: str, now: int) -> int | None:
    """A time in microseconds since 1970, from a datetime, a duration after now, or ``-5m`` before now."""
    if value is None:
        return None
    micros = _moment_of(value, name, now)
    if not 0 <= micros <= TIME_MAX:
        raise InvalidArgument(f"{name} {shown(value)} is not within the years 1970 to 9999")
    return micros


def _moment_of(value: Any, name: str, now: int) -> int:
    if isinstance(value, datetime):
        return micros_of(value, name)
    if isinstance(value, str) and (moment := _moment_in(value.strip(), name, now)) is not None:
        return moment
    if isinstance(value, timedelta):
        return now + value // _MICROSECOND
    try:
        return now + _micros(seconds_of(value))
    except InvalidArgument:
        raise InvalidArgument(
            f"{name} {shown(value)} is not understood; use a datetime, '2025-01-31T12:00', or '-5m' for 5 minutes ago"
        ) from None


def _moment_in(text: str, name: str, now: int) -> int | None:
    """The time in a text such as "2030-01-01" (UTC, if it has no zone), or "-5m" before now; None: neither."""
    if text.startswith("-"):
        return now - _micros(seconds_of(text[1:]))
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return micros_of(moment if moment.tzinfo else moment.replace(tzinfo=UTC), name)


def _micros(seconds: float) -> int:
    return round(min(seconds, _FAR_SECONDS) * 1_000_000)


def seconds_of(value: Any) -> float:
    """A duration in seconds: a number, a timedelta, or text such as '5m' or '1.5h'."""
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif is_number(value):
        try:
            seconds = float(value)
        except OverflowError:
            raise InvalidArgument(f"duration {shown(value)} is too long; use fewer seconds") from None
    elif isinstance(value, str) and (match := _DURATION.fullmatch(value.strip())):
        seconds = float(match[1]) * _UNITS[match[2]]
    else:
        raise InvalidArgument(
            f"duration {shown(value)} is not understood; use seconds, a timedelta or text such as '5m'"
        )
    if not 0 <= seconds < float("inf"):
        raise InvalidArgument(f"duration {shown(value)} must be 0 or more")
    return seconds


def is_number(value: Any) -> bool:
    """True for the numbers of Python and NumPy; False for bools and ``timedelta64``."""
    if isinstance(value, int | float):
        return not isinstance(value, bool)
    return isinstance(value, np.integer | np.floating) and not isinstance(value, np.timedelta64)


def wait_of(value: Any) -> float:
    """The seconds that a message waits for its retry."""
    seconds = seconds_of(value)
    if seconds > WAIT_SECONDS_MAX:
        raise InvalidArgument(f"a message cannot wait {shown(value)}; the limit is {WAIT_SECONDS_MAX / 86400:.0f} days")
    return seconds


def start_of(value: Any, now: int) -> Any:
    """A start position for the wire: 'earliest', 'latest', a sequence, a datetime, or '-5m' before now."""
    if value is None or (isinstance(value, str) and value in ("earliest", "latest")):
        return value
    if isinstance(value, int | np.integer) and not isinstance(value, bool | np.timedelta64):
        if value < 0:
            raise InvalidArgument(f"start sequence {shown(value)} must be 0 or more")
        return ["sequence", sequence_of(value, "start sequence")]
    if isinstance(value, datetime):
        return _start_at(micros_of(value, "start time"))
    if isinstance(value, timedelta):
        return _start_at(now - abs(value) // _MICROSECOND)
    if isinstance(value, str):
        if value.isdecimal():
            # Text with far more digits than any sequence is not converted; it becomes a number that is too large.
            number = int(value) if len(value) <= _SHOWN_MAX else SEQUENCE_MAX
            return ["sequence", sequence_of(number, "start sequence")]
        if (moment := _moment_in(value, "start time", now)) is not None:
            return _start_at(moment)
    raise InvalidArgument(
        f"start {shown(value)} is not understood; use 'earliest', 'latest', a sequence, a datetime or '-5m'"
    )


def _start_at(micros: int) -> list[Any]:
    """A time before 1970 means the earliest message."""
    return ["time", max(micros, 0)]
