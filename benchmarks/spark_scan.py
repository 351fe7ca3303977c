"""Spark scanning segment files against Spark reading the same rows from Parquet, on local[2].

``python -m benchmarks spark``, or this module alone. The rows are what a client sent to a real server, with 100-byte
bodies and order keys; the Parquet files are written from them by Spark (zstd, as the archive's). Both sides run the
same query in one session by turns, everything in the page cache.

Three comparisons:

- *body*: ``count(*), sum(length(body))``. Parquet reads one column, because Spark tells it which; a Python source is
  not told, so the user says ``columns=body``. This is the one that has a bar.
- *body, unsaid*: the same query without that option; the source hands over all eleven columns.
- *all*: a query that needs every column of either side.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import uvloop

import plait
import plait.spark
from benchmarks.plait_server import PlaitServer
from benchmarks.result import Result, median_ratio

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SUBJECT = "order.book"
BODY_SIZE = 100
KEYS = 100_000
BAR = 0.7
WARM_UPS = 5

BODY_QUERY = ["count(*)", "sum(length(body))"]
ALL_QUERY = [
    *BODY_QUERY,
    "sum(length(subject))",
    "sum(length(partition))",
    "sum(sequence)",
    "sum(length(message_id))",
    "sum(length(key))",
    "sum(size(tags))",
    "sum(size(headers))",
    "max(send_time)",
    "max(store_time)",
    "sum(logical_partition)",
]


def bodies_and_keys(count: int) -> Iterator[tuple[list[bytes], list[str]]]:
    """Order events of 100 bytes, a hundred thousand at a time."""
    chance = random.Random(1)
    for start in range(0, count, 100_000):
        bodies, keys = [], []
        for number in range(start, min(start + 100_000, count)):
            key = f"order-{chance.randrange(KEYS):06d}"
            noise = f"{chance.getrandbits(256):064x}"
            event = f'{{"order":"{key}","line":{number},"amount":{chance.random() * 1000:.2f},"note":"{noise}'
            bodies.append(event[: BODY_SIZE - 2].encode() + b'"}')
            keys.append(key)
        yield bodies, keys


async def _send(address: str, count: int) -> None:
    async with plait.connect(address) as client:
        for bodies, keys in bodies_and_keys(count):
            await client.send_many(SUBJECT, bodies, keys=keys)


class Scans:
    """One session, one log, one set of Parquet files, and queries on either."""

    def __init__(self, spark: SparkSession, data: Path, parquet: Path, count: int) -> None:
        self._spark = spark
        self._data = data
        self._parquet = parquet
        self._count = count
        self.load().write.option("compression", "zstd").parquet(str(parquet))

    def load(self, columns: str | None = None) -> DataFrame:
        source = self._spark.read.format("plait").option("subject", SUBJECT)
        if columns is not None:
            source = source.option("columns", columns)
        return source.load(str(self._data))

    def stored(self) -> DataFrame:
        return self._spark.read.parquet(str(self._parquet))

    def rate(self, frame: DataFrame, query: list[str], used: list[float]) -> float:
        """Rows a second; the answer must be the right one. ``used`` gets the CPU seconds of Java and its workers."""
        before, started = _cpu_seconds(), time.perf_counter()
        row = frame.selectExpr(*query).collect()[0]
        seconds = time.perf_counter() - started
        used.append(_cpu_seconds() - before)
        if row[0] != self._count or row[1] != self._count * BODY_SIZE:
            raise RuntimeError(f"counted {row[0]} rows of {row[1]} bytes, sent {self._count} of {BODY_SIZE} each")
        return self._count / seconds

    def compare(self, columns: str | None, query: list[str], pairs: int) -> dict[str, Any]:
        our_cpu: list[float] = []
        their_cpu: list[float] = []

        def ours() -> float:
            return self.rate(self.load(columns), query, our_cpu)

        def theirs() -> float:
            return self.rate(self.stored(), query, their_cpu)

        for _ in range(WARM_UPS):
            ours()
            theirs()
        before = psutil.cpu_times()
        ratio, mine, other = median_ratio(ours, theirs, pairs)
        after = psutil.cpu_times()
        pairs_of_cpu = zip(our_cpu[WARM_UPS:], their_cpu[WARM_UPS:], strict=True)
        return {
            "ratio": ratio,
            "ratios": [a / b for a, b in zip(mine, other, strict=True)],
            "source_rows_per_second": statistics.median(mine),
            "parquet_rows_per_second": statistics.median(other),
            # What else runs on the machine can change the ratio of times, hardly that of the work done.
            "cpu_ratio": statistics.median(b / a for a, b in pairs_of_cpu),
            "machine_busy": 1 - (after.idle - before.idle) / (sum(after) - sum(before)),
        }


def _cpu_seconds() -> float:
    """CPU used by all children of this process, and theirs, so far."""
    seconds = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            used = process.cpu_times()
            seconds += used.user + used.system
    return seconds


def run(count: int = 4_000_000, pairs: int = 7) -> dict[str, Any]:
    """Measure all three; ratios above one mean that the segment files are faster."""
    with tempfile.TemporaryDirectory(prefix="plait-bench-") as root:
        data = Path(root, "data")
        with PlaitServer(data=data) as server:
            uvloop.run(_send(server.address, count))
        spark = plait.spark.session("plait-bench", master="local[2]", config={"spark.driver.memory": "2g"})
        try:
            scans = Scans(spark, data, Path(root, "parquet"), count)
            return {
                "count": count,
                "body_size": BODY_SIZE,
                "parquet_codec": "zstd",
                "parquet_bytes": sum(path.stat().st_size for path in Path(root, "parquet").iterdir()),
                "body": scans.compare("body", BODY_QUERY, pairs),
                "body_unsaid": scans.compare(None, BODY_QUERY, pairs),
                "all": scans.compare(None, ALL_QUERY, pairs),
            }
        finally:
            spark.stop()


def results(smoke: bool) -> Iterator[Result]:
    """The bar, with the other comparisons beside it."""
    figures = run(20_000, 1) if smoke else run()
    yield Result("Spark scan of segment files / Parquet, 100 B", figures["body"]["ratio"], BAR, details=figures)


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
