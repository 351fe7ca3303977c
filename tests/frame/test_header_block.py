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
from plait.frame.header_block import BLOCK_COUNT_MIN, HeaderBlock
from plait.limits import HEADER_COLUMNS_MAX, HEADERS_SIZE_MAX
from tests.frame.samples import Draft, relaxed, with_column

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
        assert same([row or {} for row in block.maps()], rows)


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
@given(st.lists(ALIKE, min_size=BLOCK_COUNT_MIN, max_size=60))
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
    rows = [row | {"region": "eu-central-1"} for row in orders(1_000)]
    encoded = sum(len(encode(row)) for row in rows)
    block = block_of(frame_of(rows))
    # City: 4 bytes for the offset and 3 of text; amount: 2; region: once.
    assert len(block.tobytes()) < 10 * len(rows) < encoded / 3


def test_few_rows_keep_the_row_form_and_can_be_joined():
    frame = frame_of(orders(BLOCK_COUNT_MIN - 1))
    assert frame.header_block() is None
    assert can_coalesce(frame)
    assert not can_coalesce(frame_of(orders(BLOCK_COUNT_MIN)))


def test_very_many_different_names_keep_the_row_form():
    rows = [{f"name-{number}": number} for number in range(5_000)]
    frame = frame_of(rows)
    assert frame.header_block() is None
    assert same(maps_of(frame), rows)


def test_names_that_few_rows_have_stay_in_maps():
    rows = [row | ({"rare": "x"} if number % 50 == 0 else {}) for number, row in enumerate(orders(1_000))]
    block = block_of(frame_of(rows))
    assert [column.name for column in block.columns] == ["city", "amount", ""]
    assert block.array("rare") is None
    assert same([row or {} for row in block.maps()], rows)


def test_more_names_than_a_block_has_columns_for_stay_in_maps():
    rows = [{f"n{name}": number for name in range(HEADER_COLUMNS_MAX + 5)} for number in range(100)]
    block = block_of(frame_of(rows))
    assert len(block.columns) == HEADER_COLUMNS_MAX + 1
    assert same([row or {} for row in block.maps()], rows)


def _changed(block: HeaderBlock, **changes: Any) -> bytes:
    first, *rest = block.columns
    return HeaderBlock(block.count, [first._replace(**changes), *rest]).tobytes()


@pytest.mark.parametrize(
    ("stored", "text"),
    [
        (b"\xff\xff\xff\xff", "no room"),
        (b"\xff\xff\xff\xff" + bytes(4), "cannot have 0 columns"),
        (b"\xff\xff\xff\xff" + b"\xff" * 4, "cannot have"),
        (_changed(block_of(frame_of(orders(20))), name="amount"), "twice"),
        (_changed(block_of(frame_of(orders(20))), name=""), "without a name"),
        (_changed(block_of(frame_of(orders(20))), kind=99), "newer Plait"),
        (_changed(block_of(frame_of(orders(20))), presence=9), "presence 9"),
        (_changed(block_of(frame_of(orders(20))), values=np.zeros(20, np.int32), data=memoryview(b"")), "no room"),
        (_changed(block_of(frame_of(orders(20))), values=np.full(21, 7, np.int32)), "offsets"),
        (_changed(block_of(frame_of(orders(20))), data=memoryview(b"\xff" * 60)), "not UTF-8"),
        (block_of(frame_of(orders(20))).tobytes() + bytes(8), "end at"),
        (block_of(frame_of(orders(20))).tobytes()[:-8], "bytes of"),
        (block_of(frame_of(orders(21))).tobytes(), "offsets|bytes"),
    ],
)
def test_wrong_blocks_are_refused(stored: bytes, text: str):
    frame = FrameView(with_column(Draft([b"a"] * 20).build(), Column.HEADERS, Codec.RAW, stored).tobytes())
    with pytest.raises(FrameError, match=text):
        frame.validate()


def test_a_row_with_more_bytes_than_headers_may_have_is_refused():
    block = block_of(frame_of([{"a": "x" * 5_000, "b": number} for number in range(20)]))
    [first, *rest] = block.columns
    large = first._replace(data=memoryview(b"x" * (HEADERS_SIZE_MAX + 1)))
    stored = HeaderBlock(20, [large, *rest]).tobytes()
    frame = FrameView(with_column(Draft([b"a"] * 20).build(), Column.HEADERS, Codec.RAW, stored).tobytes())
    with pytest.raises(FrameError, match="have more than"):
        frame.validate()
