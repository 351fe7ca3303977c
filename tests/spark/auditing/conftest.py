"""An audit in this process, without Spark: the same parts run one after another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from plait.spark.auditing import tally
from plait.spark.auditing.job import crossed_of, judge_part
from plait.spark.auditing.report import AuditReport, GroupAudit
from plait.spark.auditing.run import open_input, wanted_of
from plait.spark.auditing.summary import summarize

Audit = Callable[..., AuditReport]


def audit_here(
    data: Path | None = None,
    archive: Path | None = None,
    *,
    subjects: Any = (),
    groups: Any = (),
    since: Any = None,
    until: Any = None,
    skip_damage: bool = False,
) -> AuditReport:
    source = open_input(
        None if data is None else str(data),
        None if archive is None else str(archive),
        wanted_of(subjects, since, until),
        frozenset(groups),
        broker_group="g1",
        skip_damage=skip_damage,
        progress=lambda name, done, total: None,
    )
    table = pa.concat_tables([tally.SCHEMA.empty_table(), *(judge_part(source, n) for n in range(len(source)))])
    crossed = crossed_of(table)
    return summarize(source, tally.added_up(table), crossed, since=None, until=None)


@pytest.fixture
def audit() -> Audit:
    return audit_here


def one_group(report: AuditReport) -> GroupAudit:
    (group,) = report.groups()
    return group
