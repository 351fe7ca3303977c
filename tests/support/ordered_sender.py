"""A producer process: ``python -m tests.support.ordered_sender ADDRESSES NAME HISTORY SEED RATE``, until SIGTERM.

Posts bursts of messages of a few keys and records the outcome of each. A body is ``name:number``; the numbers of a
producer increase. At the end it waits for the outcome of everything it sent.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import time

import plait
from plait.errors import FlowControl, PlaitError, Unavailable
from plait.testing.history import History, RecordedSend

SUBJECT = "orders"
KEYS = 60
PAUSE_SECONDS = 0.3
#: ``send_seconds`` is the longest wait for a receipt. A send without a receipt has an unknown outcome.
LIMITS = plait.ClientLimits(reconnect_max_seconds=0.5, route_seconds=2.0, request_seconds=3.0, send_seconds=60.0)


async def produce(addresses: str, name: str, path: str, seed: int, rate: float) -> None:
    """Send until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    draw = random.Random(f"{seed} {name}")
    history = History(path)
    waiting: set[asyncio.Task[None]] = set()
    number = 0
    async with await _connected(addresses, name) as client:
        print("ready", flush=True)
        while not stop.is_set():
            count = draw.choice((1, 1, 2, 6))
            for _ in range(count):
                key = f"key-{draw.randrange(KEYS)}"
                record = history.send(key, f"{name}:{number}", time.monotonic(), producer=name)
                try:
                    ticket = client.post(SUBJECT, f"{name}:{number}".encode(), key=key)
                except PlaitError as error:
                    record.failed(error, time.monotonic())
                else:
                    task = asyncio.ensure_future(_settle(ticket, record))
                    waiting.add(task)
                    task.add_done_callback(waiting.discard)
                number += 1
            try:
                async with asyncio.timeout(draw.expovariate(rate / count)):
                    await stop.wait()
            except TimeoutError:
                pass
        if waiting:
            await asyncio.wait(waiting)
    history.close()


async def _connected(addresses: str, name: str) -> plait.Client:
    """A client, as soon as a meta server answers."""
    while True:
        try:
            return await plait.connect(addresses, client_id=name, limits=LIMITS).open()
        except Unavailable as error:
            print(f"{name}: {error}; trying again", file=sys.stderr, flush=True)
            await asyncio.sleep(PAUSE_SECONDS)


async def _settle(ticket: plait.Ticket, record: RecordedSend) -> None:
    try:
        receipt = await ticket
    except FlowControl as error:
        record.failed(error, time.monotonic())
    except PlaitError as error:
        record.unknown(error, time.monotonic())
    else:
        place = None if receipt.sequence is None else (str(receipt.partition), receipt.sequence)
        record.ok(place, time.monotonic())


def main() -> None:
    addresses, name, path, seed, rate = sys.argv[1:]
    asyncio.run(produce(addresses, name, path, int(seed), float(rate)))


if __name__ == "__main__":
    main()
