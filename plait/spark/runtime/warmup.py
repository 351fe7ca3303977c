"""Makes a class-data archive for Spark, which saves Java the loading of classes: a large part of a session's start.

A short session in a separate process uses the same features of Spark as Plait, and its Java writes the loaded classes
to the archive as it exits. At every start Java checks the archive against its own build and Spark's jars, and ignores
an archive that does not match.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from plait.spark.runtime.java import SparkUnavailable
from plait.spark.runtime.session import check_packages, find_runtime, session
from plait.spark.runtime.session_files import cache_directory

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import SparkSession

#: A start, a few small jobs and the writing of the archive; a busy machine takes two minutes.
PREPARE_SECONDS_MAX = 600.0
#: An archive takes some 190 MB: one that no session has used for this long is removed.
UNUSED_SECONDS_MAX = 30 * 86_400.0

_TRAIN = "import sys; from plait.spark.runtime.warmup import train; train(sys.argv[1])"


def prepare() -> Path:
    """Make later local sessions of this Java and this PySpark start with some 40 % less work; once is enough.

    Takes a minute or two on two busy cores, and 190 MB of the user's cache. Safe to repeat, and to run at the
    same time as sessions and other preparations. Returns the archive's path.
    """
    check_packages()
    runtime = find_runtime()
    if runtime.archive.exists():
        return runtime.archive
    _remove_unused(cache_directory())
    with tempfile.TemporaryDirectory(prefix=".archive.", dir=runtime.directory) as aside:
        written = Path(aside, runtime.archive.name)
        # Java inherits the output pipe and exits after Python: reading to the end waits for both.
        training = subprocess.run(
            [sys.executable, "-c", _TRAIN, str(written)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PREPARE_SECONDS_MAX,
        )
        if training.returncode != 0 or not written.exists():
            output = training.stdout.decode(errors="replace").strip()[-2000:]
            raise SparkUnavailable(f"Java wrote no class-data archive for Spark; output of the session: {output}")
        written.replace(runtime.archive)
    return runtime.archive


def train(archive: str) -> None:
    """Use the features of Spark that Plait uses; the Java of this process writes `archive` when it exits."""
    # Compiled code is not archived, so the short run need not compile well.
    options = f'"-XX:ArchiveClassesAtExit={archive}" -XX:TieredStopAtLevel=1 -XX:+UseSerialGC'
    spark = session("plait-prepare", master="local[2]", config={"spark.driver.extraJavaOptions": options})
    with tempfile.TemporaryDirectory() as directory:
        _use(spark, directory)
    spark.stop()


def _use(spark: SparkSession, directory: str) -> None:
    from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
    from pyspark.sql.types import StructType

    class WarmupReader(DataSourceReader):
        def partitions(self) -> list[InputPartition]:
            return [InputPartition(number) for number in range(2)]

        def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
            return iter([(partition.value,)])

    class WarmupSource(DataSource):
        @classmethod
        def name(cls) -> str:
            return "plait_prepare"

        def schema(self) -> str:
            return "number bigint"

        def reader(self, schema: StructType) -> DataSourceReader:
            return WarmupReader()

    def same(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        return batches

    spark.dataSource.register(WarmupSource)
    rows = spark.read.format("plait_prepare").load().mapInArrow(same, "number bigint")
    rows.selectExpr("number", "current_timestamp() AS at", "CAST(number AS STRING) AS key").write.parquet(
        f"{directory}/rows"
    )
    stored = spark.read.parquet(f"{directory}/rows")
    stored.createOrReplaceTempView("prepare_rows")
    spark.sql(
        "SELECT key, count(*), max(at), row_number() OVER (ORDER BY key) FROM prepare_rows GROUP BY key"
    ).collect()
    stored.join(rows, "number").orderBy("key").toArrow()


def _remove_unused(cache: Path) -> None:
    """Remove archives by the age of their directory, which a session touches when it starts."""
    oldest = time.time() - UNUSED_SECONDS_MAX
    for archive in cache.glob("spark-*/spark.jsa"):
        if archive.parent.stat().st_mtime < oldest:
            archive.unlink(missing_ok=True)
