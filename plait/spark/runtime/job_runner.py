"""Runs the tasks of a job on Spark and reports their progress."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from plait import chance
from plait.errors import ArchiveError, from_code
from plait.spark.archiving.archive_tasks import Job, TaskFacts

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: How often the progress of a job is read from Spark.
LOOK_SECONDS: Final = 0.5
#: How much of Spark's error text is shown: the start of a Java error and the end of a Python error name the cause.
SHOWN_LENGTH_MAX: Final = 1_000


class ProgressListener(Protocol):
    """Receives the progress of a long step."""

    def step(self, name: str, total: int | None = None, unit: str = ...) -> None: ...

    def update(self, done: int) -> None: ...


def run_job(spark: SparkSession, job: Job, step: str, progress: ProgressListener | None = None) -> list[TaskFacts]:
    """Run all tasks and return their facts in order. Raises the first error of a task as it would be without Spark."""
    count = len(job.tasks)
    group = f"plait-{chance.token(8)}"
    context = spark.sparkContext
    if progress is not None:
        progress.step(step, sum(task.weight for task in job.tasks), "bytes")

    def collect() -> list[TaskFacts]:
        # The job group is a property of the thread.
        context.setJobGroup(group, step, interruptOnCancel=True)
        # Not a DataFrame: planning a query for a few numbers would take Java longer than the rest of its work here.
        facts: list[bytes] = context.parallelize(range(count), count).mapPartitions(job).collect()
        return [msgspec.msgpack.decode(each, type=TaskFacts) for each in facts]

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(collect)
        try:
            while not wait((running,), LOOK_SECONDS).done:
                if progress is not None:
                    progress.update(_done(spark, group, job))
        except BaseException:
            context.cancelJobGroup(group)
            raise
        facts = _result(running)
    for fact in facts:
        if fact.error is not None:
            raise from_code(*fact.error)
    return facts


def _result(running: Future[list[TaskFacts]]) -> list[TaskFacts]:
    with in_one_line("Spark did not end its tasks; nothing was committed, run again"):
        return running.result()


@contextmanager
def in_one_line(what: str) -> Iterator[None]:
    """Turn an error of Spark itself into an ``ArchiveError`` of one line that begins with ``what``."""
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException, PythonException

    try:
        yield
    except (PySparkException, Py4JError) as error:
        text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
        shown = text[-SHOWN_LENGTH_MAX:] if isinstance(error, PythonException) else text[:SHOWN_LENGTH_MAX]
        raise ArchiveError(f"{what}: {shown}") from error


def _done(spark: SparkSession, group: str, job: Job) -> int:
    """Finished bytes, estimated from the number of finished tasks, which are about equal in size."""
    tracker = spark.sparkContext.statusTracker()
    ended = 0
    for number in tracker.getJobIdsForGroup(group):
        info = tracker.getJobInfo(number)
        for stage in info.stageIds if info is not None else ():
            facts = tracker.getStageInfo(stage)
            ended += facts.numCompletedTasks if facts is not None else 0
    return sum(task.weight for task in job.tasks) * min(ended, len(job.tasks)) // len(job.tasks)
