"""Since when a group consumes a subject: what tells partitions that were added later from those it began with.

``start=`` says where a group begins that no partition of the subject knows. What went to a partition that was added
since belongs to the group from the first message on, also if no member was there meanwhile. So an opening consumer asks
the brokers, and a meta server, which remembers the groups of partitions that have left the route or been emptied; and
tells each partition the version of the route that the group began with.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import msgspec

from plait import tasks
from plait.client.consume.pull_client import Terms
from plait.client.net.node import Node
from plait.client.net.router import Router, SubjectRoute
from plait.errors import PlaitError, StaleRoute
from plait.limits import ClientLimits
from plait.wire import messages as m

log = logging.getLogger("plait.client")

#: Partitions that one request names.
NAMES_MAX: Final = 200

EARLIEST: Final = "earliest"


class _Remembered(msgspec.Struct):
    """What a meta server knows of a group that partitions knew which have left the route or been emptied."""

    version: int
    began: int | None


async def began(router: Router, route: SubjectRoute, terms: Terms, limits: ClientLimits, deadline: float) -> int:
    """The version of the route that the group began with; that of ``route`` for one that no partition knows or knew.

    A server that is away is waited for until the deadline, as it may be the only one that knows the group; once one
    knows it, the others have ``attach_seconds``. A group that none knows by the deadline counts as new. ``StaleRoute``:
    none knows it, and the route is not the newest, so a partition that knows it may not be in it. The router has the
    newest then.
    """
    if terms.start == EARLIEST or (terms.start is None and terms.group is not None):
        # Every message belongs to the group.
        return route.version
    names: dict[str, list[str]] = {}
    for partition in route.partitions:
        names.setdefault(partition.group, []).append(partition.name)
    remembering = tasks.child(_ask_meta(router.meta, terms, limits), "plait-remembered")
    asking: dict[asyncio.Task[_Remembered], str] = {remembering: "the meta server"}
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
                # What meta servers remember is for a group that no broker knows.
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
            raise StaleRoute(f"the route of {terms.subject!r} has changed since version {route.version}")
    if pending:
        log.warning(
            "%s did not answer whether group %s has consumed %s before: it counts as new, begins at %s",
            ", ".join(sorted({asking[task] for task in pending})),
            terms.group or f"of {terms.client} (broadcast)",
            terms.subject,
            terms.start or "latest",
        )
    return route.version


async def _ask(node: Node, partitions: list[str], terms: Terms, limits: ClientLimits) -> _Remembered:
    """What one broker knows."""
    request = m.AdminRequest("group.began", {"partitions": partitions, "group": terms.group, "client": terms.client})
    return _Remembered(0, msgspec.msgpack.decode(await _answer(node, request, limits), type=int | None))


async def _ask_meta(node: Node, terms: Terms, limits: ClientLimits) -> _Remembered:
    """What the meta servers remember."""
    request = m.AdminRequest(
        "group.remembered", {"subject": terms.subject, "group": terms.group, "client": terms.client}
    )
    return msgspec.msgpack.decode(await _answer(node, request, limits), type=_Remembered)


async def _answer(node: Node, request: m.AdminRequest, limits: ClientLimits) -> msgspec.Raw:
    """The answer; asked again while the server is away or cannot give it."""
    while True:
        try:
            answer: m.AdminReply = await node.request(request)
        except PlaitError as error:
            if not error.retryable:
                raise
            await asyncio.sleep(limits.reconnect_first_seconds)
            continue
        return answer.result
