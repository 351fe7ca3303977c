"""The example of docs/ordered.md: a database that refuses writes of an earlier owner of a key."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
import sqlalchemy as sa

import plait
from plait.testing import EmbeddedBroker
from tests.outbox.shop import until

PAGE = Path(__file__).resolve().parents[2] / "docs" / "ordered.md"


async def test_a_write_under_a_lower_epoch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    [source] = [each for each in examples if "message.epoch" in each]
    assert len(source.split("\n\n\n")[1].splitlines()) <= 10
    async with EmbeddedBroker() as broker, plait.connect(broker.address) as client:
        names: dict[str, object] = {"__name__": "example"}
        exec(source.replace("plait://127.0.0.1:7450", broker.address), names)
        app, engine = names["app"], names["engine"]
        assert isinstance(app, plait.App)
        assert isinstance(engine, sa.Engine)

        def change(statement: str) -> None:
            with engine.begin() as connection:
                connection.execute(sa.text(statement))

        def state() -> tuple[str, int]:
            with engine.connect() as connection:
                found = connection.execute(sa.text("SELECT state, epoch FROM orders")).one()
                return found.state, found.epoch

        change("CREATE TABLE orders (id TEXT PRIMARY KEY, state TEXT, epoch INTEGER)")
        change("INSERT INTO orders VALUES ('order-1', 'new', 0)")
        running = asyncio.ensure_future(app.run())
        await client.send("order.book", "paid", key="order-1")
        await until(lambda: state()[0] == "paid")
        assert state()[1] > 0
        # A later owner of the key has written under its higher epoch.
        change("UPDATE orders SET state = 'sent', epoch = epoch + 1")
        await client.send("order.book", "cancelled", key="order-1")
        async with asyncio.timeout(60):
            while not (letters := await client.admin.dead_letters("order.book", "billing")):  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert "another consumer owns this key" in str(letters[0].reason)
        assert state()[0] == "sent"
        app.stop()
        await running
        engine.dispose()
