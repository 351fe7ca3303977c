"""How long one turn of a broker's event loop takes with very many subjects.

A broker serves all clients from one loop, so every client waits for the longest turn. Checkpoints, new log segments and
retention involve all subjects and groups; none of them may make a turn long.

The broker runs in this process, on a loop whose callbacks are timed. The load calls the broker as a connection does: a
few sends, pulls and acks per turn, spread over the subjects. The bars are for the CPU time of the loop's thread, which
other load on the machine does not change. Wall time is shown too.

``python -m benchmarks.turns --subjects 100000`` measures with another number of subjects.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import sys
import tempfile
import time
from asyncio.events import Handle
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from benchmarks.result import Result
from plait.broker import BrokerConfig
from plait.broker.groups.group import AttachedConsumer
from plait.broker.partitions.partition import Delivery, Partition
from plait.cli.serving.foreground import keep_pauses_short
from plait.frame.builder import build_one
from plait.frame.view import FrameView
from plait.limits import KIB, MIB, ServerLimits
from plait.server import Server
from plait.storage.disk import RealDisk

GROUPS = 3
#: Subjects in use in one turn.
BUSY = 8
#: Of the action log; small, so that a segment is soon full.
SEGMENT_SIZE = 2 * MIB
#: (subjects, bar in milliseconds up to that number).
BARS = ((10_000, 50.0), (100_000, 100.0))
#: The default consumer limit of a broker; with more subjects some groups have no consumer.
CONSUMERS = 100_000


class Size(NamedTuple):
    """How much to measure."""

    subjects: int = 10_000
    #: How often each event is triggered.
    rounds: int = 1
    segment_size: int = SEGMENT_SIZE
    #: Turns with nothing but sends, pulls and acks.
    busy_turns: int = 2_000


SMOKE = Size(50, 1, 16 * KIB, 50)


class Turns:
    """The longest callbacks of the loop, by what was triggered at the broker meanwhile."""

    def __init__(self) -> None:
        self.phase = ""
        #: Phase → (CPU, wall) seconds of its longest turns; the two may be of different turns.
        self.longest: dict[str, tuple[float, float]] = {}
        self._run = Handle._run

    def __enter__(self) -> Turns:
        run, turns = self._run, self

        def timed(handle: Handle) -> None:
            cpu, wall = time.thread_time(), time.perf_counter()
            run(handle)
            turns.note(time.thread_time() - cpu, time.perf_counter() - wall)

        Handle._run = timed  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Handle._run = self._run  # type: ignore[method-assign]

    def note(self, cpu: float, wall: float) -> None:
        before = self.longest.get(self.phase, (0.0, 0.0))
        self.longest[self.phase] = max(before[0], cpu), max(before[1], wall)


class Busy:
    """Sends, pulls and acks, a few per turn, until it is cancelled."""

    def __init__(self, server: Server, partitions: list[Partition], consumers: list[AttachedConsumer]) -> None:
        self._broker = server.broker
        self._partitions = partitions
        self._consumers = consumers
        self._random = random.Random(7)
        self._sent: dict[int, int] = {}
        self.turns = 0

    async def run(self) -> None:
        while True:
            self._turn()
            self.turns += 1
            await asyncio.sleep(0)

    def _turn(self) -> None:
        broker, now = self._broker, self._broker.clock.now()
        for partition in self._random.sample(self._partitions, BUSY):
            producer = 1_000 + partition.id
            number = self._sent.get(producer, 0)
            frame = build_one(b"x" * 1000, producer=producer, first=number + 1, previous=number, send_time=now)
            self._sent[producer] = number + 1
            broker.submit(partition, FrameView(frame.tobytes()), lambda sequence, error: None)
        for consumer in self._random.sample(self._consumers, BUSY):
            consumer.last_contact = broker.clock.monotonic()
            broker.pull(consumer, 10, MIB, 0, lambda delivery, consumer=consumer: self._ack(consumer, delivery))

    def _ack(self, consumer: AttachedConsumer, delivery: Delivery | None) -> None:
        if delivery is not None:
            ranges = [(start, end, self._broker.turn.epoch) for start, end, _ in delivery.ranges]
            self._broker.ack(consumer, ranges, None)


async def _create(server: Server, subjects: int) -> tuple[list[Partition], list[AttachedConsumer]]:
    """Create subjects, each with three groups, and as many consumers as the limit allows."""
    broker, membership = server.broker, server.membership
    partitions, consumers = [], []
    for number in range(subjects):
        name = f"service-{number % 100}.events-{number:06d}"
        partitions.append(broker.create_subject(name))
        for group in range(GROUPS):
            consumer = membership.attach(name, f"group-{group}", f"worker-{number % 997:03d}")
            # Its lease does not expire, however long the rest takes.
            consumer.last_contact = consumer.leased_until = float("inf")
            if len(consumers) < CONSUMERS - GROUPS:
                consumers.append(consumer)
            else:
                membership.detach(consumer)
        if number % 100 == 99:
            await asyncio.sleep(0)
    return partitions, consumers


async def _until(done: Callable[[], bool]) -> None:
    """Let the loop run until a condition holds."""
    while not done():  # noqa: ASYNC110 - a turn is what is measured
        await asyncio.sleep(0)


async def _phases(server: Server, turns: Turns, busy: Busy, size: Size) -> None:
    broker = server.broker

    async def busy_turns(count: int) -> None:
        goal = busy.turns + count
        await _until(lambda: busy.turns >= goal)

    async def checkpoint() -> None:
        last = broker.checkpoints.last
        # Request one, as if enough log had been written.
        broker.snapshots.wanted = True
        await _until(lambda: broker.checkpoints.last is not last and not broker.snapshots.running)

    async def roll(log: Any) -> None:
        segment = log.segments[-1]
        await _until(lambda: log.segments[-1] is not segment)

    async def retention(seconds: float) -> None:
        broker.config = msgspec.structs.replace(broker.config, retention_seconds=seconds)
        for _ in server.broker_host.upkeep.housekeeping_steps():
            await asyncio.sleep(0)

    phases: list[tuple[str, Callable[[], Awaitable[None]]]] = [
        ("busy", lambda: busy_turns(size.busy_turns)),
        ("checkpoint", checkpoint),
        ("message segment", lambda: roll(broker.message_log)),
        ("action segment", lambda: roll(broker.action_log)),
        ("retention", lambda: retention(1e9)),
        ("expiry", lambda: retention(1.0)),
    ]
    for _ in range(size.rounds):
        for name, phase in phases:
            turns.phase = name
            await phase()
            turns.phase = "busy"
            await busy_turns(size.busy_turns // 10)


async def _measure(size: Size) -> Turns:
    turns = Turns()
    before = gc.get_threshold(), sys.getswitchinterval()
    with tempfile.TemporaryDirectory(prefix="plait-bench-") as directory:
        config = BrokerConfig(
            message_segment_size=4 * size.segment_size,
            action_segment_size=size.segment_size,
            disk_free_min=0,
            disk_used_max=1.0,
            # Only when this benchmark asks for one.
            checkpoint_seconds=1e9,
            checkpoint_bytes=1 << 60,
            limits=ServerLimits(consumer_lost_seconds=1e9),
        )
        server = Server(RealDisk(directory), config, port=0)
        await server.start()
        try:
            partitions, consumers = await _create(server, size.subjects)
            # Like a server that starts with everything that was created above.
            keep_pauses_short()
            busy = Busy(server, partitions, consumers)
            with turns:
                running = asyncio.create_task(busy.run())
                try:
                    await _phases(server, turns, busy, size)
                finally:
                    running.cancel()
                    await asyncio.gather(running, return_exceptions=True)
        finally:
            await server.stop()
            gc.unfreeze()
            # Undo the setting for the other benchmarks of this process.
            gc.set_threshold(*before[0])
            sys.setswitchinterval(before[1])
    return turns


def longest_turn(smoke: bool) -> Iterator[Result]:
    """The suite of ``python -m benchmarks``."""
    return results(SMOKE if smoke else Size())


def results(size: Size) -> Iterator[Result]:
    bar = next(bar for limit, bar in BARS if size.subjects <= limit)
    turns = asyncio.run(_measure(size))
    for phase, (cpu, wall) in turns.longest.items():
        if phase:
            name = f"longest turn, {size.subjects} subjects x {GROUPS} groups, {phase}"
            details = {"wall_milliseconds": wall * 1000}
            yield Result(name, cpu * 1000, bar, "ms", at_most=True, details=details)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.turns", description=__doc__)
    parser.add_argument("--subjects", type=int, default=Size().subjects)
    parser.add_argument("--rounds", type=int, default=Size().rounds)
    arguments = parser.parse_args()
    met = True
    for result in results(Size(arguments.subjects, arguments.rounds)):
        met &= result.met
        wall = result.details["wall_milliseconds"]
        state = "met" if result.met else "MISSED"
        print(f"{result.name}: {result.figure:.1f} ms CPU, {wall:.1f} ms wall (bar {result.bar:g}) {state}")
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
