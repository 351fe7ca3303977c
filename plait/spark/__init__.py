"""Spark for Plait: sessions with ``format("plait")``, the archiver, the audit and the history of a subject.

Users call `session`, `register`, `prepare`, `archive` and `audit`; the CLI calls the same functions. The packages are
``inputs`` (what jobs read), ``source``, ``sink``, ``archiving``, ``auditing``, ``history`` and ``runtime``. They may
import the client, storage, frame and model packages, and nothing of the broker, the meta server or the CLI. Running a
job needs ``pip install "plait[spark]"``; importing this package does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.spark.archiving.archiver import ArchiveReport, archive
from plait.spark.runtime.java import SparkUnavailable
from plait.spark.runtime.session import session
from plait.spark.runtime.warmup import prepare

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from os import PathLike

    from pyspark.sql import SparkSession

    from plait.spark.auditing.report import AuditReport
    from plait.spark.runtime.job_runner import ProgressListener

__all__ = ["ArchiveReport", "SparkUnavailable", "archive", "audit", "prepare", "register", "session"]


def register(spark: SparkSession) -> None:
    """Register ``format("plait")`` with a session; `session` does this for the sessions it starts.

    Also turns on filter pushdown for Python sources, which Spark leaves off by default and the source uses.
    """
    from plait.spark.source.data_source import PlaitDataSource

    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    spark.dataSource.register(PlaitDataSource)


def audit(
    data: str | PathLike[str] | None = None,
    *,
    archive: str | None = None,
    subjects: Sequence[str] = (),
    groups: Sequence[str] = (),
    since: datetime | None = None,
    until: datetime | None = None,
    broker_group: str = "g1",
    skip_damage: bool = False,
    spark: SparkSession | None = None,
    master: str | None = None,
    progress: ProgressListener | None = None,
) -> AuditReport:
    """Check the first-hand logs of a data directory or of an archive against Plait's promises.

    ``subjects`` are names, or prefixes with ``*`` (none: all); ``groups`` are consumer groups (none: all); ``since``
    and ``until`` select messages by store time. docs/audit.md explains each count of the report.
    """
    from plait.spark.auditing.run import run_audit

    return run_audit(
        None if data is None else str(data),
        archive,
        subjects=subjects,
        groups=groups,
        since=since,
        until=until,
        broker_group=broker_group,
        skip_damage=skip_damage,
        spark=spark,
        master=master,
        progress=progress,
    )
