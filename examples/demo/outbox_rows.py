"""An outbox: orders and their messages in one transaction, some rolled back; the handler books each message once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session

import plait
from examples.demo.processes import DemoFailed
from plait.outbox import Dedup, Outbox

SUBJECT = "order.paid"
GROUP = "books"
COUNT = 50
#: Every tenth transaction is rolled back.
ROLLED_BACK_EVERY = 10
PATIENCE_SECONDS = 30.0
POLL_SECONDS = 0.05

metadata = sa.MetaData()
orders = sa.Table("orders", metadata, sa.Column("id", sa.Integer, primary_key=True))
entries = sa.Table(
    "entries", metadata, sa.Column("id", sa.Integer, primary_key=True), sa.Column("order", sa.Integer, nullable=False)
)
outbox = Outbox(metadata)


class Booked(msgspec.Struct, frozen=True):
    """The result."""

    committed: list[int]
    booked: list[int]
    rolled_back: int

    def check(self) -> None:
        """Check that exactly the committed orders were booked, in order."""
        if not self.committed or self.booked != self.committed:
            raise DemoFailed(f"outbox: {len(self.committed)} orders were committed, {len(self.booked)} booked: {self}")


async def show_outbox(address: str, directory: Path) -> Booked:
    """Commit orders with their messages, relay them, and book each one in the transaction of its handler."""
    engine = sa.create_engine(f"sqlite:///{directory / 'orders.db'}")
    # One sync of the disk for each transaction instead of three.
    event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA journal_mode=WAL"))
    app = plait.App(address, group=GROUP)
    dedup = Dedup(engine, metadata)
    metadata.create_all(engine)

    @app.subscriber(SUBJECT, ordered=True, dedup=dedup)
    def book(number: int, session: Session) -> None:
        session.execute(entries.insert().values(order=number))

    def pay() -> None:
        for number in range(COUNT):
            with Session(engine) as session:
                session.execute(orders.insert().values(id=number))
                outbox.add(session, SUBJECT, number, key="till-1")
                if number % ROLLED_BACK_EVERY:
                    session.commit()

    def found() -> Booked:
        with engine.connect() as connection:
            committed = [row.id for row in connection.execute(sa.select(orders).order_by(orders.c.id))]
            booked = [row.order for row in connection.execute(sa.select(entries).order_by(entries.c.id))]
        return Booked(committed, booked, COUNT - len(committed))

    async def work() -> Booked:
        async with plait.connect(address) as client, outbox.relay(client, engine):
            await asyncio.to_thread(pay)
            async with asyncio.timeout(PATIENCE_SECONDS):
                while True:
                    result = await asyncio.to_thread(found)
                    if result.booked == result.committed:
                        return result
                    await asyncio.sleep(POLL_SECONDS)

    running = asyncio.ensure_future(app.run())
    try:
        return await work()
    except TimeoutError:
        raise DemoFailed(f"outbox: not booked within {PATIENCE_SECONDS:g} s: {found()}") from None
    finally:
        app.stop()
        await running
        engine.dispose()
