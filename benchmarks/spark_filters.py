"""Spark reading the 1 % of messages with a certain header: a filter in the source compared with Spark's own filter.

Part of ``python -m benchmarks spark``. Messages of 100 bytes have two headers. Both sides run ``count(*),
sum(length(body))`` of the same rows in one session, in turns. The other side reads all rows and lets Spark compare the
value in the map ``headers``.

- *where*: the option ``where``, from segment files, through the broker, and from an archive.
- *column*: ``headers="amount:bigint"`` and a filter of the DataFrame on that column, from segment files.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import uvloop

import plait
import plait.spark
from benchmarks.plait_server import PlaitServer
from benchmarks.result import median_ratio

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SUBJECT = "order.filtered"
BODY_SIZE = 100
#: One in so many messages is wanted.
SHARE = 100
MANY_COUNT = 50_000
WARM_UPS = 2
QUERY = ("count(*)", "sum(length(body))")
#: Bars of the CPU time without a filter in the source against the time with it.
BARS = {"where, files": 2.0, "column, files": 2.0, "where, broker": 2.5, "where, archive": 1.3}
#: Shorter times are not measured.
CPU_SECONDS_MIN = 0.01


async def _send(address: str, count: int) -> None:
    chance = random.Random(1)
    async with plait.connect(address) as client:
        for start in range(0, count, MANY_COUNT):
            numbers = range(start, min(start + MANY_COUNT, count))
            bodies = [chance.randbytes(BODY_SIZE) for _ in numbers]
            headers = [{"amount": number % SHARE, "city": ("BJS", "SHA")[number % 2]} for number in numbers]
            await client.send_many(SUBJECT, bodies, keys=[f"order-{n % 1000}" for n in numbers], headers=headers)


def compare(spark: SparkSession, server: PlaitServer, archive: Path, count: int, pairs: int) -> dict[str, Any]:
    """Rates in rows of the log per second, with a filter in the source and without."""
    uvloop.run(_send(server.address, count))
    plait.spark.archive(str(server.data), str(archive), spark=spark, now=True)
    wanted = len(range(0, count, SHARE))

    def load(place: dict[str, str], **options: str) -> DataFrame:
        return spark.read.format("plait").options(subject=SUBJECT, **place, **options).load()

    def rate(frame: DataFrame) -> float:
        started = time.perf_counter()
        found = tuple(frame.selectExpr(*QUERY).collect()[0])
        if found != (wanted, wanted * BODY_SIZE):
            raise RuntimeError(f"found {found[0]} rows of {found[1]} bytes; {wanted} of {BODY_SIZE} bytes each match")
        return count / (time.perf_counter() - started)

    places = {
        "files": {"path": str(server.data)},
        "broker": {"server": server.address},
        "archive": {"path": str(archive)},
    }
    figures: dict[str, Any] = {"count": count, "share": SHARE}
    for name in BARS:
        kind, _, place = name.partition(", ")

        def pushed(kind: str = kind, place: dict[str, str] = places[place]) -> float:
            if kind == "where":
                return rate(load(place, columns="body", where="amount = 0"))
            return rate(load(place, columns="body", headers="amount:bigint").where("header_amount = 0"))

        def whole(place: dict[str, str] = places[place]) -> float:
            return rate(load(place, columns="body,headers").where("headers['amount'] = '0'"))

        figures[name] = _by_turns(pushed, whole, pairs)
    return figures


def cpu_seconds() -> float:
    """CPU seconds of all descendants of this process so far."""
    seconds = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            used = process.cpu_times()
            seconds += used.user + used.system
    return seconds


def _by_turns(pushed: Callable[[], float], whole: Callable[[], float], pairs: int) -> dict[str, float]:
    cpu: dict[str, list[float]] = {"pushed": [], "whole": []}

    def measured(name: str, side: Callable[[], float]) -> float:
        before = cpu_seconds()
        found = side()
        cpu[name].append(cpu_seconds() - before)
        return found

    for _ in range(WARM_UPS):
        pushed()
        whole()
    ratio, mine, other = median_ratio(lambda: measured("pushed", pushed), lambda: measured("whole", whole), pairs)
    return {
        "ratio": ratio,
        # Other load on the machine changes the ratio of times, but hardly the ratio of CPU.
        "cpu_ratio": statistics.median(
            b / max(a, CPU_SECONDS_MIN) for a, b in zip(cpu["pushed"], cpu["whole"], strict=True)
        ),
        "rows_per_second": statistics.median(mine),
        "rows_per_second_of_a_full_read": statistics.median(other),
    }
