"""Attaching a consumer to the partitions of a subject: all at once, and at least one; the rows that it still holds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import Protocol

from plait import tasks
from plait.client.consume.delivered import Deliveries
from plait.client.consume.failure import EpochRange
from plait.client.consume.row_runs import merged
from plait.client.net.node import ConsumerSession
from plait.client.net.router import Router, SubjectRoute
from plait.client.types import PartitionName
from plait.errors import PlaitError, Unavailable
from plait.limits import REQUEST_RANGES_MAX, ClientLimits
from plait.wire.link import Link
from plait.wire.messages import AttachRequest

log = logging.getLogger("plait.client")


class AttachingPartition(Protocol):
    """What ``attach_some`` uses of a ``PullClient``."""

    @property
    def session(self) -> object | None: ...

    async def attach_first(self, seconds: float) -> None: ...


class StartingSession:
    """An attach request that continues when its caller is cancelled: the next attach or the end takes its session."""

    def __init__(self) -> None:
        self._reply: asyncio.Future[ConsumerSession] | None = None

    async def session(self, link: Link, request: AttachRequest) -> ConsumerSession:
        """Send the request, unless the reply to one is still due."""
        if self._reply is None:
            self._reply = ConsumerSession.start(link, request)
        try:
            session = await asyncio.shield(self._reply)
        except PlaitError:
            self._reply = None
            raise
        self._reply = None
        return session

    async def last(self, seconds: float, *, ends: bool) -> ConsumerSession | None:
        """The session that an attach has left. With ``ends`` it ends by itself if it starts after ``seconds``.

        Until it has ended, the broker refuses another consumer with the same client id.
        """
        reply = self._reply
        if reply is None:
            return None
        await asyncio.wait([reply], timeout=seconds)
        if not reply.done() and ends:
            reply.add_done_callback(_end)
        return reply.result() if reply.done() and reply.exception() is None else None


def _end(late: asyncio.Future[ConsumerSession]) -> None:
    if late.exception() is None:
        late.result().end()


async def first_route(router: Router, subject: str, creates: bool, deadline: float) -> SubjectRoute:
    while True:
        try:
            return await router.route(subject, create=creates)
        except Unavailable:
            if asyncio.get_running_loop().time() >= deadline:
                raise


async def attach_some(clients: Collection[AttachingPartition], limits: ClientLimits, deadline: float) -> None:
    """Attach to all partitions. Succeeds with at least one; the others may attach later."""
    loop = asyncio.get_running_loop()
    waiting = [client for client in clients if client.session is None]
    if len(clients) == len(waiting) == 1:
        await waiting[0].attach_first(deadline - loop.time())
        return
    if len(waiting) < len(clients):
        # Some were attached by an earlier call, before a partition left the route.
        deadline = min(deadline, loop.time() + limits.attach_seconds)
    attaching = {tasks.child(client.attach_first(deadline - loop.time()), "plait-attach") for client in waiting}
    errors: list[BaseException] = []
    try:
        pending = attaching
        while pending and (loop.time() < deadline or len(errors) + len(pending) == len(clients)):
            # Once one partition is attached, wait for all others together.
            some = len(errors) + len(pending) < len(clients)
            done, pending = await asyncio.wait(
                pending,
                timeout=max(deadline - loop.time(), 0),
                return_when=asyncio.FIRST_EXCEPTION if some else asyncio.FIRST_COMPLETED,
            )
            errors += [error for task in done if (error := task.exception()) is not None]
            for error in errors:
                if not isinstance(error, Unavailable):
                    raise error
            if done and len(errors) + len(pending) < len(clients):
                deadline = min(deadline, loop.time() + limits.attach_seconds)
        if len(errors) == len(clients):
            raise errors[0]
    finally:
        for task in attaching:
            task.cancel()
        await asyncio.gather(*attaching, return_exceptions=True)


def open_ranges(deliveries: Deliveries) -> list[EpochRange]:
    return merged([piece for delivered in deliveries.open for piece in delivered.open_ranges()])


def limited(holds: list[EpochRange], partition: PartitionName) -> list[EpochRange]:
    """As many of the ranges as an attach request takes; warns if some are left out."""
    if len(holds) > REQUEST_RANGES_MAX:
        log.warning(
            "%s: the messages being handled form %d separate ranges, and an attach request takes %d; "
            "the other messages may be delivered again",
            partition,
            len(holds),
            REQUEST_RANGES_MAX,
        )
    return holds[:REQUEST_RANGES_MAX]
