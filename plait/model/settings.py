"""What is set per subject and per group, as the database has it: JSON, so that a later version may add to it."""

from __future__ import annotations

from typing import Literal

import msgspec

from plait.errors import InvalidArgument
from plait.limits import AGE_SECONDS_MAX, RETENTION_BYTES_MAX
from plait.model import names


class SubjectSettings(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a user may set per subject; None: the broker's default."""

    #: Messages older than this may go.
    retention_seconds: float | None = None
    #: Of the newest messages, at least this much is kept.
    retention_bytes: int | None = None
    #: What a failure does to the order of its key.
    order: Literal["best_tried", "strict"] = "best_tried"

    def __post_init__(self) -> None:
        if self.order not in ("best_tried", "strict"):
            raise InvalidArgument(f"order is {self.order!r}; use best_tried or strict")
        for name, most in (("retention_seconds", AGE_SECONDS_MAX), ("retention_bytes", RETENTION_BYTES_MAX)):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (number and 0 < value <= most):
                raise InvalidArgument(
                    f"{name} is {value!r}; use a number above 0 and up to {most:g}, or None for the default"
                )


class GroupSettings(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the first member of a group fixes for all."""

    #: Each logical partition has one owner at a time.
    ordered: bool = False
    #: And that is all: what fails holds nothing back, whatever the subject's order is.
    affinity: bool = False

    def __str__(self) -> str:
        return names.sharing(self.ordered, self.affinity)


_subject = msgspec.json.Decoder(SubjectSettings)
_group = msgspec.json.Decoder(GroupSettings)


def subject_settings(text: str) -> SubjectSettings:
    return _subject.decode(text)


def group_settings(text: str) -> GroupSettings:
    return _group.decode(text)


def text_of(settings: SubjectSettings | GroupSettings) -> str:
    """As it is in the database."""
    return msgspec.json.encode(settings).decode()
