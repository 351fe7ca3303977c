"""``plait spark audit``: its output, its files and its exit code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pyarrow.parquet as pq
import pytest

from plait.cli.entry import run
from plait.spark.auditing import job
from plait.spark.auditing.report_files import TABLES, page, write_tables
from tests.spark.auditing.conftest import Audit
from tests.spark.auditing.defects import swapped_acks
from tests.spark.auditing.test_defects import one_by_one

pytest.importorskip("pyspark", reason="pip install 'plait[spark]'")

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
async def good(tmp_path: Path) -> Path:
    await one_by_one(tmp_path / "good", ordered=True)
    return tmp_path / "good"


@pytest.fixture
def bad(good: Path, tmp_path: Path) -> Path:
    swapped_acks(good, tmp_path / "bad", 4, 6)
    return tmp_path / "bad"


def test_a_good_run_ends_with_0(good: Path, spark: SparkSession, capsys: pytest.CaptureFixture[str]):
    assert run(["spark", "audit", "--data", str(good), "--since", "-24h", "--subject", "order.*"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^ *billing +ordered +12 +12 +0 +0 +0 ", out, re.MULTILINE)
    assert out.endswith("every promise was kept\n")


def test_a_group_that_is_older_than_the_action_log_ends_with_2(
    good: Path, spark: SparkSession, capsys: pytest.CaptureFixture[str]
):
    (segment,) = (good / "action").iterdir()
    # Retention has deleted the earlier segments.
    segment.rename(segment.with_name(f"{1 << 22:020d}.log"))
    assert run(["spark", "audit", "--data", str(good)]) == 2
    assert "unknown: order.book, group billing: the outcome of 12 of 12 messages" in capsys.readouterr().out


def test_a_broken_promise_ends_with_1(
    bad: Path, spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    written = ["--html", str(tmp_path / "a.html"), "--parquet", str(tmp_path / "tables")]
    assert run(["spark", "audit", "--data", str(bad), *written]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == (
        "broken: order.book, group billing: messages acked before an earlier one of the same key, "
        "such as order.book@g1 6"
    )
    assert "acked before an earlier one" in (tmp_path / "a.html").read_text()
    assert pq.read_table(tmp_path / "tables" / "examples.parquet").column("sequence").to_pylist() == [6]


def test_json_has_all_of_the_report(bad: Path, spark: SparkSession, capsys: pytest.CaptureFixture[str], audit: Audit):
    assert run(["spark", "audit", "--data", str(bad), "-o", "json"]) == 1
    report = json.loads(capsys.readouterr().out)
    group = report["subjects"][0]["groups"][0]
    assert (report["held"], group["broken"], group["out_of_order"]) == (False, ["out_of_order"], 1)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "name a data directory or an archive to audit"),
        (["--data", "{good}", "--archive", "x"], "name a data directory or an archive to audit"),
        (["--data", "{good}/nothing"], "there is no directory"),
        (["--data", "{good}", "--subject", "nothing"], "subject 'nothing' is not in"),
        (["--data", "{good}", "--group", "unknown"], "group 'unknown' is not in"),
        (["--data", "{good}", "--since", "soon"], "'soon' is not understood"),
        (["--data", "{good}", "--since", "2025-01-02", "--until", "2025-01-01"], "is not before until"),
        (["--data", "{good}", "--parquet", "{good}"], "exists already"),
        (["--data", "{good}", "--html", "{good}/nothing/audit.html"], "audit.html cannot be written"),
        (["--data", "{good}", "--html", "{good}"], "cannot be written"),
        (["--archive", "{good}"], "is not an archive"),
    ],
)
def test_an_invalid_request_ends_with_2(
    good: Path, arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
):
    assert run(["spark", "audit", *(each.format(good=good) for each in arguments)]) == 2
    errors = capsys.readouterr().err
    assert error in errors
    assert "Spark" not in errors, "Spark was started"


def test_a_page_does_not_claim_promises_that_could_not_be_judged(good: Path, audit: Audit):
    assert "Every promise was kept." in page(audit(good))
    (segment,) = (good / "action").iterdir()
    segment.rename(segment.with_name(f"{1 << 22:020d}.log"))
    html = page(audit(good))
    assert "Every promise was kept." not in html
    assert "Whether every promise was kept is not known." in html
    assert "the outcome of 12 of 12 messages is not known" in html
    assert "<th>unknown</th>" in html


def test_a_failure_of_spark_ends_with_2(
    good: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    class Broken:
        """Defined here so that it is pickled with the job."""

        partitions: ClassVar[dict[int, object]] = {}
        groups: ClassVar[dict[int, object]] = {}
        time_min = time_max = 0

        def __len__(self) -> int:
            return 1

        def blocks(self, number: int) -> None:
            raise RuntimeError("the worker has no memory")

    monkeypatch.setattr(job, "open_input", lambda *arguments, **options: Broken())
    assert run(["spark", "audit", "--data", str(good)]) == 2
    errors = capsys.readouterr().err
    assert "error: the Spark job of the audit failed" in errors
    assert "the worker has no memory" in errors


def test_a_defect_of_the_audit_itself_ends_with_2(
    good: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(*arguments: object, **options: object) -> None:
        raise ZeroDivisionError("by what")

    monkeypatch.setattr(job, "open_input", fail)
    assert run(["spark", "audit", "--data", str(good)]) == 2
    assert "the audit itself failed: ZeroDivisionError('by what') (internal)" in capsys.readouterr().err


async def test_tables_are_complete_and_typed(tmp_path: Path, audit: Audit):
    await one_by_one(tmp_path / "data")
    report = audit(tmp_path / "data")
    write_tables(report, tmp_path / "tables")
    for name, columns in TABLES.items():
        table = pq.read_table(tmp_path / "tables" / f"{name}.parquet")
        assert table.schema.names == list(columns)
    groups = pq.read_table(tmp_path / "tables" / "groups.parquet").to_pylist()
    assert [(group["group"], group["acked"]) for group in groups] == [("billing", 12)]
    assert groups[0]["p50"] > 0
