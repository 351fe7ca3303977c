"""Hashes of whole columns equal those of the library: the mapping of keys must never change."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from plait.frame.xxh3 import hash_rows


def value(length: int, number: int) -> bytes:
    """Bytes that differ from those of the next numbers at every position."""
    return bytes((31 * number + 7 * position + length) % 256 for position in range(length))


@pytest.mark.parametrize("length", range(70))
def test_values_of_one_length_are_hashed_as_the_library_hashes_them(length: int):
    rows = [value(length, number) for number in range(9)]
    assert hash_rows(pa.array(rows)).tolist() == [xxh3_64_intdigest(row) for row in rows]


def test_values_of_all_lengths_together_are_hashed_as_the_library_hashes_them():
    rows = [value(length, number) for number in range(3) for length in [*range(130), 0, 64, 1]]
    wanted = [xxh3_64_intdigest(row) for row in rows]
    column = pa.array(rows)
    for start, count in ((0, len(rows)), (5, 1), (17, 64), (len(rows) - 1, 1), (3, 0)):
        assert hash_rows(column.slice(start, count)).tolist() == wanted[start : start + count]


def test_text_is_hashed_as_utf_8_and_null_as_empty():
    assert hash_rows(pa.array(["größe-1", None, "", "訂單"])).tolist() == [
        xxh3_64_intdigest(text.encode()) for text in ("größe-1", "", "", "訂單")
    ]
    assert hash_rows(pa.array([None, None], pa.string())).tolist() == [xxh3_64_intdigest(b"")] * 2


@given(st.lists(st.binary(max_size=80), max_size=40))
def test_any_values_are_hashed_as_the_library_hashes_them(rows: list[bytes]):
    assert hash_rows(pa.array(rows, pa.binary())).tolist() == [xxh3_64_intdigest(row) for row in rows]
