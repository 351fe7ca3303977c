"""Why a message failed: what its dead letter says."""

from __future__ import annotations

import msgspec

#: Characters kept of each part; what is longer ends with "...".
TYPE_LENGTH_MAX = 200
TEXT_LENGTH_MAX = 1_000
HANDLER_LENGTH_MAX = 200


class Reason(msgspec.Struct, frozen=True, array_like=True):
    """An exception's type and text, and the handler that raised it."""

    type: str = ""
    text: str = ""
    handler: str = ""

    def __post_init__(self) -> None:
        for name, limit in (("type", TYPE_LENGTH_MAX), ("text", TEXT_LENGTH_MAX), ("handler", HANDLER_LENGTH_MAX)):
            value = getattr(self, name)
            if len(value) > limit:
                msgspec.structs.force_setattr(self, name, value[: limit - 3] + "...")

    def __str__(self) -> str:
        what = ": ".join(part for part in (self.type, self.text) if part) or "no reason was given"
        return f"{what} ({self.handler})" if self.handler else what

    @classmethod
    def of(cls, failure: BaseException, handler: str = "") -> Reason:
        """What an exception says of itself."""
        kind = type(failure)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        return cls(name, str(failure), handler)
