"""Attaching a consumer to the partitions of a subject: all at once, and at least one."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Protocol

from plait import tasks
from plait.client.net.router import Router, SubjectRoute
from plait.errors import Unavailable
from plait.limits import ClientLimits


class AttachingPartition(Protocol):
    """What ``attach_some`` uses of a ``PullClient``."""

    @property
    def session(self) -> object | None: ...

    async def attach_first(self, seconds: float) -> None: ...


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
