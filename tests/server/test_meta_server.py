"""A meta server behind its socket: what it says to who asks for something else, and while it stops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import plait
from plait.broker import BrokerConfig
from plait.errors import InvalidArgument, ProtocolError, Unavailable
from plait.limits import LOGICAL_PARTITIONS, NAME_LENGTH_MAX
from plait.meta.database.connection import file_url
from plait.meta.members.allocator import AllocationWrite
from plait.meta.members.leaving import Leave, LeaveQueue
from plait.meta.service import MetaService
from plait.model.lp_runs import NumberedRun
from plait.server.meta import meta_host
from plait.server.meta.meta_server import MetaServer
from plait.testing import EmbeddedBroker
from plait.wire import messages as m
from tests.server.raw import Raw, until


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[MetaServer]:
    made = MetaServer(file_url(str(tmp_path / "meta.db")), port=0)
    await made.start()
    yield made
    await made.stop()


async def beat(server: MetaServer, seen: int, wait: float) -> tuple[int, list[NumberedRun]]:
    """The answer to a heartbeat of client c, which is a member of one group."""
    told = await server.meta.beat("c", [("s", "g", True)], seen, wait, leaving=False, affinity=[])
    return told.seen, [run for share in told.shares for run in share.lps]


async def member(server: MetaServer) -> int:
    """Client c is one, and has heard of all that is its to handle."""
    await server.meta.call(lambda service: service.register_broker("g1", "b", "plait://127.0.0.1:1"))
    await server.meta.call(lambda service: service.create_subject("s"))
    seen, runs = await beat(server, 0, 0.0)
    while not runs:
        seen, runs = await beat(server, seen, 5.0)
    return seen


async def test_who_asks_while_it_stops_is_told_to_ask_another(server: MetaServer):
    async with Raw(server) as raw:
        await raw.hello()
        await server._meta_handlers.stop()
        for request in (
            m.RouteRequest("s", True),
            m.AdminRequest("broker.describe"),
            m.MemberHeartbeatRequest("c", [], 0, 0.0),
        ):
            with pytest.raises(Unavailable, match="this meta server is stopping"):
                await raw.ask(request)


async def test_what_is_a_brokers_is_refused(server: MetaServer):
    async with Raw(server) as raw:
        await raw.hello()
        for request in (m.PartitionNumberRequest("s"), m.AdminRequest("subject.list"), m.AdminRequest("group.parked")):
            with pytest.raises(InvalidArgument, match="this is a meta server"):
                await raw.ask(request)
        with pytest.raises(InvalidArgument, match=r"subject\.route: .*subject"):
            await raw.ask(m.AdminRequest("subject.route"))


async def test_the_first_word_is_hello(server: MetaServer):
    async with Raw(server) as raw:
        raw.request(m.AdminRequest("broker.describe"))
        assert isinstance(await raw.ending(), ProtocolError)


async def test_a_subject_is_not_put_anywhere_before_all_brokers_were_heard_of(server: MetaServer, tmp_path: Path):
    async with Raw(server) as raw:
        await raw.hello()
        for group in ("g1", "g2"):
            # Nobody is there: what is ordered of it is only late.
            facts = {"group": group, "broker": "b", "address": "plait://127.0.0.1:1", "state": "RW", "epoch": 1}
            await raw.ask(m.AdminRequest("broker.register", {**facts, "partitions": []}))
    await server.stop()
    again = MetaServer(file_url(str(tmp_path / "meta.db")), port=0)
    await again.start()
    try:
        async with Raw(again) as raw, Raw(again) as broker:
            await raw.hello()
            await broker.hello()
            await broker.ask(m.AdminRequest("broker.beat", {"group": "g1", "broker": "b", "state": "RW"}))
            asked = raw.request(m.RouteRequest("s", True))
            for _ in range(5):
                # Each is answered after what was asked before it.
                await broker.ask(m.AdminRequest("broker.describe"))
                await broker.ask(m.AdminRequest("subject.names"))
            assert await broker.ask(m.AdminRequest("subject.names")) == m.AdminReply(
                msgspec.Raw(msgspec.msgpack.encode([]))
            )
            await broker.ask(m.AdminRequest("broker.beat", {"group": "g2", "broker": "b", "state": "RW"}))
            found = (await raw.answer(asked)).message
            assert isinstance(found, m.RouteReply)
            assert sorted(group for _, group in found.partitions) == ["g1", "g2"]
    finally:
        await again.stop()


async def test_allocations_are_written_beside_the_thread_that_answers_heartbeats(
    server: MetaServer, monkeypatch: pytest.MonkeyPatch
):
    threads: dict[AllocationWrite, str] = {}
    carry_out = AllocationWrite.carry_out

    def noted(writing: AllocationWrite) -> None:
        # Who takes it in asks for it once more.
        threads.setdefault(writing, threading.current_thread().name)
        carry_out(writing)

    monkeypatch.setattr(AllocationWrite, "carry_out", noted)
    await member(server)
    assert [name.rpartition("_")[0] for name in threads.values()] == ["plait-meta-writer"]


async def test_leaves_are_written_beside_it_too(server: MetaServer, monkeypatch: pytest.MonkeyPatch):
    await member(server)
    threads: list[str] = []
    write = LeaveQueue._write

    def noted(leaving: LeaveQueue, leaves: list[Leave]) -> None:
        threads.append(threading.current_thread().name)
        write(leaving, leaves)

    monkeypatch.setattr(LeaveQueue, "_write", noted)
    assert (await server.meta.beat("c", [], 0, 5.0, leaving=True, affinity=[])).seen == 0
    assert [name.rpartition("_")[0] for name in threads] == ["plait-meta-writer"]
    assert (await server.meta.call(lambda service: service.allocation("s", "g"))).members == {}


@pytest.mark.parametrize("stays", [True, False])
async def test_what_a_client_says_before_its_leave_is_written_counts_afterwards_and_others_do_not_wait(
    server: MetaServer, monkeypatch: pytest.MonkeyPatch, stays: bool
):
    seen = await member(server)
    begun, answered = threading.Event(), threading.Event()
    in_time: list[bool] = []
    write = LeaveQueue._write

    def late(leaving: LeaveQueue, leaves: list[Leave]) -> None:
        begun.set()
        in_time.append(answered.wait(3))
        write(leaving, leaves)

    monkeypatch.setattr(LeaveQueue, "_write", late)
    said = [asyncio.ensure_future(server.meta.beat("c", [], 0, 0.0, leaving=True, affinity=[]))]
    await asyncio.to_thread(begun.wait)
    back = asyncio.ensure_future(beat(server, seen, 0.0))
    if not stays:
        said.append(asyncio.ensure_future(server.meta.beat("c", [], 0, 0.0, leaving=True, affinity=[])))
    # A decision about somebody else.
    assert await server.meta.call(lambda service: service.subject("s").name) == "s"
    assert not back.done()
    answered.set()
    assert {(await each).seen for each in said} == {0}
    await back
    assert all(in_time)
    members = (await server.meta.call(lambda service: service.allocation("s", "g"))).members
    assert members.keys() == ({"c"} if stays else set())


async def test_a_heartbeat_that_says_nothing_new_does_not_wait_for_decisions(server: MetaServer):
    seen = await member(server)
    begun, answered = threading.Event(), threading.Event()

    def decide(_: MetaService) -> bool:
        begun.set()
        return answered.wait(3)

    deciding = asyncio.ensure_future(server.meta.call(decide))
    await asyncio.to_thread(begun.wait)
    for wait in (0.0, 0.01):
        assert await beat(server, seen, wait) == (seen, [])
    answered.set()
    assert await deciding


@pytest.mark.parametrize("wait", [0.0, 30.0])
async def test_nor_does_one_that_is_told_of_news(server: MetaServer, wait: float):
    seen = await member(server)
    await server.meta.beat("c2", [("s", "g", True)], 0, 0.0, leaving=False, affinity=[])
    # It is allocated when who waits is told of it.
    assert (await beat(server, seen, 30.0))[0] > seen
    begun, answered = threading.Event(), threading.Event()

    def decide(_: MetaService) -> bool:
        begun.set()
        return answered.wait(3)

    deciding = asyncio.ensure_future(server.meta.call(decide))
    await asyncio.to_thread(begun.wait)
    async with Raw(server) as raw:
        await raw.hello()
        told = await raw.ask(m.MemberHeartbeatRequest("c", [("s", "g", True)], seen, wait))
    answered.set()
    assert await deciding
    assert isinstance(told, m.MemberHeartbeatReply)
    assert told.seen > seen
    assert sum(end - first for _, _, _, runs in told.members for first, end, _ in runs) == LOGICAL_PARTITIONS // 2


async def test_who_waits_with_nothing_new_to_say_hears_what_changes(server: MetaServer):
    seen = await member(server)
    waiting = asyncio.ensure_future(beat(server, seen, 30.0))
    await until(lambda: "c" in server.meta._waiting)
    await server.meta.beat("c2", [("s", "g", True)], 0, 0.0, leaving=False, affinity=[])
    newer, shares = await waiting
    assert newer > seen
    assert sum(end - first for first, end, _ in shares) == LOGICAL_PARTITIONS // 2


async def test_a_broker_groups_name_may_be_as_long_as_any(server: MetaServer, tmp_path: Path):
    group = "g" * NAME_LENGTH_MAX
    async with EmbeddedBroker(tmp_path / "1", config=BrokerConfig(group=group), metas=[server.address]):
        assert [view.group for view in await server.meta.call(lambda service: service.brokers())] == [group]
        async with plait.connect(server.address) as client:
            await client.send("s", b"1")


async def test_a_client_of_one_meta_server_finds_the_others(tmp_path: Path):
    url = file_url(str(tmp_path / "shared.db"))
    first, second = MetaServer(url, port=0, alone=False), MetaServer(url, port=0, alone=False)
    await first.start()
    await second.start()
    async with (
        EmbeddedBroker(tmp_path / "1", metas=[first.address, second.address]),
        plait.connect(first.address) as client,
    ):
        await until(lambda: len(first.meta.metas) == 2)
        await client.send("s", b"1")
        await first.stop()
        await client.send("t", b"2")
        assert (await client.admin.route("t")).version > 0
    await second.stop()


async def test_a_failure_that_nobody_thought_of_does_not_end_the_watch_over_the_cluster(
    server: MetaServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    await member(server)
    ticks = 0
    tick = MetaService.tick

    def failing(service: MetaService) -> Any:
        nonlocal ticks
        ticks += 1
        if ticks == 1:
            raise RuntimeError("nobody thought of this")
        return tick(service)

    monkeypatch.setattr(MetaService, "tick", failing)
    await until(lambda: ticks >= 3)
    assert "looking after the cluster failed" in caplog.text


async def test_who_waits_is_told_once_of_groups_that_change_together(
    server: MetaServer, monkeypatch: pytest.MonkeyPatch
):
    """A client that is told asks again at once, with all its groups: not once for each that changed."""
    # Long enough that no notification goes out while the allocations are still being written.
    monkeypatch.setattr(meta_host, "TELL_SECONDS", 60.0)
    await server.meta.call(lambda service: service.register_broker("g1", "b", "plait://127.0.0.1:1"))
    await server.meta.call(lambda service: service.create_subject("s"))
    groups = [("s", f"g{number}", True) for number in range(200)]
    seen = 0

    async def told(client: str, wait: float) -> int:
        nonlocal seen
        beaten = await server.meta.beat(client, groups, seen, wait, leaving=False, affinity=[])
        seen = beaten.seen
        return len([share for share in beaten.shares if share.lps])

    heard = 0
    while heard < len(groups):
        heard += await told("c", 10.0)
    waiting = asyncio.ensure_future(told("c", 10.0))
    await asyncio.sleep(0)
    await server.meta.beat("d", groups, 0, 0.0, leaving=False, affinity=[])
    counts = [await waiting]
    while sum(counts) < len(groups):
        counts.append(await told("c", 10.0))
    # Written in four parts of 64.
    assert len(counts) == 1


FACTS = {"group": "g1", "broker": "b", "address": "plait://127.0.0.1:1", "state": "RW", "epoch": 3, "partitions": []}


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("nonsense:::", "is not of this machine"),
        ("plait://127.0.0.1:99999", "is not understood"),
        ("plait://\x1b[31mred", "is not understood"),
        ("plait://example.com:7450", "is not of this machine"),
    ],
)
async def test_a_broker_is_only_where_clients_may_be_sent(server: MetaServer, address: str, words: str):
    async with Raw(server) as raw:
        await raw.hello()
        with pytest.raises(InvalidArgument, match=words):
            await raw.ask(m.AdminRequest("broker.register", {**FACTS, "address": address}))
        reply = await raw.ask(m.AdminRequest("broker.list"))
    assert not msgspec.msgpack.decode(reply.result)


async def test_a_broker_that_lives_is_not_moved_by_another_process(server: MetaServer):
    async with Raw(server) as raw:
        await raw.hello()
        await raw.ask(m.AdminRequest("broker.register", FACTS))
        await raw.ask(m.AdminRequest("broker.register", FACTS))
        with pytest.raises(InvalidArgument, match=r"is at plait://127.0.0.1:1 and lives"):
            await raw.ask(m.AdminRequest("broker.register", {**FACTS, "address": "plait://127.0.0.1:2"}))
        # One that crashed has a higher epoch.
        await raw.ask(m.AdminRequest("broker.register", {**FACTS, "address": "plait://127.0.0.1:3", "epoch": 4}))
        # One that stopped in order has said so.
        await raw.ask(m.AdminRequest("broker.beat", {"group": "g1", "broker": "b", "state": "NRW"}))
        await raw.ask(m.AdminRequest("broker.register", {**FACTS, "address": "plait://127.0.0.1:4", "epoch": 4}))


async def test_the_database_is_closed_to_other_users(server: MetaServer, tmp_path: Path):
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}  # noqa: ASYNC240
    assert "meta.db" in modes
    assert set(modes.values()) == {0o640}
