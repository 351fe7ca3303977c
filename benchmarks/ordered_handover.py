"""How long a key pauses when it gets another owner: a consumer joins, leaves or is killed.

Every key gets a message every few milliseconds. The figure is the time between the last message that the old owner
handled and the first message that the new owner handled, for each key that changed its owner.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import NamedTuple

import numpy as np
import uvloop

import plait
from benchmarks.plait_server import PlaitServer
from benchmarks.result import Result

SUBJECT, GROUP = "handover", "g"
PARTITIONS = 4
CONSUMERS = 3
LEASE_SECONDS = 2.0
#: Time between two messages of a key.
EVERY_SECONDS = 0.02
#: How long consumers are watched after a change.
CALM_SECONDS = 1.5
START_SECONDS_MAX = 60.0

HANDLED = np.dtype([("key", "<u4"), ("owner", "<u4"), ("time", "<f8")])
_context = multiprocessing.get_context("spawn")


class Size(NamedTuple):
    """The number of keys, of joins and leaves, and of kills."""

    keys: int
    changes: int
    kills: int


def handover(smoke: bool) -> Iterator[Result]:
    """Clean handovers, and those from killed consumers."""
    size = Size(16, 1, 1) if smoke else Size(100, 10, 4)
    with PlaitServer(options=("--lease", f"{LEASE_SECONDS:g}s")) as server, ExitStack() as stack:
        uvloop.run(_create(server.address))
        members = stack.enter_context(_Members(server.address, size.keys))
        clean = np.concatenate([members.change() for _ in range(size.changes)])
        killed = np.concatenate([members.kill() for _ in range(size.kills)])
    details = {"keys": size.keys, "handovers": len(clean), "p50_ms": float(np.median(clean)) * 1e3}
    p99 = float(np.percentile(clean, 99)) * 1e3
    yield Result("keys that change hands stand still, p99", p99, 200.0, "ms", at_most=True, details=details)
    details = {"keys": size.keys, "handovers": len(killed), "p50_s": float(np.median(killed)), "lease": LEASE_SECONDS}
    longest = float(killed.max())
    yield Result("keys of a killed owner stand still", longest, LEASE_SECONDS + 1.0, "s", at_most=True, details=details)


async def _create(address: str) -> None:
    async with plait.connect(address) as client:
        await client.admin.create_subject(SUBJECT, order="strict", partitions=PARTITIONS)


class _Members:
    """A producer and some consumers, each in its own process; consumers report the messages they handled by pipes."""

    def __init__(self, address: str, keys: int) -> None:
        self._address = address
        self._keys = keys
        self._processes: dict[int, BaseProcess] = {}
        self._pipes: dict[Connection, int] = {}
        self._number = 0
        self._handled: list[np.ndarray] = []

    def __enter__(self) -> _Members:
        self._producer = _context.Process(target=_produce, args=(self._address, self._keys), daemon=True)
        self._producer.start()
        for _ in range(CONSUMERS):
            self._join()
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self._producer, *self._processes.values()):
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()

    def change(self) -> np.ndarray:
        """One consumer joins and one leaves; the pauses of the keys that changed their owner."""
        self._handled.clear()
        newest = self._join()
        self._watch(CALM_SECONDS)
        pipe = next(pipe for pipe, number in self._pipes.items() if number == newest)
        pipe.send("stop")
        self._watch(CALM_SECONDS)
        self._processes.pop(newest).join()
        return self._gaps()

    def kill(self) -> np.ndarray:
        """One consumer is killed, and another joins when its keys have new owners; the pauses of those keys."""
        self._handled.clear()
        self._watch(0.5)
        victim, process = next(iter(self._processes.items()))
        process.kill()
        self._processes.pop(victim).join()
        self._watch(LEASE_SECONDS + 2.0)
        gaps = self._gaps(of=victim)
        self._join()
        return gaps

    def _join(self) -> int:
        self._number += 1
        here, there = _context.Pipe()
        process = _context.Process(target=_consume, args=(self._address, self._number, there), daemon=True)
        process.start()
        there.close()
        self._processes[self._number] = process
        self._pipes[here] = self._number
        deadline = time.monotonic() + START_SECONDS_MAX
        while self._number not in (owner for records in self._handled for owner in records["owner"][:1]):
            if time.monotonic() > deadline:
                raise RuntimeError(f"consumer {self._number} received nothing within {START_SECONDS_MAX:g} s")
            self._watch(0.05)
        return self._number

    def _watch(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(self._pipes), left):
                assert isinstance(pipe, Connection)
                try:
                    self._handled.append(np.frombuffer(pipe.recv_bytes(), HANDLED))
                except (EOFError, ConnectionResetError):
                    # The consumer left or was killed.
                    del self._pipes[pipe]
                    pipe.close()

    def _gaps(self, of: int | None = None) -> np.ndarray:
        """For every key: seconds between the last message of an owner (None: of any) and the first of the next."""
        records = np.concatenate(self._handled)
        records = records[np.lexsort((records["time"], records["key"]))]
        same_key = records["key"][1:] == records["key"][:-1]
        passed = same_key & (records["owner"][1:] != records["owner"][:-1])
        if of is not None:
            passed &= records["owner"][:-1] == of
        gaps = np.diff(records["time"])[passed]
        if not len(gaps):
            raise AssertionError("no key changed its owner")
        return gaps


def _produce(address: str, keys: int) -> None:
    async def run() -> None:
        names = [f"key-{number}" for number in range(keys)]
        bodies = [b"%d" % number for number in range(keys)]
        async with plait.connect(address) as client:
            due = time.monotonic()
            while True:
                for name, body in zip(names, bodies, strict=True):
                    client.post(SUBJECT, body, key=name)
                due += EVERY_SECONDS
                await asyncio.sleep(max(due - time.monotonic(), 0.0))

    uvloop.run(run())


def _consume(address: str, number: int, pipe: Connection) -> None:
    async def run() -> None:
        async with (
            plait.connect(address) as client,
            client.consumer(SUBJECT, GROUP, ordered=True) as consumer,
        ):
            # Anything sent through the pipe ends it.
            while not pipe.poll():
                batch = await consumer.fetch(500, wait=0.1)
                if batch:
                    now = time.monotonic()
                    pipe.send_bytes(np.array([(int(m.body), number, now) for m in batch], HANDLED).tobytes())
                    for message in batch:
                        message.ack()
            pipe.recv()

    uvloop.run(run())
