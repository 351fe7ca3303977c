"""Runs the transactions of a relay on an engine without blocking the loop.

A blocking ``Engine`` is used in one thread of its own, an ``AsyncEngine`` on the loop. Transactions are READ COMMITTED
where the database has isolation levels: under a stricter level the relay would lock rows that users insert.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from plait.errors import InvalidArgument

T = TypeVar("T")


class RelayTransactions:
    """One engine, and how to run a transaction on it."""

    def __init__(self, engine: Any) -> None:
        if not isinstance(engine, sa.Engine | AsyncEngine):
            raise InvalidArgument(f"{engine!r} is no engine; pass a SQLAlchemy Engine or AsyncEngine")
        if engine.dialect.name != "sqlite":
            engine = engine.execution_options(isolation_level="READ COMMITTED")
        #: The address of the database without its password, for messages.
        self.name = engine.url.render_as_string(hide_password=True)
        self._engine = engine
        self._pool = ThreadPoolExecutor(1, "plait-outbox") if isinstance(engine, sa.Engine) else None

    async def run(self, work: Callable[[sa.Connection], T]) -> T:
        """Run ``work`` in a transaction and commit it. A cancelled caller waits for a thread that runs it."""
        if self._pool is None:
            assert isinstance(self._engine, AsyncEngine)
            async with self._engine.begin() as connection:
                return await connection.run_sync(work)
        running = asyncio.get_running_loop().run_in_executor(self._pool, self._run, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise

    def _run(self, work: Callable[[sa.Connection], T]) -> T:
        assert isinstance(self._engine, sa.Engine)
        with self._engine.begin() as connection:
            return work(connection)

    def close(self) -> None:
        """End the thread."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)
