"""Spark for Plait: a session that knows ``format("plait")``, on this machine's Java or on one from PyPI.

Needs ``pip install "plait[spark]"``; importing this package does not.
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
    """Make ``format("plait")`` known to a session; `session` does it for those it makes.

    The source narrows what it reads by filters, which Spark must be told to allow: it is told here.
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
    """Judge from the first-hand logs whether Plait kept its promises: of a data directory, or of an archive.

    ``subjects`` are names, or beginnings and ``*`` (none: all), ``groups`` those of consumers (none: all); ``since``
    and ``until`` choose messages by when they were stored. docs/audit.md says what each count of the report means.
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
