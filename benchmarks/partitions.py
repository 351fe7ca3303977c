"""The cost of a consumer's messages when its subject has many partitions.

4,000 messages are on 1, 16, 128 and 1024 partitions; one consumer handles them one by one and acks each. The CPU time
of its process per message is compared with that on one partition. Opening and closing are not counted: their cost does
not depend on messages. A second pass, with other groups, measures how long a turn of the loop takes.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator

import plait
from benchmarks.plait_server import PlaitServer
from benchmarks.result import Result

BODY = b"x" * 100
COUNT = 4_000
PARTITIONS = (1, 16, 128, 1024)
#: The highest CPU per message, as a multiple of that on one partition.
BARS = {16: 2.0, 128: 2.0, 1024: 4.0}
TURN_BAR = 0.05
ROUNDS = 5


def consuming(smoke: bool) -> Iterator[Result]:
    """CPU per message and the worst turn, on each number of partitions."""
    counts = (1, 16) if smoke else PARTITIONS
    rounds = 1 if smoke else ROUNDS
    cpu: dict[int, list[float]] = {count: [] for count in counts}
    turns: dict[int, list[float]] = {count: [] for count in counts}
    with PlaitServer() as server:
        for count in counts:
            asyncio.run(_fill(server.address, count))
        # In turns, so that other load on the machine affects all of them.
        for number in range(rounds):
            for count in counts:
                cpu[count].append(asyncio.run(_consume(server.address, count, f"cpu{number}")))
                turns[count].append(asyncio.run(_worst_turn(server.address, count, f"turn{number}")))
    one = statistics.median(cpu[1])
    for count in counts:
        mine = statistics.median(cpu[count])
        details = {"microseconds per message": [1e6 * each for each in cpu[count]]}
        if count in BARS:
            yield Result(f"CPU per message on {count} partitions, of one", mine / one, BARS[count], "×", True, details)
        worst = {"milliseconds": [1e3 * each for each in turns[count]]}
        # Other processes of a busy machine make turns longer, never shorter.
        yield Result(f"worst turn on {count} partitions", 1e3 * min(turns[count]), 1e3 * TURN_BAR, "ms", True, worst)


def _subject(partitions: int) -> str:
    return f"spread-{partitions}"


async def _fill(address: str, partitions: int) -> None:
    async with plait.connect(address) as client:
        subject = _subject(partitions)
        await client.admin.create_subject(subject, partitions=partitions)
        await client.send_many(subject, [BODY] * COUNT, keys=[f"k{n}" for n in range(COUNT)])


async def _consume(address: str, partitions: int, group: str) -> float:
    """CPU seconds of this process per message."""
    async with plait.connect(address) as client, client.consumer(_subject(partitions), group) as consumer:
        begun = time.process_time()
        await _handle(consumer)
        return (time.process_time() - begun) / COUNT


async def _handle(consumer: plait.Consumer) -> None:
    left = COUNT
    async for message in consumer:
        # A handler that does anything yields to the loop.
        await asyncio.sleep(0)
        message.ack()
        left -= 1
        if not left:
            break
    await consumer.flush()


async def _worst_turn(address: str, partitions: int, group: str) -> float:
    """The longest time between two turns of the loop, while messages are handled one by one."""
    worst = 0.0
    ended = False

    async def watch() -> None:
        nonlocal worst
        before = time.perf_counter()
        while not ended:
            await asyncio.sleep(0)
            now = time.perf_counter()
            worst, before = max(worst, now - before), now

    async with plait.connect(address) as client, client.consumer(_subject(partitions), group) as consumer:
        watching = asyncio.ensure_future(watch())
        await _handle(consumer)
        ended = True
        await watching
    return worst
