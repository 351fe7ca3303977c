"""Costs that must not grow: with the backlog, with the number of subjects, at a restart, with idle consumers.

CPU per message is compared, not elapsed time: it is the promised figure, and other load disturbs it less.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator

import uvloop

import plait
from benchmarks.plait_server import PlaitServer
from benchmarks.result import Result
from plait.limits import GIB, MIB

BODY = b"x" * 100


# --- backlog ------------------------------------------------------------------------------------


def backlog(smoke: bool) -> Iterator[Result]:
    """Sending to and pulling from a subject with a backlog of 10 M messages, compared with an empty one."""
    waiting, probe, rounds = (20_000, 2_000, 1) if smoke else (10_000_000, 500_000, 5)
    with PlaitServer() as server:

        async def main() -> tuple[float, list[float], list[float]]:
            async with plait.connect(server.address) as client:
                bodies = [BODY] * min(waiting, 100_000)
                for _ in range(waiting // len(bodies)):
                    await client.send_many("full", bodies)
                full, empty = [], []
                async with client.consumer("full", group="slow") as consumer:
                    for number in range(rounds):
                        empty.append(await _cost(client, server, f"empty-{number}", probe, None))
                        full.append(await _cost(client, server, "full", probe, consumer))
                ratios = [a / b for a, b in zip(full, empty, strict=True)]
                return statistics.median(ratios), full, empty

        ratio, full, empty = uvloop.run(main())
        details = {"full_microseconds": full, "empty_microseconds": empty, "backlog": waiting}
        yield Result("CPU per message, 10 M backlog / empty", ratio, 1.1, at_most=True, details=details)


async def _cost(
    client: plait.Client, server: PlaitServer, subject: str, count: int, consumer: plait.Consumer | None
) -> float:
    """Microseconds of the server's CPU for each message sent and pulled."""
    before = server.cpu_seconds()
    await client.send_many(subject, [BODY] * count)
    if consumer is not None:
        await _drain(consumer, count)
    else:
        async with client.consumer(subject, group="slow") as own:
            await _drain(own, count)
    return (server.cpu_seconds() - before) / count * 1e6


async def _drain(consumer: plait.Consumer, count: int) -> None:
    while count > 0:
        batch = await consumer.fetch_arrow(min(count, 50_000), wait=30)
        count -= len(batch)
        await batch.ack()


# --- subjects -----------------------------------------------------------------------------------


def many_subjects(smoke: bool) -> Iterator[Result]:
    """One subject with three groups, alone and among 10,000 others with three groups each."""
    others, probe, rounds = (50, 1_000, 1) if smoke else (10_000, 300_000, 5)

    async def main(crowded: PlaitServer, alone: PlaitServer) -> tuple[list[float], list[float]]:
        async with plait.connect(crowded.address) as many, plait.connect(alone.address) as one:
            for start in range(0, others, 50):
                await asyncio.gather(*[_occupy(many, f"subject-{n}") for n in range(start, min(start + 50, others))])
            costs: tuple[list[float], list[float]] = ([], [])
            for number in range(rounds):
                costs[0].append(await _three_groups(many, crowded, f"probe-{number}", probe))
                costs[1].append(await _three_groups(one, alone, f"probe-{number}", probe))
            return costs

    with PlaitServer() as crowded, PlaitServer() as alone:
        busy, quiet = uvloop.run(main(crowded, alone))
        resident = crowded.resident_bytes()
    ratio = statistics.median(a / b for a, b in zip(busy, quiet, strict=True))
    details = {"crowded_microseconds": busy, "alone_microseconds": quiet, "subjects": others}
    yield Result("CPU per message, 10,000 subjects × 3 groups / one", ratio, 1.2, at_most=True, details=details)
    yield Result("resident with 10,000 subjects × 3 groups", resident / GIB, 1.0, "GiB", at_most=True)


async def _occupy(client: plait.Client, subject: str) -> None:
    await client.send(subject, BODY)
    for group in ("a", "b", "c"):
        async with client.consumer(subject, group=group) as consumer:
            await (await consumer.fetch(1, wait=30)).ack()


async def _three_groups(client: plait.Client, server: PlaitServer, subject: str, count: int) -> float:
    before = server.cpu_seconds()
    await client.send_many(subject, [BODY] * count)
    for group in ("a", "b", "c"):
        async with client.consumer(subject, group=group) as consumer:
            await _drain(consumer, count)
    return (server.cpu_seconds() - before) / count * 1e6


# --- restart ------------------------------------------------------------------------------------


def restart(smoke: bool) -> Iterator[Result]:
    """SIGKILL with 5 GiB of log and a recent checkpoint, then the time to ``ready``."""
    size = 64 * MIB if smoke else 5 * GIB
    body = b"x" * 1000

    async def fill(server: PlaitServer) -> None:
        async with plait.connect(server.address) as client:
            bodies = [body] * 20_000
            for _ in range(size // (len(bodies) * len(body))):
                await client.send_many("restart", bodies)
        # Live traffic until the disk has caught up with the burst and a checkpoint exists.
        for _ in range(1 if smoke else 20):
            await _send_some(server)
            await asyncio.sleep(0.1)

    with PlaitServer() as server:
        uvloop.run(fill(server))
        server.kill()
        times = []
        for _ in range(1 if smoke else 3):
            server.start()
            times.append(server.ready_seconds)
            uvloop.run(_send_some(server))
            server.kill()
        server.start()
    yield Result("restart with 5 GiB of log", max(times), 3.0, "s", at_most=True, details={"seconds": times})


async def _send_some(server: PlaitServer) -> None:
    async with plait.connect(server.address) as client:
        await client.send_many("restart", [BODY] * 100_000)


# --- idle consumers -----------------------------------------------------------------------------


def idle_consumers(smoke: bool) -> Iterator[Result]:
    """2,000 long-polling consumers: their memory at the server, and how soon one of them receives a message."""
    count, wakes = (20, 10) if smoke else (2_000, 300)
    with PlaitServer() as server:
        alone, crowd, resident = uvloop.run(_idle(server, count, wakes))
    details = {"alone_p99_seconds": alone, "crowd_p99_seconds": crowd}
    yield Result("resident for 2,000 idle consumers", resident / MIB, 200, "MiB", at_most=True)
    yield Result("waking one of 2,000, p99 / a lone one", crowd / alone, 3, at_most=True, details=details)


async def _idle(server: PlaitServer, count: int, wakes: int) -> tuple[float, float, int]:
    async with plait.connect(server.address) as sender:
        async with plait.connect(server.address) as lone, lone.consumer("lone", group="g") as consumer:
            alone = await _wake_p99(sender, "lone", consumer, wakes)
        before = server.resident_bytes()
        clients = [plait.connect(server.address) for _ in range(count)]
        consumers: list[plait.Consumer] = []
        try:
            for start in range(0, count, 100):
                await asyncio.gather(*[client.open() for client in clients[start : start + 100]])
            for number, client in enumerate(clients):
                consumer = client.consumer("crowd" if number else "one", group=f"g{number}")
                await consumer.__aenter__()
                consumers.append(consumer)
            resident = server.resident_bytes() - before
            crowd = await _wake_p99(sender, "one", consumers[0], wakes)
        finally:
            await asyncio.gather(*[client.close() for client in clients])
    return alone, crowd, resident


async def _wake_p99(client: plait.Client, subject: str, consumer: plait.Consumer, count: int) -> float:
    times = []
    for _ in range(count):
        waiting = asyncio.ensure_future(consumer.fetch(1, wait=30))
        await asyncio.sleep(0.005)
        started = time.perf_counter()
        await client.send(subject, BODY)
        batch = await waiting
        times.append(time.perf_counter() - started)
        await batch.ack()
    return statistics.quantiles(times, n=100)[98]
