"""An ordered consumer process: ``python -m examples.demo.ordered_consumer ADDRESS SUBJECT GROUP NAME``, until SIGTERM.

Prints a line for every batch, ``[[order, step, epoch], …]``, and reads a line in reply: which events were accepted. It
acks only those. So the parent decides about the events of consumers that were stopped past their lease.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys

import msgspec

import plait
from examples.demo.orders import Event

COUNT = 50
#: How soon SIGTERM is noticed while no message arrives.
WAIT_SECONDS = 0.2


async def consume(address: str, subject: str, group: str, name: str) -> None:
    """Handle messages until SIGTERM."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    answers = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(answers), sys.stdin)
    decode = msgspec.json.Decoder(Event).decode
    async with (
        plait.connect(address, client_id=name) as client,
        client.consumer(subject, group, ordered=True) as consumer,
    ):
        print("[]", flush=True)
        await answers.readline()
        while not stop.is_set():
            batch = await consumer.fetch(COUNT, wait=WAIT_SECONDS)
            if not batch:
                continue
            events = [decode(message.body) for message in batch]
            handled = [(event.order, event.step, m.epoch) for event, m in zip(events, batch, strict=True)]
            print(json.dumps(handled), flush=True)
            counts = json.loads(await answers.readline())
            for message, right in zip(batch, counts, strict=True):
                if not right:
                    message.nack(delay=0)
            await batch.ack()


def main() -> None:
    asyncio.run(consume(*sys.argv[1:]))


if __name__ == "__main__":
    main()
