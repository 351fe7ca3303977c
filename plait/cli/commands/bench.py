"""``plait bench``: measures a node on this machine in a few seconds.

One client process, one server process, one figure at a time. The programs under benchmarks/ measure with separate
producers and consumers and against other queues; this command shows whether a node is as fast here as expected.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np

from plait import tasks
from plait.cli.event_loop import run_loop, with_client
from plait.cli.options import DEFAULT_SERVER, Output, Server, described, flag
from plait.cli.output import print_json, print_table
from plait.cli.progress import ProgressSteps
from plait.cli.serving.child_process import OwnNode
from plait.errors import BufferFull, InvalidArgument, PlaitError
from plait.limits import BODY_SIZE_MAX

if TYPE_CHECKING:
    from plait.client.client import Client
    from plait.client.consume.consumer import Consumer

#: Concurrent tasks, each of which awaits its own send.
TASKS = 64
#: The run fails if a fetch gets no message for this long.
FETCH_SECONDS = 30.0


class Figure(msgspec.Struct, frozen=True):
    """One line of the table. Latencies are in microseconds."""

    name: str
    count: int
    seconds: float
    messages_per_second: float
    megabytes_per_second: float
    p50: float | None = None
    p99: float | None = None


def bench(
    *,
    count: Annotated[int, described("Messages of the batch figures; the other figures use fewer.")] = 500_000,
    size: Annotated[int, described("Bytes of a body.")] = 100,
    keys: Annotated[int, described("Different order keys; 0 sends without keys.")] = 0,
    batch: Annotated[int, described("Messages of one send_many call.")] = 10_000,
    embedded: Annotated[bool, flag("Start a node for the run, in a temporary directory.")] = False,
    server: Server = DEFAULT_SERVER,
    output: Output = "table",
) -> None:
    """Measure throughput and latency in a few seconds."""
    for name, value, least in (("count", count, 1), ("size", size, 0), ("keys", keys, 0), ("batch", batch, 1)):
        if value < least:
            raise InvalidArgument(f"--{name} must be {least} or more, not {value}")
    if size > BODY_SIZE_MAX:
        raise InvalidArgument(f"--size {size} is over the limit of {BODY_SIZE_MAX}")
    with ProgressSteps() as steps:
        run = BenchRun(steps, count, size, keys, batch)
        figures = run_loop(_embedded(run)) if embedded else with_client(server, run.measure)
    if output == "json":
        print_json({"count": count, "size": size, "keys": keys, "batch": batch, "figures": figures})
        return
    columns = ("what", "messages", "seconds", "messages/s", "MB/s", "p50 µs", "p99 µs")
    print_table(columns, (_row(figure) for figure in figures), right=columns[1:])


async def _embedded(run: BenchRun) -> list[Figure]:
    from plait.client.client import connect

    async with AsyncExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="plait-bench-"))
        node = await stack.enter_async_context(OwnNode(Path(directory) / "data"))
        client = await stack.enter_async_context(connect(node.address))
        return await run.measure(client)


class BenchRun:
    """Measures all figures in sequence, each on a subject of its own, which is deleted afterwards."""

    def __init__(self, steps: ProgressSteps, count: int, size: int, keys: int, batch: int) -> None:
        self._steps = steps
        self._count = count
        self._size = size
        self._batch = batch
        self._body = secrets.token_bytes(size)
        self._keys = [f"key-{number}" for number in range(keys)]

    async def measure(self, client: Client) -> list[Figure]:
        few = max(self._count // 10, 1)
        fewer = max(min(self._count // 50, 10_000), 1)
        figures: list[Figure] = []
        for count, work in ((self._count, self._batches), (few, self._singles), (fewer, self._awaited)):
            figures += await self._on_subject(client, count, work)
        figures += await self._on_subject(client, min(fewer, 2_000), self._latency)
        return figures

    async def _on_subject(
        self, client: Client, count: int, work: Callable[[Client, str, int], Awaitable[list[Figure]]]
    ) -> list[Figure]:
        subject = f"plait.bench.{secrets.token_hex(4)}"
        await client.admin.create_subject(subject)
        try:
            return await work(client, subject, count)
        finally:
            try:
                await client.admin.delete_subject(subject)
            except PlaitError:
                # An error of the measurement itself must not be replaced by this one.
                pass

    def _figure(self, name: str, count: int, seconds: float) -> Figure:
        return Figure(name, count, seconds, count / seconds, count * self._size / seconds / 1e6)

    def _keys_of(self, start: int, count: int) -> list[str] | None:
        if not self._keys:
            return None
        return [self._keys[number % len(self._keys)] for number in range(start, start + count)]

    # --- the figures ----------------------------------------------------------------------------

    async def _batches(self, client: Client, subject: str, count: int) -> list[Figure]:
        self._steps.step("send_many", count)
        begun = time.perf_counter()
        for start in range(0, count, self._batch):
            number = min(self._batch, count - start)
            await client.send_many(subject, [self._body] * number, keys=self._keys_of(start, number))
            self._steps.update(start + number)
        sent = self._figure("send_many", count, time.perf_counter() - begun)
        self._steps.step("fetch_arrow", count)
        begun = time.perf_counter()
        async with client.consumer(subject, "bench") as consumer:
            done = 0
            while done < count:
                rows = await consumer.fetch_arrow(50_000, FETCH_SECONDS)
                self._arrived(len(rows), done, count)
                done += rows.table.num_rows
                await rows.ack()
                self._steps.update(done)
        return [sent, self._figure("fetch_arrow + ack", count, time.perf_counter() - begun)]

    async def _singles(self, client: Client, subject: str, count: int) -> list[Figure]:
        self._steps.step("post", count)
        begun = time.perf_counter()
        for number in range(count):
            key = self._keys[number % len(self._keys)] if self._keys else None
            try:
                client.post(subject, self._body, key=key)
            except BufferFull:
                await client.flush()
                client.post(subject, self._body, key=key)
            if number % 1000 == 999:
                await asyncio.sleep(0)
                self._steps.update(number)
        await client.flush()
        sent = self._figure("post, a call a message", count, time.perf_counter() - begun)
        self._steps.step("fetch", count)
        begun = time.perf_counter()
        async with client.consumer(subject, "bench") as consumer:
            await self._fetch_each(consumer, count)
        return [sent, self._figure("fetch, an ack a message", count, time.perf_counter() - begun)]

    async def _fetch_each(self, consumer: Consumer, count: int) -> None:
        done = 0
        while done < count:
            messages = await consumer.fetch(1_000, FETCH_SECONDS)
            self._arrived(len(messages), done, count)
            for message in messages:
                message.ack()
            done += len(messages)
            self._steps.update(done)
        await consumer.flush()

    async def _awaited(self, client: Client, subject: str, count: int) -> list[Figure]:
        self._steps.step("await send", count)
        done = 0

        async def task(share: int) -> None:
            nonlocal done
            for _ in range(share):
                await client.send(subject, self._body)
                done += 1
                self._steps.update(done)

        begun = time.perf_counter()
        shares = [count // TASKS + (number < count % TASKS) for number in range(TASKS)]
        await asyncio.gather(*map(task, shares))
        return [self._figure(f"await send, {TASKS} tasks", count, time.perf_counter() - begun)]

    async def _latency(self, client: Client, subject: str, count: int) -> list[Figure]:
        self._steps.step("latency", count)
        times = np.empty(count)
        begun = time.perf_counter()
        async with client.consumer(subject, "bench", start="latest", prefetch=1) as consumer:
            for number in range(count):
                sent_at = time.perf_counter()
                sending = tasks.child(client.send(subject, self._body), "plait-bench")
                messages = await consumer.fetch(1, FETCH_SECONDS)
                times[number] = time.perf_counter() - sent_at
                self._arrived(len(messages), number, count)
                await sending
                await messages.ack()
                self._steps.update(number)
        figure = self._figure("one at a time, send to fetch", count, time.perf_counter() - begun)
        p50, p99 = np.percentile(times, (50, 99)) * 1e6
        return [msgspec.structs.replace(figure, p50=float(p50), p99=float(p99))]

    @staticmethod
    def _arrived(number: int, done: int, count: int) -> None:
        if number == 0:
            raise PlaitError(
                f"received {done} of {count} messages, then none for {FETCH_SECONDS:g} s; see the node's log"
            )


def _row(figure: Figure) -> tuple[str, ...]:
    return (
        figure.name,
        f"{figure.count:,}",
        f"{figure.seconds:.2f}",
        f"{figure.messages_per_second:,.0f}",
        f"{figure.megabytes_per_second:,.1f}",
        "" if figure.p50 is None else f"{figure.p50:,.0f}",
        "" if figure.p99 is None else f"{figure.p99:,.0f}",
    )
