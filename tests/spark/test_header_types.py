"""Headers as text and letters, and back."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.client.encoding import decode_headers, encode_headers
from plait.spark.columns import header_maps
from plait.spark.header_types import encoded_of, letters_of

VALUES = st.one_of(
    st.text(max_size=5), st.booleans(), st.integers(-(1 << 63), (1 << 64) - 1), st.floats(allow_nan=False)
)


@settings(deadline=None)
@given(st.lists(st.dictionaries(st.text(min_size=1, max_size=3), VALUES, max_size=4), min_size=1, max_size=5))
def test_values_come_back_with_their_types(rows: list[dict[str, str | int | float | bool]]):
    encoded = pa.array([encode_headers(row) or None for row in rows], pa.binary())
    texts, types = pa.chunked_array([header_maps(encoded)]), pa.chunked_array([letters_of(row or None for row in rows)])
    back = encoded_of(texts, types).to_pylist()
    for row, found, letters in zip(rows, back, types.to_pylist(), strict=True):
        if all(isinstance(value, str) for value in row.values()):
            assert (found, letters) == (None, None)
        else:
            read = decode_headers(found)
            assert read == row
            assert [type(value) for value in read.values()] == [type(value) for value in row.values()]
