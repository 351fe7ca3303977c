"""Batches staged and committed through real brokers and meta servers: once, atomically and in order (R23)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

import plait
from plait.client.net.node import Node
from plait.client.send.open_rows import hash_keys
from plait.client.send.row_columns import RowColumns
from plait.client.staged import batch_commit as committing
from plait.client.staged.batch_commit import abort, carry_out, commit, finish_others
from plait.client.staged.stage_writer import Staged, StageWriter, ask
from plait.errors import InvalidArgument, MetaUnavailable, StaleSession
from plait.model.logical_partitions import lp_of_key
from plait.server.meta.meta_requests import UNDONE_MAX
from plait.testing import EmbeddedBroker
from plait.wire.admin.cluster import EXCHANGE_STAGES, UNDONE_BATCHES, BatchDecision
from plait.wire.admin.operation import Operation
from tests.client.support import EAGER, PATIENCE_SECONDS
from tests.client.test_expanding import by_key, settled

KEYS = [f"k{n}" for n in range(40)]


@pytest.fixture
async def client(nodes: list[EmbeddedBroker]) -> AsyncIterator[plait.Client]:
    async with nodes[0].connect(limits=EAGER) as connected:
        await connected.admin.create_subject("s", partitions=2)
        yield connected


def rows(bodies: Sequence[bytes], keys: Sequence[str] | None = None, **columns: object) -> RowColumns:
    if keys is None:
        return RowColumns(pa.array(bodies, pa.binary()), **columns)  # type: ignore[arg-type]
    return RowColumns(
        pa.array(bodies, pa.binary()),
        pa.array(keys, pa.string()),
        hash_keys(keys, len(keys)),
        **columns,  # type: ignore[arg-type]
    )


async def stage(
    client: plait.Client, label: str, *, batch: int = 0, query: str = "q", keys: Sequence[str] = KEYS, times: int = 3
) -> list[Staged]:
    """Stage the rows of one task: each key ``times`` times, in order."""
    writer = StageWriter(client, "s", query, batch)
    for n in range(times):
        await writer.write(rows([f"{label}{n}".encode()] * len(keys), keys))
    return await writer.complete()


def wanted(*labels: str, keys: Iterable[str] = KEYS, times: int = 3) -> dict[str, list[bytes]]:
    return {key: [f"{label}{n}".encode() for label in labels for n in range(times)] for key in keys}


def stages_at(nodes: list[EmbeddedBroker]) -> int:
    return sum(len(node.server.broker.stages) for node in nodes)


async def test_a_batch_on_two_broker_groups_is_visible_after_its_commit(
    nodes: list[EmbeddedBroker], client: plait.Client
):
    staged = await stage(client, "a")
    assert sorted(each.group for each in staged) == ["g1", "g2"]
    assert await by_key(client, "s") == {}
    assert await commit(client, "q", 0, staged)
    assert await by_key(client, "s") == wanted("a")
    assert stages_at(nodes) == 0


async def test_a_second_attempt_at_a_committed_batch_is_ignored(nodes: list[EmbeddedBroker], client: plait.Client):
    assert await commit(client, "q", 0, await stage(client, "a"))
    assert not await commit(client, "q", 0, await stage(client, "other", keys=KEYS[:7]))
    assert await commit(client, "q", 1, await stage(client, "b", batch=1))
    assert not await commit(client, "q", 0, await stage(client, "late"))
    assert await by_key(client, "s") == wanted("a", "b")
    assert stages_at(nodes) == 0


async def test_a_batch_whose_driver_dies_after_the_decision_is_finished_by_the_next_driver(
    nodes: list[EmbeddedBroker], client: plait.Client
):
    staged = await stage(client, "a")
    await committing._decide(client, "q", 0, staged)
    # One of the two brokers had published its part.
    await committing._publish(client, [each for each in staged if each.group == "g1"])
    assert not await commit(client, "q", 0, await stage(client, "rerun"))
    assert await by_key(client, "s") == wanted("a")
    assert stages_at(nodes) == 0


async def test_a_batch_first_finishes_the_previous_one(client: plait.Client):
    await committing._decide(client, "q", 0, await stage(client, "a"))
    assert await commit(client, "q", 1, await stage(client, "b", batch=1))
    assert await by_key(client, "s") == wanted("a", "b")


async def test_other_drivers_finish_the_batch_of_a_dead_driver(
    nodes: list[EmbeddedBroker], client: plait.Client, monkeypatch: pytest.MonkeyPatch
):
    await committing._decide(client, "gone", 0, await stage(client, "a", query="gone"))
    assert await finish_others(client) == 0
    pass_a_minute(nodes, monkeypatch)
    assert await finish_others(client) == 1
    assert await by_key(client, "s") == wanted("a")
    assert await finish_others(client) == 0


def pass_a_minute(nodes: list[EmbeddedBroker], monkeypatch: pytest.MonkeyPatch) -> None:
    """Advance the clock of the meta server's commits by a minute."""
    host = nodes[0].server.cluster._host
    assert host is not None
    age = host.service.commits._age
    monotonic = age._clock.monotonic
    monkeypatch.setattr(age, "_clock", SimpleNamespace(monotonic=lambda: monotonic() + 61.0))


@pytest.mark.parametrize("own", ["", "m", "z"])
async def test_stuck_batches_do_not_block_others(
    nodes: list[EmbeddedBroker],
    client: plait.Client,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    own: str,
):
    """More stuck batches than one reply lists, before and after those that can be finished."""
    stuck = [f"{letter}{n}" for letter in "ay" for n in range(UNDONE_MAX + 1)]
    for query in stuck:
        await committing._decide(client, query, 0, [Staged("nowhere", "s", 1, 1)])
    for query in ("n", "z"):
        await committing._decide(client, query, 0, await stage(client, query, query=query))
    pass_a_minute(nodes, monkeypatch)
    assert await finish_others(client, own) == 2
    found = await by_key(client, "s")
    assert {key: sorted(bodies) for key, bodies in found.items()} == wanted("n", "z")
    logged = [record.getMessage() for record in caplog.records if "is still not published" in record.getMessage()]
    assert sorted(text.split()[4] for text in logged) == stuck
    assert all("broker group 'nowhere' does not exist" in text for text in logged)


async def test_a_batch_with_an_unreachable_broker_does_not_block_others(
    nodes: list[EmbeddedBroker], client: plait.Client, monkeypatch: pytest.MonkeyPatch
):
    here = [key for key in KEYS if lp_of_key(key) < 512]
    await committing._decide(client, "a", 0, await stage(client, "a", query="a"))
    await committing._decide(client, "b", 0, await stage(client, "b", query="b", keys=here))
    await nodes[1].kill()
    pass_a_minute(nodes, monkeypatch)
    monkeypatch.setattr(committing, "OTHER_SECONDS", 0.5)
    async with asyncio.timeout(PATIENCE_SECONDS):
        # On a slow machine the second batch may time out too.
        left: list[str] = []
        while left != ["a"]:
            await finish_others(client)
            undone = await ask(client._router.meta, UNDONE_BATCHES)
            left = [decision.query for decision in undone]
    await nodes[1].start()
    assert not await commit(client, "a", 0, [])
    assert (await by_key(client, "s")).keys() == set(KEYS)


async def test_an_aborted_attempt_is_never_visible(nodes: list[EmbeddedBroker], client: plait.Client):
    staged = await stage(client, "a")
    await abort(client, "q", 0, staged)
    assert stages_at(nodes) == 0
    with pytest.raises(StaleSession):
        await commit(client, "q", 0, staged)
    assert await commit(client, "q", 0, await stage(client, "b"))
    assert await by_key(client, "s") == wanted("b")


async def test_an_abort_after_the_decision_completes_the_batch(client: plait.Client):
    staged = await stage(client, "a")
    await committing._decide(client, "q", 0, staged)
    await abort(client, "q", 0, staged)
    assert await by_key(client, "s") == wanted("a")


async def test_a_commit_drops_the_stages_of_failed_attempts(nodes: list[EmbeddedBroker], client: plait.Client):
    await stage(client, "failed")
    assert await commit(client, "q", 0, await stage(client, "a"))
    assert stages_at(nodes) == 0
    assert await by_key(client, "s") == wanted("a")


async def test_staged_rows_follow_a_changed_route_and_keep_their_order(
    nodes: list[EmbeddedBroker], client: plait.Client, monkeypatch: pytest.MonkeyPatch
):
    moved: list[Staged] = []
    exchange = committing._exchange

    async def watched(of: plait.Client, decision: BatchDecision, stages: list[Staged]) -> BatchDecision:
        moved.extend(stages)
        return await exchange(of, decision, stages)

    monkeypatch.setattr(committing, "_exchange", watched)
    assert await commit(client, "q", 0, await stage(client, "a"))
    staged = await stage(client, "b", batch=1)
    other = await stage(client, "c", batch=1, keys=["c1", "c2", "c3"])
    await client.admin.expand_subject("s", 5)
    await settled(client, "s")
    assert await commit(client, "q", 1, [*staged, *other])
    assert len(moved) >= 2
    assert await by_key(client, "s") == wanted("a", "b") | wanted("c", keys=["c1", "c2", "c3"])
    assert stages_at(nodes) == 0
    assert await commit(client, "q", 2, await stage(client, "d", batch=2))
    assert (await by_key(client, "s"))["k0"] == wanted("a", "b", "d")["k0"]


async def test_two_drivers_that_move_the_same_rows_publish_them_once(nodes: list[EmbeddedBroker], client: plait.Client):
    staged = await stage(client, "a")
    await client.admin.expand_subject("s", 4)
    await settled(client, "s")
    decision = await committing._decide(client, "q", 0, staged)
    await asyncio.gather(carry_out(client, decision), carry_out(client, decision))
    assert await by_key(client, "s") == wanted("a")
    assert stages_at(nodes) == 0


async def test_a_driver_continues_with_the_stages_that_another_driver_exchanged(
    nodes: list[EmbeddedBroker], client: plait.Client, monkeypatch: pytest.MonkeyPatch
):
    """The other driver is gone, and has dropped the stages that this driver is about to read."""
    staged = await stage(client, "a")
    await client.admin.expand_subject("s", 4)
    await settled(client, "s")
    decision = await committing._decide(client, "q", 0, staged)
    publish = committing._publish
    exchanged: list[BatchDecision] = []

    async def overtaken(of: plait.Client, stages: list[Staged]) -> list[Staged]:
        moved = await publish(of, stages)
        if not exchanged:
            exchanged.append(await committing._exchange(of, decision, moved))
        return moved

    monkeypatch.setattr(committing, "_publish", overtaken)
    await carry_out(client, decision)
    assert exchanged[0].version == 2
    assert await by_key(client, "s") == wanted("a")
    assert (await committing._decide(client, "q", 0, [])).version == 2
    assert stages_at(nodes) == 0


async def test_moved_rows_are_not_dropped_when_the_reply_to_the_exchange_is_lost(
    nodes: list[EmbeddedBroker], client: plait.Client, monkeypatch: pytest.MonkeyPatch
):
    staged = await stage(client, "a")
    await client.admin.expand_subject("s", 4)
    await settled(client, "s")
    asked: list[str] = []

    async def lossy(node: Node, operation: Operation[Any], **arguments: object) -> object:
        answer = await ask(node, operation, **arguments)
        asked.append(operation.name)
        if operation is EXCHANGE_STAGES and asked.count(operation.name) == 1:
            raise MetaUnavailable("the connection was lost")
        return answer

    monkeypatch.setattr(committing, "ask", lossy)
    assert await commit(client, "q", 0, staged)
    assert asked.count("commit.exchange") == 2
    assert await by_key(client, "s") == wanted("a")
    assert stages_at(nodes) == 0


async def test_a_batch_with_the_maximum_of_stages_is_published_after_a_route_change(
    nodes: list[EmbeddedBroker], client: plait.Client, monkeypatch: pytest.MonkeyPatch
):
    """The rows of each stage move to several partitions, and other stages stay in place."""
    stays = next(key for key in KEYS if lp_of_key(key) < 128)
    labels = ["a", "b", "c"]
    staged = [each for label in labels for each in await stage(client, label)]
    staged += [each for label in labels for each in await stage(client, label, keys=[stays])]
    monkeypatch.setattr("plait.meta.batch_commits.COMMIT_STAGES_MAX", len(staged))
    await client.admin.expand_subject("s", 8)
    await settled(client, "s")
    assert await commit(client, "q", 0, staged)
    found = await by_key(client, "s")
    once = wanted(*labels)
    assert {key: sorted(bodies) for key, bodies in found.items()} == once | {stays: sorted(once[stays] * 2)}
    # Tasks have no order among each other; the rows of one task and key are in order and adjacent.
    orders = [wanted(*order)["k0"] for order in permutations(labels)]
    assert all(bodies in orders for key, bodies in found.items() if key != stays)
    assert stages_at(nodes) == 0


async def test_a_commit_waits_for_a_restarting_broker(nodes: list[EmbeddedBroker], client: plait.Client):
    writer = StageWriter(client, "s", "q", 0)
    await writer.write(rows([b"0"] * len(KEYS), KEYS))
    await nodes[1].kill()
    await nodes[1].start()
    await writer.write(rows([b"1"] * len(KEYS), KEYS))
    staged = await writer.complete()
    await nodes[1].kill()
    publishing = asyncio.create_task(commit(client, "q", 0, staged))
    await nodes[1].start()
    assert await publishing
    assert await by_key(client, "s") == {key: [b"0", b"1"] for key in KEYS}


async def test_rows_of_all_sizes_are_published(client: plait.Client):
    writer = StageWriter(client, "s", "q", 0)
    bodies = [b"x" * size for size in (0, 1, 700_000, 700_000, 5)]
    await writer.write(rows(bodies))
    await writer.write(rows([]))
    await writer.write(rows([b"n"] * 120_000))
    assert await commit(client, "q", 0, await writer.complete())
    found: list[bytes] = []
    async with client.reader("s", start="earliest") as reader:
        while len(found) < 120_005:
            found += [message.body for message in await reader.fetch(50_000, wait=10)]
    assert found[:5] == bodies
    assert found[5:] == [b"n"] * 120_000


async def test_delayed_staged_rows_are_delivered_when_due(tmp_path: Path):
    async with (
        EmbeddedBroker(tmp_path, clock=plait.testing.ManualClock()) as broker,
        broker.connect() as client,
        client.consumer("s", group="g") as consumer,
    ):
        writer = StageWriter(client, "s", "q", 0)
        await writer.write(rows([b"late"], dues=broker.clock.now() + 60_000_000))
        await writer.write(rows([b"now"]))
        assert await commit(client, "q", 0, await writer.complete())
        assert [message.body for message in await consumer.fetch(10, wait=5)] == [b"now"]
        await broker.advance(61)
        assert [message.body for message in await consumer.fetch(10, wait=5)] == [b"late"]


async def test_rows_without_keys_of_a_task_stay_in_one_partition(client: plait.Client):
    writer = StageWriter(client, "s", "q", 0)
    for n in range(10):
        await writer.write(rows([b"%d" % n]))
    assert len(await writer.complete()) == 1


async def test_a_commit_without_a_meta_server_is_refused(tmp_path: Path):
    async with EmbeddedBroker(tmp_path, metas=()) as broker, broker.connect() as client:
        staged = await stage(client, "a")
        with pytest.raises(InvalidArgument, match="to a meta server"):
            await commit(client, "q", 0, staged)
