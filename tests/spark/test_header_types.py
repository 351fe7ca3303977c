"""Headers as text with type letters, and back."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.client.send.encoding import encode_headers
from plait.client.send.open_rows import hash_keys
from plait.frame.header_block import UNREADABLE, decode_headers, read_headers
from plait.spark.archiving import archiver as archiving
from plait.spark.history.lookup import History
from plait.spark.history.pieces import ENCODED
from plait.spark.source.header_columns import encoded_of, header_maps, letters_of
from plait.storage.disk import RealDisk
from tests.spark.archives import archive_here, archived_rows, log_rows, run_here
from tests.support.broker_node import Node, Producer

VALUES = st.one_of(
    st.text(max_size=5), st.booleans(), st.integers(-(1 << 63), (1 << 64) - 1), st.floats(allow_nan=False)
)


@settings(deadline=None)
@given(st.lists(st.dictionaries(st.text(min_size=1, max_size=3), VALUES, max_size=4), min_size=1, max_size=5))
def test_values_are_restored_with_their_types(rows: list[dict[str, str | int | float | bool]]):
    encoded = pa.array([encode_headers(row) or None for row in rows], pa.binary())
    letters = letters_of([row or None for row in rows], len(rows))
    texts, types = pa.chunked_array([header_maps(encoded)]), pa.chunked_array([letters])
    back = encoded_of(texts, types).to_pylist()
    for row, found, letters in zip(rows, back, types.to_pylist(), strict=True):
        if all(isinstance(value, str) for value in row.values()):
            assert (found, letters) == (None, None)
        else:
            read = decode_headers(found)
            assert read == row
            assert [type(value) for value in read.values()] == [type(value) for value in row.values()]


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=40))
def test_malformed_headers_are_readable_and_are_restored(stored: bytes):
    """They are shown as text and sent again as stored, or as a header that marks them."""
    encoded = pa.array([stored, None, encode_headers({"n": 1})], pa.binary())
    maps = header_maps(encoded)
    maps.validate(full=True)
    assert maps.to_pylist()[1:] == [None, [("n", "1")]]
    headers = decode_headers(stored)
    assert encode_headers(headers) or headers == {}
    if (known := read_headers(stored)) is None:
        assert headers == {UNREADABLE: stored.hex()}
        assert maps.to_pylist()[0] == [(UNREADABLE, stored.hex())]
        types = letters_of([{UNREADABLE: stored}, None, {"n": 1}], 3)
        assert encoded_of(pa.chunked_array([maps]), pa.chunked_array([types])).to_pylist()[0] == stored
    else:
        assert headers == known


def test_headers_that_do_not_decode_are_archived_as_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(archiving, "run_job", run_here)
    node, to = Node(RealDisk(tmp_path / "data")), tmp_path / "archive"
    producer = Producer(5)
    long = b"\xc1" * 40_000
    for headers in ([b"\x81\xa1n\x01", b"\xc1\xff"], [b"", long]):
        node.submit(
            producer.frame("orders", b"a", b"b", headers=headers, keys=["k", "k"], key_hashes=hash_keys(["k"] * 2, 2))
        )
        node.turn()
    node.broker.stop()
    assert archive_here(tmp_path / "data", to, now=True, verify=True).messages == 4
    assert archived_rows(to) == log_rows(tmp_path / "data")
    found = History(to).find("orders")
    assert [row["headers"] for row in found.to_pylist()] == [
        [("n", "1")],
        [("plait-unreadable", "c1ff")],
        None,
        [("plait-unreadable", long.hex())],
    ]
    encoded = [
        row
        for table in History(to).scan(History(to).selection("orders"), encoded=True)
        for row in table[ENCODED].to_pylist()
    ]
    assert [encoded[1], encoded[3]] == [b"\xc1\xff", long]
