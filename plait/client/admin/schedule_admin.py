"""Management of delayed messages: listing, counting, cancelling and rescheduling them."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

import msgspec

from plait.client.arguments import Duration, limit_of, micros_of, moment_of, sequence_of, to_datetime
from plait.client.net.admin_calls import Calls, Partition, PartitionNode
from plait.client.types import MessageId, PartitionName, Receipt
from plait.errors import InvalidArgument, NotScheduled
from plait.limits import SCHEDULE_PAGE_MAX
from plait.wire.admin import delayed
from plait.wire.admin.subjects import DESCRIBE_SUBJECT


class ScheduledMessage(msgspec.Struct, frozen=True):
    """A delayed message that is not due yet; an argument for ``client.cancel`` and ``client.reschedule``."""

    subject: str
    number: int
    deliver_at: datetime
    message_id: MessageId
    key: str | None
    size: int
    #: The partition whose schedule has it.
    partition: PartitionName


class ScheduleCount(msgspec.Struct, frozen=True):
    """The number of delayed messages of a subject, or of the period that starts at ``time``."""

    subject: str | None
    time: datetime | None
    count: int


def place_of(scheduled: Any) -> tuple[PartitionName, int, int]:
    """(partition, number, due time in microseconds): the broker finds a delayed message by these."""
    if isinstance(scheduled, ScheduledMessage):
        return scheduled.partition, scheduled.number, micros_of(scheduled.deliver_at, "deliver_at")
    if not isinstance(scheduled, Receipt):
        raise InvalidArgument(f"{scheduled!r} is not a receipt; use the result of send(..., delay=...)")
    if scheduled.schedule is None or scheduled.deliver_at is None:
        raise InvalidArgument(
            f"message {scheduled.message_id} has no schedule number: it was not delayed, "
            "or it was resent so late that the broker no longer has the number"
        )
    return scheduled.partition, scheduled.schedule, micros_of(scheduled.deliver_at, "deliver_at")


class ScheduleAdmin(Calls):
    """The operations of ``plait schedule``.

    Numbers belong to a partition's schedule: where a subject has several partitions, ``partition`` selects one.
    """

    async def scheduled(
        self,
        subject: str,
        *,
        partition: Partition | None = None,
        start: datetime | Duration | None = None,
        end: datetime | Duration | None = None,
        limit: int = 100,
    ) -> list[ScheduledMessage]:
        """Messages of a subject that are due from ``start`` up to ``end`` (times, or durations from now as "5m")."""
        limit = limit_of(limit)
        span = self._span(start, end)
        places = await self._places(subject, partition)
        if len(places) > 1:
            # A partition that is not created yet has no schedule.
            places = [place for place, _ in await self._each(places, DESCRIBE_SUBJECT)]
        found = [message for place in places for message in await self._scheduled_at(place, span, limit)]
        found.sort(key=lambda message: (message.deliver_at, message.partition, message.number))
        return found[:limit]

    async def _scheduled_at(
        self, place: PartitionNode, span: dict[str, int | None], limit: int
    ) -> list[ScheduledMessage]:
        found: list[ScheduledMessage] = []
        after: tuple[int, int] | None = None
        while len(found) < limit:
            wanted = min(limit - len(found), SCHEDULE_PAGE_MAX)
            page = await self._run(
                delayed.LIST_DELAYED,
                at=place.node,
                subject=place.name.name,
                after=after,
                limit=wanted,
                **span,
            )
            found += [
                ScheduledMessage(
                    row.subject,
                    row.number,
                    to_datetime(row.deliver_at),
                    MessageId(row.producer, row.sequence),
                    row.key,
                    row.size,
                    place.name,
                )
                for row in page.rows
            ]
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
        """The number of delayed messages that are not due yet, by subject or by due time."""
        if by not in ("subject", "time"):
            raise InvalidArgument(f"by {by!r} is not known; use 'subject' or 'time'")
        span = self._span(start, end)
        if subject is None:
            answers = await self._everywhere(delayed.COUNT_DELAYED, by=by, **span)
        else:
            places = await self._places(subject)
            answers = [a for _, a in await self._each(places, delayed.COUNT_DELAYED, by=by, **span)]
        counts: dict[tuple[str | None, int | None], int] = {}
        for each in (each for answer in answers for each in answer):
            # By time, the broker reports the partition's name instead of the subject.
            key = (each.subject if by == "subject" else subject, each.bucket)
            counts[key] = counts.get(key, 0) + each.count
        order = sorted(counts, key=lambda key: (key[0] or "", key[1] or 0))
        return [
            ScheduleCount(name, None if bucket is None else to_datetime(bucket), counts[name, bucket])
            for name, bucket in order
        ]

    async def cancel_scheduled(
        self, subject: str, number: int, deliver_at: datetime, *, partition: Partition | None = None
    ) -> bool:
        """Cancel a delayed message. True: it is never delivered; False: it was delivered or cancelled before.

        Like ``client.cancel``, with the number and due time of a receipt instead of the receipt.
        """
        due, number = micros_of(deliver_at, "deliver_at"), sequence_of(number, "number")
        return await self._cancel(await self._place(subject, partition, "numbers"), number, due)

    async def _cancel(self, place: PartitionNode, number: int, due: int) -> bool:
        return await self._run(
            delayed.CANCEL_DELAYED, at=place.node, subject=place.name.name, number=number, deliver_at=due
        )

    async def reschedule(
        self, subject: str, number: int, deliver_at: datetime, *, to: datetime, partition: Partition | None = None
    ) -> int:
        """Change the due time of a message; returns its new number. ``NotScheduled``: it was delivered or cancelled.

        Like ``client.reschedule``, with the number and due time of a receipt instead of the receipt.
        """
        due, number = micros_of(deliver_at, "deliver_at"), sequence_of(number, "number")
        new_due = micros_of(to, "to")
        return await self._reschedule(await self._place(subject, partition, "numbers"), number, due, new_due)

    async def _reschedule(self, place: PartitionNode, number: int, due: int, new_due: int) -> int:
        new = await self._run(
            delayed.RESCHEDULE,
            at=place.node,
            subject=place.name.name,
            number=number,
            deliver_at=due,
            to=max(new_due, 0),
        )
        if new is None:
            at = to_datetime(due)
            raise NotScheduled(
                f"message number {number} of {place.name.name!r} is not scheduled for {at}: "
                "it was delivered or cancelled, or never scheduled",
                subject=place.name.name,
                number=number,
            )
        return new

    async def _of(self, name: PartitionName) -> PartitionNode:
        """The partition that a receipt names."""
        return PartitionNode(name, await self._router.group_node(name.group))
