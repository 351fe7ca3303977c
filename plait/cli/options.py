"""What several commands take: the server's address, the form of the output, sizes and durations in words."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from cyclopts import Parameter

from plait.errors import InvalidArgument
from plait.limits import GIB, KIB, MIB

Server = Annotated[str, Parameter(env_var="PLAIT_SERVER", help="The node to talk to: plait://host:port.")]
Output = Annotated[Literal["table", "json"], Parameter(name=("--output", "-o"), help="For people or for programs.")]
Yes = Annotated[bool, Parameter(name=("--yes", "-y"), help="Do not ask.", show_default=False)]

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
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


def duration_of(text: str) -> float:
    """Seconds of a duration in words: ``5m``, ``1.5h``, or a plain number of seconds."""
    from plait.client.arguments import seconds_of

    try:
        return seconds_of(float(text))
    except ValueError:
        return seconds_of(text)


def size_of(text: str) -> int:
    """Bytes of a size in words: ``1GiB``, ``64MiB``, ``100MB`` or a plain number."""
    match = _SIZE.fullmatch(text.strip())
    unit = match[2].lower() if match else "?"
    if match is None or unit not in _UNITS:
        raise InvalidArgument(f"size {text!r} is not understood; write bytes, or a number with KiB, MiB, GiB, MB or GB")
    return int(float(match[1]) * _UNITS[unit])
