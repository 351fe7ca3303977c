"""The methods of a client that are about requests and replies."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Final

from plait.client.admin.admin import Admin
from plait.client.arguments import Duration, seconds_of
from plait.client.consume.failure import reason_of
from plait.client.net.router import Router
from plait.client.read.reader import Reader
from plait.client.requests.requester import FAILURE, REPLY_TO, REQUEST_ID, Requester
from plait.client.types import HeaderValue, Message, Receipt, Why
from plait.errors import InvalidArgument, SubjectExists
from plait.limits import ClientLimits
from plait.model import names
from plait.model.filter_terms import FilterTerms, TagFilter

#: How long a request waits for its reply, if its caller names no time.
REQUEST_TIMEOUT_SECONDS: Final = 30.0
#: How long the messages of a reply subject are kept: longer than requests wait, and a client that lost its connection
#: reads the replies of that time.
REPLY_RETENTION_SECONDS: Final = 3600.0
#: The reply subject of clients that name no other.
DEFAULT_REPLY_SUBJECT: Final = "plait.replies"


def asks_for_reply(message: Message) -> bool:
    """Whether the sender of a message waits for a reply."""
    return REPLY_TO in message.headers


class Requesting:
    """Base of the client: sends requests, and replies to those of others."""

    limits: ClientLimits
    admin: Admin
    _router: Router
    _requester: Requester
    send: Callable[..., Coroutine[Any, Any, Receipt]]
    _check_open: Callable[[], None]

    def _new_requester(self, subject: str) -> Requester:
        names.check("subject", subject)

        def read(channel: str) -> Reader:
            terms = FilterTerms(TagFilter(any=(channel,)))
            return Reader(self._router, self.limits, subject, "latest", terms)

        async def create() -> None:
            try:
                await self.admin.create_subject(subject, retention=REPLY_RETENTION_SECONDS)
            except SubjectExists:
                # Another client has created it.
                pass

        refresh = functools.partial(self._router.refresh, subject, create=False)
        return Requester(subject, self.limits, read, create, refresh)

    async def request(
        self,
        subject: str,
        body: Any,
        *,
        timeout: Duration = REQUEST_TIMEOUT_SECONDS,
        key: str | int | None = None,
        tags: Iterable[str] | None = None,
        headers: Mapping[str, HeaderValue] | None = None,
        to_group: str | None = None,
    ) -> Message:
        """Send a message and wait for the reply to it.

        A handler replies with ``message.reply``, or in an app by the value that it returns. Several requests may wait
        at a time. A request that is delivered again may be handled twice; the first reply counts. Raises
        ``RequestTimeout`` if there is no reply within ``timeout``, and ``RequestFailed`` if the handler gave up.
        """
        self._check_open()

        def send(own: dict[str, Any]) -> Coroutine[Any, Any, Receipt]:
            return self.send(subject, body, key=key, tags=tags, headers={**(headers or {}), **own}, to_group=to_group)

        return await self._requester.request(names.check("subject", subject), seconds_of(timeout), send)

    async def reply(
        self,
        message: Message,
        body: Any = b"",
        *,
        headers: Mapping[str, HeaderValue] | None = None,
        failure: Why | None = None,
    ) -> Receipt:
        """Reply to a request. With ``failure`` the request raises ``RequestFailed``.

        A reply that comes after the timeout of the request, or after another reply, has no effect.
        """
        found = message.headers
        subject, name = found.get(REPLY_TO), found.get(REQUEST_ID)
        if not isinstance(subject, str) or not isinstance(name, str):
            raise InvalidArgument(f"{message!r} is not a request: its sender waits for no reply")
        own: dict[str, HeaderValue] = {**(headers or {}), REQUEST_ID: name}
        if (reason := reason_of(failure)) is not None:
            own[FAILURE] = str(reason)
        return await self.send(subject, body, tags=[name.partition(":")[0]], headers=own)

    @property
    def dropped_replies(self) -> int:
        """Replies that were dropped, because they came after the timeout of their request or a second time."""
        return self._requester.dropped
