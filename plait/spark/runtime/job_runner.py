"""Runs Spark jobs for the archiver, the audit and lookups: progress, cancellation, and the errors of tasks."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import msgspec

from plait import chance
from plait.errors import ArchiveError, PlaitError, from_code
from plait.spark.archiving.archive_tasks import Job, TaskFacts

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")

#: How often the progress of a job is read from Spark.
LOOK_SECONDS: Final = 0.5
#: How much of Spark's error text is shown: the start of a Java error and the end of a Python error name the cause.
SHOWN_LENGTH_MAX: Final = 1_000
#: Precedes an encoded error in the text of a Java or Python error.
_ERROR_PREFIX: Final = "plait-error-"


class ProgressListener(Protocol):
    """Receives the progress of a long step."""

    def step(self, name: str, total: int | None = None, unit: str = ...) -> None: ...

    def update(self, done: int) -> None: ...


class NoProgress:
    """Ignores progress."""

    def step(self, name: str, total: int | None = None, unit: str = "") -> None: ...

    def update(self, done: int) -> None: ...


def run_job(spark: SparkSession, job: Job, step: str, progress: ProgressListener | None = None) -> list[TaskFacts]:
    """Run all tasks and return their facts in order. Raises the first error of a task as it would be without Spark."""
    progress = progress or NoProgress()
    count, total = len(job.tasks), sum(task.weight for task in job.tasks)
    progress.step(step, total, "bytes")

    def collect() -> list[bytes]:
        # Not a DataFrame: planning a query for a few numbers would take Java longer than the rest of its work here.
        found: list[bytes] = spark.sparkContext.parallelize(range(count), count).mapPartitions(job).collect()
        return found

    with spark_errors("Spark did not end its tasks; nothing was committed, run again"):
        # Tasks are about equal in size.
        encoded = run_action(spark, collect, lambda ended: progress.update(total * min(ended, count) // count))
    facts = [msgspec.msgpack.decode(each, type=TaskFacts) for each in encoded]
    for fact in facts:
        if fact.error is not None:
            raise from_code(*fact.error)
    return facts


def run_action(spark: SparkSession, action: Callable[[], T], look: Callable[[int], None]) -> T:
    """Run an action of Spark in a thread; an exception in this thread, such as Ctrl-C, cancels it.

    ``look`` is called every ``LOOK_SECONDS`` with the number of finished tasks.
    """
    context = spark.sparkContext
    group = f"plait-{chance.token(8)}"

    def run() -> T:
        # The job group is a property of the thread.
        context.setJobGroup(group, "plait", interruptOnCancel=True)
        return action()

    with ThreadPoolExecutor(1, "plait-spark") as thread:
        running = thread.submit(run)
        try:
            while not wait((running,), LOOK_SECONDS).done:
                look(_finished_tasks(spark, group))
        except BaseException:
            context.cancelJobGroup(group)
            raise
        return running.result()


def _finished_tasks(spark: SparkSession, group: str) -> int:
    tracker = spark.sparkContext.statusTracker()
    finished = 0
    for number in tracker.getJobIdsForGroup(group):
        info = tracker.getJobInfo(number)
        for stage in info.stageIds if info is not None else ():
            facts = tracker.getStageInfo(stage)
            finished += facts.numCompletedTasks if facts is not None else 0
    return finished


# --- errors -------------------------------------------------------------------------------------


def encode_error(error: PlaitError) -> str:
    """The error of a task as text that survives in the middle of Java's error text."""
    return f"{_ERROR_PREFIX}{pickle.dumps(error).hex()};"


def raise_encoded(text: str) -> None:
    """Raise the error that a text contains; none: do nothing."""
    match = re.search(rf"{_ERROR_PREFIX}([0-9a-f]+);", text)
    if match is not None:
        error: PlaitError = pickle.loads(bytes.fromhex(match[1]))
        raise error


@contextmanager
def spark_errors(failed: str, kind: type[PlaitError] = ArchiveError) -> Iterator[None]:
    """Raise the encoded error of a task as it would be without Spark, and an error of Spark itself as one line that
    begins with ``failed``."""
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException, PythonException

    try:
        yield
    except (PySparkException, Py4JError) as error:
        raise_encoded(f"{error} {getattr(error, '_stackTrace', '')}")
        text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
        shown = text[-SHOWN_LENGTH_MAX:] if isinstance(error, PythonException) else text[:SHOWN_LENGTH_MAX]
        raise kind(f"{failed}: {shown}") from error
