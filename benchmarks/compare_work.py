"""One workload of ``benchmarks.compare``, run with the Plait that is first on the path; prints its CPU seconds.

It imports nothing of the benchmarks, because the measured Plait may be an older one.
"""

from __future__ import annotations

import asyncio
import sys
import time

import uvloop

import plait

BODY = b"x" * 100
KEYS = [f"order-{number}" for number in range(1000)]


async def send_many(client: plait.Client, subject: str, count: int) -> None:
    for start in range(0, count, 50_000):
        await client.send_many(subject, [BODY] * min(50_000, count - start))


async def post_keyed(client: plait.Client, subject: str, count: int) -> None:
    post = client.post
    for start in range(0, count, 1000):
        for key in KEYS[: count - start]:
            post(subject, BODY, key=key)
        await client.flush()


async def send_awaiting(client: plait.Client, subject: str, count: int) -> None:
    async def worker() -> None:
        for _ in range(count // 64):
            await client.send(subject, BODY)

    await asyncio.gather(*[worker() for _ in range(64)])


async def send_alone(client: plait.Client, subject: str, count: int) -> None:
    for _ in range(count):
        await client.send(subject, BODY)


async def fetch_arrow(client: plait.Client, subject: str, count: int) -> None:
    async with client.consumer(subject, group="arrow") as consumer:
        while count > 0:
            batch = await consumer.fetch_arrow(50_000, wait=30)
            count -= batch.table.num_rows
            await batch.ack()


async def ack_messages(client: plait.Client, subject: str, count: int) -> None:
    async with client.consumer(subject, group="messages") as consumer:
        while count > 0:
            batch = await consumer.fetch(5_000, wait=30)
            count -= len(batch)
            for message in batch:
                message.ack()
        await consumer.flush()


WORK = {work.__name__: work for work in (send_many, post_keyed, send_awaiting, send_alone, fetch_arrow, ack_messages)}


async def main(name: str, address: str, subject: str, count: int) -> float:
    async with plait.connect(address) as client:
        await client.send_many("warm-up", [BODY] * 1000)
        began = time.process_time()
        await WORK[name](client, subject, count)
        return time.process_time() - began


if __name__ == "__main__":
    print(uvloop.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))))
