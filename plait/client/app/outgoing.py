"""A message before it is sent, as the send hooks of an app see it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from plait.client.client import Client
from plait.client.send.encoding import Delay
from plait.client.types import HeaderValue, Receipt


@dataclass(slots=True)
class Outgoing:
    """The arguments of ``app.send``; hooks may change them."""

    subject: str
    body: Any
    key: str | int | None
    tags: list[str]
    headers: dict[str, HeaderValue]
    oneway: bool
    delay: Delay | None = None
    deliver_at: datetime | None = None

    async def send(self, client: Client) -> Receipt:
        """Send the message with its current values."""
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


#: Called around each send, with the message and a function that continues the send.
SendHook = Callable[[Outgoing, Callable[[], Awaitable[Receipt]]], Awaitable[Receipt]]
