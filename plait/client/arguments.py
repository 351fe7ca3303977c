"""Arguments that users may write in several ways: durations, times and start positions."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

from plait.errors import InvalidArgument
from plait.retry import WAIT_SECONDS_MAX

#: Seconds, a timedelta, or text such as "5m".
Duration = float | timedelta | str
#: "earliest", "latest", a sequence, a time, or "-5m" before now.
Start = str | int | datetime | timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


def to_datetime(micros: int) -> datetime:
    """Microseconds since 1970 as a time in UTC, exactly."""
    return _EPOCH + timedelta(microseconds=micros)


def micros_of(moment: Any, name: str) -> int:
    """The same back."""
    if not isinstance(moment, datetime):
        raise InvalidArgument(f"{name} {moment!r} is a {type(moment).__name__}; use a datetime with a time zone")
    if moment.tzinfo is None:
        raise InvalidArgument(f"{name} {moment} has no time zone; add one")
    return (moment - _EPOCH) // _MICROSECOND


def moment_of(value: Any, name: str, now: int) -> int | None:
    """A time in microseconds: a datetime, a duration from now, or ``-5m`` before it."""
    if value is None:
        return None
    if isinstance(value, datetime):
        return micros_of(value, name)
    if isinstance(value, str):
        text = value.strip()
        if text.startswith("-"):
            return now - round(seconds_of(text[1:]) * 1_000_000)
        try:
            return micros_of(_with_zone(datetime.fromisoformat(text)), name)
        except ValueError:
            pass
    if isinstance(value, timedelta):
        return now + value // _MICROSECOND
    return now + round(seconds_of(value) * 1_000_000)


def _with_zone(moment: datetime) -> datetime:
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def seconds_of(value: Any) -> float:
    """A duration in seconds: a number, a timedelta, or text such as '5m' or '1.5h'."""
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    elif isinstance(value, str) and (match := _DURATION.fullmatch(value.strip())):
        seconds = float(match[1]) * _UNITS[match[2]]
    else:
        raise InvalidArgument(f"duration {value!r} is not understood; use seconds, a timedelta or text such as '5m'")
    if not 0 <= seconds < float("inf"):
        raise InvalidArgument(f"duration {value!r} must be 0 or more")
    return seconds


def wait_of(value: Any) -> float:
    """How long a message is to wait, in seconds."""
    seconds = seconds_of(value)
    if seconds > WAIT_SECONDS_MAX:
        raise InvalidArgument(f"a message cannot wait {value!r}; the limit is {WAIT_SECONDS_MAX / 86400:.0f} days")
    return seconds


def start_of(value: Any, now: int) -> Any:
    """A start position for the wire: 'earliest', 'latest', a sequence, a datetime, or '-5m' before now."""
    if value is None or value in ("earliest", "latest"):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise InvalidArgument(f"start sequence {value} must be 0 or more")
        return ["sequence", value]
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise InvalidArgument(f"start time {value} has no time zone; add one")
        return ["time", int(value.timestamp() * 1_000_000)]
    if isinstance(value, timedelta):
        return ["time", now - int(abs(value.total_seconds()) * 1_000_000)]
    if isinstance(value, str):
        if value.startswith("-"):
            return ["time", now - int(seconds_of(value[1:]) * 1_000_000)]
        if value.isdigit():
            return ["sequence", int(value)]
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            pass
        else:
            return ["time", int(_with_zone(moment).timestamp() * 1_000_000)]
    raise InvalidArgument(
        f"start {value!r} is not understood; use 'earliest', 'latest', a sequence, a datetime or '-5m'"
    )
