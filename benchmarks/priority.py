"""How soon a message of a high priority, and the messages of small tenants, are handled while a million others wait."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator

import uvloop

import plait
from benchmarks.plait_server import PlaitServer
from benchmarks.result import Result

MANY_COUNT = 50_000
BODY = b"x" * 100
#: Small tenants, and the messages of each.
TENANTS, FEW = 100, 10
#: Messages of the highest priority that are measured.
URGENT = 20
HANDLING_SECONDS = 0.001


async def _send(client: plait.Client, subject: str, count: int, key: str | None = None) -> None:
    for start in range(0, count, MANY_COUNT):
        some = min(MANY_COUNT, count - start)
        await client.send_many(subject, [BODY] * some, keys=None if key is None else [key] * some)


async def _urgent(address: str, count: int) -> tuple[list[float], int]:
    """The seconds from the send of each urgent message to its handler, and the other messages handled meanwhile."""
    others = 0
    waits: list[float] = []
    begun, ended = asyncio.Event(), asyncio.Event()
    app = plait.App(address, group="workers")

    @app.subscriber("work")
    async def handle(message: plait.Message) -> None:
        nonlocal others
        if message.priority == 9:
            waits.append(time.time() - float(message.body))
            if len(waits) == URGENT:
                ended.set()
        else:
            others += 1
            begun.set()
        await asyncio.sleep(HANDLING_SECONDS)

    async with plait.connect(address) as client:
        await client.admin.create_subject("work", partitions=2)
        await _send(client, "work", count)
        # A partition that never had a priority is read far ahead.
        await client.send_many("work", [b"0"] * 10, priority=1)
        running = asyncio.create_task(app.run())
        await begun.wait()
        before = others
        for _ in range(URGENT):
            await client.send("work", str(time.time()), priority=9)
            await asyncio.sleep(0.05)
        await ended.wait()
        app.stop()
        await running
        return waits, others - before


async def _small_tenants(address: str, count: int) -> float:
    """The seconds from the first pull until the last message of a small tenant, one of which sent them last."""
    left: Counter[str] = Counter({f"small-{number}": FEW for number in range(TENANTS)})
    async with plait.connect(address) as client:
        await _send(client, "tenants", count, "large")
        keys = [key for key in left for _ in range(FEW)]
        await client.send_many("tenants", [BODY] * len(keys), keys=keys)
        async with client.consumer("tenants", "fair", fair_by="key") as consumer:
            began = time.perf_counter()
            while left:
                batch = await consumer.fetch(100)
                for message in batch:
                    if message.key in left:
                        left[message.key] -= 1
                        if not left[message.key]:
                            del left[message.key]
                await batch.ack()
            return time.perf_counter() - began


def bars(smoke: bool) -> Iterator[Result]:
    """One million waiting messages: of priority 0, and of one tenant."""
    count = 5_000 if smoke else 1_000_000
    with PlaitServer() as server:
        waits, others = uvloop.run(_urgent(server.address, count))
        seconds = uvloop.run(_small_tenants(server.address, count))
    worst = max(waits) * 1000
    details = {"waits": waits, "lower": others}
    yield Result("urgent message to handler, 1 M others waiting", worst, 100.0, "ms", at_most=True, details=details)
    yield Result("messages of priority 0 handled meanwhile", others, 1.0, "")
    yield Result("100 small tenants done beside one of 1 M", seconds, 1.0, "s", at_most=True)
