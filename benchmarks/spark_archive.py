"""``plait spark archive`` against a plain program of two processes that writes the same Parquet files, on local[2].

``python -m benchmarks archive``, or this module alone. A client sent the rows to a real server, with order keys. The
plain program gets them as Arrow IPC files, one for each of the archiver's chunks, sorts each by key and writes it with
the same codec, level and row groups; it neither reads back nor syncs, and writes no manifest. Both run in turns, with
warm processes, all data in the page cache.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import uvloop

import plait
import plait.spark
from benchmarks.plait_server import PlaitServer
from benchmarks.result import Result, median_ratio
from benchmarks.spark_scan import bodies_and_keys
from plait.spark.archiving import file_writer as files
from plait.spark.archiving.manifest import Archive
from plait.spark.source.spark_columns import record_batches
from plait.storage.reading.log_chunks import WantedRows, plan, read_chunk
from plait.storage.reading.log_reader import open_log

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SUBJECT = "order.book"
#: Body size → (rows, the bar). With 1,000 bytes the rows fill a segment, which an archiver processes at a time.
CASES = {1000: (1_000_000, 0.8), 100: (2_000_000, 0.6)}
WARM_UPS = 2


async def _send(address: str, count: int, body_size: int) -> None:
    async with plait.connect(address) as client:
        for bodies, keys in bodies_and_keys(count):
            if body_size > 100:
                # Text that compresses like the small bodies.
                bodies = [b"".join(bodies[at : at + 10])[:body_size] for at in range(0, len(bodies), 10)]
                keys = keys[::10]
            await client.send_many(SUBJECT, bodies, keys=keys)


def _write_ipc(data: Path, to: Path) -> list[Path]:
    """The rows of each chunk, in log order."""
    reader = open_log(str(data))
    wanted = WantedRows(frozenset((SUBJECT,)))
    to.mkdir()
    paths = []
    for number, chunk in enumerate(plan(reader, wanted, chunks_min=2, expired=True).chunks):
        frames = read_chunk(reader.disk, str(data), chunk, wanted)
        path = to / f"{number}.arrow"
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, files.MESSAGE_SCHEMA) as writer:
            for batch in record_batches(frames, files.MESSAGE_SCHEMA, "g1"):
                writer.write_batch(batch)
        paths.append(path)
    return paths


def write_plainly(source: str, target: str) -> int:
    """One Parquet file, written in the obvious way."""
    pa.set_cpu_count(1)
    with pa.memory_map(source) as mapped:
        table = pa.ipc.open_file(mapped).read_all()
        order = pc.sort_indices(
            table, sort_keys=[("key", "ascending"), ("partition", "ascending"), ("sequence", "ascending")]
        )
        pq.write_table(
            table.take(order),
            target,
            row_group_size=files.row_group_count(table.num_rows, table.nbytes),
            compression=files.COMPRESSION,
            compression_level=files.COMPRESSION_LEVEL,
            use_dictionary=["partition"],
            write_page_index=True,
            write_page_checksum=True,
        )
    count: int = table.num_rows
    return count


class Archiving:
    """One log, archived by the archiver and by the plain program in turns."""

    def __init__(self, spark: SparkSession, pool: ProcessPoolExecutor, root: Path, count: int, body_size: int) -> None:
        self._spark, self._pool, self._root, self._count = spark, pool, root, count
        self._data = root / f"data-{body_size}"
        with PlaitServer(data=self._data) as server:
            uvloop.run(_send(server.address, count * max(body_size // 100, 1), body_size))
        self._ipc = _write_ipc(self._data, root / f"ipc-{body_size}")
        self.sizes: dict[str, int] = {}

    def ours(self) -> float:
        to = self._root / "archive"
        started = time.perf_counter()
        report = plait.spark.archive(self._data, to, spark=self._spark, now=True)
        seconds = time.perf_counter() - started
        if report.messages != self._count:
            raise RuntimeError(f"archived {report.messages} messages, sent {self._count}")
        self.sizes["archive"] = sum(file.size for file in Archive.at(to).open().find("messages"))
        shutil.rmtree(to)
        return self._count / seconds

    def theirs(self) -> float:
        to = self._root / "plain"
        to.mkdir()
        started = time.perf_counter()
        targets = [str(to / f"{path.stem}.parquet") for path in self._ipc]
        count = sum(self._pool.map(write_plainly, map(str, self._ipc), targets))
        seconds = time.perf_counter() - started
        if count != self._count:
            raise RuntimeError(f"wrote {count} rows of {self._count}")
        self.sizes["plain"] = sum(path.stat().st_size for path in to.iterdir())
        shutil.rmtree(to)
        return self._count / seconds

    def compare(self, pairs: int) -> dict[str, Any]:
        for _ in range(WARM_UPS):
            self.ours()
            self.theirs()
        before = psutil.cpu_times()
        ratio, mine, other = median_ratio(self.ours, self.theirs, pairs)
        after = psutil.cpu_times()
        return {
            "ratio": ratio,
            "ratios": [a / b for a, b in zip(mine, other, strict=True)],
            "archive_rows_per_second": statistics.median(mine),
            "plain_rows_per_second": statistics.median(other),
            "sizes": self.sizes,
            "chunks": len(self._ipc),
            "machine_busy": 1 - (after.idle - before.idle) / (sum(after) - sum(before)),
        }


def run(body_size: int, count: int, pairs: int = 5) -> dict[str, Any]:
    """Measure one body size; a ratio above one means that the archiver is faster."""
    with tempfile.TemporaryDirectory(prefix="plait-bench-") as root:
        spark = plait.spark.session("plait-bench", master="local[2]")
        try:
            with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
                return {
                    "count": count,
                    "body_size": body_size,
                    "level": files.COMPRESSION_LEVEL,
                    **Archiving(spark, pool, Path(root), count, body_size).compare(pairs),
                }
        finally:
            spark.stop()


def results(smoke: bool) -> Iterator[Result]:
    """Both bars."""
    for body_size, (count, bar) in CASES.items():
        figures = run(body_size, 20_000, 1) if smoke else run(body_size, count)
        yield Result(f"archive / plain program, {body_size} B", figures["ratio"], bar, details=figures)


if __name__ == "__main__":
    print(json.dumps([run(size, count) for size, (count, _) in CASES.items()], indent=1))
