"""Rows of a DataFrame become columns of frames that decode to the same values, without Spark."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from plait.client.send.encoding import decode_tags, encode_headers, encode_tags
from plait.client.send.row_columns import RowColumns
from plait.errors import InvalidArgument, InvalidName, TooLarge
from plait.frame.header_block import decode_headers
from plait.model.logical_partitions import NO_KEY_HASH
from plait.spark.sink import frame_columns as encoding
from plait.spark.sink.frame_columns import check_columns, encode

NOW = 1_700_000_000_000_000
MAP = pa.map_(pa.string(), pa.string())
TEXTS = pa.list_(pa.string())
TIME = pa.timestamp("us", tz="UTC")


def batch(**columns: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(columns)


def one(**columns: pa.Array) -> RowColumns:
    """Encode a batch whose rows all go to subject "s"."""
    [(subject, rows)] = encode(batch(**columns), "s", NOW)
    assert subject == "s"
    return rows


def bodies(*values: str) -> pa.Array:
    return pa.array(values, pa.string())


def test_bodies_are_bytes_or_text():
    assert one(body=pa.array([b"\xff", b""], pa.binary())).bodies.to_pylist() == [b"\xff", b""]
    assert one(body=bodies("ä", "")).bodies.cast(pa.binary()).to_pylist() == ["ä".encode(), b""]


def test_keys_are_text_or_whole_numbers_or_none():
    rows = one(body=bodies("a", "b", "c"), key=pa.array([7, None, -1], pa.int64()))
    assert rows.keys is not None
    assert rows.keys.to_pylist() == ["7", "", "-1"]
    assert rows.hashes is not None
    assert rows.hashes[1] == NO_KEY_HASH
    texts = one(body=bodies("a"), key=pa.array(["7"]))
    assert texts.hashes is not None
    assert texts.hashes[0] == rows.hashes[0]


def test_tags_are_encoded_as_by_a_client():
    tags: list[Any] = [["a", "b"], None, [], ["long " * 20], ["a"]]
    rows = one(body=bodies(*"abcde"), tags=pa.array(tags, TEXTS))
    assert rows.tags is not None
    encoded = rows.tags.cast(pa.binary()).to_pylist()
    assert encoded == [encode_tags(each) for each in tags]
    assert [decode_tags(each) for each in encoded] == [each or [] for each in tags]


def test_headers_are_encoded_as_by_a_client():
    many = {f"name{n}": "x" * n for n in range(300)}
    headers: list[Any] = [
        {"a": "1"},
        None,
        {},
        {"ä" * 20: "b" * 31, "c" * 32: "d" * 255, "e" * 256: "f" * 3000},
        {str(n): "" for n in range(15)},
        {str(n): "" for n in range(16)},
        many,
    ]
    column = pa.array([None if each is None else list(each.items()) for each in headers], MAP)
    rows = one(body=bodies(*["x"] * len(headers)), headers=column)
    assert rows.headers is not None
    assert rows.headers.to_pylist() == [encode_headers(each) for each in headers]
    assert decode_headers(rows.headers[6].as_py()) == many


def test_a_slice_of_a_batch_is_encoded_correctly():
    columns = {
        "body": bodies(*"abcd"),
        "headers": pa.array([[("n", str(n))] for n in range(4)], MAP),
        "tags": pa.array([[str(n)] for n in range(4)], TEXTS),
        "key": pa.array(["k0", "k1", None, "k3"]),
    }
    [(_, rows)] = encode(batch(**columns).slice(1, 2), "s", NOW)
    assert rows.bodies.to_pylist() == ["b", "c"]
    assert rows.headers is not None
    assert [decode_headers(each) for each in rows.headers.to_pylist()] == [{"n": "1"}, {"n": "2"}]
    assert rows.tags is not None
    assert [decode_tags(each) for each in rows.tags.cast(pa.binary()).to_pylist()] == [["1"], ["2"]]
    assert rows.keys is not None
    assert rows.keys.to_pylist() == ["k1", ""]


def test_rows_are_grouped_by_subject_in_order():
    found = list(encode(batch(body=bodies(*"abcd"), subject=pa.array(["x", "y", None, "x"])), "s", NOW))
    assert [(subject, rows.bodies.to_pylist()) for subject, rows in found] == [
        ("x", ["a", "d"]),
        ("y", ["b"]),
        ("s", ["c"]),
    ]
    assert [subject for subject, _ in encode(batch(body=bodies("a"), subject=pa.array(["x"])), None, NOW)] == ["x"]


@pytest.mark.parametrize(
    "delay",
    [
        pa.array([60, None]),
        pa.array([60.0, None]),
        pa.array([Decimal("60.000"), None], pa.decimal128(5, 3)),
        pa.array([timedelta(minutes=1), None], pa.duration("us")),
    ],
)
def test_delays_count_from_now_and_null_means_immediately(delay: pa.Array):
    found = list(encode(batch(body=bodies("late", "now"), delay=delay), "s", NOW))
    assert [rows.bodies.to_pylist() for _, rows in found] == [["now"], ["late"]]
    assert found[0][1].dues is None
    assert np.array(found[1][1].dues).tolist() == [NOW + 60_000_000]


def test_decimal_delays_are_exact_to_the_microsecond():
    delays = [Decimal("0.010001"), Decimal("1.5"), Decimal("86400.123456")]
    rows = one(body=bodies(*"abc"), delay=pa.array(delays, pa.decimal128(20, 6)))
    assert np.array(rows.dues).tolist() == [NOW + 10_001, NOW + 1_500_000, NOW + 86_400_123_456]


def test_delivery_times_are_not_changed():
    at = datetime.fromtimestamp(NOW / 1e6 + 5, UTC)
    [(_, rows)] = encode(batch(body=bodies("a"), deliver_at=pa.array([at], TIME)), "s", NOW)
    assert np.array(rows.dues).tolist() == [NOW + 5_000_000]


def test_an_empty_batch_gives_no_rows():
    assert list(encode(batch(body=bodies(), key=pa.array([], pa.string())), "s", NOW)) == []


@pytest.mark.parametrize(
    ("columns", "error", "text"),
    [
        ({"body": pa.array(["a", None])}, InvalidArgument, "column 'body' has 1 null"),
        ({"body": bodies("a"), "key": bodies("")}, InvalidArgument, "column 'key' has empty values"),
        ({"body": bodies("a"), "key": bodies("k" * 1025)}, TooLarge, "'key' has a value of 1025 bytes"),
        ({"body": bodies("a"), "tags": pa.array([["t"] * 17], TEXTS)}, TooLarge, "17 tags"),
        ({"body": bodies("a"), "tags": pa.array([["\n"]], TEXTS)}, InvalidName, "tag"),
        ({"body": bodies("a"), "tags": pa.array([[None]], TEXTS)}, InvalidArgument, "'tags' has 1 null"),
        ({"body": bodies("a"), "headers": pa.array([[("", "x")]], MAP)}, InvalidArgument, "without a name"),
        ({"body": bodies("a"), "headers": pa.array([[("x", None)]], MAP)}, InvalidArgument, "'headers' has 1 null"),
        ({"body": bodies("a"), "headers": pa.array([[("x", "y" * 70_000)]], MAP)}, TooLarge, "70000 bytes"),
        ({"body": bodies("a"), "headers": pa.array([[("x", "y" * 65_535)]], MAP)}, TooLarge, "'headers' has a value"),
        (
            {"body": bodies("a"), "headers": pa.array([[(str(n), "") for n in range(70_000)]], MAP)},
            TooLarge,
            "70000 headers",
        ),
        ({"body": bodies("a"), "delay": pa.array([-1])}, InvalidArgument, "cannot be delayed by -1"),
        ({"body": bodies("a"), "subject": bodies("no spaces")}, InvalidName, "subject name"),
    ],
)
def test_an_invalid_value_is_reported(columns: dict[str, pa.Array], error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        list(encode(batch(**columns), "s", NOW))


def test_rows_without_a_subject_are_refused():
    with pytest.raises(InvalidArgument, match="option"):
        list(encode(batch(body=bodies("a"), subject=pa.array([None], pa.string())), None, NOW))


def test_every_column_that_can_be_written_is_accepted():
    whole = pa.schema(
        {"subject": pa.string(), "body": pa.binary(), "key": pa.int32(), "tags": TEXTS, "headers": MAP, "delay": TIME}
        | {"to_group": pa.string()}
    )
    check_columns(whole.remove(5))
    check_columns(whole.remove(5).append(pa.field("delay", pa.duration("us"))))
    check_columns(whole.remove(5).append(pa.field("delay", pa.decimal128(2, 1))))
    check_columns(whole.remove(5).append(pa.field("deliver_at", TIME)))
    assert set(encoding.COLUMNS) == {*whole.names, "deliver_at"}


def test_columns_of_one_name_are_refused():
    with pytest.raises(InvalidArgument, match=r"several columns 'key': choose one with select\(\)"):
        check_columns(pa.schema([("body", pa.binary()), ("key", pa.string()), ("key", pa.string())]))


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"body": pa.binary(), "sequence": pa.int64()}, "column 'sequence' cannot be written"),
        ({"key": pa.string()}, "no column 'body'"),
        ({"body": pa.int64()}, "'body' is int64; it must be binary or string"),
        ({"body": pa.binary(), "key": pa.float64()}, "'key' is double"),
        ({"body": pa.binary(), "tags": pa.string()}, "array<string>"),
        ({"body": pa.binary(), "headers": pa.map_(pa.string(), pa.int64())}, "map<string,string>"),
        ({"body": pa.binary(), "delay": pa.string()}, "number of seconds"),
        ({"body": pa.binary(), "deliver_at": pa.timestamp("us")}, "timestamp"),
        ({"body": pa.binary(), "subject": pa.binary()}, "'subject' is binary"),
        ({"body": pa.binary(), "delay": pa.int64(), "deliver_at": TIME}, "drop one of them"),
    ],
)
def test_columns_that_do_not_fit_are_refused(columns: dict[str, pa.DataType], text: str):
    with pytest.raises(InvalidArgument, match=text):
        check_columns(pa.schema(columns))
