"""A selection on Spark returns the same messages as a lookup."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from plait.cli.commands.spark import history as spark_history
from plait.cli.commands.spark.selection_options import Where
from plait.errors import ArchiveError
from plait.spark.history.lookup import History
from plait.spark.history.pieces import SCHEMA
from tests.spark.histories import replaced_once, thirty_messages

pytest.importorskip("pyspark", reason="pip install 'plait[spark]'")

from plait.spark.history import spark_lookup as wide
from plait.spark.history.spark_lookup import dataframe, tables, write

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    root = tmp_path_factory.mktemp("wide")
    thirty_messages(root)
    return History(root / "archive", data=root / "data")


def test_spark_finds_what_a_lookup_finds(spark: SparkSession, history: History):
    selection = history.selection("orders", headers={"odd": True})
    here = history.table(selection)
    assert here.num_rows == 15
    assert pa.concat_tables(tables(spark, history, selection)).to_pylist() == here.to_pylist()
    assert pa.concat_tables(tables(spark, history, selection, limit=4)).to_pylist() == here.slice(0, 4).to_pylist()
    frame = dataframe(spark, history, selection)
    assert frame.columns == SCHEMA.names
    assert frame.where("sequence >= 20").count() == 5


def test_the_driver_never_holds_all_rows_at_once(
    spark: SparkSession, history: History, monkeypatch: pytest.MonkeyPatch
):
    added: list[int] = []
    add = wide.Ordering.add

    def watched(self: wide.Ordering, rows: pa.Table) -> None:
        added.append(rows.num_rows)
        add(self, rows)

    monkeypatch.setattr(wide.Ordering, "add", watched)
    selection = history.selection("orders")
    everything = pa.concat_tables(tables(spark, history, selection)).to_pylist()
    assert everything == history.table(selection).to_pylist()
    added.clear()
    assert pa.concat_tables(tables(spark, history, selection)).num_rows == sum(added) == 30
    assert max(added) < 30
    added.clear()
    assert pa.concat_tables(tables(spark, history, selection, limit=2)).to_pylist() == everything[:2]
    assert max(added) <= 2
    assert not spark.sparkContext._jsc.getPersistentRDDs()


def test_a_task_returns_the_first_rows_of_each_partition(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wide, "CUT_COUNT", 10)
    given = [
        pa.table({"partition": [f"p{n % 3}" for n in numbers], "sequence": list(numbers)})
        for numbers in (range(50, 100), range(25), range(25, 50))
    ]
    (kept,) = wide.first_of_each(iter(given), 4)
    assert kept["sequence"].to_pylist() == [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]
    assert list(wide.first_of_each(iter([]), 4)) == []


def test_an_empty_selection_gives_an_empty_frame(spark: SparkSession, history: History):
    assert dataframe(spark, history, history.selection("orders", until="2020-01-01")).count() == 0


def read_whole(spark: SparkSession, history: History, path: Path) -> list[int]:
    return sorted(pa.concat_tables(tables(spark, history, history.selection("orders")))["sequence"].to_pylist())


def written_whole(spark: SparkSession, history: History, path: Path) -> list[int]:
    write(spark, history, history.selection("orders"), str(path / "found"))
    return sorted(pq.read_table(path / "found")["sequence"].to_pylist())


@pytest.mark.parametrize("read", [read_whole, written_whole])
def test_a_replaced_file_is_found_again_and_a_missing_one_is_named(
    spark: SparkSession,
    history: History,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    read: Callable[[SparkSession, History, Path], list[int]],
):
    shutil.copytree(Path(history.location).parent, tmp_path, dirs_exist_ok=True)
    moved = History(tmp_path / "archive", data=tmp_path / "data")
    with monkeypatch.context() as patch:
        replaced_once(moved, patch)
        assert read(spark, moved, tmp_path) == list(range(30))
    shutil.rmtree(tmp_path / "found", ignore_errors=True)
    next((tmp_path / "archive").rglob("subject=orders/**/*.parquet")).unlink()
    with pytest.raises(ArchiveError, match=r"\A\S*subject=orders\S* does not exist.*messages are missing[^\n]*\Z"):
        read(spark, moved, tmp_path)


def test_an_error_of_spark_is_reported_in_one_line(
    spark: SparkSession, history: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "found").mkdir()
    with pytest.raises(ArchiveError, match=r"\ASpark did not read all of it[^\n]*already exists[^\n]*\Z"):
        write(spark, history, history.selection("orders"), str(tmp_path / "found"))

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("by chance")

    monkeypatch.setattr(wide, "_packed", broken)
    with pytest.raises(ArchiveError, match=r"\ASpark did not read all of it[^\n]*by chance[^\n]*\Z"):
        list(tables(spark, history, history.selection("orders")))


def test_the_command_reads_on_spark_on_request(
    spark: SparkSession, history: History, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    data = Path(history.location).parent / "data"
    where = Where(history.location, "orders", data=[data], key="order-1")
    spark_history.history(where, spark=True, limit=3, output="json")
    assert [json.loads(line)["sequence"] for line in capsys.readouterr().out.splitlines()] == [1, 4, 7]
    spark_history.history(where, spark=True, parquet=str(tmp_path / "found"))
    assert capsys.readouterr().err.endswith(f"8 messages written to {tmp_path / 'found'}\n")
    assert sorted(pq.read_table(tmp_path / "found")["sequence"].to_pylist()) == [1, 4, 7, 13, 16, 19, 22, 28]
