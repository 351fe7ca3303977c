"""A consumer's session with the broker of a partition: an attach starts it, a detach ends it."""

from __future__ import annotations

import asyncio
from typing import Any

from plait.errors import PlaitError
from plait.wire import messages as m
from plait.wire.link import Link


class ConsumerSession:
    """Lasts until its link closes or the broker ends it. Every request of the consumer has its number."""

    __slots__ = ("link", "number", "reply")

    def __init__(self, link: Link, reply: m.AttachReply) -> None:
        self.link = link
        self.number = reply.session
        self.reply = reply

    @classmethod
    async def start(cls, link: Link, attach: m.AttachRequest) -> ConsumerSession:
        """Start a session. If the caller is cancelled, end it, as it would block the consumer's next attach."""
        future: asyncio.Future[ConsumerSession] = asyncio.get_running_loop().create_future()

        def answered(answer: Any, _: memoryview, error: PlaitError | None) -> None:
            if future.done():
                if error is None:
                    cls(link, answer).end()
            elif error is not None:
                future.set_exception(error)
            else:
                future.set_result(cls(link, answer))

        link.call(attach, answered)
        try:
            return await future
        except asyncio.CancelledError:
            if not future.cancelled() and future.exception() is None:
                # The reply arrived in the same turn of the loop.
                future.result().end()
            raise

    def end(self) -> None:
        """Request the end of the session. Requests are processed in order: the next one need not wait for the reply."""
        if not self.link.closed:
            self.link.call(m.DetachRequest(self.number), _ignore)


def _ignore(_: Any, __: memoryview, ___: PlaitError | None) -> None:
    """The reply to a detach has no content."""
