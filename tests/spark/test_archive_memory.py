"""An archiver's tasks hold a limited part of a log in memory, for any messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.spark.archiving import archive_tasks as tasks
from plait.spark.archiving import archiver as archiving
from plait.spark.source import spark_columns as columns
from tests.spark.archives import archive_here, archived_rows, log_rows, run_here, three_days


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tasks run in this process."""
    monkeypatch.setattr(archiving, "run_job", run_here)
    return three_days(tmp_path / "data")


@pytest.mark.parametrize(("bound", "value"), [("HELD_SIZE_MAX", 2000), ("HELD_COUNT_MAX", 6)])
def test_a_task_holds_a_limited_number_of_bytes_and_rows(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, value: int
):
    monkeypatch.setattr(tasks, bound, value)
    to = tmp_path / "archive"
    report = archive_here(data, to, now=True)
    assert report.files > 30
    assert archived_rows(to) == log_rows(data)


def test_columns_as_large_as_a_file_are_not_held_for_the_next_one(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    columns._shared_texts.cache_clear()
    monkeypatch.setattr(columns, "BATCH_COUNT_MAX", 2)
    archive_here(data, tmp_path / "archive", now=True)
    assert columns._shared_texts.cache_info().currsize == 0
