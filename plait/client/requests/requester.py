"""``Requester``: the requests of one client that wait for replies, and the reader that receives the replies.

All clients share one reply subject. A request carries the name of that subject and an id; the id begins with the
*channel* of the client, a random text. A reply carries the id, and the channel as a tag. The broker filters by the tag,
so a client gets its own replies only. Nothing is stored for a request besides the two messages.

Promise: each request ends with the first reply that has its id, or with an error. Other replies are dropped, and
counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

from plait import chance, tasks
from plait.client.read.reader import ITERATION_COUNT, Reader
from plait.client.requests.request_errors import RequestFailed, RequestTimeout
from plait.client.types import Message, Receipt
from plait.errors import Closed, PlaitError, SubjectNotFound, Timeout, Unavailable
from plait.limits import ClientLimits

log = logging.getLogger("plait.client")

#: Headers of a request: the subject for the reply, and the id of the request. A reply has the id too.
REPLY_TO: Final = "plait-reply-to"
REQUEST_ID: Final = "plait-request"
#: A header of a reply: why there is no result.
FAILURE: Final = "plait-failure"
#: Pause before replies are read again after an error.
AGAIN_SECONDS: Final = 0.05
#: How often the route of the reply subject is requested while requests wait.
ROUTE_SECONDS: Final = 1.0

#: Sends a request with these headers.
SendRequest = Callable[[dict[str, Any]], Coroutine[Any, Any, Receipt]]


class Requester:
    """The requests of one client."""

    def __init__(
        self,
        subject: str,
        limits: ClientLimits,
        read: Callable[[str], Reader],
        create: Callable[[], Awaitable[None]],
        refresh: Callable[[], Awaitable[object]],
    ) -> None:
        """``read`` makes a reader of the replies on a channel. ``create`` creates the reply subject, and ``refresh``
        requests its route.
        """
        self._subject = subject
        self._limits = limits
        self._read = read
        self._create = create
        self._refresh = refresh
        self._channel = chance.token(12)
        self._number = 0
        #: Request id → the future of its reply.
        self._waiting: dict[str, asyncio.Future[Message]] = {}
        #: Set while the reader is open: replies that are sent from now on are received.
        self._open = asyncio.Event()
        self._receiving: asyncio.Task[None] | None = None
        #: Requests the route while requests wait.
        self._route_timer: asyncio.TimerHandle | None = None
        #: Why the replies cannot be read at present.
        self._error: PlaitError | None = None
        self._closed = False
        #: Replies that no request waited for: they came after the timeout, or a second time.
        self.dropped = 0

    async def request(self, subject: str, seconds: float, send: SendRequest) -> Message:
        """Send a request to a subject and wait for its reply."""
        if self._closed:
            raise Closed("the client is closed; connect again")
        if self._receiving is None:
            self._receiving = tasks.keep(self._receive, "plait-replies")
        self._number += 1
        name = f"{self._channel}:{self._number}"
        reply: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[name] = reply
        self._watch_route()
        sending: asyncio.Task[Receipt] | None = None
        try:
            async with asyncio.timeout(seconds):
                await self._ready(reply)
                # The reply may arrive before the receipt, which may be lost.
                sending = tasks.child(send({REPLY_TO: self._subject, REQUEST_ID: name}), "plait-request")
                sending.add_done_callback(lambda sent: _fail(reply, sent))
                found = await reply
        except TimeoutError as error:
            if isinstance(error, PlaitError):
                raise
            cause = f"; its replies cannot be read: {self._error}" if self._error is not None else ""
            raise RequestTimeout(
                f"no reply to a request to {subject!r} within {seconds:g} s{cause}; it may still be handled",
                subject=subject,
                seconds=seconds,
            ) from None
        finally:
            del self._waiting[name]
            if not reply.cancel() and not reply.cancelled():
                # Retrieved, so that asyncio does not report an error that came with the timeout.
                reply.exception()
            if sending is not None:
                sending.cancel()
        if (failure := found.headers.get(FAILURE)) is not None:
            raise RequestFailed(f"the request to {subject!r} failed: {failure}", subject=subject, reason=str(failure))
        return found

    async def _ready(self, reply: asyncio.Future[Message]) -> None:
        """Wait until the reader is open, or the client is closed."""
        if not self._open.is_set():
            opened = tasks.child(self._open.wait(), "plait-replies-open")
            try:
                either: list[asyncio.Future[Any]] = [opened, reply]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            finally:
                opened.cancel()
            if reply.done():
                reply.result()

    def _watch_route(self) -> None:
        """While requests wait, look for new partitions of the reply subject: their replies may be there."""

        def look() -> None:
            self._route_timer = None
            if self._waiting:
                tasks.start(self._look(), "plait-replies-route")
                self._watch_route()

        if self._route_timer is None:
            self._route_timer = asyncio.get_running_loop().call_later(ROUTE_SECONDS, look)

    async def _look(self) -> None:
        with contextlib.suppress(PlaitError):
            await self._refresh()

    async def _receive(self) -> None:
        """Receive replies until the client is closed."""
        while True:
            try:
                async with self._read(self._channel) as reader:
                    self._error = None
                    self._open.set()
                    await self._receive_from(reader)
            except SubjectNotFound:
                try:
                    await self._create()
                    continue
                except PlaitError as error:
                    self._failed(error)
            except PlaitError as error:
                self._failed(error)
            finally:
                self._open.clear()
            await asyncio.sleep(AGAIN_SECONDS)

    def _failed(self, error: PlaitError) -> None:
        log.info("replies in %s cannot be read: %s", self._subject, error)
        self._error = error

    async def _receive_from(self, reader: Reader) -> None:
        while True:
            try:
                messages = await reader.fetch(ITERATION_COUNT, self._limits.pull_wait_seconds)
            except (Unavailable, Timeout) as error:
                # The reader keeps its position: replies that are stored meanwhile are received later.
                self._failed(error)
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            self._error = None
            for message in messages:
                waiting = self._waiting.get(str(message.headers.get(REQUEST_ID)))
                if waiting is None or waiting.done():
                    self.dropped += 1
                else:
                    waiting.set_result(message)

    async def close(self) -> None:
        """End all requests with ``Closed``, and stop receiving replies."""
        self._closed = True
        if self._route_timer is not None:
            self._route_timer.cancel()
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(Closed("the client was closed while a request waited for its reply"))
        if self._receiving is not None:
            self._receiving.cancel()
            await asyncio.wait([self._receiving])


def _fail(reply: asyncio.Future[Message], sent: asyncio.Task[Receipt]) -> None:
    """End a request with the error of its send."""
    if not sent.cancelled() and (error := sent.exception()) is not None and not reply.done():
        reply.set_exception(error)
