"""A process is killed at each step of the outbox's protocol: exactly the committed rows arrive, in order per key."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator

import msgspec
import pytest

import plait
from plait.testing import EmbeddedBroker
from tests.outbox.shop import SUBJECT, committed, create, drained, outbox, stored, until
from tests.outbox.victim import LEASE_SECONDS, STEPS, Request

SECONDS = 60.0


class Victims:
    """Starts processes that end themselves."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def run(self, request: Request) -> tuple[int, int]:
        """Returns the process id and the signal that ended or stopped it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(request) + b"\n")
        async with asyncio.timeout(SECONDS):
            number = int(await self._process.stdout.readline())
            return number, -int(await self._process.stdout.readline())


@pytest.fixture
async def victims() -> AsyncIterator[Victims]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.outbox.victim"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield Victims(process)
    finally:
        # Also a forked process that has not reached its step, and has the pipes open.
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def test_exactly_the_committed_rows_arrive_after_kills_at_every_step(url: str, victims: Victims) -> None:
    engine = create(url)
    async with EmbeddedBroker() as broker, plait.connect(broker.address) as client:
        await client.admin.create_subject(SUBJECT, partitions=3, order="strict")
        for seed, step in enumerate(STEPS):
            _, ended = await victims.run(Request(url, broker.address, step, seed=seed))
            assert ended == signal.SIGKILL, step
        async with outbox.relay(client, engine, lease=LEASE_SECONDS):
            await drained(engine)
        assert await stored(client) == committed(engine)
    engine.dispose()


@pytest.mark.parametrize(
    "step", ["after the sequences are written", "while a frame is sent", "after a frame is stored"]
)
async def test_a_leader_that_was_stopped_changes_nothing_when_it_wakes(url: str, step: str, victims: Victims) -> None:
    engine = create(url)
    async with EmbeddedBroker() as broker, plait.connect(broker.address) as client:
        await client.admin.create_subject(SUBJECT, partitions=3, order="strict")
        number, stopped = await victims.run(Request(url, broker.address, step, signal.SIGSTOP))
        assert stopped == signal.SIGSTOP
        async with outbox.relay(client, engine, lease=LEASE_SECONDS) as relay:
            await drained(engine)
            assert relay.leading == 1
            before = sum(map(len, committed(engine).values()))
            os.kill(number, signal.SIGCONT)
            await until(lambda: sum(map(len, committed(engine).values())) > before + 10)
            os.kill(number, signal.SIGKILL)
            await drained(engine)
        assert await stored(client) == committed(engine)
    engine.dispose()
