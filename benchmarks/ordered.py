"""Ordered groups compared with shared groups, and how far their consumers scale on one partition."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator

import plait
from benchmarks.plait_server import PlaitServer
from benchmarks.result import Result, median_ratio

BODY = b"x" * 100
BATCH = 50_000
KEYS = 10_000
#: How long a handler waits for each message.
WAIT_SECONDS = 0.01
OWNERS = 16


def throughput(smoke: bool) -> Iterator[Result]:
    """The same backlog by the batch interface: the rate of an ordered group divided by that of a shared group."""
    count = 20_000 if smoke else 2_000_000
    with PlaitServer() as server:
        asyncio.run(_fill(server.address, "backlog", count))
        groups = iter(range(1_000))

        def rate(*, ordered: bool) -> float:
            return asyncio.run(_drain(server.address, f"g{next(groups)}", count, ordered=ordered))

        pairs = 1 if smoke else 5
        ratio, ordered, shared = median_ratio(lambda: rate(ordered=True), lambda: rate(ordered=False), pairs)
    details = {"ordered per second": ordered, "shared per second": shared}
    yield Result("ordered batches, of shared", ratio, 0.5, details=details)


def scaling(smoke: bool) -> Iterator[Result]:
    """One partition, handlers that wait 10 ms: the rate of sixteen ordered consumers divided by that of one."""
    seconds = 1.0 if smoke else 8.0
    with PlaitServer() as server:
        asyncio.run(_fill(server.address, "waiting", 4_000 if smoke else 40_000))
        one = asyncio.run(_handled(server.address, "one", 1, seconds))
        many = asyncio.run(_handled(server.address, "many", OWNERS, seconds))
    details = {"one per second": one, f"{OWNERS} per second": many}
    yield Result(f"{OWNERS} ordered consumers on one partition, of one", many / one, 14.0, details=details)


async def _fill(address: str, subject: str, count: int) -> None:
    async with plait.connect(address) as client:
        await client.admin.create_subject(subject, partitions=1)
        for at in range(0, count, 500_000):
            size = min(500_000, count - at)
            await client.send_many(subject, [BODY] * size, keys=[f"k{(at + n) % KEYS}" for n in range(size)])


async def _drain(address: str, group: str, count: int, *, ordered: bool) -> float:
    async with plait.connect(address) as client, client.consumer("backlog", group, ordered=ordered) as consumer:
        begun, done = time.perf_counter(), 0
        while done < count:
            batch = await consumer.fetch_arrow(BATCH, wait=5.0)
            done += len(batch.table)
            await batch.ack()
        return count / (time.perf_counter() - begun)


async def _handled(address: str, group: str, owners: int, seconds: float) -> float:
    """Messages handled per second, once every consumer has its share."""
    done = 0

    async def handle(consumer: plait.Consumer) -> None:
        nonlocal done
        async for message in consumer:
            await asyncio.sleep(WAIT_SECONDS)
            message.ack()
            done += 1

    async with contextlib.AsyncExitStack() as stack:
        consumers = [await stack.enter_async_context(_member(address, group, number)) for number in range(owners)]
        tasks = [asyncio.ensure_future(handle(consumer)) for consumer in consumers]
        await asyncio.sleep(1.0)
        begun, before = time.perf_counter(), done
        await asyncio.sleep(seconds)
        rate = (done - before) / (time.perf_counter() - begun)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return rate


@contextlib.asynccontextmanager
async def _member(address: str, group: str, number: int) -> AsyncIterator[plait.Consumer]:
    async with (
        plait.connect(address, client_id=f"{group}-{number}") as client,
        client.consumer("waiting", group, ordered=True, prefetch=32) as consumer,
    ):
        yield consumer
