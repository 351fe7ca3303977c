"""Rows of several partitions in the order in which they were stored, sorted in memory or on disk."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest

from plait.spark.history import storage_order as ordering_module
from plait.spark.history.storage_order import Ordering

Row = tuple[str, int, int]


def table_of(rows: list[Row]) -> pa.Table:
    partitions, sequences, times = zip(*rows, strict=True)
    return pa.table(
        {
            "partition": pa.array(partitions, pa.string()),
            "sequence": pa.array(sequences, pa.int64()),
            "store_time": pa.array(times, pa.timestamp("us", tz="UTC")),
            "body": pa.array([b"%d" % sequence for sequence in sequences], pa.binary()),
        }
    )


def ordered(rows: list[Row], **settings: int) -> list[Row]:
    with Ordering(**settings) as ordering:
        for row in rows:
            ordering.add(table_of([row]))
        found = pa.concat_tables(ordering.tables())
    assert found["body"].to_pylist() == [b"%d" % sequence for sequence in found["sequence"].to_pylist()]
    times = found["store_time"].cast(pa.int64()).to_pylist()
    return list(zip(found["partition"].to_pylist(), found["sequence"].to_pylist(), times, strict=True))


def test_partitions_are_interleaved_by_time():
    rows = [("b", 0, 10), ("a", 7, 20), ("b", 1, 30), ("a", 8, 40)]
    assert ordered(rows[::-1]) == rows


def test_rows_of_the_same_time_are_ordered_by_partition_and_sequence():
    rows = [("a", 1, 10), ("a", 2, 10), ("b", 0, 10), ("b", 1, 10)]
    assert ordered(rows[::-1]) == rows


def test_a_partition_keeps_its_order_when_its_clock_is_set_back():
    rows = [("a", 0, 100), ("a", 1, 40), ("b", 0, 70), ("a", 2, 50), ("a", 3, 110)]
    assert ordered(rows) == [("b", 0, 70), ("a", 0, 100), ("a", 1, 40), ("a", 2, 50), ("a", 3, 110)]


def test_no_rows_give_no_rows():
    with Ordering() as ordering:
        ordering.add(table_of([("a", 0, 1)]).slice(1))
        assert list(ordering.tables()) == []


@pytest.mark.parametrize("seed", range(5))
def test_sorting_on_disk_gives_the_same_order(seed: int):
    rng = random.Random(seed)
    rows: list[Row] = []
    for name in ("a", "b", "c"):
        time = 1000
        for sequence in range(rng.randrange(1, 60)):
            time += rng.choice([0, 0, 1, 5, -20])
            rows.append((name, sequence, time))
    expected = ordered(rows)
    rng.shuffle(rows)
    size = table_of(rows[:1]).nbytes
    assert ordered(rows, run_size=7 * size, block_size=2 * size) == expected
    assert ordered(rows, run_size=1, block_size=1) == expected
    assert ordered(rows) == expected


@pytest.mark.parametrize("run_size", [1, 1000, 1 << 20])
@pytest.mark.parametrize("limit", [1, 3, 20, 59, 100])
def test_a_limit_returns_the_first_rows_of_the_whole_order(limit: int, run_size: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ordering_module, "CUT_COUNT", 5)
    rows = [(name, sequence, 10 * sequence + place) for sequence in range(20) for place, name in enumerate("abc")]
    shuffled = random.Random(limit).sample(rows, len(rows))
    assert ordered(shuffled, limit=limit, run_size=run_size) == rows[:limit]


def test_rows_beyond_the_limit_are_recognized(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ordering_module, "CUT_COUNT", 4)
    with Ordering(limit=2) as ordering:
        ordering.add(table_of([("a", 0, 10), ("a", 1, 40), ("b", 0, 30)]))
        assert ordering.bound is None
        ordering.add(table_of([("b", 1, 50)]))
        assert ordering.bound == 30
