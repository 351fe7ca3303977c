"""An audit in this process, without Spark: the same parts run one after another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from plait.clock import SystemClock
from plait.spark.archiving import archiver
from plait.spark.auditing import tally
from plait.spark.auditing.job import crossed_of, judge_part, open_input
from plait.spark.auditing.report import AuditReport, GroupAudit
from plait.spark.auditing.summary import summarize
from plait.spark.history.selection import period_of
from plait.spark.runtime.job_runner import NoProgress
from tests.spark.archives import run_here

Audit = Callable[..., AuditReport]


def audit_here(
    data: Path | None = None, archive: Path | None = None, *, since: Any = None, until: Any = None, **options: Any
) -> AuditReport:
    low, high = period_of(since, until, SystemClock().now())
    source = open_input(data, archive, since=low, until=high, progress=NoProgress(), **options)
    table = pa.concat_tables([tally.SCHEMA.empty_table(), *(judge_part(source, n) for n in range(len(source)))])
    crossed = crossed_of(table)
    return summarize(source, tally.added_up(table), crossed, since=None, until=None)


@pytest.fixture(autouse=True)
def archive_without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Archivers of these tests run their tasks in this process."""
    monkeypatch.setattr(archiver, "run_job", run_here)


@pytest.fixture
def audit() -> Audit:
    return audit_here


def one_group(report: AuditReport) -> GroupAudit:
    (group,) = report.groups()
    return group
