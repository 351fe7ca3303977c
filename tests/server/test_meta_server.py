"""A meta server behind its socket: what it says to who asks for something else, and while it stops."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

import plait
from plait.broker import BrokerConfig
from plait.errors import InvalidArgument, ProtocolError, Unavailable
from plait.limits import NAME_LENGTH_MAX
from plait.meta.allocating import Writing
from plait.meta.database import file_url
from plait.server.meta_server import MetaServer
from plait.testing import EmbeddedBroker
from plait.wire import messages as m
from tests.server.raw import Raw, until


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[MetaServer]:
    made = MetaServer(file_url(str(tmp_path / "meta.db")), port=0)
    await made.start()
    yield made
    await made.stop()


async def test_who_asks_while_it_stops_is_told_to_ask_another(server: MetaServer):
    async with Raw(server) as raw:
        await raw.hello()
        await server._meta_handlers.stop()
        for request in (m.FindRoute("s", True), m.Admin("broker.describe"), m.Beat("c", [], 0, 0.0)):
            with pytest.raises(Unavailable, match="this meta server is stopping"):
                await raw.ask(request)


async def test_what_is_a_brokers_is_refused(server: MetaServer):
    async with Raw(server) as raw:
        await raw.hello()
        for request in (m.Route("s"), m.Admin("subject.list"), m.Admin("group.parked")):
            with pytest.raises(InvalidArgument, match="this is a meta server"):
                await raw.ask(request)
        with pytest.raises(InvalidArgument, match=r"subject\.route: .*subject"):
            await raw.ask(m.Admin("subject.route"))


async def test_the_first_word_is_hello(server: MetaServer):
    async with Raw(server) as raw:
        raw.request(m.Admin("broker.describe"))
        assert isinstance(await raw.ending(), ProtocolError)


async def test_a_subject_is_not_put_anywhere_before_all_brokers_were_heard_of(server: MetaServer, tmp_path: Path):
    async with Raw(server) as raw:
        await raw.hello()
        for group in ("g1", "g2"):
            # Nobody is there: what is ordered of it is only late.
            facts = {"group": group, "broker": "b", "address": "plait://127.0.0.1:1", "state": "RW", "epoch": 1}
            await raw.ask(m.Admin("broker.register", {**facts, "partitions": []}))
    await server.stop()
    again = MetaServer(file_url(str(tmp_path / "meta.db")), port=0)
    await again.start()
    try:
        async with Raw(again) as raw, Raw(again) as broker:
            await raw.hello()
            await broker.hello()
            await broker.ask(m.Admin("broker.beat", {"group": "g1", "broker": "b", "state": "RW"}))
            asked = raw.request(m.FindRoute("s", True))
            for _ in range(5):
                # Each is answered after what was asked before it.
                await broker.ask(m.Admin("broker.describe"))
                await broker.ask(m.Admin("subject.names"))
            assert await broker.ask(m.Admin("subject.names")) == m.AdminReply(msgspec.Raw(msgspec.msgpack.encode([])))
            await broker.ask(m.Admin("broker.beat", {"group": "g2", "broker": "b", "state": "RW"}))
            found = (await raw.answer(asked)).message
            assert isinstance(found, m.RouteFound)
            assert sorted(group for _, group in found.partitions) == ["g1", "g2"]
    finally:
        await again.stop()


async def test_allocations_are_written_beside_the_thread_that_answers_heartbeats(
    server: MetaServer, monkeypatch: pytest.MonkeyPatch
):
    threads: dict[Writing, str] = {}
    carry_out = Writing.carry_out

    def noted(writing: Writing) -> None:
        # Who takes it in asks for it once more.
        threads.setdefault(writing, threading.current_thread().name)
        carry_out(writing)

    monkeypatch.setattr(Writing, "carry_out", noted)
    await server.meta.call(lambda service: service.register_broker("g1", "b", "plait://127.0.0.1:1"))
    await server.meta.call(lambda service: service.create_subject("s"))
    told = await server.meta.beat("c", [("s", "g", True)], 0, 0.0, leaving=False, affinity=[])
    while not any(share.lps for share in told.shares):
        told = await server.meta.beat("c", [("s", "g", True)], told.seen, 5.0, leaving=False, affinity=[])
    assert [name.rpartition("_")[0] for name in threads.values()] == ["plait-meta-writer"]


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
