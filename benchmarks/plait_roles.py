"""Plait's producers and consumers in the measurements, each in its own process."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pyarrow as pa
import uvloop

import plait
import plait.sync
from benchmarks.peers.roles import Job, Stopwatch

#: Rows of one ``send_many`` call.
MANY_COUNT = 50_000
#: Rows of one ``fetch_arrow`` call.
ARROW_COUNT = 50_000
FETCH_COUNT = 5_000
GROUP = "bench"


def _run(main: Callable[[plait.Client], Awaitable[None]], job: Job) -> None:
    async def body() -> None:
        async with plait.connect(job.address) as client:
            await main(client)

    uvloop.run(body())


def _bodies(job: Job) -> list[bytes]:
    """Different objects with different bytes, like real messages."""
    source = random.Random(7)
    return [source.randbytes(job.body_size) for _ in range(MANY_COUNT)]


def _send_all(job: Job, stopwatch: Stopwatch, bodies: list[bytes] | pa.Array) -> None:
    async def main(client: plait.Client) -> None:
        await client.send_many("warm-up", bodies)
        with stopwatch:
            for start in range(0, job.count, MANY_COUNT):
                await client.send_many(job.channel, bodies[: job.count - start])

    _run(main, job)


def send_many(job: Job, stopwatch: Stopwatch) -> None:
    _send_all(job, stopwatch, _bodies(job))


def send_column(job: Job, stopwatch: Stopwatch) -> None:
    """Send bodies that are an Arrow array already, like those of a program that reads them from a file or a table."""
    _send_all(job, stopwatch, pa.array(_bodies(job), pa.binary()))


def send_many_blocking(job: Job, stopwatch: Stopwatch) -> None:
    bodies = _bodies(job)
    with plait.sync.connect(job.address) as client:
        client.send_many("warm-up", bodies)
        with stopwatch:
            for start in range(0, job.count, MANY_COUNT):
                client.send_many(job.channel, bodies[: job.count - start])


def fetch_arrow(job: Job, stopwatch: Stopwatch) -> None:
    async def main(client: plait.Client) -> None:
        received = 0
        async with client.consumer(job.channel, group=GROUP + job.variant) as consumer:
            with stopwatch:
                while received < job.count:
                    batch = await consumer.fetch_arrow(ARROW_COUNT, wait=30)
                    if not len(batch):
                        raise TimeoutError(f"only {received} of {job.count} messages arrived")
                    received += batch.table.num_rows
                    await batch.ack()

    _run(main, job)


def post_keyed(job: Job, stopwatch: Stopwatch) -> None:
    async def main(client: plait.Client) -> None:
        keys = [f"order-{number}" for number in range(1000)]
        body = job.body
        await client.send_many("warm-up", [body] * len(keys), keys=keys)
        with stopwatch:
            post = client.post
            for start in range(0, job.count, 1000):
                for key in keys[: job.count - start]:
                    try:
                        post(job.channel, body, key=key)
                    except plait.BufferFull:
                        await client.flush()
                        post(job.channel, body, key=key)
                await asyncio.sleep(0)
            await client.flush()

    _run(main, job)


def ack_messages(job: Job, stopwatch: Stopwatch) -> None:
    async def main(client: plait.Client) -> None:
        received = 0
        async with client.consumer(job.channel, group=GROUP + job.variant) as consumer:
            with stopwatch:
                while received < job.count:
                    batch = await consumer.fetch(FETCH_COUNT, wait=30)
                    if not len(batch):
                        raise TimeoutError(f"only {received} of {job.count} messages arrived")
                    for message in batch:
                        message.ack()
                    received += len(batch)
                await consumer.flush()

    _run(main, job)


def send_awaiting(job: Job, stopwatch: Stopwatch) -> None:
    async def main(client: plait.Client) -> None:
        body = job.body
        await client.send(job.channel, body)

        async def worker(count: int) -> None:
            for _ in range(count):
                await client.send(job.channel, body)

        with stopwatch:
            await asyncio.gather(*[worker(job.count // job.tasks) for _ in range(job.tasks)])

    _run(main, job)


def send_one_by_one(job: Job, stopwatch: Stopwatch) -> None:
    async def main(client: plait.Client) -> None:
        await client.send("warm-up", b"")
        with stopwatch:
            for body in stopwatch.stamped_bodies(job):
                await client.send(job.channel, body)

    _run(main, job)


def handle_one_by_one(job: Job, stopwatch: Stopwatch) -> None:
    async def main(client: plait.Client) -> None:
        async with client.consumer(job.channel, group=GROUP, start="earliest") as consumer:
            with stopwatch:
                async for message in consumer:
                    more = stopwatch.arrived(message.body)
                    message.ack()
                    if not more:
                        break
                    stopwatch.acked()

    _run(main, job)


def request_one_by_one(job: Job, stopwatch: Stopwatch) -> None:
    """Measures from before each request until its reply is there."""

    async def main(client: plait.Client) -> None:
        await client.send("warm-up", b"")
        with stopwatch:
            for body in stopwatch.stamped_bodies(job):
                stopwatch.arrived((await client.request(job.channel, body)).body)

    _run(main, job)


def reply_one_by_one(job: Job, stopwatch: Stopwatch) -> None:
    async def main(client: plait.Client) -> None:
        async with client.consumer(job.channel, group=GROUP, start="earliest") as consumer:
            with stopwatch:
                async for message in consumer:
                    await message.reply(message.body)
                    more = stopwatch.arrived(message.body)
                    message.ack()
                    if not more:
                        break
                    stopwatch.acked()

    _run(main, job)
