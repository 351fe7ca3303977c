"""Management of delayed messages: cancel, reschedule, list and count them."""

from __future__ import annotations

from plait.broker.schedule import delayed_requests
from plait.broker.schedule.delayed_requests import count_scheduled, list_scheduled
from plait.errors import InvalidArgument
from plait.frame.header import SEQUENCE_MAX, TIME_MAX
from plait.limits import SCHEDULE_PAGE_MAX
from plait.server.broker_host import BrokerHost
from plait.wire.admin.delayed import CancelDelayed, CountDelayed, DelayedCount, DelayedPage, ListDelayed, Reschedule


def cancel(host: BrokerHost, request: CancelDelayed) -> bool:
    _check(number=request.number, deliver_at=request.deliver_at)
    return delayed_requests.cancel(host.broker, request.subject, request.number, request.deliver_at)


def reschedule(host: BrokerHost, request: Reschedule) -> int | None:
    _check(number=request.number, deliver_at=request.deliver_at, to=request.to)
    return delayed_requests.reschedule(host.broker, request.subject, request.number, request.deliver_at, request.to)


def list_(host: BrokerHost, request: ListDelayed) -> DelayedPage:
    if not 1 <= request.limit <= SCHEDULE_PAGE_MAX:
        raise InvalidArgument(f"a limit of {request.limit} messages is invalid; use 1 to {SCHEDULE_PAGE_MAX}")
    start, end = _span(request.start, request.end)
    if request.after is not None:
        _check(deliver_at=request.after[0], number=request.after[1])
    return list_scheduled(host.broker, request.subject, start, end, request.after, request.limit)


def count(host: BrokerHost, request: CountDelayed) -> list[DelayedCount]:
    start, end = _span(request.start, request.end)
    return count_scheduled(host.broker, request.subject, start, end, request.by)


def _span(start: int | None, end: int | None) -> tuple[int, int]:
    begin, stop = 0 if start is None else start, TIME_MAX if end is None else end
    _check(start=begin, end=stop)
    return begin, stop


def _check(**values: int) -> None:
    for name, value in values.items():
        limit = SEQUENCE_MAX if name == "number" else TIME_MAX
        if not 0 <= value <= limit:
            raise InvalidArgument(f"the field {name!r} is {value}; use a number from 0 to {limit}")
