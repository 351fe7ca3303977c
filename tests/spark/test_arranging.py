"""Sorting rows for lookups: each row is kept once and unchanged, whether values move or views of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import ArchiveError
from plait.spark.archiving import archiver as archiving
from plait.spark.archiving.array_views import (
    arranged,
    is_moved,
    joined,
    log_order,
    lookup_order,
    moved,
    raw_size,
    viewed_batch,
)
from plait.spark.archiving.file_writer import MESSAGE_SCHEMA
from plait.spark.source.spark_columns import one_batch
from plait.storage.disk import RealDisk
from plait.storage.reading.log_chunks import WantedRows, plan, read_chunk
from plait.storage.reading.log_reader import open_log
from tests.spark.archives import Filler, archive_here, archived_rows, log_rows, run_here

LONG = b"too long to stand in its view: "
ROW: dict[str, Any] = {
    "partition": "a@g1",
    "message_id": "0000000000000001-1",
    "key": "k",
    "body": LONG,
    "store_time": 2,
    "epoch": 1,
}


def rows_of(*rows: dict[str, Any]) -> pa.RecordBatch:
    plain = [{**ROW, "sequence": number, **row} for number, row in enumerate(rows)]
    return viewed_batch(pa.RecordBatch.from_pylist(plain, schema=MESSAGE_SCHEMA))


def changed(column: str, values: list[Any]) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    """Replace values by others, in other memory."""
    return lambda rows: replaced(rows, column, pa.array(values, rows.schema.field(column).type))


def swapped(column: str, order: list[int]) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    """The same values in the same memory, in other rows."""
    return lambda rows: replaced(rows, column, moved(rows, np.array(order)).column(column))


def replaced(rows: pa.RecordBatch, column: str, array: pa.Array) -> pa.RecordBatch:
    return rows.set_column(rows.schema.get_field_index(column), rows.schema.field(column), array)


ROWS = rows_of(
    {"key": "b", "body": LONG + b"0", "tags": ["x"], "headers": [("h", "1")]},
    {"key": None, "body": b"short", "send_time": 1, "logical_partition": 7},
    {"key": "a", "body": LONG + b"2", "tags": []},
    {"key": "a", "body": b"", "message_id": "0000000000000002-1", "header_types": "i"},
)


def test_rows_are_sorted_by_key_and_unchanged():
    sorted_rows = arranged(ROWS, lookup_order(ROWS))
    assert sorted_rows.column("sequence").to_pylist() == [2, 3, 0, 1]
    assert sorted_rows.to_pylist() == [ROWS.to_pylist()[place] for place in (2, 3, 0, 1)]
    assert arranged(sorted_rows, log_order(sorted_rows)).equals(ROWS)
    assert arranged(ROWS, np.arange(4)) is ROWS


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda rows: rows.slice(1), id="lost"),
        pytest.param(lambda rows: moved(rows, np.array([0, 0, 2, 3])), id="doubled"),
        pytest.param(lambda rows: moved(rows, np.array([0, 1, 2, 3, 3])), id="one more"),
        pytest.param(lambda rows: moved(rows, np.array([1, 0, 2, 3])), id="swapped"),
        swapped("sequence", [1, 0, 2, 3]),
        swapped("message_id", [1, 0, 2, 3]),
        swapped("key", [0, 1, 3, 2]),
        swapped("tags", [1, 0, 2, 3]),
        swapped("headers", [0, 1, 3, 2]),
        swapped("body", [0, 3, 2, 1]),
        swapped("body", [2, 1, 0, 3]),
        swapped("send_time", [0, 1, 3, 2]),
        swapped("logical_partition", [0, 1, 3, 2]),
        swapped("header_types", [0, 2, 1, 3]),
        changed("body", [LONG + b"2", b"", LONG + b"1", b"short"]),
        changed("body", [LONG + b"2", b"", LONG + b"00", b"short"]),
        changed("body", [LONG + b"2", b"", LONG + b"0", b"shirt"]),
        changed("key", ["a", "a", "b", ""]),
        changed("key", ["a", "a", None, None]),
        changed("partition", ["a@g1", "b@g1", "a@g1", "a@g1"]),
        changed("store_time", [2, 2, 3, 2]),
        changed("epoch", [1, 1, 1, 2]),
        changed("tags", [None, None, ["x"], None]),
        changed("headers", [None, None, [("h", "2")], None]),
    ],
)
def test_every_change_of_a_row_by_sorting_is_detected(
    spoil: Callable[[pa.RecordBatch], pa.RecordBatch], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("plait.spark.archiving.array_views.moved", lambda rows, order: spoil(moved(rows, order)))
    with pytest.raises(ArchiveError, match=r"sorted rows differ from the rows that were read; nothing was committed"):
        arranged(ROWS, lookup_order(ROWS))


def test_equal_values_in_other_memory_are_accepted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "plait.spark.archiving.array_views.moved",
        lambda rows, order: changed("body", [LONG + b"2", b"", LONG + b"0", b"short"])(moved(rows, order)),
    )
    assert arranged(ROWS, lookup_order(ROWS)).column("sequence").to_pylist() == [2, 3, 0, 1]


def test_an_order_that_has_a_row_twice_is_detected():
    order = np.array([2, 3, 0, 0])
    assert not is_moved(ROWS, order, moved(ROWS, order))
    assert not is_moved(ROWS, order[:3], moved(ROWS, order[:3]))
    with pytest.raises(ArchiveError):
        arranged(ROWS, order)


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([None, "", "k2", "k1"]), st.binary(max_size=20))),
    st.integers(0, 30),
)
def test_rows_are_sorted_for_any_input(given_rows: list[tuple[str, str | None, bytes]], cut: int):
    rows = rows_of(
        *(
            {"partition": f"{partition}@g1", "key": key, "body": body, "headers": [("n", key)] if key else None}
            for partition, key, body in given_rows
        )
    )
    sorted_rows = arranged(rows, lookup_order(rows))
    listed = sorted_rows.to_pylist()
    places = [(row["key"] is None, row["key"] or "", row["partition"], row["sequence"]) for row in listed]
    assert places == sorted(places)
    assert sorted(listed, key=lambda row: row["sequence"]) == rows.to_pylist()
    parts = [part for part in (sorted_rows.slice(0, cut), sorted_rows.slice(cut)) if part.num_rows] or [rows]
    again = joined(parts)
    assert arranged(again, log_order(again)).equals(rows)
    text_size = sum(len(body) + len(key or "") for _, key, body in given_rows)
    assert text_size <= raw_size(rows) <= text_size + 400 * len(given_rows)


def test_a_sequence_that_was_given_out_twice_is_sorted_by_epoch():
    rows = rows_of({"sequence": 5, "epoch": 2}, {"sequence": 6}, {"sequence": 5})
    assert log_order(rows).tolist() == [2, 1, 0]


def test_bodies_of_large_frames_are_not_copied_before_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(archiving, "run_job", run_here)
    data, to = tmp_path / "data", tmp_path / "archive"
    filler = Filler(data)
    filler.rounds(4, size=20_000)
    filler.stop()
    wanted = WantedRows(prefixes=("",))
    disk = RealDisk(data, read_only=True)
    chunks = plan(open_log(str(data)), wanted).chunks
    members = [member for chunk in chunks for member in read_chunk(disk, str(data), chunk, wanted)]
    bodies = one_batch(members, MESSAGE_SCHEMA, "g1").column("body")
    for (_, view), buffer in zip(members, bodies.buffers()[2:], strict=True):
        file = np.frombuffer(view.buffer, np.uint8)
        assert 0 < buffer.address - file.ctypes.data < len(file)
    archive_here(data, to, now=True)
    rows = log_rows(data)
    assert archived_rows(to) == rows
    assert bodies.to_pylist() == [row["body"] for row in rows]
