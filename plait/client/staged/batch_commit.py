"""A batch is committed: decided once at the meta server, then published by every broker that has stages of it (R23).

Whatever breaks in between, the decision stands, and whoever comes next carries it out: publishing a stage that is
published already changes nothing. A stage whose partition does not take its keys any more, because the route has
changed, is written again to where the route leads now, and exchanged in the decision; so a key's rows stay in order.
What is published by then is not named any more, so that the decision does not outgrow what one may name.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from itertools import groupby
from typing import Any, Final

import msgspec

from plait.client.client import Client
from plait.client.staged.stage_sender import ask
from plait.client.staged.stage_writer import Staged, StageWriter
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

log = logging.getLogger("plait.client")

#: How often a decision is carried out again after the route has changed, or others have.
ATTEMPTS: Final = 20
#: A broker, or the meta server, that is away comes back within this, or the commit fails and is repeated by whoever
#: comes next.
PATIENCE_SECONDS: Final = 60.0
#: A batch that somebody else left undone is tried for so long: its broker may be away, and others wait behind it.
OTHER_SECONDS: Final = 5.0

_PASSING: Final = (Unavailable, FlowControl, DiskFull, ReadOnly, MetaUnavailable, MetaBusy)


class DecisionReply(msgspec.Struct, frozen=True):
    """The last batch of a query that was decided, as the meta server tells it."""

    query: str
    batch: int
    version: int
    stages: list[tuple[str, str, list[tuple[int, int]]]]
    done: bool

    @property
    def staged(self) -> list[Staged]:
        """Its stages."""
        return [Staged(group, name, *each) for group, name, found in self.stages for each in found]


class _StagePage(msgspec.Struct, array_like=True):
    """Some frames of a stage, and where the next one begins."""

    subject: str
    frames: list[bytes]
    end: int


async def commit(client: Client, query: str, batch: int, stages: Iterable[Staged]) -> bool:
    """These stages become visible, all of them; False: the batch was committed before, and these are dropped."""
    mine = list(stages)
    for _ in range(ATTEMPTS):
        decision = await _decide(client, query, batch, mine)
        if not decision.done:
            await carry_out(client, decision)
        if decision.batch >= batch:
            ours = decision.batch == batch and {s.producer for s in decision.staged} == {s.producer for s in mine}
            if not ours:
                kept = {staged.producer for staged in decision.staged}
                await _drop(client, [staged for staged in mine if staged.producer not in kept])
            return ours
    raise FlowControl(f"batch {batch} of query {query} cannot be committed: the one before it is not done; try again")


async def abort(client: Client, query: str, batch: int, stages: Iterable[Staged]) -> None:
    """The attempt that wrote these stages failed: nobody will see them, unless they are decided already."""
    mine = list(stages)
    if mine:
        decision = await _patiently(
            client, "commit.veto", DecisionReply | None, query=query, batch=batch, producer=mine[0].producer
        )
        if decision is None:
            await _drop(client, mine)
        elif not decision.done:
            await carry_out(client, decision)


async def finish_others(client: Client, query: str = "") -> int:
    """Carry out what drivers that are gone have decided and left undone; how many batches that was.

    One that cannot be finished, or takes long, holds up nobody: it is logged, and left to who comes next. Those behind
    ``query`` are first, by name: with names of their own, not all begin with the same ones.
    """
    count = 0
    tried: set[str] = set()
    for after in dict.fromkeys((query, "")):
        last = after
        while page := await ask(client._router.meta, "commit.undone", list[DecisionReply], after=last):
            last = page[-1].query
            new = [decision for decision in page if decision.query not in tried]
            tried.update(decision.query for decision in new)
            count += sum(await asyncio.gather(*(_finish(client, decision) for decision in new)))
    return count


async def _finish(client: Client, decision: DecisionReply) -> bool:
    batch, query = decision.batch, decision.query
    log.warning("batch %d of query %s was decided and left undone; it is published now", batch, query)
    try:
        async with asyncio.timeout(OTHER_SECONDS):
            await carry_out(client, decision)
    except PlaitError as error:
        log.warning("batch %d of query %s stays undone: %s", batch, query, error)
    except TimeoutError:
        log.warning("batch %d of query %s stays undone: it takes longer than %g s", batch, query, OTHER_SECONDS)
    else:
        return True
    return False


async def carry_out(client: Client, decision: DecisionReply) -> None:
    """Publish what was decided; returns when all of it is visible, durably."""
    for _ in range(ATTEMPTS):
        try:
            await _carry_out(client, decision)
            return
        except Expired:
            # Somebody else may have done all of it meanwhile, or exchanged stages, and cleaned up.
            newest = await _decide(client, decision.query, decision.batch, [])
            if newest.done or newest.batch != decision.batch:
                return
            if newest.version == decision.version:
                raise
            decision = newest
    raise _unsteady(decision)


async def _carry_out(client: Client, decision: DecisionReply) -> None:
    groups: set[str] = set()
    for _ in range(ATTEMPTS):
        groups.update(staged.group for staged in decision.staged)
        moved = await _publish(client, decision.staged)
        if not moved:
            if await _patiently(
                client, "commit.done", bool, query=decision.query, batch=decision.batch, version=decision.version
            ):
                await _forget(client, decision, groups)
                return
            # Somebody else has exchanged stages meanwhile, and may be gone.
            decision = await _decide(client, decision.query, decision.batch, [])
            if decision.done:
                return
        else:
            decision = await _exchange(client, decision, moved)
    raise _unsteady(decision)


def _unsteady(decision: DecisionReply) -> FlowControl:
    return FlowControl(
        f"batch {decision.batch} of query {decision.query}: its route changes again and again; try again"
    )


async def _publish(client: Client, stages: list[Staged]) -> list[Staged]:
    """Publish stages, at all brokers at once; those whose keys have moved."""
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
            await _patiently(client, "stage.publish", None, group=group, stages=named)
        except StaleRoute as error:
            refused = {error.details.get("producer"), *error.details.get("producers", ())}
            gone = [staged for staged in page if staged.producer in refused]
            if not gone:
                raise
            moved += gone
            left = [staged for staged in page if staged not in gone] + left
    return moved


async def _exchange(client: Client, decision: DecisionReply, moved: list[Staged]) -> DecisionReply:
    """Write stages anew to where the route leads now, and let them count in the place of the old ones.

    All others are published. Each place gets one stage, whatever the number of those that had its rows.
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
    exchanged = await _patiently(
        client,
        "commit.exchange",
        DecisionReply | None,
        query=decision.query,
        batch=decision.batch,
        version=decision.version,
        stages=_by_place(new),
    )
    # Either way one of the two is of no use: the old ones now, or the new ones because others have exchanged them.
    await _drop(client, new if exchanged is None else moved)
    return exchanged or await _decide(client, decision.query, decision.batch, [])


async def _copy(client: Client, decision: DecisionReply, staged: Staged, writers: dict[str, StageWriter]) -> None:
    """Write a stage's rows once more, with the writer of their subject."""
    start = 0
    while start < staged.rows:
        found: _StagePage = await _patiently(
            client, "stage.read", _StagePage, group=staged.group, producer=staged.producer, start=start
        )
        if found.end <= start:
            raise Expired(f"row {start} of the stage of producer {staged.producer:016x} is gone")
        if found.subject not in writers:
            writers[found.subject] = StageWriter(client, found.subject, decision.query, decision.batch)
        for data in found.frames:
            await writers[found.subject].copy(FrameView(data).verify())
        start = found.end


async def _decide(client: Client, query: str, batch: int, stages: list[Staged]) -> DecisionReply:
    decision: DecisionReply = await _patiently(
        client, "commit.decide", DecisionReply, query=query, batch=batch, stages=_by_place(stages)
    )
    return decision


async def _drop(client: Client, stages: list[Staged]) -> None:
    """These are of no use any more. Where a broker does not answer, they expire."""
    for group, found in groupby(sorted(stages), key=lambda staged: staged.group):
        producers = [staged.producer for staged in found]
        for start in range(0, len(producers), STAGES_PAGE_MAX):
            await _try(client, group, "stage.drop", producers=producers[start : start + STAGES_PAGE_MAX])


async def _forget(client: Client, decision: DecisionReply, groups: set[str]) -> None:
    """What failed attempts have left at the batch's brokers goes. Elsewhere, or without an answer, it expires."""
    for group in sorted(groups):
        await _try(client, group, "stage.forget", query=decision.query, batch=decision.batch)


async def _try(client: Client, group: str, operation: str, **arguments: Any) -> None:
    try:
        await ask(await client._router.group_node(group), operation, Any, **arguments)
    except PlaitError as error:
        log.info("%s at %s: %s", operation, group, error)


async def _patiently(client: Client, operation: str, kind: Any, *, group: str | None = None, **arguments: Any) -> Any:
    """Ask a broker group, or the meta server, again and again while it is away: every request here may be repeated."""
    loop = asyncio.get_running_loop()
    patience = loop.time() + PATIENCE_SECONDS
    pause = client.limits.send_retry_first_seconds
    while True:
        try:
            node = client._router.meta if group is None else await client._router.group_node(group)
            return await ask(node, operation, kind, **arguments)
        except Timeout:
            # It is there, and busy with it.
            patience = loop.time() + PATIENCE_SECONDS
        except _PASSING:
            if loop.time() > patience:
                raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, client.limits.send_retry_max_seconds)


def _by_place(stages: list[Staged]) -> list[tuple[str, str, list[tuple[int, int]]]]:
    places = groupby(sorted(stages), key=lambda staged: (staged.group, staged.name))
    return [(group, name, [(s.producer, s.rows) for s in found]) for (group, name), found in places]
