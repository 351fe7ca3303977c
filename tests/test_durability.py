"""Processes are killed under load, and every promise holds; tests/deep/test_long_runs.py runs longer.

- A server: acknowledged messages are stored exactly once and unchanged.
- A server with delayed messages: none is early, lost or duplicated, and none that was cancelled arrives.
- A cluster: every key stays in order.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import plait
from plait.errors import NotScheduled, Timeout, Unavailable
from plait.limits import FRAME_SIZE_MAX, KIB
from tests.support.durability import Load
from tests.support.ordered_chaos import FAULTS, Chaos, script
from tests.support.process import ServerProcess

FLUSHES = ("async", "sync")
#: Frequent checkpoints and new segments, so that kills hit partly written ones.
TIGHT: dict[str, Any] = {
    "message_segment_size": FRAME_SIZE_MAX,
    "action_segment_size": 64 * KIB,
    "checkpoint_seconds": 0.0,
    "checkpoint_bytes": 64 * KIB,
}


@pytest.mark.parametrize(("settings", "count"), [(None, 3), (TIGHT, 2)], ids=["serve", "tight"])
async def test_a_killed_server_keeps_its_promises(
    tmp_path: Path, seed: int, settings: dict[str, Any] | None, count: int
):
    with ServerProcess(tmp_path / "data", settings=settings) as server:
        server.start()
        async with Load(server, random.Random(seed)) as load:
            for number in range(count):
                await load.cycle(FLUSHES[(number + 1) % 2])
        assert load.restarts == count
        assert all(load.acknowledged.values())


COUNT = 300
KILLS = 3
PATIENCE_SECONDS = 180.0
LIMITS = plait.ClientLimits(reconnect_max_seconds=0.1, send_seconds=PATIENCE_SECONDS)


class Books:
    """The requests of the test and their replies."""

    def __init__(self) -> None:
        self.scheduled: dict[bytes, plait.Receipt] = {}
        self.cancelled: set[bytes] = set()
        #: Messages without a reply to their cancellation, because the server was killed: they may be cancelled.
        self.unknown: set[bytes] = set()


async def schedule(client: plait.Client, books: Books, rng: random.Random, name: str) -> None:
    """Send delayed messages with ``send``, ``post`` and ``send_many``. A kill only delays them."""
    bodies = [f"{name}.{n}".encode() for n in range(COUNT)]
    waits = [rng.uniform(0.05, 3.0) for _ in bodies]
    third = COUNT // 3
    receipts = await asyncio.gather(
        *(client.send("s", body, key="k", delay=wait) for body, wait in zip(bodies[:third], waits, strict=False))
    )
    tickets = [client.post("s", bodies[n], delay=waits[n]) for n in range(third, 2 * third)]
    many = await client.send_many("s", bodies[2 * third :], delay=waits[2 * third :])
    receipts += [await ticket for ticket in tickets]
    books.scheduled.update(zip(bodies, [*receipts, *many], strict=True))


async def change(client: plait.Client, books: Books, rng: random.Random, some: list[bytes]) -> None:
    """Cancel some messages and reschedule others; some are delivered before."""
    for body in some:
        receipt = books.scheduled[body]
        try:
            if rng.random() < 0.7:
                if await client.cancel(receipt):
                    books.cancelled.add(body)
            else:
                books.scheduled[body] = await client.reschedule(receipt, delay=rng.uniform(0.05, 2.0))
        except NotScheduled:
            pass
        except (Timeout, Unavailable):
            books.unknown.add(body)


@pytest.mark.parametrize("settings", [None, TIGHT], ids=["serve", "tight"])
async def test_a_killed_server_keeps_its_schedule(tmp_path: Path, seed: int, settings: dict[str, Any] | None) -> None:
    rng = random.Random(seed)
    books = Books()
    with ServerProcess(tmp_path / "data", settings=settings) as server:
        server.start()
        async with plait.connect(server.address, limits=LIMITS) as client:
            await client.send("s", b"first", delay=0.01)
            for number in range(KILLS):
                sending = asyncio.create_task(schedule(client, books, rng, f"life-{number}"))
                if number % 2:
                    # Kill the server while it receives the messages.
                    await asyncio.sleep(0)
                else:
                    await sending
                    some = rng.sample(sorted(books.scheduled), COUNT // 3)
                    await change(client, books, rng, some)
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)
                async with asyncio.timeout(PATIENCE_SECONDS):
                    await sending
            # Change some of all messages, delivered or not.
            await change(client, books, rng, rng.sample(sorted(books.scheduled), COUNT // 5))
            found = await everything(client, books)
    assert max(found.values()) == 1
    assert not books.cancelled & found.keys()
    assert found.keys() - {b"first"} <= books.scheduled.keys()
    assert books.scheduled.keys() - books.cancelled - books.unknown <= found.keys()
    assert len(books.cancelled) > COUNT // 20


async def everything(client: plait.Client, books: Books) -> Counter[bytes]:
    """Read the subject until no message is delayed, and check that none is early."""
    found: Counter[bytes] = Counter()
    async with client.reader("s", start="earliest") as reader, asyncio.timeout(PATIENCE_SECONDS):
        waiting = True
        while waiting:
            waiting = sum(count.count for count in await client.admin.schedule_counts("s")) > 0
            while messages := await reader.fetch(1000, wait=0.1):
                for message in messages:
                    found[message.body] += 1
                    assert message.deliver_at is not None
                    assert message.store_time >= message.deliver_at
                    if message.body in books.scheduled and message.body not in books.unknown:
                        assert message.message_id == books.scheduled[message.body].message_id
                        assert message.deliver_at == books.scheduled[message.body].deliver_at
    return found


@pytest.mark.timeout(900)
async def test_keys_stay_in_order_while_every_kind_of_process_fails(tmp_path: Path, seed: int):
    chaos = Chaos(tmp_path, seed, seconds=15.0)
    await chaos.run()
    assert chaos.sink.handovers > 0


def test_a_script_has_every_kind_of_fault_and_is_determined_by_its_seed():
    faults = script(7, 15.0)
    assert faults == script(7, 15.0) != script(8, 15.0)
    assert {fault.kind for fault in faults} == set(FAULTS)
    assert [fault.at for fault in faults] == sorted(fault.at for fault in faults)
    assert len(script(7, 45.0)) == 3 * len(faults)
