"""The methods of a client that change delayed messages after they were sent."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from plait.client.admin.admin import Admin
from plait.client.admin.schedule_admin import ScheduledMessage, place_of
from plait.client.arguments import to_datetime
from plait.client.send.encoding import Delay, due_of
from plait.client.send.producer import Producer
from plait.client.types import Receipt
from plait.errors import InvalidArgument


class Rescheduling:
    """Base of the client: cancels and reschedules delayed messages."""

    admin: Admin
    _producer: Producer
    _check_open: Callable[[], None]

    async def cancel(self, scheduled: Receipt | ScheduledMessage) -> bool:
        """Cancel a delayed message. True: it is never delivered. False: it was already delivered or cancelled."""
        self._check_open()
        name, number, due = place_of(scheduled)
        return await self.admin._cancel(await self.admin._of(name), number, due)

    async def reschedule(
        self,
        scheduled: Receipt | ScheduledMessage,
        *,
        delay: Delay | None = None,
        deliver_at: datetime | None = None,
    ) -> Receipt:
        """Change the due time of a delayed message; returns its new receipt.

        Raises ``NotScheduled`` if it was already delivered or cancelled.
        """
        self._check_open()
        name, number, due = place_of(scheduled)
        if delay is None and deliver_at is None:
            raise InvalidArgument("reschedule needs a new time; give delay=... or deliver_at=...")
        new_due = due_of(delay, deliver_at, self._producer.next_now())
        new = await self.admin._reschedule(await self.admin._of(name), number, due, new_due)
        return Receipt(scheduled.message_id, name, None, to_datetime(new_due), new)
