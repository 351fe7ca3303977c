"""Spark writing to a subject compared with Spark writing the same rows to a sink that does nothing, on local[2].

``python -m benchmarks sink``, or this module alone. The rows, 100-byte bodies with order keys, come from Parquet files,
as in a real job, and in a second comparison from Spark's memory, where reading them is almost free; the bar is for the
first. Both sinks get the rows as Arrow batches in Python tasks; the other one only counts them. The Plait sink encodes
them, stages them at a server on the same machine, which shares the cores, and publishes them: the clock stops when all
rows are visible.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import plait.spark
import plait.sync
from benchmarks.plait_server import PlaitServer
from benchmarks.result import Result, median_ratio

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BAR = 0.6
WARM_UPS = 2
ROW = [
    "concat('order-', lpad(cast(id % 100000 as string), 6, '0')) as key",
    "cast(rpad(cast(id as string), 100, 'x') as binary) as body",
]


def register_nothing(spark: SparkSession) -> None:
    """``format("nothing")``: a sink that reads only the size of each batch."""
    from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage

    class NothingWriter(DataSourceArrowWriter):
        def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
            self.rows = sum(batch.num_rows for batch in iterator)
            return WriterCommitMessage()

    class Nothing(DataSource):
        @classmethod
        def name(cls) -> str:
            return "nothing"

        def writer(self, schema: Any, overwrite: bool) -> DataSourceArrowWriter:
            return NothingWriter()

    spark.dataSource.register(Nothing)


class Writes:
    """Writes the same rows to both sinks in turns; every write to Plait has its own subject."""

    def __init__(self, rows: DataFrame, server: PlaitServer, count: int) -> None:
        self._rows = rows
        self._server = server
        self._count = count
        self._turn = 0

    def compare(self, pairs: int) -> dict[str, Any]:
        """The ratio is the row rate of Plait divided by that of the other sink."""
        for _ in range(WARM_UPS):
            self.plait()
            self.nothing()
        ratio, ours, theirs = median_ratio(self.plait, self.nothing, pairs)
        return {
            "ratio": ratio,
            "ratios": [a / b for a, b in zip(ours, theirs, strict=True)],
            "rows_per_second": statistics.median(ours),
            "nothing_rows_per_second": statistics.median(theirs),
        }

    def nothing(self) -> float:
        started = time.perf_counter()
        self._rows.write.format("nothing").mode("append").save()
        return self._count / (time.perf_counter() - started)

    def plait(self) -> float:
        self._turn += 1
        subject = f"bench.{id(self)}.{self._turn}"
        started = time.perf_counter()
        writer = self._rows.write.format("plait").mode("append").option("server", self._server.address)
        writer.option("subject", subject).save()
        rate = self._count / (time.perf_counter() - started)
        with plait.sync.connect(self._server.address) as client:
            found = client.admin.subject(subject).subject.count
            client.admin.delete_subject(subject)
        if found != self._count:
            raise RuntimeError(f"{found} messages are visible, {self._count} were written")
        return rate


def run(count: int = 2_000_000, pairs: int = 7) -> dict[str, Any]:
    """Measure with rows from files and with rows from memory."""
    spark = plait.spark.session("plait-bench", master="local[2]", config={"spark.driver.memory": "2g"})
    try:
        with tempfile.TemporaryDirectory(prefix="plait-bench-") as directory, PlaitServer() as server:
            register_nothing(spark)
            rows = spark.range(0, count, 1, 4).selectExpr(*ROW)
            rows.write.parquet(f"{directory}/rows")
            files = Writes(spark.read.parquet(f"{directory}/rows"), server, count).compare(pairs)
            held = rows.cache()
            held.count()
            memory = Writes(held, server, count).compare(pairs)
    finally:
        spark.stop()
    return {"count": count, "files": files, "memory": memory}


def results(smoke: bool) -> Iterator[Result]:
    """The bar."""
    figures = run(20_000, 1) if smoke else run()
    yield Result("Spark sink / sink that does nothing, 100 B", figures["files"]["ratio"], BAR, details=figures)


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
