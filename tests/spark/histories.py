"""Messages in a data directory, and an archive of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

import plait
from plait.broker import BrokerConfig
from plait.server import Server
from plait.spark.archiving import archiver as archiving
from plait.spark.archiving import file_writer as files
from plait.spark.history import lookup as history_module
from plait.spark.history.lookup import History
from plait.storage.disk import RealDisk
from tests.spark.archives import archive_here, commit_next, run_here
from tests.support.broker_node import NO_WATERMARKS, SMALL_SEGMENTS


@asynccontextmanager
async def serving(root: Path, **settings: Any) -> AsyncIterator[plait.Client]:
    server = Server(RealDisk(root), BrokerConfig(**NO_WATERMARKS, **SMALL_SEGMENTS, **settings), port=0)
    await server.start()
    try:
        async with plait.connect(server.address) as client:
            yield client
    finally:
        await server.stop()


async def sent(root: Path, count: int, *, start: int = 0, keys: int = 3) -> None:
    """Send messages n = start, start + 1, ... in frames of a few rows, with every kind of attribute."""
    async with serving(root) as client:
        for number in range(start, start + count):
            await client.send(
                "orders",
                f"body-{number}",
                key=f"order-{number % keys}" if number % 5 else None,
                tags=["even", "größer"] if number % 2 == 0 else None,
                headers={"number": number, "half": number / 2, "odd": number % 2 == 1, "city": "BJS"},
            )
            if number % 7 == 0:
                await client.send("others", b"other", key="order-1")


def thirty_messages(root: Path) -> None:
    """Fill ``root``: ``archive`` with 20 messages, archived in two runs, and ``data`` with these and 10 more."""
    data, place = root / "data", root / "archive"
    asyncio.run(sent(data, 12))
    archive(data, place)
    asyncio.run(sent(data, 8, start=12))
    archive(data, place)
    asyncio.run(sent(data, 10, start=20))


def archive(data: Path, place: Path) -> None:
    """Archive everything up to the end of the log, in this process and with tiny row groups."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(archiving, "run_job", run_here)
        patch.setattr(files, "ROW_GROUP_COUNT", 4)
        archive_here(data, place, now=True)


def copy_segments(data: Path, place: Path) -> None:
    """Copy full segments to the archive, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(archiving, "run_job", run_here)
        archive_here(data, place, raw=True)


def replaced_once(history: History, patch: pytest.MonkeyPatch) -> None:
    """Compact the archive between planning and reading, once."""
    plan_archived = history_module.plan_archived
    planned = []

    def plan_then_replace(*arguments: Any) -> Any:
        pieces = plan_archived(*arguments)
        if not planned:
            planned.extend(pieces)
            place = Path(history.location)
            renamed = []
            for file in history._manifest.files:
                moved = file.path.replace(".parquet", "-new.parquet")
                (place / file.path).rename(place / moved)
                renamed.append(msgspec.structs.replace(file, path=moved))
            commit_next(history._archive, files=renamed)
        return pieces

    patch.setattr(history_module, "plan_archived", plan_then_replace)
