"""``Dedup``: a message that is delivered again has no second effect, on every database and in every kind of handler."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import plait
from plait.outbox import Dedup
from plait.outbox import dedup as module
from plait.testing import EmbeddedBroker
from tests.outbox.shop import engine_of, until

SUBJECT = "shop.paid"
GROUP = "books"
metadata = sa.MetaData()
entries = sa.Table(
    "entries", metadata, sa.Column("id", sa.Integer, primary_key=True), sa.Column("body", sa.String(50), nullable=False)
)


@pytest.fixture
def engine(url: str) -> Iterator[sa.Engine]:
    made = engine_of(url)
    metadata.create_all(made)
    yield made
    made.dispose()


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[sa.Engine]:
    made = engine_of(f"sqlite:///{tmp_path / 'books.db'}")
    metadata.create_all(made)
    yield made
    made.dispose()


@pytest.fixture
async def broker() -> AsyncIterator[EmbeddedBroker]:
    async with EmbeddedBroker() as running:
        yield running


def dedup_of(engine: Any, **options: Any) -> Dedup:
    """A ``Dedup`` whose table exists."""
    tables = sa.MetaData()
    made = Dedup(engine, tables, **options)
    if isinstance(engine, sa.Engine):
        tables.create_all(engine)
    return made


def written(engine: sa.Engine) -> list[str]:
    with engine.connect() as connection:
        return [row.body for row in connection.execute(sa.select(entries).order_by(entries.c.id))]


async def twice(app: plait.App, broker: EmbeddedBroker, handled: Callable[[], int], count: int) -> None:
    """Run the app, then reset its group and run it again, until it has been offered each message twice."""
    async with plait.connect(broker.address) as client:
        await client.send_many(SUBJECT, [b"%d" % number for number in range(count)], keys=["k"] * count)
        for _ in range(2):
            running = asyncio.ensure_future(app.run())
            await until(lambda: handled() >= count)

            async with asyncio.timeout(60):
                while (info := await client.admin.group(SUBJECT, GROUP)).lag or info.unacked:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            app.stop()
            await running
            await client.admin.rewind_group(SUBJECT, GROUP, "earliest")


@pytest.mark.parametrize(("batch", "ordered"), [(None, False), (3, False), (None, True)])
async def test_a_message_that_comes_again_changes_nothing(
    engine: sa.Engine, broker: EmbeddedBroker, batch: int | None, ordered: bool
) -> None:
    app = plait.App(broker.address, group=GROUP)
    attempts: list[int] = []

    def write(session: Session, bodies: list[bytes], attempt: int) -> None:
        session.execute(entries.insert(), [{"body": body.decode()} for body in bodies])
        attempts.append(attempt)
        if attempt == 1 and b"2" in bodies:
            raise ValueError("the first attempt fails after its change")

    options: dict[str, Any] = {"dedup": dedup_of(engine), "ordered": ordered, "retry": plait.Retry.constant(0.01)}
    if batch is None:

        @app.subscriber(SUBJECT, **options)
        def on_paid(body: bytes, session: Session, message: plait.Message) -> None:
            write(session, [body], message.attempt)

    else:

        @app.subscriber(SUBJECT, batch=batch, **options)
        def on_many(session: Session, bodies: list[bytes], messages: list[plait.Message]) -> None:
            assert [message.body for message in messages] == bodies
            write(session, bodies, max(message.attempt for message in messages))

    await twice(app, broker, lambda: len(written(engine)), 7)
    assert sorted(written(engine)) == [str(number) for number in range(7)]
    assert any(attempt > 1 for attempt in attempts)


@pytest.mark.parametrize("kind", [AsyncSession, AsyncConnection])
async def test_asynchronous_handlers(tmp_path: Path, shop: sa.Engine, broker: EmbeddedBroker, kind: type) -> None:
    dedup_of(shop)
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'books.db'}")
    app = plait.App(broker.address, group=GROUP)

    async def on_paid(transaction: Any, body: bytes) -> None:
        await transaction.execute(entries.insert().values(body=body.decode()))

    on_paid.__annotations__["transaction"] = kind
    app.subscriber(SUBJECT, dedup=dedup_of(engine))(on_paid)
    await twice(app, broker, lambda: len(written(shop)), 5)
    assert sorted(written(shop)) == ["0", "1", "2", "3", "4"]
    await engine.dispose()


def test_two_consumers_with_one_message_have_one_effect(engine: sa.Engine) -> None:
    """The second one waits for the transaction of the first, and handles the message only if that is rolled back."""
    run, _ = dedup_of(engine).runner("h", is_async=False, annotations=[sa.Connection])
    messages: list[Any] = [delivered(1), delivered(2)]
    begun, calls = threading.Event(), []

    def first(connection: sa.Connection, new: list[int]) -> None:
        connection.execute(entries.insert().values(body="first"))
        begun.set()
        calls.append(("first", new))
        threads[1].start()
        threads[1].join(0.2)
        assert calls == [("first", [0, 1])]

    def second(connection: sa.Connection, new: list[int]) -> None:
        calls.append(("second", new))

    threads = [
        threading.Thread(target=run, args=(GROUP, messages, first)),
        threading.Thread(target=run, args=(GROUP, [*messages, delivered(3)], second)),
    ]
    threads[0].start()
    assert begun.wait(60)
    for thread in threads:
        thread.join(60)
    assert (calls, written(engine)) == ([("first", [0, 1]), ("second", [2])], ["first"])


class _MessageId:
    """A message of which only the id matters."""

    def __init__(self, sequence: int) -> None:
        self.message_id = plait.MessageId(7, sequence)


def delivered(sequence: int) -> Any:
    return _MessageId(sequence)


def test_groups_are_independent_and_can_forget(engine: sa.Engine) -> None:
    dedup = dedup_of(engine)
    run, _ = dedup.runner("h", is_async=False, annotations=[sa.Connection])
    calls: list[str] = []
    for group in ("a", "A", "a"):
        run(group, [delivered(1)], lambda *_, group=group: calls.append(group))
    assert calls == ["a", "A"]
    with engine.begin() as connection:
        assert dedup.forget(connection, "a") == 1
    run("a", [delivered(1)], lambda *_: calls.append("again"))
    assert calls == ["a", "A", "again"]


def test_a_message_that_is_twice_in_a_batch_is_handled_once(engine: sa.Engine) -> None:
    dedup = dedup_of(engine)
    run, _ = dedup.runner("h", is_async=False, annotations=[sa.Connection])
    calls: list[list[int]] = []
    run(GROUP, [delivered(1), delivered(2), delivered(1)], lambda _, new: calls.append(new))
    run(GROUP, [delivered(2), delivered(3), delivered(3)], lambda _, new: calls.append(new))
    assert calls == [[0, 1], [1]]


def test_old_ids_are_deleted(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DEDUP_CLEAN_EVERY", 10)
    dedup = dedup_of(engine, keep=25)
    run, _ = dedup.runner("h", is_async=False, annotations=[Session])
    for number in range(0, 100, 2):
        run(GROUP, [delivered(number), delivered(number + 1)], lambda *_: None)
    with engine.connect() as connection:
        kept = [row.sequence for row in connection.execute(sa.select(dedup.table).order_by(dedup.table.c.id))]
    assert kept == list(range(100 - len(kept), 100))
    assert 25 <= len(kept) <= 35


def test_what_does_not_fit_is_refused_when_the_handler_is_declared(shop: sa.Engine) -> None:
    app, dedup = plait.App(group=GROUP), dedup_of(shop)

    def without(body: bytes) -> None: ...
    async def asynchronous(body: bytes, session: AsyncSession) -> None: ...
    def fits(body: bytes, session: Session) -> None: ...

    with pytest.raises(plait.InvalidArgument, match=r"without takes no transaction; .* Session or Connection"):
        app.subscriber(SUBJECT, dedup=dedup)(without)
    with pytest.raises(plait.InvalidArgument, match="has an Engine; give it an AsyncEngine"):
        app.subscriber(SUBJECT, dedup=dedup)(asynchronous)
    engine: AsyncEngine = create_async_engine("sqlite+aiosqlite://")
    with pytest.raises(plait.InvalidArgument, match="has an AsyncEngine; give it an Engine"):
        app.subscriber(SUBJECT, dedup=dedup_of(engine))(fits)
    with pytest.raises(plait.InvalidArgument, match="a broadcast has none"):
        app.subscriber(SUBJECT, broadcast=True, dedup=dedup)(fits)
    with pytest.raises(plait.InvalidArgument, match="keep must be a number of message ids from 1, not 0"):
        Dedup(shop, sa.MetaData(), keep=0)
    with pytest.raises(plait.InvalidArgument, match="is no engine"):
        Dedup("sqlite://", sa.MetaData())  # type: ignore[arg-type]
