"""Spark makes an archive: tasks run in its workers, and their errors are raised in the driver."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from plait.errors import ArchiveError, DamageError
from plait.model.reason import Reason
from plait.spark.archiving.archive_tasks import Job
from plait.spark.archiving.archiver import archive
from plait.spark.runtime.job_runner import run_job
from tests.spark.archives import Filler, archived_deaths, archived_rows, damage, log_deaths, log_rows, three_days

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_spark_runs_the_tasks_and_reads_the_archive(spark: SparkSession, tmp_path: Path):
    data, to = three_days(tmp_path / "data"), tmp_path / "archive"
    steps: list[tuple[str, int | None]] = []

    class Told:
        def step(self, name: str, total: int | None = None, unit: str = "") -> None:
            steps.append((name, total))

        def update(self, done: int) -> None:
            steps.append(("", done))

    report = archive(data, to, spark=spark, now=True, verify=True, progress=Told())
    assert archived_rows(to) == log_rows(data)
    assert (report.messages, report.verified) == (246, report.files)
    assert [name for name, _ in steps if name] == ["archiving messages and events", "reading the archive back"]
    assert steps[0][1] is not None
    rows = spark.read.parquet(str(to / "messages"))
    counts = {row["subject"]: row["count"] for row in rows.groupBy("subject").count().collect()}
    assert counts == {"orders": 120, "refunds": 120, "rare": 6}
    assert spark.read.parquet(str(to / "actions")).where("action = 'ack'").count() == 40
    damage(sorted((data / "message").iterdir())[0])
    with pytest.raises(DamageError, match="is damaged"):
        archive(data, tmp_path / "other", spark=spark, now=True)


def test_spark_archives_the_reasons_of_deaths(spark: SparkSession, tmp_path: Path):
    data, to = tmp_path / "data", tmp_path / "archive"
    filler = Filler(data)
    failing = filler.failing()
    filler.rounds(4)
    filler.fail(failing, Reason("ValueError", "no"), 7)
    filler.stop()
    assert archive(data, to, spark=spark, now=True).deaths == 7
    assert archived_deaths(to) == log_deaths(data)
    found = spark.read.parquet(str(to / "deaths")).where("consumer_group = 'failing'").groupBy("type").count()
    assert [tuple(row) for row in found.collect()] == [("ValueError", 7)]


def test_a_failure_of_spark_is_reported_in_one_line(spark: SparkSession, tmp_path: Path):
    broken = Job(str(tmp_path), 1, "g1", (Broken(),))
    with pytest.raises(ArchiveError, match=r"Spark did not end its tasks; nothing was committed.*ZeroDivisionError"):
        run_job(spark, broken, "failing")


class Broken:
    """A task with a defect."""

    weight = 1

    def run(self, writer: object) -> Any:
        return 1 // 0
