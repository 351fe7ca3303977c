"""The same selection on Spark: the same messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from plait.spark.history import History
from plait.spark.live import SCHEMA
from tests.spark.histories import thirty_messages

pytest.importorskip("pyspark", reason="pip install 'plait[spark]'")

from plait.spark.wide import dataframe, tables

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


def test_nothing_is_an_empty_frame(spark: SparkSession, history: History):
    assert dataframe(spark, history, history.selection("orders", until="2020-01-01")).count() == 0
