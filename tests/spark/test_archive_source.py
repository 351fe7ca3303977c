"""The source reads an archive: the rows of its log, in the same columns, found by the manifest."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from plait.errors import ArchiveError, InvalidArgument, SubjectNotFound

pytest.importorskip("pyspark", reason="pip install 'plait[spark]'")

from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, GreaterThanOrEqual, LessThanOrEqual

from plait.spark.archiving import archiver as archiving
from plait.spark.archiving.manifest import Archive
from plait.spark.inputs.parquet_files import ArchiveReadTask, OpenFile, limits_of
from tests.spark.archives import Filler, archive_here, run_here
from tests.spark.support import Stream, batch_reader, rows_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DAY = 86_400.0


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two subjects over more than two days."""
    filler = Filler(tmp_path / "data")
    filler.rounds(40, ("orders", "refunds"), seconds=DAY / 15)
    filler.stop()
    return tmp_path / "data"


@pytest.fixture
def to(monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path) -> Path:
    """Its archive."""
    monkeypatch.setattr(archiving, "run_job", run_here)
    archive_here(data, tmp_path / "archive", now=True)
    return tmp_path / "archive"


def by_sequence(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (row["subject"], row["sequence"]))


def test_an_archive_has_the_rows_of_its_log_in_the_same_columns(data: Path, to: Path):
    archived = rows_of(batch_reader(path=to, subject="*"))
    assert by_sequence(archived) == by_sequence(rows_of(batch_reader(path=data, subject="*")))
    assert len(archived) == 240
    assert {row["subject"] for row in rows_of(batch_reader(path=to, subject="orders", columns="subject"))} == {"orders"}
    reader = batch_reader(path=to, subject="orders", columns="body,subject")
    assert set(rows_of(reader)[0]) == {"body", "subject"}


def read_and_files(to: Path, *filters: Filter) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows, and the files that were planned for them."""
    reader = batch_reader(path=to, subject="*", minPartitions=1)
    reader.pushFilters(list(filters))
    tasks: list[ArchiveReadTask] = [partition.value for partition in reader.partitions()]
    return rows_of(reader), [part.file.path for task in tasks for part in task.parts]


def test_files_that_filters_exclude_are_not_opened(data: Path, to: Path):
    everything = by_sequence(rows_of(batch_reader(path=data, subject="*")))
    _, files = read_and_files(to)
    assert len(files) >= 6
    rows, narrowed = read_and_files(to, EqualTo(("subject",), "orders"))
    assert by_sequence(rows) == [row for row in everything if row["subject"] == "orders"]
    assert all("subject=orders" in path for path in narrowed)
    middle = everything[60]["store_time"]
    rows, narrowed = read_and_files(to, EqualTo(("subject",), "orders"), GreaterThan(("store_time",), middle))
    assert len(narrowed) < len(files) / 2
    wanted = [row for row in everything if row["subject"] == "orders" and row["store_time"] > middle]
    assert [row for row in by_sequence(rows) if row["store_time"] > middle] == wanted
    _, narrowed = read_and_files(to, GreaterThanOrEqual(("sequence",), 10), LessThanOrEqual(("sequence",), 12))
    assert 0 < len(narrowed) < len(files)
    assert read_and_files(to, EqualTo(("partition",), "other@g1")) == ([], [])


def test_keys_are_found_by_statistics_and_only_matching_rows_are_returned(data: Path, to: Path):
    everything = by_sequence(rows_of(batch_reader(path=data, subject="*")))
    rows, _ = read_and_files(to, EqualTo(("key",), "key-3"))
    assert by_sequence(rows) == [row for row in everything if row["key"] == "key-3"]
    assert read_and_files(to, EqualTo(("key",), "zzz")) == ([], [])


def test_a_row_group_without_matching_rows_is_skipped(to: Path):
    import pyarrow.parquet as pq

    (file, *_) = Archive.at(to).open().find("messages", subjects=["orders"])
    table = pq.read_table(to / file.path)
    pq.write_table(table, to / file.path, row_group_size=5)
    metadata = pq.read_metadata(to / file.path)
    reader = batch_reader(path=to)
    reader.pushFilters([EqualTo(("key",), "key-1")])
    chosen = OpenFile(Archive.at(to), file, verify=True).groups(limits_of(reader.wanted))
    assert 0 < len(chosen) < metadata.num_row_groups


def test_a_request_that_an_archive_cannot_answer_is_refused(to: Path):
    with pytest.raises(SubjectNotFound, match=r"'gone' is not in the archive .*there are orders, refunds"):
        batch_reader(path=to, subject="gone").partitions()
    with pytest.raises(SubjectNotFound, match=r"'gone' is not in the archive"):
        Stream(path=to, subject="gone")
    with pytest.raises(InvalidArgument, match="'group' does not apply to an archive"):
        batch_reader(path=to, group="g2")
    with pytest.raises(InvalidArgument, match="'failOnDamage' does not apply to an archive"):
        Stream(path=to, failOnDamage=False)
    shutil.rmtree(to / "_plait")
    (to / "_plait").mkdir()
    with pytest.raises(ArchiveError, match="is not an archive"):
        batch_reader(path=to)


def test_a_remote_place_that_is_no_archive_is_not_read_as_a_log():
    with pytest.raises(ArchiveError, match=r"is not an archive.*segment files can only be read from local paths"):
        batch_reader(path="mock:///archive/raw/g1-572aa25f4c7d511d/message")


def test_a_missing_or_damaged_file_is_named(to: Path):
    reader = batch_reader(path=to)
    (partition, *_) = reader.partitions()
    path = to / partition.value.parts[0].file.path
    data = path.read_bytes()
    path.write_bytes(data[:100])
    with pytest.raises(ArchiveError, match=rf"{path.name} is damaged or cannot be read"):
        list(reader.read(partition))
    path.unlink()
    with pytest.raises(ArchiveError, match=rf"{path.name} is gone"):
        list(reader.read(partition))


def test_spark_reads_an_archive(spark: SparkSession, to: Path):
    frame = spark.read.format("plait").option("subject", "*").load(str(to))
    assert frame.where("key = 'key-3'").count() == frame.toArrow().to_pydict()["key"].count("key-3")
    assert frame.where("subject = 'orders' and sequence between 10 and 12").count() == 3
