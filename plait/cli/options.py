"""What several commands take: the server's address, the form of the output, sizes and durations in words."""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from plait.errors import InvalidArgument
from plait.limits import GIB, KIB, LEASE_SECONDS_MAX, LEASE_SECONDS_MIN, MIB

Server = Annotated[str, Parameter(env_var="PLAIT_SERVER", help="The node to talk to: plait://host:port.")]
Output = Annotated[Literal["table", "json"], Parameter(name=("--output", "-o"), help="For people or for programs.")]
Partition = Annotated[
    str | None, Parameter(help="The partition that is meant, as name@group; where the subject has several.")
]
Yes = Annotated[bool, Parameter(name=("--yes", "-y"), help="Do not ask.", show_default=False)]

Lease = Annotated[
    str, Parameter(help="How long an ordered consumer has its locks after a word from it; the same on all servers.")
]

DEFAULT_SERVER = "plait://127.0.0.1:7450"

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1024 * GIB,
}
_LEVEL = re.compile(r"level[_ ]?(\d+)", re.IGNORECASE)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


def confirm(name: str, what: str, *, yes: bool) -> None:
    """Ask on a terminal whether ``what`` is to be deleted, by its name; ``InvalidArgument`` where it is not."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidArgument(f"deleting {what} cannot be undone: say --yes")
    sys.stderr.write(f"delete {what}? Type its name to continue: ")
    sys.stderr.flush()
    if sys.stdin.readline().strip() != name:
        raise InvalidArgument("not deleted")


def whole_of(text: str, option: str) -> int:
    """A whole number."""
    try:
        return int(text)
    except ValueError:
        raise InvalidArgument(f"{option} {text} is not understood; use a whole number") from None


def duration_of(text: str) -> float:
    """Seconds of a duration in words: ``5m``, ``1.5h``, or a plain number of seconds."""
    from plait.client.arguments import seconds_of

    try:
        return seconds_of(float(text))
    except ValueError:
        return seconds_of(text)


def lease_of(text: str) -> float:
    """Seconds of a lease in words."""
    seconds = duration_of(text)
    if not LEASE_SECONDS_MIN <= seconds <= LEASE_SECONDS_MAX:
        raise InvalidArgument(
            f"--lease {text} is not possible: use {LEASE_SECONDS_MIN:g} s (heartbeats come every second) "
            f"to {LEASE_SECONDS_MAX:g} s"
        )
    return seconds


def delay_of(text: str) -> Any:
    """A delay in words: as ``duration_of``, or one of RocketMQ's levels, as in ``level3``."""
    from plait.client.send.due_time import DelayLevel

    match = _LEVEL.fullmatch(text.strip())
    if match is None:
        return duration_of(text)
    try:
        return DelayLevel[f"LEVEL_{int(match[1])}"]
    except KeyError:
        raise InvalidArgument(f"delay {text!r}: there are levels 1 to {len(DelayLevel)}") from None


def time_of(text: str) -> datetime:
    """A time: ISO 8601, in UTC unless it says otherwise."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidArgument(f"time {text!r} is not understood; write it as in 2025-01-31T12:00:00Z") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def size_of(text: str) -> int:
    """Bytes of a size in words: ``1GiB``, ``64MiB``, ``100MB`` or a plain number."""
    match = _SIZE.fullmatch(text.strip())
    unit = match[2].lower() if match else "?"
    if match is None or unit not in _UNITS:
        raise InvalidArgument(f"size {text!r} is not understood; write bytes, or a number with KiB, MiB, GiB, MB or GB")
    return int(float(match[1]) * _UNITS[unit])
