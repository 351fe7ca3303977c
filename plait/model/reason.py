"""Why a message failed, as recorded in its dead letter."""

from __future__ import annotations

import msgspec

from plait.errors import InvalidArgument

#: Characters stored of each part; a longer part is cut and ends with "...".
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
            if not isinstance(value, str):
                raise InvalidArgument(f"the {name} of a reason is text, not a {type(value).__name__}")
            if len(value) > limit:
                msgspec.structs.force_setattr(self, name, value[: limit - 3] + "...")

    def __str__(self) -> str:
        what = ": ".join(part for part in (self.type, self.text) if part) or "no reason was given"
        return f"{what} ({self.handler})" if self.handler else what

    @classmethod
    def of(cls, failure: BaseException, handler: str = "") -> Reason:
        """The reason for a failure that raised this exception."""
        return cls(type_name(type(failure)), str(failure), handler)


def type_name(kind: type[BaseException]) -> str:
    """The name of an exception type in reasons: the public module to import it from, and its name."""
    module = kind.__module__
    if module == "builtins":
        return kind.__qualname__
    return f"{'plait' if module.startswith('plait.') else module}.{kind.__qualname__}"
