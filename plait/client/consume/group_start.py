"""Finds the route version that a group began with: partitions added by a later version are new to the group.

``start=`` applies to a group that no partition of the subject knows. In a partition that was added after the group
began, every message belongs to the group, even if the group had no member at the time. So an opening consumer asks the
brokers, and a meta server, which remembers the groups of partitions that have left the route or been emptied. The
consumer then sends each partition the route version that the group began with.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final, TypeVar

from plait import tasks
from plait.client.consume.terms import Terms
from plait.client.net.node import Node
from plait.client.net.router import Router, SubjectRoute
from plait.errors import PlaitError, StaleRoute
from plait.limits import ClientLimits
from plait.wire.admin.operation import Operation
from plait.wire.admin.subjects import GROUP_BEGAN, GROUP_REMEMBERED, Remembered

R = TypeVar("R")

log = logging.getLogger("plait.client")

#: The most partitions that one request names.
NAMES_MAX: Final = 200

EARLIEST: Final = "earliest"


async def find_start_version(
    router: Router, route: SubjectRoute, terms: Terms, limits: ClientLimits, deadline: float
) -> int:
    """The route version that the group began with; the version of ``route`` for a new group.

    Waits until the deadline for a server that does not answer, as it may be the only one that knows the group. Once one
    server knows the group, the others have ``attach_seconds``. A group that no server knows by the deadline is a new
    group. Raises ``StaleRoute`` if no server knows the group and ``route`` is not the newest route, because ``route``
    may lack a partition that knows the group. The router has the newest route by then.
    """
    if terms.start == EARLIEST or (terms.start is None and terms.group is not None):
        # Every message belongs to the group.
        return route.version
    names: dict[str, list[str]] = {}
    for partition in route.partitions:
        names.setdefault(partition.group, []).append(partition.name)
    remembering = tasks.child(_ask_meta(router.meta, terms, limits), "plait-remembered")
    asking: dict[asyncio.Task[Remembered], str] = {remembering: "the meta server"}
    asking |= {
        tasks.child(
            _ask(router.node(route, group), some[at : at + NAMES_MAX], terms, limits), "plait-began"
        ): f"broker group {group}"
        for group, some in names.items()
        for at in range(0, len(some), NAMES_MAX)
    }
    known: list[int] = []
    loop = asyncio.get_running_loop()
    pending = set(asking)
    try:
        while pending and (left := deadline - loop.time()) > 0:
            done, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            found = [version for task in done if (version := task.result().began) is not None]
            if found and not known:
                deadline = min(deadline, loop.time() + limits.attach_seconds)
            known += found
            if known:
                # The meta server's answer is needed only for a group that no broker knows.
                pending.discard(remembering)
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    if known:
        return min(known)
    if remembering not in pending and remembering.result().version > route.version:
        newest = await router.refresh(terms.subject)
        if newest.version > route.version:
            raise StaleRoute(
                f"route version {route.version} of {terms.subject!r} is outdated, the newest is {newest.version}"
            )
    if pending:
        log.warning(
            "%s did not answer whether group %s has consumed %s before: it counts as a new group and begins at %s",
            ", ".join(sorted({asking[task] for task in pending})),
            terms.group or f"of {terms.client} (broadcast)",
            terms.subject,
            terms.start or "latest",
        )
    return route.version


async def _ask(node: Node, partitions: list[str], terms: Terms, limits: ClientLimits) -> Remembered:
    """The route version that the group began with, as one broker knows it."""
    began = await _answer(node, limits, GROUP_BEGAN, partitions=partitions, group=terms.group, client=terms.client)
    return Remembered(0, began)


async def _ask_meta(node: Node, terms: Terms, limits: ClientLimits) -> Remembered:
    """The route version that the group began with, as the meta server remembers it."""
    return await _answer(node, limits, GROUP_REMEMBERED, subject=terms.subject, group=terms.group, client=terms.client)


async def _answer(node: Node, limits: ClientLimits, operation: Operation[R], **arguments: Any) -> R:
    """The result of a request, repeated while the server is unreachable or returns a retryable error."""
    while True:
        try:
            return operation.result(await node.request(operation.packet(**arguments)))
        except PlaitError as error:
            if not error.retryable:
                raise
            await asyncio.sleep(limits.reconnect_first_seconds)
