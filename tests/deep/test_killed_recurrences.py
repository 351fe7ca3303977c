"""Thousands of recurrences on a node that is killed again and again: each firing once, none early."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

import plait
from plait.errors import PlaitError
from tests.support.process import ServerProcess

RECURRENCES = 10_000
KILLS = 20
#: Seconds between two firings of one recurrence.
EVERY = 20.0
#: How long the last firings may take.
SECONDS_MAX = 120.0


async def create(address: str, count: int) -> None:
    """Create the recurrences, each with one of the three kinds of catching up."""
    async with plait.connect(address) as client:
        await client.admin.create_subject("jobs", partitions=4)
        names = iter(range(count))

        async def some() -> None:
            for number in names:
                await client.admin.create_recurrence(
                    f"r{number}",
                    "jobs",
                    b"x",
                    every=EVERY,
                    key=f"k{number}" if number % 2 else None,
                    catch_up=("one", "all", "none")[number % 3],  # type: ignore[arg-type]
                )

        await asyncio.gather(*(some() for _ in range(16)))


class Seen:
    """The firings that a reader has found."""

    def __init__(self) -> None:
        self.dues: dict[tuple[str, int], int] = {}

    async def read(self, address: str) -> int:
        """Read everything until nothing comes, then compare with the recurrences. Returns the number of firings."""
        async with plait.connect(address) as client, client.reader("jobs", start="earliest") as reader:
            async with asyncio.timeout(SECONDS_MAX):
                rows = {row.name: row.firings for row in await client.admin.recurrences()}
                wanted = sum(rows.values())
                while sum(number <= rows[name] for name, number in self.dues) < wanted:
                    for message in await reader.fetch(10_000, wait=1.0):
                        self._note(message)
        return wanted

    def _note(self, message: plait.Message) -> None:
        place = str(message.headers["plait-recurrence"]), int(message.headers["plait-firing"])
        due = int(message.headers["plait-due"])
        assert place not in self.dues, f"{place} is stored twice"
        assert message.store_time.timestamp() * 1e6 + 0.5 >= due, f"{place} is early"
        before = self.dues.get((place[0], place[1] - 1))
        assert before is None or before < due, f"{place} is not after the firing before"
        self.dues[place] = due


def kill_and_compare(data: Path, seed: int, *, count: int, kills: int) -> int:
    draw = random.Random(seed)
    server = ServerProcess(data)
    server.start()
    try:
        asyncio.run(create(server.address, count))
        for _ in range(kills):
            assert not server.ended(draw.uniform(0.05, 4.0)), "the node has ended by itself"
            server.kill()
            server.start()
        return asyncio.run(Seen().read(server.address))
    except PlaitError as error:
        error.add_note(server.log[-4000:])
        raise
    finally:
        server.kill()


@pytest.mark.deep("crash")
@pytest.mark.timeout(1_800)
def test_each_firing_is_stored_once_and_none_early(tmp_path: Path, seed: int) -> None:
    fired = kill_and_compare(tmp_path, seed, count=RECURRENCES, kills=KILLS)
    assert fired > RECURRENCES
