"""Delayed messages: list, count, cancel and reschedule them."""

from __future__ import annotations

from typing import Literal

import msgspec

from plait.wire.admin.operation import Operation, Request


class CancelDelayed(Request):
    """Cancel a delayed message. The fields are those of its receipt."""

    subject: str
    number: int
    deliver_at: int


class Reschedule(CancelDelayed):
    """Give a delayed message the due time ``to``. The other fields are those of its receipt."""

    to: int


class ListDelayed(Request):
    """List a subject's messages that are due in [start, end), after the message with ``after`` (due time, number)."""

    subject: str
    start: int | None = None
    end: int | None = None
    after: tuple[int, int] | None = None
    limit: int = 100


class CountDelayed(Request):
    """Count the messages that are due in [start, end), per subject or per ten minutes."""

    subject: str | None = None
    start: int | None = None
    end: int | None = None
    by: Literal["subject", "time"] = "subject"


class DelayedRow(msgspec.Struct, frozen=True):
    """A waiting message."""

    subject: str
    number: int
    deliver_at: int
    producer: int
    sequence: int
    key: str | None
    size: int


class DelayedPage(msgspec.Struct, frozen=True):
    """A page of waiting messages, and the (time, number) after which the next page begins; None: the last page."""

    rows: list[DelayedRow]
    next: tuple[int, int] | None


class DelayedCount(msgspec.Struct, frozen=True):
    """The number of waiting messages of a subject; or only of those due in the ten minutes from ``bucket`` (µs) on."""

    subject: str | None
    bucket: int | None
    count: int


#: True: the message is never delivered. False: it was delivered or cancelled before.
CANCEL_DELAYED = Operation("schedule.cancel", CancelDelayed, bool)
#: The new number of the message; None: it was delivered or cancelled before.
RESCHEDULE = Operation[int | None]("schedule.reschedule", Reschedule, int | None)
LIST_DELAYED = Operation("schedule.list", ListDelayed, DelayedPage)
COUNT_DELAYED = Operation("schedule.count", CountDelayed, list[DelayedCount])
