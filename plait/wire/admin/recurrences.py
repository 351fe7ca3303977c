"""Recurring messages: create, list, change, pause, resume and remove them."""

from __future__ import annotations

from typing import Literal

import msgspec

from plait.wire.admin.operation import Operation, Request

#: What happens with firings that were missed: one for all of them, each of them, or none.
CatchUp = Literal["one", "all", "none"]
HeaderValue = str | int | float | bool


class RecurrenceRow(msgspec.Struct, frozen=True):
    """A recurrence and its progress. Times are microseconds since 1970."""

    name: str
    subject: str
    body: bytes
    #: The rule: a cron expression in a time zone, or an interval in seconds.
    cron: str | None
    zone: str
    every: float | None
    catch_up: CatchUp
    key: str | None
    tags: list[str]
    headers: dict[str, HeaderValue]
    paused: bool
    created: int
    #: The due time of the next firing; None: there is none, or the recurrence is paused.
    next: int | None
    #: The number of the last firing, and its due time.
    firings: int
    last: int | None


class CreateRecurrence(Request):
    """Create a recurrence. A repeated request with the same fields changes nothing."""

    name: str
    subject: str
    body: bytes
    cron: str | None = None
    zone: str = "UTC"
    every: float | None = None
    catch_up: CatchUp = "one"
    key: str | None = None
    tags: list[str] = msgspec.field(default_factory=list)
    headers: dict[str, HeaderValue] = msgspec.field(default_factory=dict)


class SetRecurrence(Request):
    """Change fields of a recurrence. Unset fields stay; ``cron`` and ``every`` replace each other."""

    name: str
    body: bytes | msgspec.UnsetType = msgspec.UNSET
    cron: str | msgspec.UnsetType = msgspec.UNSET
    zone: str | msgspec.UnsetType = msgspec.UNSET
    every: float | msgspec.UnsetType = msgspec.UNSET
    catch_up: CatchUp | msgspec.UnsetType = msgspec.UNSET
    key: str | msgspec.UnsetType | None = msgspec.UNSET
    tags: list[str] | msgspec.UnsetType = msgspec.UNSET
    headers: dict[str, HeaderValue] | msgspec.UnsetType = msgspec.UNSET


class OfRecurrence(Request):
    """Names a recurrence."""

    name: str


class PauseRecurrence(OfRecurrence):
    """Pause a recurrence, or resume it."""

    paused: bool


class ListRecurrences(Request):
    """List the recurrences of a subject, or all, by name, after the name ``after``."""

    subject: str | None = None
    after: str = ""
    limit: int = 100


class PreviewFirings(Request):
    """The next times of a recurrence, by its name or by a rule."""

    name: str | None = None
    cron: str | None = None
    zone: str = "UTC"
    every: float | None = None
    count: int = 10


class RecurrencePage(msgspec.Struct, frozen=True):
    """A page of recurrences, and the name after which the next page begins; None: the last page."""

    rows: list[RecurrenceRow]
    next: str | None


CREATE_RECURRENCE = Operation("recurrence.create", CreateRecurrence, RecurrenceRow)
SET_RECURRENCE = Operation("recurrence.set", SetRecurrence, RecurrenceRow)
DESCRIBE_RECURRENCE = Operation("recurrence.describe", OfRecurrence, RecurrenceRow)
PAUSE_RECURRENCE = Operation("recurrence.pause", PauseRecurrence, RecurrenceRow)
REMOVE_RECURRENCE = Operation[None]("recurrence.remove", OfRecurrence)
LIST_RECURRENCES = Operation("recurrence.list", ListRecurrences, RecurrencePage)
PREVIEW_FIRINGS = Operation("recurrence.preview", PreviewFirings, list[int])
