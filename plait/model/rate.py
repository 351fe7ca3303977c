"""A limit of messages and bytes a second."""

from __future__ import annotations

import msgspec

from plait.errors import InvalidArgument
from plait.limits import RATE_BYTES_MIN, RATE_MAX, RATE_MESSAGES_MIN


class Rate(msgspec.Struct, frozen=True, omit_defaults=True):
    """At most this many messages, and bytes, a second; None: as many as there are."""

    messages_per_second: float | None = None
    #: Bytes of frames as they are stored and sent, with keys, tags and headers.
    bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("messages_per_second", RATE_MESSAGES_MIN), ("bytes_per_second", RATE_BYTES_MIN)):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (number and least <= value <= RATE_MAX):
                raise InvalidArgument(f"{name} is {value!r}; use a number from {least:g} to {RATE_MAX:g}, or None")

    @property
    def limited(self) -> bool:
        """True if it limits anything."""
        return self.messages_per_second is not None or self.bytes_per_second is not None

    def __str__(self) -> str:
        messages, size = self.messages_per_second, self.bytes_per_second
        found = [] if messages is None else [f"{messages:,.6g} messages/s"]
        found += [] if size is None else [f"{size:,.12g} bytes/s"]
        return ", ".join(found) or "unlimited"
