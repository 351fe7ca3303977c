"""The kinds of rows that the builder accepts, and what it refuses."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from plait.errors import InvalidArgument, TooLarge
from plait.frame import FrameView, build_frame
from plait.frame.builder import SMALL_COUNT, Rows, build_one
from plait.frame.columns import ORIGINAL_SIZE_MAX, Codec, Column
from plait.frame.header import SEQUENCE_MAX, TIME_MAX
from plait.limits import COLUMN_SIZE_MAX, FRAME_COUNT_MAX, MIB

ROWS = [b"one", b"", "drü".encode(), b"\x1f" * 40]
TEXT = [row.decode() for row in ROWS]

KINDS = {
    "list": ROWS,
    "tuple": tuple(ROWS),
    "text": TEXT,
    "bytearrays": [bytearray(row) for row in ROWS],
    "memoryviews": [memoryview(row) for row in ROWS],
    "text and bytes": [TEXT[0], *ROWS[1:]],
    "bytes and text": [*ROWS[:2], *TEXT[2:]],
    "binary": pa.array(ROWS, pa.binary()),
    "string": pa.array(TEXT, pa.string()),
    "large binary": pa.array(ROWS, pa.large_binary()),
    "large string": pa.array(TEXT, pa.large_string()),
    "binary view": pa.array(ROWS, pa.binary_view()),
    "dictionary": pa.array(TEXT).dictionary_encode(),
    "sliced": pa.array([b"before", *ROWS, b"after"])[1:-1],
    "sliced text": pa.array(["before", *TEXT, "after"])[1:-1],
    "sliced large": pa.array([b"before", *ROWS, b"after"], pa.large_binary())[1:-1],
    "null outside": pa.array([None, *ROWS, None])[1:-1],
    "chunked": pa.chunked_array([ROWS[:1], ROWS[1:3], [], ROWS[3:]], pa.binary()),
    "one chunk": pa.chunked_array([pa.array([b"before", *ROWS])[1:]]),
    "chunked text": pa.chunked_array([TEXT[:1], TEXT[1:]], pa.large_string()),
}


@pytest.mark.parametrize("compression", [None, "zstd", "lz4"])
@pytest.mark.parametrize("repeat", [1, SMALL_COUNT])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_every_container_are_stored(kind: str, repeat: int, compression: str | None):
    rows = KINDS[kind]
    if repeat > 1:
        rows = pa.concat_arrays([rows] * repeat) if isinstance(rows, pa.Array) else rows
        rows = pa.chunked_array(rows.chunks * repeat) if isinstance(rows, pa.ChunkedArray) else rows
        rows = list(rows) * repeat if isinstance(rows, list | tuple) else rows
    count = len(ROWS) * repeat
    frame = build_frame(
        rows,
        producer=1,
        first=1,
        keys=rows,
        key_hashes=np.arange(count, dtype=np.uint64),
        tags=rows,
        headers=rows,
        compression=compression,
    )
    view = FrameView(frame.tobytes()).validate()
    assert frame.count == view.count == count
    for column in (Column.KEY, Column.BODY, Column.TAGS, Column.HEADERS):
        assert view.binary(column).to_pylist() == ROWS * repeat


@pytest.mark.parametrize("count", [1, SMALL_COUNT + 1])
def test_views_of_numbers_are_stored_as_their_bytes(count: int):
    view = memoryview(np.arange(3, dtype=np.int32))
    frame = build_frame([view] * count, producer=1, first=1)
    assert FrameView(frame.tobytes()).validate().binary(Column.BODY).to_pylist() == [view.tobytes()] * count


def test_arrays_are_not_copied():
    array = pa.array([b"x" * 1000] * 100)
    addresses = {buffer.address: buffer.size for buffer in array.buffers() if buffer}
    parts = build_frame(array, producer=1, first=1).parts
    wrapped = [np.frombuffer(part, np.uint8).ctypes.data for part in parts if isinstance(part, memoryview)]
    assert sorted(wrapped) == sorted(addresses)


@pytest.mark.parametrize("count", [1, SMALL_COUNT, SMALL_COUNT + 1])
@pytest.mark.parametrize("wrong", [None, 1, 1.5, [b"x"], "\udc80"], ids=lambda value: repr(value)[:12])
def test_rows_that_are_not_bytes_are_refused(wrong: object, count: int):
    rows: list = [b"x"] * (count - 1) + [wrong]  # type: ignore[type-arg]
    with pytest.raises(InvalidArgument, match=r"null rows|not all bytes"):
        build_frame(rows, producer=1, first=1)


@pytest.mark.parametrize(
    "rows",
    [
        pa.array([1, 2]),
        pa.array([[b"a"], [b"b"]]),
        pa.chunked_array([[1], [2]]),
        pa.array([{"a": 1}, {"a": 2}]),
    ],
    ids=lambda rows: str(rows.type),
)
def test_arrays_of_other_types_are_refused(rows: Rows):
    with pytest.raises(InvalidArgument, match="are not bytes"):
        build_frame(rows, producer=1, first=1)


@pytest.mark.parametrize(
    "rows", [pa.array([b"a", None]), pa.nulls(2), pa.chunked_array([[b"a"], [None]], pa.binary()), [b"a", None]]
)
def test_null_rows_are_refused(rows: Rows):
    with pytest.raises(InvalidArgument):
        build_frame(rows, producer=1, first=1)
    with pytest.raises(InvalidArgument):
        build_frame([b"a", b"b"], producer=1, first=1, headers=rows)


@pytest.mark.parametrize("count", [0, FRAME_COUNT_MAX + 1])
def test_zero_rows_and_too_many_rows_are_refused(count: int):
    with pytest.raises(InvalidArgument, match=f"1 to {FRAME_COUNT_MAX} rows, not {count}"):
        build_frame([b""] * count, producer=1, first=1)


@pytest.mark.parametrize("column", ["keys", "tags", "headers", "key_hashes", "send_time", "deliver_at"])
def test_columns_of_other_lengths_are_refused(column: str):
    values = np.zeros(3, np.int64) if column in ("key_hashes", "send_time", "deliver_at") else [b"a"] * 3
    with pytest.raises(InvalidArgument, match="3 rows, bodies have 2"):
        build_frame([b"a", b"b"], producer=1, first=1, **{column: values})  # type: ignore[arg-type]


def test_fixed_columns_of_any_layout_are_stored():
    hashes = np.arange(20, dtype=np.uint64)[::2]
    times = np.arange(10, dtype=">i4")
    frame = build_frame([b"a"] * 10, producer=1, first=1, key_hashes=hashes, send_time=times)
    view = FrameView(frame.tobytes()).validate()
    assert view.fixed(Column.KEY_HASH).tolist() == hashes.tolist()
    assert view.fixed(Column.SEND_TIME).tolist() == list(range(10))


@pytest.mark.parametrize("time", [-1, TIME_MAX + 1, 1 << 80])
def test_a_time_that_is_not_a_date_is_refused(time: int):
    with pytest.raises(InvalidArgument, match=f"send time {time} is not a date"):
        build_frame([b"a"], producer=1, first=1, send_time=time)
    with pytest.raises(InvalidArgument, match=f"deliver at {time} is not a date"):
        build_frame([b"a"], producer=1, first=1, deliver_at=time)


def test_one_time_for_all_rows_is_stored_once():
    one = FrameView(build_frame([b"a"] * 3, producer=1, first=1, deliver_at=7).tobytes()).validate()
    each = FrameView(build_frame([b"a"] * 3, producer=1, first=1, deliver_at=np.array([7, 8, 9])).tobytes()).validate()
    assert one.places[Column.DELIVER_AT][0] == Codec.CONST
    assert one.stored(Column.DELIVER_AT) == (7).to_bytes(8, "little")
    assert one.fixed(Column.DELIVER_AT).tolist() == [7, 7, 7]
    assert each.fixed(Column.DELIVER_AT).tolist() == [7, 8, 9]


@pytest.mark.parametrize(
    ("producer", "first", "previous", "flags"),
    [
        (-1, 1, 0, 0),
        (1 << 64, 1, 0, 0),
        (1, -1, 0, 0),
        (1, SEQUENCE_MAX, 0, 0),
        (1, 1, -1, 0),
        (1, 1, 1 << 64, 0),
        (1, 1, 0, 256),
    ],
)
def test_numbers_that_do_not_fit_the_header_are_refused(producer: int, first: int, previous: int, flags: int):
    with pytest.raises(InvalidArgument):
        build_frame([b"a"], producer=producer, first=first, previous=previous, flags=flags)


def test_frames_over_the_limit_are_refused():
    room = ORIGINAL_SIZE_MAX - 80 - 8 - 8
    assert build_frame([bytes(room)], producer=1, first=1).size == ORIGINAL_SIZE_MAX
    for rows in ([bytes(room + 1)], [bytes(MIB)] * 18, [bytes(COLUMN_SIZE_MAX)] * 2, [bytes(MIB)] * 65):
        with pytest.raises(TooLarge, match=r"limit; send fewer|limit of"):
            build_frame(rows, producer=1, first=1)


def test_chunks_too_large_for_a_frame_are_not_combined():
    chunk = pa.array([bytes(COLUMN_SIZE_MAX)])
    with pytest.raises(TooLarge, match="over any frame's limit"):
        build_frame(pa.chunked_array([chunk] * 40), producer=1, first=1)


@given(
    body=st.binary(max_size=200),
    key=st.none() | st.text(max_size=20),
    producer=st.integers(0, 2**64 - 1),
    first=st.integers(1, 2**40),
    previous=st.integers(0, 2**40),
    send_time=st.integers(0, TIME_MAX),
    flags=st.sampled_from([0, 1]),
)
def test_build_one_makes_the_same_frame_as_build_frame(
    body: bytes, key: str | None, producer: int, first: int, previous: int, send_time: int, flags: int
):
    said = {"producer": producer, "first": first, "previous": previous, "send_time": send_time, "flags": flags}
    if key is None:
        one, frame = build_one(body, **said), build_frame([body], **said)
    else:
        key_hash = xxh3_64_intdigest(key.encode())
        one = build_one(body, key.encode(), key_hash, **said)
        frame = build_frame([body], keys=[key], key_hashes=np.array([key_hash], np.uint64), **said)
    assert one.tobytes() == frame.tobytes()


def test_build_one_refuses_numbers_that_do_not_fit_the_header():
    with pytest.raises(InvalidArgument, match="producer"):
        build_one(b"", producer=-1, first=1, previous=0, send_time=0)
    with pytest.raises(InvalidArgument, match="sequence"):
        build_one(b"", producer=1, first=SEQUENCE_MAX, previous=0, send_time=0)
