"""Processes that a test kills: a broker with short check intervals, and a producer that stops at a step.

- ``broker DIRECTORY PORT`` prints ``ready ADDRESS``.
- ``dies ADDRESS DATABASE NUMBER STEP`` runs a transaction with two messages beside a local transaction in an SQLite
  database, and ends by SIGKILL at the step.
- ``waits ADDRESS DATABASE FIRST`` runs a transaction for each step, numbered from ``FIRST``; each waits at its step.
  When all wait it prints ``waiting``; after a line from standard input it finishes them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

import plait
from plait.limits import ServerLimits
from plait.testing import EmbeddedBroker
from plait.testing.embedded_broker import TEST_CONFIG
from tests.client.support import EAGER

#: The steps of a producer, in order.
STEPS = ("opened", "first", "second", "local", "committing", "committed")
SUBJECTS = ("orders", "stock")


async def broker(directory: str, port: str) -> None:
    limits = ServerLimits(
        log_busy_seconds=float("inf"),
        queue_head_seconds=float("inf"),
        transaction_check_first_seconds=0.3,
        transaction_check_seconds=0.2,
        transaction_checks=10_000,
    )
    running = EmbeddedBroker(Path(directory), config=msgspec.structs.replace(TEST_CONFIG, limits=limits))
    running._port = int(port)
    async with running:
        print(f"ready {running.address}", flush=True)
        await asyncio.Event().wait()


async def producer(
    address: str, local: sqlite3.Connection, number: str, stop: str, at_step: Callable[[], Awaitable[None]]
) -> None:
    async def step(name: str) -> None:
        if stop == name:
            await at_step()

    async with plait.connect(address, limits=EAGER) as client, client.transaction("shop") as tx:
        await step("opened")
        await tx.send(SUBJECTS[0], number.encode(), key=number)
        await step("first")
        await tx.send(SUBJECTS[1], number.encode(), key=number)
        await step("second")
        local.execute("INSERT INTO deals VALUES (?, ?)", (tx.id, int(number)))
        await step("local")
        committing = asyncio.ensure_future(tx.commit())
        if stop == "committing":
            for _ in range(3):
                await asyncio.sleep(0)
            await step("committing")
        await committing
        await step("committed")


async def dies(address: str, database: str, number: str, stop: str) -> None:
    async def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    await producer(address, sqlite3.connect(database, isolation_level=None), number, stop, die)


async def waits(address: str, database: str, first: str) -> None:
    waiting = asyncio.Semaphore(0)
    go_on = asyncio.Event()

    async def wait() -> None:
        waiting.release()
        await go_on.wait()

    local = sqlite3.connect(database, isolation_level=None)
    producers = [
        asyncio.ensure_future(producer(address, local, str(int(first) + number), step, wait))
        for number, step in enumerate(STEPS)
    ]
    for _ in STEPS:
        await waiting.acquire()
    print("waiting", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    go_on.set()
    await asyncio.gather(*producers)
    print("done", flush=True)


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    asyncio.run({"broker": broker, "dies": dies, "waits": waits}[role](*arguments))
