"""A meta server behind its socket: what it says to who asks for something else, and while it stops."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from plait.errors import InvalidArgument, ProtocolError, Unavailable
from plait.meta.database import file_url
from plait.server.meta_server import MetaServer
from plait.wire import messages as m
from tests.server.raw import Raw


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
