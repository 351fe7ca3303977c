"""Headers stored as columns by name: same headers as sent, readable by name, and cut like other columns."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import FrameError
from plait.frame import FrameView, build_frame, can_coalesce, slice_mask, slice_rows
from plait.frame.columns import Codec, Column
from plait.frame.header_block import (
    NAME_SIZE_MAX,
    HeaderBlock,
    HeaderColumn,
    _text_sizes,
    _value_sizes,
)
from plait.frame.header_packing import BLOCK_COUNT_MIN, pack
from plait.frame.slicing import keep_mask
from plait.limits import HEADER_COLUMNS_MAX, HEADERS_SIZE_MAX
from tests.frame.samples import Draft, relaxed, small_blocks, with_column

encode = msgspec.msgpack.Encoder().encode

NAMES = st.sampled_from(["city", "amount", "größe", "a" * 300])
VALUES = st.one_of(
    st.text(max_size=20),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.floats(allow_nan=False),
    st.booleans(),
)
ALIKE = st.fixed_dictionaries(
    {"city": st.sampled_from(["BJS", "SHA"]), "amount": st.integers(0, 1 << 20)},
    optional={"vip": st.booleans(), "price": st.floats(allow_nan=False), "note": st.text(max_size=8)},
)
#: Rows that mostly agree on names and kinds, so that they are stored as a block; or any rows.
ROWS = st.one_of(
    st.lists(ALIKE, min_size=1, max_size=60),
    st.lists(st.dictionaries(NAMES, VALUES, max_size=4), min_size=1, max_size=40),
)


def frame_of(rows: list[dict[str, Any]], compression: str | None = None) -> FrameView:
    encoded = [encode(row) if row else b"" for row in rows]
    bodies = [b"body"] * len(rows)
    with small_blocks():
        frame = build_frame(bodies, producer=1, first=1, headers=encoded, compression=compression)
    return FrameView(frame.tobytes()).validate()


def block_of(frame: FrameView) -> HeaderBlock:
    block = frame.header_block()
    assert block is not None
    return block


def maps_of(frame: FrameView) -> list[dict[str, Any]]:
    """The headers of each row, read as an old reader does: from the row form."""
    return [msgspec.msgpack.decode(row) if row else {} for row in frame.binary(Column.HEADERS).to_pylist()]


def same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    """Whether headers are equal in value and type; 1, 1.0, True and -0.0 are four values."""
    return list(map(_canonical, found)) == list(map(_canonical, expected))


def _canonical(row: dict[str, Any]) -> bytes:
    return encode(dict(sorted(row.items())))


@relaxed
@given(ROWS, st.sampled_from([None, "zstd", "lz4"]))
def test_rows_get_their_headers_back(rows: list[dict[str, Any]], compression: str | None):
    frame = frame_of(rows, compression)
    assert same(maps_of(frame), rows)
    block = frame.header_block()
    if block is not None:
        assert compression is None
        assert same(block.maps(), rows)
        assert same([block.map(row) for row in range(len(rows))], rows)


@relaxed
@given(ROWS, st.data(), st.sampled_from([None, "zstd"]))
def test_cuts_keep_the_headers_of_their_rows(rows: list[dict[str, Any]], data: st.DataObject, compression: str | None):
    frame = frame_of(rows, compression)
    start = data.draw(st.integers(0, len(rows) - 1))
    stop = data.draw(st.integers(start + 1, len(rows)))
    sliced = FrameView(slice_rows(frame, start, stop).tobytes()).validate()
    assert same(maps_of(sliced), rows[start:stop])
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=sliced.count, max_size=sliced.count)))
    mask[data.draw(st.integers(0, sliced.count - 1))] = True
    masked = FrameView(slice_mask(sliced, mask).tobytes()).validate()
    assert same(maps_of(masked), [row for row, chosen in zip(rows[start:stop], mask, strict=True) if chosen])


@relaxed
@given(st.lists(ALIKE, min_size=8, max_size=60))
def test_a_name_is_read_as_an_array_without_the_others(rows: list[dict[str, Any]]):
    block = frame_of(rows).header_block()
    if block is None:
        return
    kinds = {"city": pa.string(), "amount": pa.int64(), "vip": pa.bool_(), "price": pa.float64(), "note": pa.string()}
    for name, kind in kinds.items():
        array = block.array(name)
        if array is not None:
            array.validate(full=True)
            assert array.type == kind
            assert array.to_pylist() == [row.get(name) for row in rows]
    assert block.array("") is None
    assert block.array("absent") is None


def orders(count: int) -> list[dict[str, Any]]:
    draw = Random(7)
    return [{"city": draw.choice(["BJS", "SHA"]), "amount": draw.randrange(10_000)} for _ in range(count)]


def test_a_block_is_smaller_than_the_rows():
    rows = [row | {"vip": row["amount"] > 5_000} for row in orders(1_000)]
    encoded = sum(len(encode(row)) for row in rows)
    # City: 4 bytes for the offset and 3 of text; amount: 2; vip: 1.
    assert len(block_of(frame_of(rows)).tobytes()) < 10 * len(rows) + 100 < encoded / 2


def test_few_rows_keep_the_row_form_and_can_be_joined():
    def built(count: int) -> FrameView:
        headers = [encode(row) for row in orders(count)]
        return FrameView(build_frame([b"a"] * count, producer=1, first=1, headers=headers).tobytes())

    assert built(BLOCK_COUNT_MIN - 1).header_block() is None
    assert can_coalesce(built(BLOCK_COUNT_MIN - 1))
    assert built(BLOCK_COUNT_MIN).header_block() is not None
    assert not can_coalesce(built(BLOCK_COUNT_MIN))


def test_delayed_rows_keep_the_row_form():
    headers = [encode(row) for row in orders(100)]
    frame = build_frame([b"a"] * 100, producer=1, first=1, headers=headers, deliver_at=5)
    assert FrameView(frame.tobytes()).validate().header_block() is None
    block = block_of(frame_of(orders(100))).tobytes()
    wrong = with_column(frame, Column.HEADERS, Codec.RAW, block)
    with pytest.raises(FrameError, match="delayed rows"):
        FrameView(wrong.tobytes()).validate()


def test_very_many_different_names_keep_the_row_form():
    rows = [{f"name-{number}": number} for number in range(5_000)]
    frame = frame_of(rows)
    assert frame.header_block() is None
    assert same(maps_of(frame), rows)


def test_names_that_few_rows_have_stay_in_maps():
    rows = [row | ({"rare": "x"} if number % 50 == 0 else {}) for number, row in enumerate(orders(1_000))]
    block = block_of(frame_of(rows))
    assert [column.name for column in block.columns] == ["city", "amount"]
    assert block.rest is not None
    assert block.array("rare") is None
    assert same(block.maps(), rows)


def test_more_names_than_a_block_has_columns_for_stay_in_maps():
    rows = [{f"n{name}": number for name in range(HEADER_COLUMNS_MAX + 5)} for number in range(100)]
    block = block_of(frame_of(rows))
    assert len(block.columns) == HEADER_COLUMNS_MAX
    assert block.rest is not None
    assert same(block.maps(), rows)


def _stored(**changes: Any) -> bytes:
    """The block of 20 orders, changed in its first column."""
    block = block_of(frame_of(orders(20)))
    first, *rest = block.columns
    return HeaderBlock(block.count, [first._replace(**changes), *rest], None).tobytes()


def _with_block(stored: bytes, count: int = 20) -> FrameView:
    return FrameView(with_column(Draft([b"a"] * count).build(), Column.HEADERS, Codec.RAW, stored).tobytes())


@pytest.mark.parametrize(
    ("stored", "text"),
    [
        (b"\xff\xff\xff\xff", "no room"),
        (b"\xff\xff\xff\xff" + bytes(4), "cannot have 0 columns"),
        (b"\xff\xff\xff\xff" + b"\xff" * 4, "cannot have"),
        (_stored(name="amount"), "twice"),
        (_stored(name=""), "twice, or a name"),
        (_stored(name="n" * (NAME_SIZE_MAX + 1)), "a name of"),
        (_stored(kind=99), "newer Plait"),
        (_stored(present=np.full(20, 2, np.uint8)), "which of 20 rows"),
        (_stored(values=np.zeros(20, np.int32), data=memoryview(b"")), "no room"),
        (_stored(values=np.full(21, 7, np.int32)), "offsets"),
        (_stored(data=memoryview(b"\xff" * 60)), "not UTF-8"),
        (_stored() + bytes(8), "end at"),
        (_stored()[:-8], "bytes of"),
        (block_of(frame_of(orders(21))).tobytes(), "offsets|bytes"),
    ],
)
def test_wrong_blocks_are_refused(stored: bytes, text: str):
    with pytest.raises(FrameError, match=text):
        _with_block(stored).validate()


def _numbers(count: int, columns: int, name: str) -> bytes:
    """A block of columns with one byte a row."""
    values = np.zeros(count, np.uint8)
    made = [HeaderColumn(f"{number}{name}", 2, None, values, memoryview(b"")) for number in range(columns)]
    return HeaderBlock(count, made, None).tobytes()


def test_a_block_that_stands_for_far_more_bytes_than_it_has_is_refused():
    with pytest.raises(FrameError, match="the limit is"):
        _with_block(_numbers(200_000, 4, "n" * 100), 200_000).validate()


def test_the_row_form_of_a_block_counts_as_memory():
    frame = _with_block(_numbers(1_000, 4, "n" * 100), 1_000).validate()
    assert frame.inflated_size > sum(len(row) for row in frame.binary(Column.HEADERS).to_pylist()) - 4 * 1_000
    assert FrameView(Draft([b"a"]).build().tobytes()).inflated_size == 0


def test_rows_just_below_the_limit_are_accepted_and_rows_above_it_are_not():
    long = [{"a": "x" * (HEADERS_SIZE_MAX - 100), "b": 1.5}] + [{f"n{n}": 1.5 * n for n in range(60)}] * 40
    assert same(maps_of(frame_of(long)), long)
    rows = [{"a": "x" * 60_000, "b": number} for number in range(20)]
    first, *rest = block_of(frame_of(rows)).columns
    ends = np.arange(21, dtype=np.int32) * (HEADERS_SIZE_MAX + 1)
    large = first._replace(values=ends, data=memoryview(b"x" * int(ends[-1])))
    with pytest.raises(FrameError, match="have more than"):
        _with_block(HeaderBlock(20, [large, *rest], None).tobytes()).validate()


@given(ALIKE | st.dictionaries(st.sampled_from(["a", "b" * 40, "c" * 128]), VALUES, min_size=1, max_size=3))
def test_the_counted_size_of_a_row_is_that_of_its_map(row: dict[str, Any]):
    block = frame_of([row] * 20).header_block()
    if block is not None and block.rest is None:
        sizes = sum(_text_sizes(np.array([len(c.name.encode())])) + _value_sizes(c) for c in block.columns)
        assert int(np.max(sizes)) == len(encode(row)) - 1


def test_headers_that_do_not_decode_are_shown_as_in_the_row_form():
    block = block_of(frame_of([row | {"mixed": n if n % 2 else "x"} for n, row in enumerate(orders(20))]))
    assert block.rest is not None
    rest = block.rest._replace(values=np.arange(21, dtype=np.int32), data=memoryview(b"\xff" * 20))
    frame = _with_block(HeaderBlock(20, block.columns, rest).tobytes()).validate()
    found = block_of(frame)
    assert found.map(3)["plait-unreadable"] == "ff"
    assert found.maps()[3] == found.map(3)


def test_slices_of_slices_keep_their_rows():
    rows = orders(60)
    frame = frame_of(rows)
    once = FrameView(slice_rows(frame, 10, 50).tobytes())
    twice = FrameView(slice_rows(once, 5, 20).tobytes()).validate()
    assert same(maps_of(twice), rows[15:30])
    kept = FrameView(keep_mask(frame, np.arange(60) % 7 == 0, b"note").tobytes()).validate()
    assert kept.header_block() is None
    assert same(maps_of(kept), rows[::7])


def test_headers_that_readers_do_not_decode_stay_in_the_row_form():
    rows = [encode({"city": "BJS"})] * (BLOCK_COUNT_MIN - 1)
    for hostile in (encode({"city": "BJS", "": 1}), b"\xff"):
        ends = np.cumsum([0, *map(len, [*rows, hostile])]).astype(np.int32)
        assert pack(ends.tobytes(), b"".join([*rows, hostile])) is None
    ends = np.cumsum([0, *map(len, [*rows, rows[0]])]).astype(np.int32)
    assert pack(ends.tobytes(), b"".join([*rows, rows[0]])) is not None
