"""Spark scanning segment files or a broker compared with Spark reading the same rows from Parquet, on local[2].

``python -m benchmarks spark``, or this module alone. A client sent the rows to a real server, with order keys and
bodies of 100 bytes and of 1 KB; Spark wrote the Parquet files from them (zstd, as in an archive). Both sides run the
same query in one session in turns, with all files in the page cache.

Comparisons with Parquet:

- *body*: ``count(*), sum(length(body))``. Parquet reads one column, because Spark passes it the column list. A Python
  source does not get that list, so the user sets ``columns=body``. This comparison has a bar.
- *body, unsaid*: the same query without that option; the source returns all eleven columns.
- *all*: a query that needs every column of either side.

Comparisons of the source with itself:

- *broker*: the query of *body* through the broker, compared with the same query on its files.
- *filters*: a scan of the 1 % of messages with a certain header, compared with a full read and Spark's filter
  (``spark_filters.py``).
- *beside*: how fast another client sends to the broker during a scan with ``bytesPerSecond``, compared with how fast it
  sends alone.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import uvloop

import plait
import plait.spark
import plait.sync
from benchmarks import spark_filters
from benchmarks.plait_server import PlaitServer
from benchmarks.result import Result, median_ratio
from benchmarks.spark_filters import cpu_seconds

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SUBJECT = "order.book"
BODY_SIZE = 100
LARGE_BODY_SIZE = 1_000
KEYS = 100_000
#: Bars of the scan of files against Parquet, by body size.
BARS = {BODY_SIZE: 0.7, LARGE_BODY_SIZE: 0.8}
BROKER_BAR = 0.5
BESIDE_BAR = 0.8
#: The read rate of a scan beside other traffic, and how long one measurement of that traffic takes.
BYTES_PER_SECOND = 10_000_000
BESIDE_SECONDS = 3.0
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


def bodies_and_keys(count: int, size: int = BODY_SIZE) -> Iterator[tuple[list[bytes], list[str]]]:
    """Order events of ``size`` bytes, a hundred thousand at a time."""
    chance = random.Random(1)
    for start in range(0, count, 100_000):
        bodies, keys = [], []
        for number in range(start, min(start + 100_000, count)):
            key = f"order-{chance.randrange(KEYS):06d}"
            noise = f"{chance.getrandbits(4 * size):0{size}x}"
            event = f'{{"order":"{key}","line":{number},"amount":{chance.random() * 1000:.2f},"note":"{noise}'
            bodies.append(event[: size - 2].encode() + b'"}')
            keys.append(key)
        yield bodies, keys


async def _send(address: str, count: int, size: int) -> None:
    async with plait.connect(address) as client:
        for bodies, keys in bodies_and_keys(count, size):
            await client.send_many(SUBJECT, bodies, keys=keys)


class Scans:
    """One session, one log, one set of Parquet files, and queries on either."""

    def __init__(self, spark: SparkSession, server: PlaitServer, parquet: Path, count: int, size: int) -> None:
        self._spark = spark
        self._server = server
        self._parquet = parquet
        self._count = count
        self._size = size
        self.load().write.option("compression", "zstd").parquet(str(parquet))

    def load(self, columns: str | None = None, **options: Any) -> DataFrame:
        source = self._spark.read.format("plait").option("subject", SUBJECT).options(**options)
        if columns is not None:
            source = source.option("columns", columns)
        return source.load() if "server" in options else source.load(str(self._server.data))

    def stored(self) -> DataFrame:
        return self._spark.read.parquet(str(self._parquet))

    def rate(self, frame: DataFrame, query: list[str], used: list[float]) -> float:
        """Rows per second; checks the answer, and appends the CPU seconds of Java and its workers to ``used``."""
        before, started = cpu_seconds(), time.perf_counter()
        row = frame.selectExpr(*query).collect()[0]
        seconds = time.perf_counter() - started
        used.append(cpu_seconds() - before)
        if row[0] != self._count or row[1] != self._count * self._size:
            raise RuntimeError(f"counted {row[0]} rows of {row[1]} bytes, sent {self._count} of {self._size} each")
        return self._count / seconds

    def compare(self, columns: str | None, query: list[str], pairs: int) -> dict[str, Any]:
        """The files compared with Parquet."""
        return self._by_turns(lambda: self.load(columns), self.stored, query, pairs, ("source", "parquet"))

    def through_broker(self, pairs: int) -> dict[str, Any]:
        """The broker compared with its files."""
        address = self._server.address
        return self._by_turns(
            lambda: self.load("body", server=address), lambda: self.load("body"), BODY_QUERY, pairs, ("broker", "files")
        )

    def _by_turns(
        self,
        one: Callable[[], DataFrame],
        another: Callable[[], DataFrame],
        query: list[str],
        pairs: int,
        names: tuple[str, str],
    ) -> dict[str, Any]:
        our_cpu: list[float] = []
        their_cpu: list[float] = []

        def ours() -> float:
            return self.rate(one(), query, our_cpu)

        def theirs() -> float:
            return self.rate(another(), query, their_cpu)

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
            f"{names[0]}_rows_per_second": statistics.median(mine),
            f"{names[1]}_rows_per_second": statistics.median(other),
            # Other load on the machine changes the ratio of times, but hardly the ratio of CPU.
            "cpu_ratio": statistics.median(b / a for a, b in pairs_of_cpu),
            "machine_busy": 1 - (after.idle - before.idle) / (sum(after) - sum(before)),
        }

    def beside(self, pairs: int) -> dict[str, Any]:
        """What another client sends per second during a paced scan, compared with what it sends alone."""
        bodies = next(bodies_and_keys(10_000, LARGE_BODY_SIZE))[0]
        # So slow that the scan takes longer than the measurement.
        rate = int(min(BYTES_PER_SECOND, self._count * self._size / (4 * BESIDE_SECONDS)))

        def scan(over: threading.Event, failed: list[Exception]) -> None:
            # A log that fits one answer is not paced, so it is scanned again.
            while not over.is_set() and not failed:
                try:
                    paced = self.load("body", server=self._server.address, bytesPerSecond=rate)
                    paced.selectExpr("sum(length(body))").collect()
                except Exception as error:  # noqa: BLE001
                    # The scan is cancelled when the measurement is over.
                    if not over.is_set():
                        failed.append(error)

        with plait.sync.connect(self._server.address) as client:

            def sent_once() -> float:
                count, started = 0, time.perf_counter()
                while time.perf_counter() - started < BESIDE_SECONDS:
                    client.send_many("other", bodies)
                    count += len(bodies)
                return count / (time.perf_counter() - started)

            def sent() -> float:
                # Measure the second of two: planning, task starts and an idle disk count for neither side.
                sent_once()
                return sent_once()

            def sent_beside() -> float:
                over = threading.Event()
                failed: list[Exception] = []
                scanning = threading.Thread(target=scan, args=(over, failed))
                scanning.start()
                try:
                    speed = sent()
                    if not scanning.is_alive():
                        raise RuntimeError("the scan ended before the measurement did") from failed[0]
                    return speed
                finally:
                    over.set()
                    self._spark.sparkContext.cancelAllJobs()
                    scanning.join()

            sent()
            ratio, mine, other = median_ratio(sent_beside, sent, pairs)
        return {
            "ratio": ratio,
            "bytes_per_second": rate,
            "messages_per_second_beside": statistics.median(mine),
            "messages_per_second_alone": statistics.median(other),
        }


def run(count: int = 4_000_000, pairs: int = 7, size: int = BODY_SIZE) -> dict[str, Any]:
    """Run all comparisons; a ratio above one means that the first side is faster."""
    with tempfile.TemporaryDirectory(prefix="plait-bench-") as root, PlaitServer(data=Path(root, "data")) as server:
        uvloop.run(_send(server.address, count, size))
        spark = plait.spark.session("plait-bench", master="local[2]", config={"spark.driver.memory": "2g"})
        try:
            scans = Scans(spark, server, Path(root, "parquet"), count, size)
            figures = {
                "count": count,
                "body_size": size,
                "parquet_codec": "zstd",
                "parquet_bytes": sum(path.stat().st_size for path in Path(root, "parquet").iterdir()),
                "body": scans.compare("body", BODY_QUERY, pairs),
                "broker": scans.through_broker(pairs),
            }
            if size == BODY_SIZE:
                figures["body_unsaid"] = scans.compare(None, BODY_QUERY, pairs)
                figures["all"] = scans.compare(None, ALL_QUERY, pairs)
                figures["beside"] = scans.beside(pairs)
                figures["filters"] = spark_filters.compare(spark, server, Path(root, "archive"), count, pairs)
            return figures
        finally:
            spark.stop()


def results(smoke: bool) -> Iterator[Result]:
    """The figures with bars; the details have the other comparisons."""
    for size, name in ((BODY_SIZE, "100 B"), (LARGE_BODY_SIZE, "1 KB")):
        full = 4_000_000 * BODY_SIZE // size
        figures = run(20_000, 1, size) if smoke else run(full, size=size)
        files, broker = figures["body"]["ratio"], figures["broker"]["ratio"]
        yield Result(f"Spark scan of segment files / Parquet, {name}", files, BARS[size], details=figures)
        yield Result(f"Spark scan through a broker / segment files, {name}", broker, BROKER_BAR)
        if "beside" in figures:
            beside = figures["beside"]
            yield Result("sending beside a paced Spark scan / alone", beside["ratio"], BESIDE_BAR, details=beside)
            for kind, bar in spark_filters.BARS.items():
                found = figures["filters"][kind]
                name = f"CPU of Spark's own filter for 1 % / of a filter in the source ({kind})"
                yield Result(name, found["cpu_ratio"], bar, details=found)


if __name__ == "__main__":
    print(json.dumps([run(), run(400_000, size=LARGE_BODY_SIZE)], indent=1))
