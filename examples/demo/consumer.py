"""A consumer process: ``python -m examples.demo.consumer ADDRESS GROUP NAME``, until SIGTERM.

Writes a record of every handled message to standard output, and acks it afterwards. If the process is killed in
between, another consumer handles the message again: delivery is at least once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import msgspec
import numpy as np

import plait
from examples.demo.orders import HANDLED, SUBJECT, Event

COUNT = 500
#: How soon SIGTERM is noticed while no message arrives.
WAIT_SECONDS = 0.2


async def consume(address: str, group: str, name: str) -> None:
    """Handle messages until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    decode = msgspec.json.Decoder(Event).decode
    async with (
        plait.connect(address, client_id=name) as client,
        client.consumer(SUBJECT, group) as consumer,
    ):
        while not stop.is_set():
            batch = await consumer.fetch(COUNT, wait=WAIT_SECONDS)
            handled = []
            for message in batch:
                event = decode(message.body)
                if message.key != event.order:
                    raise SystemExit(f"message {message.sequence} has key {message.key!r} and order {event.order!r}")
                handled.append((message.sequence, event.number, event.producer, message.attempt))
            if handled:
                write_all(np.array(handled, HANDLED).tobytes())
                await batch.ack()


def write_all(data: bytes) -> None:
    """Write all bytes to the pipe."""
    while data:
        data = data[os.write(sys.stdout.fileno(), data) :]


def main() -> None:
    address, group, name = sys.argv[1:]
    asyncio.run(consume(address, group, name))


if __name__ == "__main__":
    main()
