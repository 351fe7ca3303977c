"""A message on its way out, for those who look at it before it leaves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from plait.client.client import Client
from plait.client.send.due_time import Delay
from plait.client.types import HeaderValue, Receipt


@dataclass(slots=True)
class Outgoing:
    """What ``app.send`` was given; hooks may change it."""

    subject: str
    body: Any
    key: str | int | None
    tags: list[str]
    headers: dict[str, HeaderValue]
    oneway: bool
    delay: Delay | None = None
    deliver_at: datetime | None = None

    async def send(self, client: Client) -> Receipt:
        """Send it as it is now."""
        return await client.send(
            self.subject,
            self.body,
            key=self.key,
            tags=self.tags or None,
            headers=self.headers or None,
            delay=self.delay,
            deliver_at=self.deliver_at,
            oneway=self.oneway,
        )


#: Called around each send, with the message and with what goes on.
SendHook = Callable[[Outgoing, Callable[[], Awaitable[Receipt]]], Awaitable[Receipt]]
