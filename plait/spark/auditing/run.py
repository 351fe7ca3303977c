"""The implementation of ``plait.spark.audit``: checks the arguments, opens the input, runs the job."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final

from plait.errors import InvalidArgument
from plait.frame.header import TIME_MAX
from plait.model import names
from plait.spark.auditing.inputs.archived_input import open_archived
from plait.spark.auditing.inputs.audit_input import AuditInput, Progress
from plait.spark.auditing.inputs.live_input import open_live
from plait.spark.auditing.report import AuditReport
from plait.spark.runtime.job_runner import ProgressListener as Steps
from plait.storage.reading.log_chunks import WantedRows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: The Spark master unless the caller names one. Two threads bound the memory on small machines.
DEFAULT_MASTER: Final = "local[2]"
#: The least number of parts, so that threads share the work evenly.
TASKS_MIN: Final = 4


def run_audit(
    data: str | None,
    archive: str | None,
    *,
    subjects: Sequence[str],
    groups: Sequence[str],
    since: datetime | None,
    until: datetime | None,
    broker_group: str,
    skip_damage: bool,
    spark: SparkSession | None,
    master: str | None,
    progress: Steps | None,
) -> AuditReport:
    """Audit a data directory or an archive (``plait.spark.audit`` describes the arguments)."""
    report_progress = _by_step(progress)
    source = open_input(
        data,
        archive,
        wanted_of(subjects, since, until),
        frozenset(names.check("group", group) for group in groups),
        broker_group=broker_group,
        skip_damage=skip_damage,
        progress=report_progress,
    )
    from plait.spark.auditing.job import run, spark_failures
    from plait.spark.runtime.session import check_packages, session

    check_packages()

    if spark is None:
        report_progress("starting Spark", 0, 1)
        with spark_failures():
            spark = session("plait audit", master=master or DEFAULT_MASTER)
    return run(spark, source, since=_micros(since), until=_micros(until), progress=report_progress)


def _by_step(steps: Steps | None) -> Progress:
    """A ``Progress`` that starts a new step in ``steps`` whenever the name changes."""
    current = ""

    def report(name: str, done: int, total: int) -> None:
        nonlocal current
        if steps is None:
            return
        if name != current:
            current = name
            steps.step(name, total, "parts")
        steps.update(done)

    return report


def open_input(
    data: str | None,
    archive: str | None,
    wanted: WantedRows,
    groups: frozenset[str],
    *,
    broker_group: str,
    skip_damage: bool,
    progress: Progress,
) -> AuditInput:
    """Open the data directory or the archive and plan the work."""
    if (data is None) == (archive is None):
        raise InvalidArgument("name a data directory or an archive to audit: exactly one of them")
    if archive is not None:
        return open_archived(archive, wanted, groups, progress=progress)
    assert data is not None
    return open_live(
        data,
        wanted,
        groups,
        broker_group=broker_group,
        fail_on_damage=not skip_damage,
        tasks_min=TASKS_MIN,
        progress=progress,
    )


def wanted_of(subjects: Sequence[str], since: datetime | None, until: datetime | None) -> WantedRows:
    """The rows of ``subjects`` (names, or prefixes with ``*``; none: all) that were stored at times [since, until)."""
    exact = [names.check("subject", name) for name in subjects if not name.endswith("*")]
    prefixes = [name[:-1] for name in subjects if name.endswith("*")] if subjects else [""]
    low, high = _micros(since), _micros(until)
    if low is not None and high is not None and low >= high:
        raise InvalidArgument(f"since {since} is not before until {until}")
    return WantedRows(
        frozenset(exact),
        tuple(prefixes),
        time_min=low or 0,
        time_max=TIME_MAX if high is None else high - 1,
    )


def _micros(moment: datetime | None) -> int | None:
    if moment is None:
        return None
    if moment.tzinfo is None:
        raise InvalidArgument(f"time {moment} has no time zone; add one, such as tzinfo=UTC")
    return round(moment.timestamp() * 1_000_000)
