"""An application with an outbox: orders in a table, and a message for each event of an order.

``orders`` is the truth: a row is inserted in the same transaction as its message.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session

import plait
from plait.outbox import Outbox

SUBJECT = "shop.order"
metadata = sa.MetaData()
orders = sa.Table(
    "orders",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("key", sa.String(50), nullable=False),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("note", sa.String(100), nullable=False),
)
#: One row for each key; a transaction locks it before it adds events of the key.
locks = sa.Table(
    "locks", metadata, sa.Column("key", sa.String(50), primary_key=True), sa.Column("last", sa.Integer, nullable=False)
)
outbox = Outbox(metadata, "shop_outbox")
KEYS = [f"order-{number}" for number in range(6)]
PATIENCE_SECONDS = 60.0


def engine_of(url: str) -> sa.Engine:
    engine = sa.create_engine(url, pool_pre_ping=True)
    if engine.dialect.name == "sqlite":
        # The data does not outlive the test, and a killed process loses nothing that it has written.
        event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous=OFF"))
    return engine


def create(url: str) -> sa.Engine:
    """The engine of a database with empty tables."""
    engine = engine_of(url)
    metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(locks.insert(), [{"key": key, "last": 0} for key in KEYS])
    return engine


def add_event(session: Session, key: str, note: str = "") -> None:
    """Add the next event of an order, and its message."""
    session.execute(locks.update().where(locks.c.key == key).values(last=locks.c.last + 1))
    number = session.execute(sa.select(locks.c.last).where(locks.c.key == key)).scalar_one()
    session.execute(orders.insert().values(key=key, number=number, note=note))
    outbox.add(session, SUBJECT, f"{number} {note}", key=key, headers={"number": number})


def committed(engine: sa.Engine) -> dict[str, list[str]]:
    """Key → the bodies of its committed messages, in order."""
    found = defaultdict(list)
    with engine.connect() as connection:
        for row in connection.execute(sa.select(orders).order_by(orders.c.key, orders.c.number)):
            found[row.key].append(f"{row.number} {row.note}")
    return dict(found)


def left(engine: sa.Engine) -> int:
    """How many rows are in the outbox."""
    with engine.connect() as connection:
        return connection.execute(sa.select(sa.func.count()).select_from(outbox.table)).scalar_one()


async def until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds, which is checked in a thread."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await asyncio.to_thread(_holds, condition):
            pass


def _holds(condition: Callable[[], object]) -> bool:
    """Check the condition, and wait a moment if it does not hold."""
    return bool(condition()) or threading.Event().wait(0.01)


async def drained(engine: sa.Engine) -> None:
    """Wait until the relay has deleted all rows."""
    await until(lambda: not left(engine))


async def stored(client: plait.Client, subject: str = SUBJECT) -> dict[str, list[str]]:
    """Key → the bodies of the stored messages, in the order of a partition."""
    found = defaultdict(list)
    async with client.reader(subject, start="earliest") as reader:
        while batch := await reader.fetch(10_000, wait=0.5):
            for message in batch:
                found[message.key or ""].append(message.body.decode())
    return dict(found)
