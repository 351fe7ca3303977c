"""Commits a batch: the meta server decides it once, then every broker that has stages of it publishes them (R23).

A decision is final. If its driver fails before all stages are published, the next driver publishes them; publishing a
stage is idempotent. If the route has changed and a partition no longer accepts the keys of its stage, the driver writes
the rows to new stages in the partitions of the new route. The new stages replace the old stage in the decision, so the
rows of a key stay in order. The new decision leaves out the stages that are already published, so that it does not
exceed its size limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from itertools import groupby
from typing import Any, Final, TypeVar

from plait.client.client import Client
from plait.client.staged.stage_writer import Staged, StageWriter, ask
from plait.errors import (
    DiskFull,
    Expired,
    FlowControl,
    MetaBusy,
    MetaUnavailable,
    PlaitError,
    ReadOnly,
    StaleRoute,
    Timeout,
    Unavailable,
)
from plait.frame.view import FrameView
from plait.limits import STAGES_PAGE_MAX
from plait.wire.admin import cluster as c
from plait.wire.admin import partitions as p
from plait.wire.admin.cluster import BatchDecision
from plait.wire.admin.operation import Operation

R = TypeVar("R")

log = logging.getLogger("plait.client")

#: How often a decision is carried out again because the route, or another driver, has changed it.
ATTEMPTS: Final = 20
#: How long requests to a disconnected server are repeated. After that the commit fails, and the next driver repeats
#: it.
PATIENCE_SECONDS: Final = 60.0
#: Time limit for the batch of another driver: its broker may be down, and other batches wait.
OTHER_SECONDS: Final = 5.0

_PASSING: Final = (Unavailable, FlowControl, DiskFull, ReadOnly, MetaUnavailable, MetaBusy)


def _staged(decision: BatchDecision) -> list[Staged]:
    """The stages of a batch."""
    return [Staged(group, name, *each) for group, name, found in decision.stages for each in found]


async def commit(client: Client, query: str, batch: int, stages: Iterable[Staged]) -> bool:
    """Make all these stages visible. Returns False if the batch was committed before; these stages are then dropped."""
    mine = list(stages)
    for _ in range(ATTEMPTS):
        decision = await _decide(client, query, batch, mine)
        if not decision.done:
            await carry_out(client, decision)
        if decision.batch >= batch:
            ours = decision.batch == batch and {s.producer for s in _staged(decision)} == {s.producer for s in mine}
            if not ours:
                kept = {staged.producer for staged in _staged(decision)}
                await _drop(client, [staged for staged in mine if staged.producer not in kept])
            return ours
    raise FlowControl(
        f"batch {batch} of query {query} cannot be committed: the batch before it is not published; try again"
    )


async def abort(client: Client, query: str, batch: int, stages: Iterable[Staged]) -> None:
    """Drop the stages of a failed attempt. If they are already decided, publish them instead."""
    mine = list(stages)
    if mine:
        decision = await _with_retries(client, c.VETO_BATCH, query=query, batch=batch, producer=mine[0].producer)
        if decision is None:
            await _drop(client, mine)
        elif not decision.done:
            await carry_out(client, decision)


async def finish_others(client: Client, query: str = "") -> int:
    """Publish batches that stopped drivers have decided and not published; returns how many.

    A batch that fails or takes too long is logged and left to the next driver, so that it does not block others. The
    queries whose names follow ``query`` are first, so that drivers of different queries start with different batches.
    """
    count = 0
    tried: set[str] = set()
    for after in dict.fromkeys((query, "")):
        last = after
        while page := await ask(client._router.meta, c.UNDONE_BATCHES, after=last):
            last = page[-1].query
            new = [decision for decision in page if decision.query not in tried]
            tried.update(decision.query for decision in new)
            count += sum(await asyncio.gather(*(_finish(client, decision) for decision in new)))
    return count


async def _finish(client: Client, decision: BatchDecision) -> bool:
    batch, query = decision.batch, decision.query
    log.warning("batch %d of query %s is decided and not published; publishing it", batch, query)
    try:
        async with asyncio.timeout(OTHER_SECONDS):
            await carry_out(client, decision)
    except PlaitError as error:
        log.warning("batch %d of query %s is still not published: %s", batch, query, error)
    except TimeoutError:
        log.warning("batch %d of query %s is not published within %g s", batch, query, OTHER_SECONDS)
    else:
        return True
    return False


async def carry_out(client: Client, decision: BatchDecision) -> None:
    """Publish a decided batch; returns when all of it is visible and durable."""
    for _ in range(ATTEMPTS):
        try:
            await _carry_out(client, decision)
            return
        except Expired:
            # Another driver may have published all of it, or replaced stages, and dropped the old ones.
            newest = await _decide(client, decision.query, decision.batch, [])
            if newest.done or newest.batch != decision.batch:
                return
            if newest.version == decision.version:
                raise
            decision = newest
    raise _route_unstable(decision)


async def _carry_out(client: Client, decision: BatchDecision) -> None:
    groups: set[str] = set()
    for _ in range(ATTEMPTS):
        groups.update(staged.group for staged in _staged(decision))
        moved = await _publish(client, _staged(decision))
        if not moved:
            if await _with_retries(
                client, c.BATCH_DONE, query=decision.query, batch=decision.batch, version=decision.version
            ):
                await _forget(client, decision, groups)
                return
            # Another driver has replaced stages, and may have stopped.
            decision = await _decide(client, decision.query, decision.batch, [])
            if decision.done:
                return
        else:
            decision = await _exchange(client, decision, moved)
    raise _route_unstable(decision)


def _route_unstable(decision: BatchDecision) -> FlowControl:
    return FlowControl(
        f"batch {decision.batch} of query {decision.query} is not published: its route keeps changing; try again"
    )


async def _publish(client: Client, stages: list[Staged]) -> list[Staged]:
    """Publish stages at all brokers at once; returns those whose keys have moved to other partitions."""
    groups = [(group, list(found)) for group, found in groupby(sorted(stages), key=lambda staged: staged.group)]
    answers = await asyncio.gather(*(_publish_at(client, group, found) for group, found in groups))
    return [staged for moved in answers for staged in moved]


async def _publish_at(client: Client, group: str, stages: list[Staged]) -> list[Staged]:
    moved: list[Staged] = []
    left = stages
    while left:
        page, left = left[:STAGES_PAGE_MAX], left[STAGES_PAGE_MAX:]
        try:
            named = [(staged.producer, staged.rows) for staged in page]
            await _with_retries(client, p.PUBLISH_STAGES, group=group, stages=named)
        except StaleRoute as error:
            refused = {error.details.get("producer"), *error.details.get("producers", ())}
            gone = [staged for staged in page if staged.producer in refused]
            if not gone:
                raise
            moved += gone
            left = [staged for staged in page if staged not in gone] + left
    return moved


async def _exchange(client: Client, decision: BatchDecision, moved: list[Staged]) -> BatchDecision:
    """Write stages again by the current route, and replace the old ones in the decision.

    All other stages are published. Each partition gets one new stage, however many old ones had its rows.
    """
    writers: dict[str, StageWriter] = {}
    try:
        for staged in moved:
            await _copy(client, decision, staged, writers)
        new = [staged for writer in writers.values() for staged in await writer.complete()]
    except PlaitError:
        for writer in writers.values():
            with contextlib.suppress(PlaitError):
                await writer.drop()
        raise
    exchanged = await _with_retries(
        client,
        c.EXCHANGE_STAGES,
        query=decision.query,
        batch=decision.batch,
        version=decision.version,
        stages=_by_place(new),
    )
    # Drop the old stages, or the new ones if another driver has replaced the stages first.
    await _drop(client, new if exchanged is None else moved)
    return exchanged or await _decide(client, decision.query, decision.batch, [])


async def _copy(client: Client, decision: BatchDecision, staged: Staged, writers: dict[str, StageWriter]) -> None:
    """Write the rows of a stage again, with the writer of their subject."""
    start = 0
    while start < staged.rows:
        found = await _with_retries(client, p.READ_STAGE, group=staged.group, producer=staged.producer, start=start)
        if found.end <= start:
            raise Expired(f"row {start} of the stage of producer {staged.producer:016x} no longer exists")
        if found.subject not in writers:
            writers[found.subject] = StageWriter(client, found.subject, decision.query, decision.batch)
        for data in found.frames:
            await writers[found.subject].copy(FrameView(data).verify())
        start = found.end


async def _decide(client: Client, query: str, batch: int, stages: list[Staged]) -> BatchDecision:
    return await _with_retries(client, c.DECIDE_BATCH, query=query, batch=batch, stages=_by_place(stages))


async def _drop(client: Client, stages: list[Staged]) -> None:
    """Drop stages that are not needed. If a broker does not answer, they expire."""
    for group, found in groupby(sorted(stages), key=lambda staged: staged.group):
        producers = [staged.producer for staged in found]
        for start in range(0, len(producers), STAGES_PAGE_MAX):
            await _try(client, group, p.DROP_STAGES, producers=producers[start : start + STAGES_PAGE_MAX])


async def _forget(client: Client, decision: BatchDecision, groups: set[str]) -> None:
    """Drop the stages of failed attempts at the brokers of the batch. Other stages, and those without reply, expire."""
    for group in sorted(groups):
        await _try(client, group, p.FORGET_BATCHES, query=decision.query, batch=decision.batch)


async def _try(client: Client, group: str, operation: Operation[int], **arguments: Any) -> None:
    try:
        await ask(await client._router.group_node(group), operation, **arguments)
    except PlaitError as error:
        log.info("%s at %s: %s", operation.name, group, error)


async def _with_retries(client: Client, operation: Operation[R], *, group: str | None = None, **arguments: Any) -> R:
    """Ask a broker group or the meta server; repeat while it is down. Every request here is idempotent."""
    loop = asyncio.get_running_loop()
    patience = loop.time() + PATIENCE_SECONDS
    pause = client.limits.send_retry_first_seconds
    while True:
        try:
            node = client._router.meta if group is None else await client._router.group_node(group)
            return await ask(node, operation, **arguments)
        except Timeout:
            # The server is connected and still works on the request.
            patience = loop.time() + PATIENCE_SECONDS
        except _PASSING:
            if loop.time() > patience:
                raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, client.limits.send_retry_max_seconds)


def _by_place(stages: list[Staged]) -> list[tuple[str, str, list[tuple[int, int]]]]:
    places = groupby(sorted(stages), key=lambda staged: (staged.group, staged.name))
    return [(group, name, [(s.producer, s.rows) for s in found]) for (group, name), found in places]
