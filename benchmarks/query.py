"""Queries by key among very many messages over the network, and what the index of the log costs."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import uvloop

import plait
from benchmarks.plait_server import PlaitServer
from benchmarks.result import Result
from plait.storage.disk import RealDisk
from plait.storage.index.index_builder import IndexBuilder
from plait.storage.index.index_file import IndexFile

MANY_COUNT = 50_000
#: Messages of each key.
PER_KEY = 10
QUERIES = 200
#: How long the broker may take to index what was stored.
INDEX_SECONDS_MAX = 300.0


async def _fill(address: str, count: int) -> int:
    """Store messages; those of a key are spread over the whole log. Returns the number of keys."""
    keys = count // PER_KEY
    names = [f"key-{number}" for number in range(keys)]
    order = np.random.default_rng(1).permutation(count) % keys
    async with plait.connect(address) as client:
        for start in range(0, count, MANY_COUNT):
            chosen = [names[number] for number in order[start : start + MANY_COUNT].tolist()]
            await client.send_many("queried", [b"x" * 16] * len(chosen), keys=chosen)
    return keys


async def _ask(address: str, keys: int, queries: int) -> list[float]:
    """The seconds of each query by key, the second time."""
    rng, seconds = random.Random(1), []
    async with plait.connect(address) as client:
        for _ in range(queries):
            key = f"key-{rng.randrange(keys)}"
            for _ in range(2):
                began = time.perf_counter()
                found = await client.query("queried", key=key)
                taken = time.perf_counter() - began
                if len(found) != PER_KEY:
                    raise AssertionError(f"{len(found)} messages with key {key}, not {PER_KEY}")
            seconds.append(taken)
    return seconds


def _wait_for_indexes(data: Path) -> float:
    """Wait until every sealed segment has an index; returns the seconds."""
    began = time.perf_counter()
    while time.perf_counter() - began < INDEX_SECONDS_MAX:
        segments = sorted(path.stem for path in (data / "message").glob("*.log"))
        if {path.stem for path in (data / "index").glob("*.idx")} >= set(segments[:-2]):
            break
        time.sleep(0.2)
    # The newest segment is indexed in memory, once a second.
    time.sleep(3)
    return time.perf_counter() - began


def _rebuilt(segment: Path) -> tuple[float, float, float]:
    """Index a segment again: keys per second of CPU, bytes per message, and the longest step in CPU seconds."""
    with tempfile.TemporaryDirectory() as directory, segment.open("rb") as file:
        view = memoryview(file.read())
        disk, builder, longest = RealDisk(directory), IndexBuilder(RealDisk(directory), 0, 0), 0.0
        began = time.process_time()
        more = True
        while more:
            step = time.process_time()
            more = builder.step(view, len(view.obj))
            longest = max(longest, time.process_time() - step)
        builder.finish(view)
        seconds = time.process_time() - began
        index = IndexFile(disk, 0)
        # Every message of this benchmark has a key, and no frame has the same key twice.
        entries = sum(len(part.keys) for part in index.parts)
        return entries / seconds, index.size / entries, longest


def by_key(smoke: bool) -> Iterator[Result]:
    """Queries by key among 50 million messages; the size and the speed of the index."""
    count = 600_000 if smoke else 50_000_000
    options = ("--segment-size", "18MiB") if smoke else ()
    with PlaitServer(options=options) as server:
        began = time.perf_counter()
        keys = uvloop.run(_fill(server.address, count))
        filled = time.perf_counter() - began
        waited = _wait_for_indexes(server.data)
        seconds = uvloop.run(_ask(server.address, keys, 10 if smoke else QUERIES))
        segments = sorted((server.data / "message").glob("*.log"))
        speed, size, longest = _rebuilt(segments[0])
    details = {"messages": count, "segments": len(segments), "fill_seconds": filled, "index_wait_seconds": waited}
    median = statistics.median(seconds) * 1000
    details["p99_ms"] = sorted(seconds)[int(len(seconds) * 0.99)] * 1000
    yield Result("query by key, warm, median", median, 20, unit="ms", at_most=True, details=details)
    yield Result("index of keys and ids, per message", size, 16, unit="B", at_most=True)
    yield Result("keys indexed per CPU second", speed / 1e6, 5, unit="M/s", details={"longest_step_ms": longest * 1000})
