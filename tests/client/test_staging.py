"""Batches that are staged and committed through real brokers and meta servers: once, whole, in order (R23)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

import plait
from plait.client.net.node import Node
from plait.client.send.open_rows import hash_keys
from plait.client.staged import batch_commit as committing
from plait.client.staged.batch_commit import abort, carry_out, commit, finish_others
from plait.client.staged.stage_sender import ask
from plait.client.staged.stage_writer import Staged, StagedRows, StageWriter
from plait.errors import InvalidArgument, MetaUnavailable, StaleSession
from plait.model.logical_partitions import lp_of_key
from plait.server.meta.meta_requests import UNDONE_MAX
from plait.testing import EmbeddedBroker
from tests.client.support import EAGER, PATIENCE_SECONDS, config_of
from tests.client.test_expanding import by_key, settled, wait_for

KEYS = [f"k{n}" for n in range(40)]


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[list[EmbeddedBroker]]:
    """A node with a meta server and a broker, and a broker that belongs to it."""
    async with (
        EmbeddedBroker(tmp_path / "1", config=config_of("g1")) as first,
        EmbeddedBroker(tmp_path / "2", config=config_of("g2"), metas=[first.address]) as second,
    ):
        async with first.connect() as client:
            await wait_for(client, lambda brokers: len(brokers) == 2)
        yield [first, second]


@pytest.fixture
async def client(nodes: list[EmbeddedBroker]) -> AsyncIterator[plait.Client]:
    async with nodes[0].connect(limits=EAGER) as connected:
        await connected.admin.create_subject("s", partitions=2)
        yield connected


def rows(bodies: Sequence[bytes], keys: Sequence[str] | None = None, **columns: object) -> StagedRows:
    if keys is None:
        return StagedRows(pa.array(bodies, pa.binary()), **columns)  # type: ignore[arg-type]
    return StagedRows(
        pa.array(bodies, pa.binary()),
        pa.array(keys, pa.string()),
        hash_keys(keys, len(keys)),
        **columns,  # type: ignore[arg-type]
    )


async def stage(
    client: plait.Client, label: str, *, batch: int = 0, query: str = "q", keys: Sequence[str] = KEYS, times: int = 3
) -> list[Staged]:
    """One task's work: each key so many times, in order."""
    writer = StageWriter(client, "s", query, batch)
    for n in range(times):
        await writer.write(rows([f"{label}{n}".encode()] * len(keys), keys))
    return await writer.complete()


def wanted(*labels: str, keys: Iterable[str] = KEYS, times: int = 3) -> dict[str, list[bytes]]:
    return {key: [f"{label}{n}".encode() for label in labels for n in range(times)] for key in keys}


def stages_at(nodes: list[EmbeddedBroker]) -> int:
    return sum(len(node.server.broker.stages) for node in nodes)


async def test_a_batch_on_two_broker_groups_is_seen_when_it_is_committed(
    nodes: list[EmbeddedBroker], client: plait.Client
):
    staged = await stage(client, "a")
    assert sorted(each.group for each in staged) == ["g1", "g2"]
    assert await by_key(client, "s") == {}
    assert await commit(client, "q", 0, staged)
    assert await by_key(client, "s") == wanted("a")
    assert stages_at(nodes) == 0


async def test_the_second_attempt_at_a_batch_does_not_count(nodes: list[EmbeddedBroker], client: plait.Client):
    assert await commit(client, "q", 0, await stage(client, "a"))
    assert not await commit(client, "q", 0, await stage(client, "other", keys=KEYS[:7]))
    assert await commit(client, "q", 1, await stage(client, "b", batch=1))
    assert not await commit(client, "q", 0, await stage(client, "late"))
    assert await by_key(client, "s") == wanted("a", "b")
    assert stages_at(nodes) == 0


async def test_a_driver_that_dies_after_the_decision_is_finished_by_the_next(
    nodes: list[EmbeddedBroker], client: plait.Client
):
    staged = await stage(client, "a")
    await committing._decide(client, "q", 0, staged)
    # One of the two brokers had published its part.
    await committing._publish(client, [each for each in staged if each.group == "g1"])
    assert not await commit(client, "q", 0, await stage(client, "rerun"))
    assert await by_key(client, "s") == wanted("a")
    assert stages_at(nodes) == 0


async def test_the_next_batch_finishes_the_one_before_first(client: plait.Client):
    await committing._decide(client, "q", 0, await stage(client, "a"))
    assert await commit(client, "q", 1, await stage(client, "b", batch=1))
    assert await by_key(client, "s") == wanted("a", "b")


async def test_what_a_dead_driver_left_is_finished_by_others(
    nodes: list[EmbeddedBroker], client: plait.Client, monkeypatch: pytest.MonkeyPatch
):
    await committing._decide(client, "gone", 0, await stage(client, "a", query="gone"))
    assert await finish_others(client) == 0
    a_minute_passes(nodes, monkeypatch)
    assert await finish_others(client) == 1
    assert await by_key(client, "s") == wanted("a")
    assert await finish_others(client) == 0


def a_minute_passes(nodes: list[EmbeddedBroker], monkeypatch: pytest.MonkeyPatch) -> None:
    """For the meta server's commits."""
    host = nodes[0].server.cluster._host
    assert host is not None
    age = host._opened().commits._age
    monotonic = age._clock.monotonic
    monkeypatch.setattr(age, "_clock", SimpleNamespace(monotonic=lambda: monotonic() + 61.0))


@pytest.mark.parametrize("own", ["", "m", "z"])
async def test_batches_that_cannot_be_finished_hold_up_no_other(
    nodes: list[EmbeddedBroker],
    client: plait.Client,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    own: str,
):
    """More of them than one answer names, before and behind those that can be."""
    stuck = [f"{letter}{n}" for letter in "ay" for n in range(UNDONE_MAX + 1)]
    for query in stuck:
        await committing._decide(client, query, 0, [Staged("nowhere", "s", 1, 1)])
    for query in ("n", "z"):
        await committing._decide(client, query, 0, await stage(client, query, query=query))
    a_minute_passes(nodes, monkeypatch)
    assert await finish_others(client, own) == 2
    found = await by_key(client, "s")
    assert {key: sorted(bodies) for key, bodies in found.items()} == wanted("n", "z")
    said = [record.getMessage() for record in caplog.records if "stays undone" in record.getMessage()]
    assert sorted(text.split()[4] for text in said) == stuck
    assert all("no broker group 'nowhere'" in text for text in said)


async def test_a_batch_whose_broker_is_away_holds_up_no_other(
    nodes: list[EmbeddedBroker], client: plait.Client, monkeypatch: pytest.MonkeyPatch
):
    here = [key for key in KEYS if lp_of_key(key) < 512]
    await committing._decide(client, "a", 0, await stage(client, "a", query="a"))
    await committing._decide(client, "b", 0, await stage(client, "b", query="b", keys=here))
    await nodes[1].kill()
    a_minute_passes(nodes, monkeypatch)
    monkeypatch.setattr(committing, "OTHER_SECONDS", 0.5)
    async with asyncio.timeout(PATIENCE_SECONDS):
        # Where the machine is slow, the second one takes longer, too.
        left: list[str] = []
        while left != ["a"]:
            await finish_others(client)
            undone = await committing.ask(client._router.meta, "commit.undone", list[committing.DecisionReply])
            left = [decision.query for decision in undone]
    await nodes[1].start()
    assert not await commit(client, "a", 0, [])
    assert (await by_key(client, "s")).keys() == set(KEYS)


async def test_an_aborted_attempt_is_never_seen(nodes: list[EmbeddedBroker], client: plait.Client):
    staged = await stage(client, "a")
    await abort(client, "q", 0, staged)
    assert stages_at(nodes) == 0
    with pytest.raises(StaleSession):
        await commit(client, "q", 0, staged)
    assert await commit(client, "q", 0, await stage(client, "b"))
    assert await by_key(client, "s") == wanted("b")


async def test_an_abort_after_the_decision_completes_it(client: plait.Client):
    staged = await stage(client, "a")
    await committing._decide(client, "q", 0, staged)
    await abort(client, "q", 0, staged)
    assert await by_key(client, "s") == wanted("a")


async def test_what_failed_attempts_left_goes_with_the_commit(nodes: list[EmbeddedBroker], client: plait.Client):
    await stage(client, "failed")
    assert await commit(client, "q", 0, await stage(client, "a"))
    assert stages_at(nodes) == 0
    assert await by_key(client, "s") == wanted("a")


async def test_rows_follow_a_route_that_has_changed_and_keep_their_order(
    nodes: list[EmbeddedBroker], client: plait.Client, monkeypatch: pytest.MonkeyPatch
):
    moved: list[Staged] = []
    exchange = committing._exchange

    async def watched(
        of: plait.Client, decision: committing.DecisionReply, stages: list[Staged]
    ) -> committing.DecisionReply:
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


async def test_of_two_drivers_that_move_the_same_rows_one_counts(nodes: list[EmbeddedBroker], client: plait.Client):
    staged = await stage(client, "a")
    await client.admin.expand_subject("s", 4)
    await settled(client, "s")
    decision = await committing._decide(client, "q", 0, staged)
    await asyncio.gather(carry_out(client, decision), carry_out(client, decision))
    assert await by_key(client, "s") == wanted("a")
    assert stages_at(nodes) == 0


async def test_who_finds_the_stages_exchanged_by_another_goes_on_with_the_new_ones(
    nodes: list[EmbeddedBroker], client: plait.Client, monkeypatch: pytest.MonkeyPatch
):
    """The other one is gone, and has dropped the stages that this one is about to read."""
    staged = await stage(client, "a")
    await client.admin.expand_subject("s", 4)
    await settled(client, "s")
    decision = await committing._decide(client, "q", 0, staged)
    publish = committing._publish
    exchanged: list[committing.DecisionReply] = []

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


async def test_rows_that_moved_are_not_dropped_where_the_answer_to_that_was_lost(
    nodes: list[EmbeddedBroker], client: plait.Client, monkeypatch: pytest.MonkeyPatch
):
    staged = await stage(client, "a")
    await client.admin.expand_subject("s", 4)
    await settled(client, "s")
    asked: list[str] = []

    async def lossy(node: Node, operation: str, kind: object = None, **arguments: object) -> object:
        answer = await ask(node, operation, kind, **arguments)
        asked.append(operation)
        if asked.count("commit.exchange") == 1 and operation == "commit.exchange":
            raise MetaUnavailable("the connection was lost")
        return answer

    monkeypatch.setattr(committing, "ask", lossy)
    assert await commit(client, "q", 0, staged)
    assert asked.count("commit.exchange") == 2
    assert await by_key(client, "s") == wanted("a")
    assert stages_at(nodes) == 0


async def test_a_batch_of_as_many_stages_as_may_be_is_published_after_the_route_has_changed(
    nodes: list[EmbeddedBroker], client: plait.Client, monkeypatch: pytest.MonkeyPatch
):
    """The rows of each stage go to several places then, and other stages stay where they are."""
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
    # Tasks have no order among each other; what one wrote of a key is in order, and in one piece.
    orders = [wanted(*order)["k0"] for order in permutations(labels)]
    assert all(bodies in orders for key, bodies in found.items() if key != stays)
    assert stages_at(nodes) == 0


async def test_a_broker_that_restarts_meanwhile_only_takes_longer(nodes: list[EmbeddedBroker], client: plait.Client):
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


async def test_rows_of_all_sizes_and_kinds_arrive(client: plait.Client):
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


async def test_delayed_rows_come_at_their_time(tmp_path: Path):
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


async def test_keyless_rows_of_a_task_stay_together(client: plait.Client):
    writer = StageWriter(client, "s", "q", 0)
    for n in range(10):
        await writer.write(rows([b"%d" % n]))
    assert len(await writer.complete()) == 1


async def test_without_a_meta_server_nothing_can_be_committed(tmp_path: Path):
    async with EmbeddedBroker(tmp_path, metas=()) as broker, broker.connect() as client:
        staged = await stage(client, "a")
        with pytest.raises(InvalidArgument, match="asked of a meta server"):
            await commit(client, "q", 0, staged)


def test_the_keys_are_on_both_sides():
    assert {lp_of_key(key) < 512 for key in KEYS} == {True, False}
