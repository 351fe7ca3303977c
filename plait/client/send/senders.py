"""The subject senders of a client: makes them, gives them new routes, drops idle ones, and flushes or ends them all."""

from __future__ import annotations

import asyncio
import math

from plait.client.net.router import Router, SubjectRoute
from plait.client.send.producer import Producer
from plait.client.send.subject_sender import SubjectSender
from plait.errors import Closed, PlaitError, Timeout
from plait.model import names


class Senders:
    """Sends everything that one client sends."""

    def __init__(self, router: Router, producer: Producer) -> None:
        self.router = router
        self.producer = producer
        #: Subject → its sender...
        self.plain: dict[str, SubjectSender] = {}
        #: ...and the sender of its delayed rows.
        self.delayed: dict[str, SubjectSender] = {}
        router.on_route.append(self._new_route)
        router.users.append(self._uses)
        router.on_deleted.append(self._drop_idle)

    def sender(self, subject: str, *, delayed: bool = False) -> SubjectSender:
        """The sender of a subject, made on first use."""
        senders = self.delayed if delayed else self.plain
        sender = senders.get(subject)
        if sender is None:
            names.check("subject", subject)
            sender = senders[subject] = SubjectSender(self.producer, self.router, subject, delayed=delayed)
        sender.used_at = self.producer.loop.time()
        return sender

    def _all(self) -> list[SubjectSender]:
        return [*self.plain.values(), *self.delayed.values()]

    def _uses(self, subject: str) -> bool:
        """Drop the senders of the subject if they are idle. Returns whether the subject still needs its route."""
        self._drop_idle(subject, self.producer.loop.time() - self.producer.limits.sender_idle_seconds)
        return subject in self.plain or subject in self.delayed

    def _drop_idle(self, subject: str, oldest: float = math.inf) -> None:
        """Drop the senders of a subject, unless they have rows or sent some after ``oldest`` (loop time).

        The next send makes a new one; the broker then reports the last row that it has stored.
        """
        for senders in (self.plain, self.delayed):
            sender = senders.get(subject)
            if sender is not None and sender.idle(oldest):
                del senders[subject]
                sender.stop()

    def _new_route(self, route: SubjectRoute) -> None:
        for senders in (self.plain, self.delayed):
            sender = senders.get(route.subject)
            if sender is not None:
                sender.begin(route)

    async def flush(self) -> None:
        """Wait until every posted row has a result; raises the first error since the last flush."""
        for batch in [batch for sender in self._all() for batch in sender.unsettled()]:
            await batch.wait()
        # No await before the raise, so that a flush that is cancelled while it waits leaves the error to the next
        # flush.
        error, self.producer.error = self.producer.error, None
        if error is not None:
            raise error

    async def close(self) -> PlaitError | None:
        """Send the buffered rows, then refuse more. Returns the first error of posted messages since the last flush."""
        error: PlaitError | None = None
        seconds = self.producer.limits.send_seconds
        try:
            async with asyncio.timeout(seconds):
                await self.flush()
        except PlaitError as failure:
            error = failure
        except TimeoutError:
            error = Timeout(
                f"{self.producer.buffered} bytes of messages had no answer within {seconds:g} s; "
                "they may or may not be stored"
            )
        closed = Closed("the client is closed; connect again")
        self.producer.close(closed)
        for sender in self._all():
            sender.abandon(closed)
        return error
