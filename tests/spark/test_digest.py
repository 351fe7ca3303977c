"""The checksum of rows does not depend on how they are divided into batches, and changes with any row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.spark.archiving.digest import Digest
from plait.spark.archiving.file_writer import MESSAGE_SCHEMA

ROW: dict[str, Any] = {
    "partition": "a@g1",
    "sequence": 0,
    "message_id": "0000000000000001-1",
    "key": "k",
    "tags": ["x", "y"],
    "headers": [("h", "1")],
    "body": b"body",
    "send_time": 1,
    "store_time": 2,
    "logical_partition": 3,
    "epoch": 1,
}


def table_of(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist([{**ROW, **row} for row in rows], schema=MESSAGE_SCHEMA)


def checksum(*tables: pa.Table) -> tuple[int, int]:
    digest = Digest()
    for table in tables:
        for batch in table.to_batches():
            digest.feed(batch)
    return digest.value


THREE = ({"sequence": 0}, {"sequence": 1, "key": None, "tags": None}, {"sequence": 2, "body": b""})


@pytest.mark.parametrize(
    "changed",
    [
        {"partition": "b@g1"},
        {"sequence": 9},
        {"message_id": "0000000000000001-2"},
        {"key": None},
        {"key": ""},
        {"key": "kk"},
        {"tags": ["xy"]},
        {"tags": []},
        {"tags": None},
        {"headers": [("h", "2")]},
        {"headers": [("h1", "")]},
        {"headers": None},
        {"body": b"bodz"},
        {"body": b""},
        {"send_time": None},
        {"send_time": 0},
        {"store_time": 3},
        {"logical_partition": None},
        {"logical_partition": 0},
        {"epoch": 2},
    ],
)
def test_every_value_of_every_column_changes_the_checksum(changed: dict[str, Any]):
    before, after = table_of(*THREE), table_of({**THREE[0], **changed}, *THREE[1:])
    assert checksum(before) != checksum(after)


def test_bytes_that_move_to_another_row_change_the_checksum():
    before, after = (
        table_of({"body": first}, {"sequence": 1, "body": second}) for first, second in ((b"ab", b"c"), (b"a", b"bc"))
    )
    assert checksum(before) != checksum(after)
    assert checksum(table_of(*THREE)) != checksum(table_of(*THREE[:2]))
    assert checksum(table_of(*THREE)) != checksum(table_of(*THREE[::-1]))


@given(st.lists(st.tuples(st.sampled_from([None, "k1", "k2"]), st.binary(max_size=5)), max_size=30), st.integers(0, 30))
def test_batch_boundaries_do_not_change_the_checksum(given_rows: list[tuple[str | None, bytes]], cut: int):
    rows = [
        {"sequence": number, "key": key, "body": body, "headers": [("n", str(number))]}
        for number, (key, body) in enumerate(given_rows)
    ]
    whole = table_of(*rows)
    assert checksum(whole.slice(0, cut), whole.slice(cut)) == checksum(whole)


def test_bytes_behind_a_null_do_not_change_the_checksum():
    validity = pa.py_buffer(b"\x05")
    arrays = [
        pa.Array.from_buffers(pa.int32(), 3, [validity, pa.py_buffer(np.array([1, hidden, 3], np.int32))])
        for hidden in (7, 8)
    ]
    digests = [Digest(), Digest()]
    for digest, array in zip(digests, arrays, strict=True):
        digest.feed(pa.RecordBatch.from_arrays([array], ["n"]))
    assert digests[0].value == digests[1].value
