"""A meta server that listens on a socket: requests that it refuses, its two threads, and notifications."""

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
from plait.model.logical_partitions import NumberedRun
from plait.server.meta import meta_host
from plait.server.meta.meta_server import MetaServer
from plait.testing import EmbeddedBroker
from plait.wire import messages as m
from plait.wire.admin.subjects import MATCH_SUBJECTS
from tests.meta.support import subject_names
from tests.server.raw import Raw, until


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[MetaServer]:
    made = MetaServer(file_url(str(tmp_path / "meta.db")), port=0)
    await made.start()
    yield made
    await made.stop()


async def heartbeat(server: MetaServer, seen: int, wait: float) -> tuple[int, list[NumberedRun]]:
    """Send a heartbeat of client c, which is a member of one group. Returns the change number and its LPs."""
    view = await server.meta.heartbeat(m.MemberHeartbeatRequest("c", [("s", "g", True)], seen, wait))
    return view.seen, [run for share in view.shares for run in share.lps]


async def member(server: MetaServer) -> int:
    """Make client c a member that has received its whole share. Returns the change number."""
    await server.meta.call(lambda service: service.register_broker("g1", "b", "plait://127.0.0.1:1"))
    await server.meta.call(lambda service: service.subjects.create("s"))
    seen, runs = await heartbeat(server, 0, 0.0)
    while not runs:
        seen, runs = await heartbeat(server, seen, 5.0)
    return seen


async def test_a_stopping_meta_server_refuses_requests_as_unavailable(server: MetaServer):
    async with Raw(server, "raw") as raw:
        await server._meta_handlers.stop()
        for request in (
            m.RouteRequest("s", True),
            m.AdminRequest("broker.describe"),
            m.MemberHeartbeatRequest("c", [], 0, 0.0),
        ):
            with pytest.raises(Unavailable, match="this meta server is stopping"):
                await raw.ask(request)


async def test_requests_for_a_broker_are_refused(server: MetaServer):
    async with Raw(server, "raw") as raw:
        for request in (m.PartitionNumberRequest("s"), m.AdminRequest("subject.list"), m.AdminRequest("group.parked")):
            with pytest.raises(InvalidArgument, match="this is a meta server"):
                await raw.ask(request)
        with pytest.raises(InvalidArgument, match=r"subject\.route: .*subject"):
            await raw.ask(m.AdminRequest("subject.route"))


async def test_the_first_packet_must_be_a_hello(server: MetaServer):
    async with Raw(server) as raw:
        raw.request(m.AdminRequest("broker.describe"))
        assert isinstance(await raw.ending(), ProtocolError)


async def test_a_subject_is_not_placed_before_every_broker_is_known_to_be_alive_or_lost(
    server: MetaServer, tmp_path: Path
):
    async with Raw(server, "raw") as raw:
        for group in ("g1", "g2"):
            # No broker listens at the address: orders to it stay pending.
            facts = {"group": group, "broker": "b", "address": "plait://127.0.0.1:1", "state": "RW", "epoch": 1}
            await raw.ask(m.AdminRequest("broker.register", {**facts, "partitions": []}))
    await server.stop()
    again = MetaServer(file_url(str(tmp_path / "meta.db")), port=0)
    await again.start()
    try:
        async with Raw(again) as raw, Raw(again) as broker:
            await raw.hello()
            await broker.hello()
            await broker.ask(m.AdminRequest("broker.heartbeat", {"group": "g1", "broker": "b", "state": "RW"}))
            asked = raw.request(m.RouteRequest("s", True))
            for _ in range(5):
                # Replies come in the order of the requests.
                await broker.ask(m.AdminRequest("broker.describe"))
                await broker.ask(MATCH_SUBJECTS.packet(patterns=["*"]))
            assert MATCH_SUBJECTS.result(await broker.ask(MATCH_SUBJECTS.packet(patterns=["*"]))).names == []
            await broker.ask(m.AdminRequest("broker.heartbeat", {"group": "g2", "broker": "b", "state": "RW"}))
            found = (await raw.answer(asked)).message
            assert isinstance(found, m.RouteReply)
            assert sorted(group for _, group in found.partitions) == ["g1", "g2"]
    finally:
        await again.stop()


async def test_the_writer_thread_writes_allocations(server: MetaServer, monkeypatch: pytest.MonkeyPatch):
    threads: dict[AllocationWrite, str] = {}
    carry_out = AllocationWrite.carry_out

    def noted(writing: AllocationWrite) -> None:
        # Called again when the result is applied: keep the first thread.
        threads.setdefault(writing, threading.current_thread().name)
        carry_out(writing)

    monkeypatch.setattr(AllocationWrite, "carry_out", noted)
    await member(server)
    assert [name.rpartition("_")[0] for name in threads.values()] == ["plait-meta-writer"]


@pytest.mark.parametrize("stays", [True, False])
async def test_heartbeats_wait_for_the_clients_own_leave_and_other_decisions_do_not(
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
    leaves_sent = [
        asyncio.ensure_future(server.meta.heartbeat(m.MemberHeartbeatRequest("c", [], 0, 0.0, leaving=True)))
    ]
    await asyncio.to_thread(begun.wait)
    back = asyncio.ensure_future(heartbeat(server, seen, 0.0))
    if not stays:
        leaves_sent.append(
            asyncio.ensure_future(server.meta.heartbeat(m.MemberHeartbeatRequest("c", [], 0, 0.0, leaving=True)))
        )
    # A decision that is not about the client.
    assert await server.meta.call(subject_names) == ["s"]
    assert not back.done()
    answered.set()
    assert {(await each).seen for each in leaves_sent} == {0}
    await back
    assert all(in_time)
    members = (await server.meta.call(lambda service: service.allocator.view("s", "g"))).members
    assert members.keys() == ({"c"} if stays else set())


async def test_a_repeated_heartbeat_does_not_wait_for_decisions(server: MetaServer):
    seen = await member(server)
    begun, answered = threading.Event(), threading.Event()

    def decide(_: MetaService) -> bool:
        begun.set()
        return answered.wait(3)

    deciding = asyncio.ensure_future(server.meta.call(decide))
    await asyncio.to_thread(begun.wait)
    for wait in (0.0, 0.01):
        assert await heartbeat(server, seen, wait) == (seen, [])
    answered.set()
    assert await deciding


@pytest.mark.parametrize("wait", [0.0, 30.0])
async def test_a_repeated_heartbeat_with_a_new_share_does_not_wait_for_decisions(server: MetaServer, wait: float):
    seen = await member(server)
    await server.meta.heartbeat(m.MemberHeartbeatRequest("c2", [("s", "g", True)], 0, 0.0))
    # The new allocation exists when the waiting heartbeat is answered.
    assert (await heartbeat(server, seen, 30.0))[0] > seen
    begun, answered = threading.Event(), threading.Event()

    def decide(_: MetaService) -> bool:
        begun.set()
        return answered.wait(3)

    deciding = asyncio.ensure_future(server.meta.call(decide))
    await asyncio.to_thread(begun.wait)
    async with Raw(server, "raw") as raw:
        reply = await raw.ask(m.MemberHeartbeatRequest("c", [("s", "g", True)], seen, wait))
    answered.set()
    assert await deciding
    assert isinstance(reply, m.MemberHeartbeatReply)
    assert reply.seen > seen
    assert sum(end - first for _, _, _, runs in reply.members for first, end, _ in runs) == LOGICAL_PARTITIONS // 2


async def test_a_broker_group_name_may_have_the_maximum_length(server: MetaServer, tmp_path: Path):
    group = "g" * NAME_LENGTH_MAX
    async with EmbeddedBroker(tmp_path / "1", config=BrokerConfig(group=group), metas=[server.address]):
        assert [view.group for view in await server.meta.call(lambda service: service.brokers.views())] == [group]
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


async def test_the_tick_loop_continues_after_an_unexpected_error(
    server: MetaServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    await member(server)
    ticks = 0
    tick = MetaService.tick

    def failing(service: MetaService) -> Any:
        nonlocal ticks
        ticks += 1
        if ticks == 1:
            raise RuntimeError("unexpected")
        return tick(service)

    monkeypatch.setattr(MetaService, "tick", failing)
    await until(lambda: ticks >= 3)
    assert "a tick of the meta server failed" in caplog.text


async def test_a_client_is_notified_once_of_groups_that_change_together(
    server: MetaServer, monkeypatch: pytest.MonkeyPatch
):
    """A notified client sends a heartbeat with all its groups, so one notification per changed group is too many."""
    # Long enough that no notification goes out while the allocations are still being written.
    monkeypatch.setattr(meta_host, "NOTIFY_SECONDS", 60.0)
    await server.meta.call(lambda service: service.register_broker("g1", "b", "plait://127.0.0.1:1"))
    await server.meta.call(lambda service: service.subjects.create("s"))
    groups = [("s", f"g{number}", True) for number in range(200)]
    seen = 0

    async def changed_shares(client: str, wait: float) -> int:
        nonlocal seen
        view = await server.meta.heartbeat(m.MemberHeartbeatRequest(client, groups, seen, wait))
        seen = view.seen
        return len([share for share in view.shares if share.lps])

    received = 0
    while received < len(groups):
        received += await changed_shares("c", 10.0)
    waiting = asyncio.ensure_future(changed_shares("c", 10.0))
    await asyncio.sleep(0)
    await server.meta.heartbeat(m.MemberHeartbeatRequest("d", groups, 0, 0.0))
    counts = [await waiting]
    while sum(counts) < len(groups):
        counts.append(await changed_shares("c", 10.0))
    # The allocations are written in four parts of 64 groups.
    assert len(counts) == 1


FACTS = {"group": "g1", "broker": "b", "address": "plait://127.0.0.1:1", "state": "RW", "epoch": 3, "partitions": []}


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("nonsense:::", "is not on this machine"),
        ("plait://127.0.0.1:99999", "is not understood"),
        ("plait://\x1b[31mred", "is not understood"),
        ("plait://example.com:7450", "is not on this machine"),
    ],
)
async def test_a_broker_address_must_be_on_this_machine(server: MetaServer, address: str, expected: str):
    async with Raw(server, "raw") as raw:
        with pytest.raises(InvalidArgument, match=expected):
            await raw.ask(m.AdminRequest("broker.register", {**FACTS, "address": address}))
        reply = await raw.ask(m.AdminRequest("broker.list"))
    assert not msgspec.msgpack.decode(reply.result)


async def test_another_process_cannot_take_the_group_name_of_a_live_broker(server: MetaServer):
    async with Raw(server, "raw") as raw:
        await raw.ask(m.AdminRequest("broker.register", FACTS))
        await raw.ask(m.AdminRequest("broker.register", FACTS))
        with pytest.raises(InvalidArgument, match=r"is alive at plait://127.0.0.1:1"):
            await raw.ask(m.AdminRequest("broker.register", {**FACTS, "address": "plait://127.0.0.1:2"}))
        # A restart after a crash has a higher epoch.
        await raw.ask(m.AdminRequest("broker.register", {**FACTS, "address": "plait://127.0.0.1:3", "epoch": 4}))
        # A clean stop reports the state NRW.
        await raw.ask(m.AdminRequest("broker.heartbeat", {"group": "g1", "broker": "b", "state": "NRW"}))
        await raw.ask(m.AdminRequest("broker.register", {**FACTS, "address": "plait://127.0.0.1:4", "epoch": 4}))


async def test_the_database_is_closed_to_other_users(server: MetaServer, tmp_path: Path):
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}  # noqa: ASYNC240
    assert "meta.db" in modes
    assert set(modes.values()) == {0o640}
