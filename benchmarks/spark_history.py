"""Lookups of one key in an archive: in an open process, and from the command line. No Java in either.

``python -m benchmarks history``, or this module alone. A client sent ten million messages with 100-byte bodies and
order keys to a real server, and ``plait spark archive`` archived them; all files are in the page cache. Two figures
have no bar: the first lookup, which opens the files, and a lookup by message id, which files are not sorted by.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import uvloop

import plait
import plait.spark
from benchmarks.plait_server import PlaitServer
from benchmarks.result import Result
from benchmarks.spark_scan import KEYS, bodies_and_keys
from plait.spark.history.lookup import History

SUBJECT = "order.book"
OPEN_BAR_MILLISECONDS = 50.0
COMMAND_BAR_SECONDS = 1.5


async def _send(address: str, count: int) -> None:
    async with plait.connect(address) as client:
        for bodies, keys in bodies_and_keys(count):
            await client.send_many(SUBJECT, bodies, keys=keys)


def _timed(find: Callable[[], pa.Table]) -> tuple[float, float, int]:
    """(milliseconds, milliseconds of CPU, rows)."""
    cpu, begun = time.process_time(), time.perf_counter()
    rows = find()
    return (time.perf_counter() - begun) * 1e3, (time.process_time() - cpu) * 1e3, rows.num_rows


def _command(archive: Path, key: str) -> float:
    """Seconds of one lookup from the command line."""
    command = ["spark", "history", "--archive", str(archive), "--subject", SUBJECT, "--key", key, "-o", "json"]
    begun = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "plait.cli", *command], capture_output=True, check=True)
    if not done.stdout:
        raise RuntimeError(f"key {key} was not found")
    return time.perf_counter() - begun


def run(count: int = 10_000_000, lookups: int = 50, commands: int = 7) -> dict[str, Any]:
    chance = random.Random(2)
    with tempfile.TemporaryDirectory(prefix="plait-bench-") as root:
        data, archive = Path(root, "data"), Path(root, "archive")
        with PlaitServer(data=data) as server:
            uvloop.run(_send(server.address, count))
        spark = plait.spark.session("plait-bench", master="local[2]", config={"spark.driver.memory": "2g"})
        try:
            report = plait.spark.archive(data, archive, spark=spark, now=True)
        finally:
            spark.stop()
        if report.messages != count:
            raise RuntimeError(f"{report.messages} messages were archived, {count} were sent")
        # Choose from the keys of the rows: a small run does not have all keys.
        keys = [key for _, batch in bodies_and_keys(min(count, 100_000)) for key in batch]
        before = psutil.cpu_times()
        history = History(archive)
        first = _timed(lambda: history.find(SUBJECT, key=chance.choice(keys)))
        found = [_timed(lambda: history.find(SUBJECT, key=chance.choice(keys))) for _ in range(lookups)]
        ids = history.find(SUBJECT, key=keys[0])["message_id"].to_pylist()
        by_id = [_timed(lambda: history.find(SUBJECT, message_id=chance.choice(ids))) for _ in range(3)]
        if not all(rows for *_, rows in [first, *found, *by_id]):
            raise RuntimeError("a lookup found nothing")
        seconds = [_command(archive, chance.choice(keys)) for _ in range(commands)]
        after = psutil.cpu_times()
        return {
            "count": count,
            "keys": KEYS,
            "files": report.files,
            "archive_bytes": report.size,
            "first_milliseconds": first[0],
            "milliseconds": statistics.median(wall for wall, _, _ in found),
            "cpu_milliseconds": statistics.median(cpu for _, cpu, _ in found),
            "rows_of_a_key": statistics.median(rows for *_, rows in found),
            "id_milliseconds": statistics.median(wall for wall, _, _ in by_id),
            "command_seconds": statistics.median(seconds),
            "machine_busy": 1 - (after.idle - before.idle) / (sum(after) - sum(before)),
        }


def results(smoke: bool) -> Iterator[Result]:
    """The two figures with bars; the details have the others."""
    figures = run(20_000, 3, 1) if smoke else run()
    name = f"one key in an archive of {figures['count']:,}"
    yield Result(f"{name}, open process", figures["milliseconds"], OPEN_BAR_MILLISECONDS, "ms", True, figures)
    yield Result(f"{name}, command", figures["command_seconds"], COMMAND_BAR_SECONDS, "s", True, figures)


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
