"""Management of delayed messages: cancel, reschedule, list and count them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from plait.broker.schedule import changes
from plait.broker.schedule.schedule_views import CountView, ScheduledPage, count_scheduled, list_scheduled
from plait.errors import InvalidArgument
from plait.frame.header import SEQUENCE_MAX, TIME_MAX
from plait.limits import SCHEDULE_PAGE_MAX

if TYPE_CHECKING:
    from plait.server.broker_host import BrokerHost as Server


class Cancel(msgspec.Struct, forbid_unknown_fields=True):
    """Cancel a delayed message. The fields are those of its receipt."""

    subject: str
    number: int
    deliver_at: int


class Reschedule(msgspec.Struct, forbid_unknown_fields=True):
    """Give a delayed message the due time ``to``. The other fields are those of its receipt."""

    subject: str
    number: int
    deliver_at: int
    to: int


class ListScheduled(msgspec.Struct, forbid_unknown_fields=True):
    """List a subject's messages that are due in [start, end), after the message with ``after`` (due time, number)."""

    subject: str
    start: int | None = None
    end: int | None = None
    after: tuple[int, int] | None = None
    limit: int = 100


class CountScheduled(msgspec.Struct, forbid_unknown_fields=True):
    """Count the messages that are due in [start, end), per subject or per ten minutes."""

    subject: str | None = None
    start: int | None = None
    end: int | None = None
    by: Literal["subject", "time"] = "subject"


def cancel(server: Server, request: Cancel) -> bool:
    _check(number=request.number, deliver_at=request.deliver_at)
    return changes.cancel(server.broker, request.subject, request.number, request.deliver_at)


def reschedule(server: Server, request: Reschedule) -> int | None:
    _check(number=request.number, deliver_at=request.deliver_at, to=request.to)
    return changes.reschedule(server.broker, request.subject, request.number, request.deliver_at, request.to)


def list_(server: Server, request: ListScheduled) -> ScheduledPage:
    if not 1 <= request.limit <= SCHEDULE_PAGE_MAX:
        raise InvalidArgument(f"a limit of {request.limit} messages is invalid; use 1 to {SCHEDULE_PAGE_MAX}")
    start, end = _span(request.start, request.end)
    if request.after is not None:
        _check(deliver_at=request.after[0], number=request.after[1])
    return list_scheduled(server.broker, request.subject, start, end, request.after, request.limit)


def count(server: Server, request: CountScheduled) -> list[CountView]:
    start, end = _span(request.start, request.end)
    return count_scheduled(server.broker, request.subject, start, end, request.by)


def _span(start: int | None, end: int | None) -> tuple[int, int]:
    begin, stop = 0 if start is None else start, TIME_MAX if end is None else end
    _check(start=begin, end=stop)
    return begin, stop


def _check(**values: int) -> None:
    for name, value in values.items():
        limit = SEQUENCE_MAX if name == "number" else TIME_MAX
        if not 0 <= value <= limit:
            raise InvalidArgument(f"{name} is {value}; use 0 to {limit}")
