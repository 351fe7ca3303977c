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

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


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
            return ["time", int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1_000_000)]
    raise InvalidArgument(
        f"start {value!r} is not understood; use 'earliest', 'latest', a sequence, a datetime or '-5m'"
    )
