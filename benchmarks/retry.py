"""The cost of failing messages to others, and resent dead letters: a storm of retries, and a paced resend."""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np
import uvloop

import plait
from benchmarks.plait_server import PlaitServer
from benchmarks.result import Result

BODY = b"x" * 100
SUBJECT, OTHER, GROUP = "storm", "other", "g"
#: Every message fails on all attempts but the last.
ATTEMPTS = 3
RETRY = plait.Retry.constant(0.05)
PULL_COUNT = 10_000


# --- a storm ------------------------------------------------------------------------------------


def storm(smoke: bool) -> Iterator[Result]:
    """A million messages fail twice each, while a client uses another subject where no message fails.

    The comparison has the same load without failures: as many messages that succeed.
    """
    count, pairs = (3_000, 1) if smoke else (1_000_000, 3)
    beside_failing, beside_plain, alone, thrice = [], [], [], []
    for number in range(pairs):
        for failing in (True, False) if number % 2 else (False, True):
            rate, handled = _beside(count if failing else ATTEMPTS * count, failing=failing)
            (beside_failing if failing else beside_plain).append(rate)
            if failing:
                thrice.append(handled)
        alone.append(_beside(0, failing=False)[0])
    ratio = statistics.median(a / b for a, b in zip(beside_failing, beside_plain, strict=True))
    details = {"beside_failing": beside_failing, "beside_plain": beside_plain, "alone": alone, "count": count}
    yield Result("retry storm: share handled exactly 3 times", min(thrice), 1.0, "", details={"count": count})
    yield Result("plain path beside a retry storm / beside as many that succeed", ratio, 0.8, details=details)


def _beside(count: int, *, failing: bool) -> tuple[float, float]:
    """(messages per second through another subject while ``count`` are handled, share of these handled correctly)."""
    with PlaitServer() as server:
        uvloop.run(_fill(server.address, SUBJECT, count))
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        handler = context.Process(target=_handle, args=(server.address, count, failing, there))
        handler.start()
        try:
            here.recv()
            rate = uvloop.run(_plain_path(server.address, here))
            share: float = here.recv()
        finally:
            handler.join(60)
            handler.kill()
        return rate, share


async def _fill(address: str, subject: str, count: int) -> None:
    async with plait.connect(address) as client:
        for start in range(0, count, 100_000):
            await client.send_many(subject, [BODY] * min(100_000, count - start))


async def _plain_path(address: str, handler: Connection) -> float:
    """Send and consume until the other process has handled everything, for at least a second."""
    bodies = [BODY] * 2_000
    async with plait.connect(address) as client, client.consumer(OTHER, GROUP) as consumer:
        began, count = time.perf_counter(), 0
        while not handler.poll() or time.perf_counter() < began + 1:
            await client.send_many(OTHER, bodies)
            received = 0
            while received < len(bodies):
                batch = await consumer.fetch_arrow(len(bodies), wait=30)
                received += len(batch)
                await batch.ack()
            count += received
        return count / (time.perf_counter() - began)


def _handle(address: str, count: int, failing: bool, pipe: Connection) -> None:
    uvloop.run(_handle_all(address, count, failing, pipe))


async def _handle_all(address: str, count: int, failing: bool, pipe: Connection) -> None:
    calls = np.zeros(count, np.int64)
    last = ATTEMPTS if failing else 1
    async with plait.connect(address) as client, client.consumer(SUBJECT, GROUP, retry=RETRY) as consumer:
        pipe.send("begins")
        left = count
        while left:
            batch = await consumer.fetch_arrow(PULL_COUNT, wait=30)
            if not len(batch):
                break
            sequences = batch.table["sequence"].to_numpy()
            attempts = batch.table["attempt"].to_numpy()
            np.add.at(calls, sequences, 1)
            failed = np.flatnonzero(attempts < last)
            left -= len(sequences) - len(failed)
            if len(failed) == len(sequences):
                await batch.nack()
            else:
                if len(failed):
                    await batch.nack(failed.tolist())
                await batch.ack()
    pipe.send(float((calls == last).mean()) if count else 1.0)


# --- dead letters -------------------------------------------------------------------------------


def dead_letters(smoke: bool) -> Iterator[Result]:
    """100,000 dead letters are resent at a fixed rate while their group handles them."""
    count, rate = (1_000, 2_000.0) if smoke else (100_000, 10_000.0)
    with PlaitServer() as server:
        seconds, calls = uvloop.run(_resend(server.address, count, rate))
    error = abs(count / rate / seconds - 1)
    details = {"count": count, "rate": rate, "seconds": seconds}
    yield Result("dead letters resent at 10,000/s: off the rate by", error, 0.1, "", at_most=True, details=details)
    yield Result("dead letters resent: share handled exactly once", float((calls == 1).mean()), 1.0, "")


async def _resend(address: str, count: int, rate: float) -> tuple[float, np.ndarray]:
    calls = np.zeros(count, np.int64)
    async with plait.connect(address) as client:
        await _fill(address, SUBJECT, count)
        async with client.consumer(SUBJECT, GROUP) as consumer:
            buried = 0
            while buried < count:
                batch = await consumer.fetch_arrow(PULL_COUNT, wait=30)
                buried += len(batch)
                await batch.reject(reason="measured")

            async def handle() -> None:
                # One more fetch than needed: no message may be delivered twice.
                came = 1
                while int(calls.sum()) < count or came:
                    letters = await consumer.fetch_arrow(PULL_COUNT, wait=1)
                    came = len(letters)
                    np.add.at(calls, letters.table["sequence"].to_numpy(), 1)
                    await letters.ack()

            handling = asyncio.ensure_future(handle())
            began = time.perf_counter()
            resent = await client.admin.resend_dead(SUBJECT, GROUP, rate=rate)
            seconds = time.perf_counter() - began
            assert resent == count
            await handling
    return seconds, calls
