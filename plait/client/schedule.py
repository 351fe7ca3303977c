"""Management of delayed messages: what is scheduled, how much, and calling it off."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

import msgspec

from plait.client.arguments import Duration, limit_of, micros_of, moment_of, sequence_of, to_datetime
from plait.client.calls import Calls
from plait.client.types import MessageId, Receipt
from plait.errors import InvalidArgument, NotScheduled
from plait.limits import SCHEDULE_PAGE_MAX


class ScheduledMessage(msgspec.Struct, frozen=True):
    """A message that waits for its time; ``client.cancel`` and ``client.reschedule`` take it."""

    subject: str
    number: int
    deliver_at: datetime
    message_id: MessageId
    key: str | None
    size: int


class ScheduleCount(msgspec.Struct, frozen=True):
    """How many messages wait: of a subject, or from a time on, as it was asked for."""

    subject: str | None
    time: datetime | None
    count: int


class _Row(msgspec.Struct):
    """A scheduled message as the broker tells of it."""

    subject: str
    number: int
    deliver_at: int
    producer: int
    sequence: int
    key: str | None
    size: int


class _Rows(msgspec.Struct):
    """A page of them, and after which place the next one begins; None: that is all."""

    rows: list[_Row]
    next: tuple[int, int] | None


class _Count(msgspec.Struct):
    subject: str | None
    bucket: int | None
    count: int


def place_of(scheduled: Any) -> tuple[str, int, datetime]:
    """(subject, number, time) by which the broker finds a delayed message."""
    if isinstance(scheduled, ScheduledMessage):
        return scheduled.subject, scheduled.number, scheduled.deliver_at
    if not isinstance(scheduled, Receipt):
        raise InvalidArgument(f"{scheduled!r} is no receipt; use what send(..., delay=...) returned")
    if scheduled.schedule is None or scheduled.deliver_at is None:
        raise InvalidArgument(
            f"message {scheduled.message_id} has no number in a schedule: it was not delayed, "
            "or it was sent again so late that the broker has forgotten the number"
        )
    return scheduled.partition.name, scheduled.schedule, scheduled.deliver_at


class ScheduleAdmin(Calls):
    """What ``plait schedule`` does, as methods."""

    async def scheduled(
        self,
        subject: str,
        *,
        start: datetime | Duration | None = None,
        end: datetime | Duration | None = None,
        limit: int = 100,
    ) -> list[ScheduledMessage]:
        """Messages of a subject that are to be delivered from ``start`` up to ``end`` (times, or "5m" from now)."""
        limit = limit_of(limit)
        span = self._span(start, end)
        found: list[ScheduledMessage] = []
        after: tuple[int, int] | None = None
        while len(found) < limit:
            wanted = min(limit - len(found), SCHEDULE_PAGE_MAX)
            page: _Rows = await self._run("schedule.list", _Rows, subject=subject, after=after, limit=wanted, **span)
            found += [_message(row) for row in page.rows]
            after = page.next
            if after is None:
                break
        return found

    def _span(self, start: Any, end: Any) -> dict[str, int | None]:
        now = self._now()
        return {"start": moment_of(start, "start", now), "end": moment_of(end, "end", now)}

    async def schedule_counts(
        self,
        subject: str | None = None,
        *,
        start: datetime | Duration | None = None,
        end: datetime | Duration | None = None,
        by: Literal["subject", "time"] = "subject",
    ) -> list[ScheduleCount]:
        """How many messages wait for their time, by subject or by when they are due."""
        if by not in ("subject", "time"):
            raise InvalidArgument(f"by {by!r} is not known; use 'subject' or 'time'")
        counts: list[_Count] = await self._run(
            "schedule.count", list[_Count], subject=subject, by=by, **self._span(start, end)
        )
        return [ScheduleCount(c.subject, None if c.bucket is None else to_datetime(c.bucket), c.count) for c in counts]

    async def cancel_scheduled(self, subject: str, number: int, deliver_at: datetime) -> bool:
        """Call a message off. True: it is never delivered; False: it was delivered or cancelled before.

        That is ``client.cancel`` for who has kept the number and the time of a receipt, and not the receipt.
        """
        due, number = micros_of(deliver_at, "deliver_at"), sequence_of(number, "number")
        cancelled: bool = await self._run("schedule.cancel", bool, subject=subject, number=number, deliver_at=due)
        return cancelled

    async def reschedule(self, subject: str, number: int, deliver_at: datetime, *, to: datetime) -> int:
        """Deliver a message at another time; its new number. ``NotScheduled``: it is too late for that.

        That is ``client.reschedule`` for who has kept the number and the time of a receipt, and not the receipt.
        """
        due, number = micros_of(deliver_at, "deliver_at"), sequence_of(number, "number")
        new: int | None = await self._run(
            "schedule.reschedule",
            int | None,
            subject=subject,
            number=number,
            deliver_at=due,
            to=max(micros_of(to, "to"), 0),
        )
        if new is None:
            raise NotScheduled(f"number {number} of {subject!r} is not scheduled for {deliver_at} (any more)")
        return new


def _message(row: _Row) -> ScheduledMessage:
    return ScheduledMessage(
        row.subject, row.number, to_datetime(row.deliver_at), MessageId(row.producer, row.sequence), row.key, row.size
    )
