"""Options of several commands, and parsers for sizes, durations and times."""

from __future__ import annotations

import re
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar

from cyclopts import Parameter

from plait.cli.event_loop import with_client
from plait.errors import InvalidArgument
from plait.limits import GIB, KIB, LEASE_SECONDS_MAX, LEASE_SECONDS_MIN, MIB

if TYPE_CHECKING:
    from plait.client.client import Client
    from plait.model.rate import Rate


def described(text: str) -> Parameter:
    """An argument or option with its help."""
    return Parameter(help=text)


def flag(text: str) -> Parameter:
    """An option that is off unless it is given."""
    return Parameter(help=text, show_default=False)


def signed(text: str) -> Parameter:
    """An argument or option whose value may begin with a hyphen."""
    return Parameter(help=text, allow_leading_hyphen=True)


T = TypeVar("T")

Server = Annotated[str, Parameter(env_var="PLAIT_SERVER", help="The node to talk to: plait://host:port.")]
Output = Annotated[Literal["table", "json"], Parameter(name=("--output", "-o"), help="A table, or JSON for programs.")]
Partition = Annotated[str | None, described("The partition, as name@group, if the subject has several.")]
Yes = Annotated[bool, Parameter(name=("--yes", "-y"), help="Do not ask for confirmation.", show_default=False)]

Lease = Annotated[
    str,
    described("How long an ordered consumer keeps its locks after a heartbeat; the same on all servers."),
]

DEFAULT_SERVER = "plait://127.0.0.1:7450"


@Parameter(name="*")
@dataclass(frozen=True)
class NodeOptions:
    """The options of a command that talks to a node and prints a table or JSON."""

    server: Server = DEFAULT_SERVER
    output: Output = "table"

    def run(self, work: Callable[[Client], Awaitable[T]]) -> T:
        return with_client(self.server, work)


NODE: Final = NodeOptions()

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


def confirm(name: str, what: str, *, yes: bool, verb: Literal["delete", "rewind"] = "delete") -> None:
    """Ask on a terminal for the name of ``what`` before it is changed. Raises ``InvalidArgument`` otherwise."""
    if yes:
        return
    doing, done = {"delete": ("deleting", "deleted"), "rewind": ("rewinding", "rewound")}[verb]
    if not sys.stdin.isatty():
        raise InvalidArgument(f"{doing} {what} cannot be undone; confirm with --yes")
    sys.stderr.write(f"{verb} {what}? Type its name to continue: ")
    sys.stderr.flush()
    if sys.stdin.readline().strip() != name:
        raise InvalidArgument(f"nothing was {done}: the name typed is not {name!r}")


def whole_of(text: str, option: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidArgument(f"{option} {text} is not understood; use a whole number") from None


def duration_of(text: str) -> float:
    """Seconds of a duration such as ``5m`` or ``1.5h``, or a plain number of seconds."""
    from plait.client.arguments import seconds_of

    try:
        return seconds_of(float(text))
    except ValueError:
        return seconds_of(text)


def lease_of(text: str) -> float:
    seconds = duration_of(text)
    if not LEASE_SECONDS_MIN <= seconds <= LEASE_SECONDS_MAX:
        raise InvalidArgument(
            f"--lease {text} is out of range; use {LEASE_SECONDS_MIN:g} s (a heartbeat is sent every second) "
            f"to {LEASE_SECONDS_MAX:g} s"
        )
    return seconds


def delay_of(text: str) -> Any:
    """A delay: a duration, or one of RocketMQ's levels, as in ``level3``."""
    from plait.client.send.encoding import DelayLevel

    match = _LEVEL.fullmatch(text.strip())
    if match is None:
        return duration_of(text)
    try:
        return DelayLevel[f"LEVEL_{int(match[1])}"]
    except KeyError:
        raise InvalidArgument(f"delay {text!r} is not a level; use level1 to level{len(DelayLevel)}") from None


def time_of(text: str) -> datetime:
    """A time in ISO 8601, in UTC unless it has an offset."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidArgument(f"time {text!r} is not understood; write it as in 2025-01-31T12:00:00Z") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def rate_of(text: str, option: str) -> Rate:
    """A rate such as ``500``, ``10MiB`` or ``500,10MiB``: messages and bytes a second; ``none``: no limit."""
    from plait.model.rate import Rate

    found: dict[str, float] = {}
    for part in [] if text.strip() == "none" else text.split(","):
        match = _SIZE.fullmatch(part.strip())
        if match is None or match[2].lower() not in _UNITS:
            raise InvalidArgument(
                f"{option} {text!r} is not understood; write messages or bytes a second as in 500, 10MiB or "
                "500,10MiB, or none"
            )
        name = "bytes_per_second" if match[2] else "messages_per_second"
        if name in found:
            raise InvalidArgument(f"{option} {text!r} has two numbers of {name.split('_')[0]}; write one of each")
        found[name] = float(match[1]) * _UNITS[match[2].lower()]
    return Rate(**found)


def size_of(text: str) -> int:
    """Bytes of a size such as ``1GiB``, ``64MiB`` or ``100MB``, or a plain number of bytes."""
    match = _SIZE.fullmatch(text.strip())
    unit = match[2].lower() if match else "?"
    if match is None or unit not in _UNITS:
        raise InvalidArgument(f"size {text!r} is not understood; write bytes, or a number with KiB, MiB, GiB, MB or GB")
    return int(float(match[1]) * _UNITS[unit])
