"""Adding messages in transactions, and sending them: through every kind of session, on every database."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import plait
import plait.sync
from plait.client.types import PartitionName
from plait.frame.builder import FrameParts
from plait.outbox import Outbox
from plait.outbox.frame_queues import Exclusion, FrameQueues, OutboxFrame, WaitingRow
from plait.outbox.outbox_limits import OUTBOX_PARTIAL_SUBJECTS
from plait.outbox.relay_store import RelayStore
from plait.testing import EmbeddedBroker
from tests.outbox.shop import SUBJECT, add_event, committed, create, drained, left, metadata, outbox, stored, until


class Routed:
    """A route whose logical partitions are all in partitions of their own."""

    def __init__(self, partitions: list[PartitionName]) -> None:
        self.partitions = partitions
        self.table = np.arange(len(partitions))

    def writable(self, group: str, /) -> bool:
        return True


@pytest.fixture
def engine(url: str) -> Iterator[sa.Engine]:
    made = create(url)
    yield made
    made.dispose()


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[sa.Engine]:
    """A database of which the kind does not matter."""
    made = create(f"sqlite:///{tmp_path / 'shop.db'}")
    yield made
    made.dispose()


@pytest.fixture
async def broker() -> AsyncIterator[EmbeddedBroker]:
    async with EmbeddedBroker() as running:
        yield running


@pytest.fixture
async def client(broker: EmbeddedBroker) -> AsyncIterator[plait.Client]:
    async with plait.connect(broker.address) as connected:
        yield connected


async def test_committed_messages_arrive_and_others_do_not(engine: sa.Engine, client: plait.Client) -> None:
    with Session(engine) as session:
        add_event(session, "order-1", "kept")
        with session.begin_nested() as savepoint:
            add_event(session, "order-2", "rolled back")
            savepoint.rollback()
        session.commit()
        add_event(session, "order-1", "rolled back")
        session.rollback()
    assert left(engine) == 1
    async with outbox.relay(client, engine):
        await drained(engine)
    assert await stored(client) == committed(engine) == {"order-1": ["1 kept"]}


async def test_a_message_has_all_that_a_sent_one_has(engine: sa.Engine, client: plait.Client) -> None:
    body = bytes(range(256)) * 300
    headers: dict[str, str | int | float | bool] = {"city": "Łódź", "amount": 5, "rate": 0.5, "new": True}
    with engine.begin() as connection:
        outbox.add(connection, SUBJECT, body, key="ключ\0", tags=["a", "b"], headers=headers)
        outbox.add(connection, SUBJECT, {"number": 1}, key=7)
        outbox.add(connection, SUBJECT, "no key")
    async with outbox.relay(client, engine):
        await drained(engine)
    async with client.reader(SUBJECT, start="earliest") as reader:
        first, second, third = sorted(await reader.fetch(10, wait=5), key=lambda message: message.message_id.sequence)
    assert (bytes(first.body), first.key, list(first.tags), first.headers) == (body, "ключ\0", ["a", "b"], headers)
    assert (second.body, second.key, third.body, third.key) == (b'{"number":1}', "7", b"no key", None)
    assert first.message_id.producer == third.message_id.producer
    assert third.message_id.sequence - first.message_id.sequence == 2
    assert first.send_time is not None
    assert abs(first.send_time - first.store_time) < timedelta(minutes=1)


@pytest.mark.parametrize("kind", ["session", "registry", "connection"])
async def test_asynchronous_sessions(kind: str, tmp_path: Path, client: plait.Client) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'shop.db'}")
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    async with outbox.relay(client, engine, poll=600):
        if kind == "connection":
            async with engine.begin() as connection:
                await outbox.add(connection, SUBJECT, b"1", key="k")
        else:
            maker = async_sessionmaker(engine)
            session = maker() if kind == "session" else async_scoped_session(maker, scopefunc=lambda: 1)
            await outbox.add(session, SUBJECT, b"1", key="k")
            await session.commit()
            await session.close()
        async with client.consumer(SUBJECT, "g") as consumer:
            assert [message.body for message in await consumer.fetch(1, wait=30)] == [b"1"]
    await engine.dispose()


async def test_asynchronous_sessions_on_postgresql(request: pytest.FixtureRequest, client: plait.Client) -> None:
    url = request.getfixturevalue("postgres").create().replace("postgresql://", "postgresql+psycopg://", 1)
    engine = create_async_engine(url)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    async with outbox.relay(client, engine), AsyncSession(engine) as session:
        async with session.begin():
            await outbox.add(session, SUBJECT, b"1", key="k")
        async with client.consumer(SUBJECT, "g") as consumer:
            assert [message.body for message in await consumer.fetch(1, wait=30)] == [b"1"]
    await engine.dispose()


@pytest.mark.parametrize("kind", ["session", "registry", "connection"])
async def test_a_commit_wakes_the_relay_of_its_process(kind: str, shop: sa.Engine, client: plait.Client) -> None:
    async with outbox.relay(client, shop, poll=600) as relay, client.consumer(SUBJECT, "g") as consumer:
        await until(lambda: relay.leading)
        for number in range(2):
            if kind == "connection":
                with shop.begin() as connection:
                    outbox.add(connection, SUBJECT, str(number))
            else:
                session = Session(shop) if kind == "session" else scoped_session(sessionmaker(shop))
                outbox.add(session, SUBJECT, str(number))
                session.commit()
                session.close()
            assert [message.body for message in await consumer.fetch(1, wait=30)] == [b"%d" % number]


async def test_a_delay_counts_from_the_call(shop: sa.Engine, client: plait.Client) -> None:
    with Session(shop) as session, session.begin():
        outbox.add(session, SUBJECT, b"later", key="k", delay=0.5)
        outbox.add(session, SUBJECT, b"now", key="k")
    async with outbox.relay(client, shop), client.consumer(SUBJECT, "g") as consumer:
        messages = [*await consumer.fetch(1, wait=30), *await consumer.fetch(1, wait=30)]
    assert [message.body for message in messages] == [b"now", b"later"]
    assert messages[1].deliver_at is not None
    assert messages[1].deliver_at - messages[1].send_time >= timedelta(seconds=0.5)


async def test_one_relay_serves_all_shards(tmp_path: Path, client: plait.Client) -> None:
    shards = [create(f"sqlite:///{tmp_path / name}") for name in ("a.db", "b.db", "c.db")]
    for number, engine in enumerate(shards):
        with Session(engine) as session, session.begin():
            add_event(session, f"order-{number}")
    async with outbox.relay(client, shards) as relay:
        for engine in shards:
            await drained(engine)
        assert relay.leading == 3
    assert await stored(client) == {f"order-{number}": ["1 "] for number in range(3)}
    for engine in shards:
        engine.dispose()


async def test_one_of_two_relays_leads_and_the_other_takes_over_at_once(shop: sa.Engine, client: plait.Client) -> None:
    async with outbox.relay(client, shop, lease=600, poll=0.01) as second:
        async with outbox.relay(client, shop, lease=600, poll=0.01) as first:
            await until(lambda: first.leading + second.leading)
            assert first.leading + second.leading == 1
            with Session(shop) as session, session.begin():
                add_event(session, "order-1")
            await drained(shop)
        with Session(shop) as session, session.begin():
            add_event(session, "order-1")
        await drained(shop)
        assert second.leading == 1
    assert await stored(client) == committed(shop)


async def test_rows_are_kept_while_the_broker_is_away(shop: sa.Engine, broker: EmbeddedBroker) -> None:
    limits = plait.ClientLimits(send_seconds=0.2, request_seconds=0.2)
    async with plait.connect(broker.address, limits=limits) as client:
        async with outbox.relay(client, shop, poll=0.01) as relay:
            await client.send(SUBJECT, b"0 ", key="order-0")
            await broker.stop()
            for _ in range(3):
                with Session(shop) as session, session.begin():
                    add_event(session, "order-1")
            await until(lambda: relay.errors)
            assert left(shop) == 3
            await broker.start()
            await drained(shop)
            await until(lambda: not relay.errors)
        assert (await stored(client))["order-1"] == ["1 ", "2 ", "3 "]


async def test_rows_follow_the_route(shop: sa.Engine, client: plait.Client) -> None:
    await client.admin.create_subject(SUBJECT, partitions=1, order="strict")
    async with outbox.relay(client, shop, poll=0.01):
        for partitions in (2, 3, 5):
            for number in range(30):
                with Session(shop) as session, session.begin():
                    add_event(session, f"order-{number % 6}")
            await client.admin.expand_subject(SUBJECT, partitions)
        await drained(shop)
    assert await stored(client) == committed(shop)


def test_a_subject_that_waits_holds_up_no_subject_of_another_case(engine: sa.Engine) -> None:
    store = RelayStore(outbox.table, outbox.relay_table)
    with engine.begin() as connection:
        outbox.add(connection, "shop.Events", b"1")
        whole = [Exclusion("shop.events", [(0, 1024)], True)]
        part = [Exclusion("shop.events", [(0, 10)], True)]
        for excluded, subjects in (whole, []), (part, []), ([], ["shop.events"]):
            assert [row.subject for row in store.waiting(connection, excluded, subjects)] == ["shop.Events"]


def test_a_search_leaves_out_as_many_ranges_as_a_relay_may_name(engine: sa.Engine) -> None:
    places = [PartitionName(f"p{number}", "g1") for number in range(1024)]
    routes, queues = {}, FrameQueues()
    for number in range(OUTBOX_PARTIAL_SUBJECTS):
        subject = f"shop.s{number:02}"
        routes[subject] = Routed([PartitionName(f"{subject}/{each.name}", each.group) for each in places])
        for place in routes[subject].partitions[::2]:
            rows = [WaitingRow(1, subject, None, 1, False)]
            queues.failing.add((place, False))
            queues.add([OutboxFrame((place, False), rows, FrameParts(0, [b""], 0, 1, 1, 1, 0, 0))])
    excluded = queues.exclusions(routes)
    assert len(excluded) == len(routes)
    store = RelayStore(outbox.table, outbox.relay_table)
    with engine.begin() as connection:
        outbox.add(connection, "shop.other", b"1")
        assert [row.subject for row in store.waiting(connection, excluded, [])] == ["shop.other"]


async def test_a_leader_that_fails_seldom_is_back_at_once(
    shop: sa.Engine, client: plait.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures, calls, turn = 12, 0, RelayStore.turn

    def fail(self: RelayStore, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 2 and calls < 2 * failures:
            raise sa.exc.OperationalError("turn", {}, Exception("database is locked"))
        return turn(self, *arguments, **options)

    monkeypatch.setattr(RelayStore, "turn", fail)
    started = asyncio.get_running_loop().time()
    async with outbox.relay(client, shop, lease=0.02, poll=0.001):
        await until(lambda: calls > 2 * failures)
    # With pauses that only grow, it would take 15 seconds.
    assert asyncio.get_running_loop().time() - started < 10.0


def test_a_blocking_client_relays(shop: sa.Engine) -> None:
    with (
        EmbeddedBroker() as broker,
        plait.sync.connect(broker.address) as client,
        outbox.relay(client, shop) as relay,
        client.consumer(SUBJECT, "g") as consumer,
    ):
        with Session(shop) as session, session.begin():
            add_event(session, "order-1")
        [message] = consumer.fetch(1, wait=30)
        assert message.body == b"1 "
        assert relay.leading == 1


def test_migrations_find_nothing_to_change_after_the_tables_are_made(engine: sa.Engine) -> None:
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, metadata) == []
        wanted = {table for table in metadata.tables if table.startswith("shop_outbox")}
        assert wanted == {"shop_outbox", "shop_outbox_relay"}


def test_what_cannot_be_sent_is_refused_before_the_commit(shop: sa.Engine) -> None:
    with Session(shop) as session:
        for arguments, error, message in (
            (("no spaces please", b""), plait.InvalidName, "subject name"),
            ((SUBJECT, object()), plait.CodecError, "cannot be encoded"),
            ((SUBJECT, bytes(17 * 1024 * 1024)), plait.TooLarge, "BODY_SIZE_MAX|over the limit"),
        ):
            with pytest.raises(error, match=message):
                outbox.add(session, *arguments)
        with pytest.raises(plait.InvalidArgument, match="key '' is empty"):
            outbox.add(session, SUBJECT, b"", key="")
        session.commit()
    assert left(shop) == 0


async def test_wrong_arguments_are_named(shop: sa.Engine, client: plait.Client) -> None:
    with pytest.raises(plait.InvalidArgument, match="is no session; pass a SQLAlchemy Session"):
        outbox.add(shop, SUBJECT, b"")  # type: ignore[call-overload]
    with pytest.raises(plait.InvalidArgument, match="is no engine"):
        outbox.relay(client, ["sqlite://"])
    with pytest.raises(plait.InvalidArgument, match="is no client"):
        outbox.relay("plait://127.0.0.1:1", shop)  # type: ignore[arg-type]
    with pytest.raises(plait.InvalidArgument, match="list of engines is empty"):
        outbox.relay(client, [])
    with pytest.raises(plait.InvalidArgument, match="lease must be more than 0, not 0"):
        outbox.relay(client, shop, lease=0)
    with pytest.raises(plait.InvalidArgument, match="with 'async with'"), outbox.relay(client, shop):
        pass


async def test_missing_tables_are_reported_until_they_exist(
    tmp_path: Path, client: plait.Client, caplog: pytest.LogCaptureFixture
) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'new.db'}")
    tables = sa.MetaData()
    fresh = Outbox(tables, "fresh")
    async with fresh.relay(client, engine, poll=0.01):
        await until(lambda: "the outbox cannot be read" in caplog.text)
        tables.create_all(engine)
        with engine.begin() as connection:
            fresh.add(connection, SUBJECT, b"1")
        async with client.consumer(SUBJECT, "g") as consumer:
            assert [message.body for message in await consumer.fetch(1, wait=30)] == [b"1"]
    engine.dispose()


def test_importing_plait_does_not_load_sqlalchemy() -> None:
    code = "import sys, plait, plait.sync; plait.App; assert 'sqlalchemy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
