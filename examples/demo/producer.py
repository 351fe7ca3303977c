"""A producer process: ``python -m examples.demo.producer ADDRESS SUBJECT NUMBER ORDERS SECONDS``.

Sends the events of its orders, spread over about SECONDS seconds, and prints how many are acknowledged so far.
"""

from __future__ import annotations

import asyncio
import sys
import time
from itertools import islice

import msgspec

import plait
from examples.demo.orders import STEPS, events

#: Events that are posted before the producer waits for their receipts.
CHUNK = 500


async def produce(address: str, subject: str, number: int, orders: int, seconds: float) -> None:
    """Send all events; returns when all are acknowledged."""
    total = orders * len(STEPS)
    source = events(number, orders)
    encode = msgspec.json.Encoder().encode
    acknowledged = 0
    begun = time.monotonic()
    async with plait.connect(address) as client:
        while chunk := list(islice(source, CHUNK)):
            for event in chunk:
                client.post(subject, encode(event), key=event.order, tags=[event.step])
            await client.flush()
            acknowledged += len(chunk)
            print(acknowledged, flush=True)
            ahead = begun + seconds * acknowledged / total - time.monotonic()
            await asyncio.sleep(max(ahead, 0.0))


def main() -> None:
    address, subject, number, orders, seconds = sys.argv[1:]
    asyncio.run(produce(address, subject, int(number), int(orders), float(seconds)))


if __name__ == "__main__":
    main()
