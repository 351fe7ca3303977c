"""The parts of the format that a reader accepts, skips and refuses; and the size of a frame."""

from __future__ import annotations

import importlib.util
import struct
import sys

import numpy as np
import pytest

from plait.errors import FrameError
from plait.frame import FrameView, build_frame
from plait.frame import header as header_module
from plait.frame.columns import ENTRY_SIZE_BITS, KNOWN_BITS, ROW_SIZES_MAX, Codec, Column
from plait.frame.compression import deflate
from plait.frame.header import HEADER_SIZE, SEQUENCE_MAX, TIME_MAX
from plait.limits import FRAME_COUNT_MAX, FRAME_SIZE_MAX
from tests.frame.samples import Draft, full_draft, resign, rows_of, with_column


def changed(position: int, layout: str, value: int | bytes, frame: bytes | None = None) -> bytes:
    """A frame with one header field overwritten and its checksums corrected."""
    result = bytearray(frame or full_draft(5).build().tobytes())
    struct.pack_into(layout, result, position, value)
    return resign(result)


@pytest.mark.parametrize("number", [n for n in range(16, 32) if not KNOWN_BITS >> n & 1])
def test_an_unknown_optional_column_is_skipped(number: int):
    draft = full_draft(5)
    for codec in (0, 1, 2, 15):
        frame = FrameView(with_column(draft.build(), number, codec, b"something new").tobytes()).validate()
        assert rows_of(frame) == draft.rows()
        assert frame.places[number][0] == codec
        assert frame.stored(number) == b"something new"


@pytest.mark.parametrize("number", [n for n in range(16) if not KNOWN_BITS >> n & 1])
def test_an_unknown_mandatory_column_is_refused(number: int):
    frame = with_column(full_draft(5).build(), number, 0, b"something new")
    with pytest.raises(FrameError, match=r"columns .* are not known; a newer Plait"):
        FrameView(frame.tobytes())


@pytest.mark.parametrize("flag", [4, 8])
def test_an_unknown_mandatory_flag_is_refused(flag: int):
    with pytest.raises(FrameError, match=r"flags .* are not known; a newer Plait"):
        FrameView(changed(3, "B", flag))


@pytest.mark.parametrize("flag", [16, 32, 64, 128])
def test_an_unknown_optional_flag_is_ignored(flag: int):
    assert FrameView(changed(3, "B", flag)).validate().flags == flag


@pytest.mark.parametrize("version", [0, 2, 255])
def test_another_version_is_refused(version: int):
    with pytest.raises(FrameError, match=f"version {version} is not 1"):
        FrameView(changed(2, "B", version))


@pytest.mark.parametrize(
    ("position", "layout", "value", "message"),
    [
        (0, "2s", b"LP", "magic"),
        (4, "<I", 0, "size 0 is impossible"),
        (4, "<I", HEADER_SIZE, "size 80 is impossible"),
        (4, "<I", 0xFFFFFFF8, "is impossible"),
        (4, "<I", FRAME_SIZE_MAX + 8, "is impossible"),
        (4, "<I", 95, "size 95 is impossible"),
        (4, "<I", FRAME_SIZE_MAX, "cut off"),
        (8, "<I", 0, "count 0 is impossible"),
        (8, "<I", FRAME_COUNT_MAX + 1, "count 1048577 is impossible"),
        (12, "<I", 0, "columns end at 80"),
        (12, "<I", 0xFFFF0000, "columns end at|no room"),
        (24, "<Q", SEQUENCE_MAX - 4, "sequences"),
        (24, "<Q", (1 << 64) - 1, "sequences"),
        (48, "<Q", SEQUENCE_MAX - 4, "sequences"),
        (48, "<Q", 1 << 63, "sequences"),
        (56, "<q", -1, "store time -1 is not a date"),
        (56, "<q", TIME_MAX + 1, "is not a date"),
        (80, "<I", 0x0FFFFFFF, "columns end at"),
    ],
)
def test_impossible_headers_are_refused(position: int, layout: str, value: int | bytes, message: str):
    with pytest.raises(FrameError, match=message):
        FrameView(changed(position, layout, value))


@pytest.mark.parametrize("size", [0, 1, HEADER_SIZE - 1])
def test_fewer_bytes_than_a_header_are_refused(size: int):
    with pytest.raises(FrameError, match=f"{size} bytes are too few"):
        FrameView(full_draft(1).build().tobytes()[:size])


def test_a_directory_longer_than_the_frame_is_refused():
    frame = bytearray(build_frame([b""], producer=1, first=1).tobytes()[:88])
    struct.pack_into("<I", frame, 4, 88)
    struct.pack_into("<I", frame, 12, 0xFFFF0000)
    with pytest.raises(FrameError, match="no room for 16 columns"):
        FrameView(resign(frame))


def test_a_frame_without_bodies_is_not_valid_and_cannot_be_read():
    frame = bytearray(build_frame([b"a"], producer=1, first=1).tobytes())
    struct.pack_into("<I", frame, 12, 1 << 16)
    view = FrameView(resign(frame))
    with pytest.raises(FrameError, match="no body column"):
        view.validate()
    with pytest.raises(FrameError, match="no body column"):
        view.binary(Column.BODY)
    with pytest.raises(FrameError, match="no send time column"):
        view.fixed(Column.SEND_TIME)
    with pytest.raises(FrameError, match="no unknown 20 column"):
        view.stored(20)


def test_keys_without_hashes_are_not_valid():
    frame = build_frame([b"a"], producer=1, first=1, keys=[b"k"])
    with pytest.raises(FrameError, match="keys and no key hashes"):
        FrameView(frame.tobytes()).validate()


def variable(rows: list[bytes]) -> bytes:
    ends = np.cumsum([0, *map(len, rows)]).astype("<i4")
    return ends.tobytes() + b"".join(rows)


@pytest.mark.parametrize("count", [1, 3, 100])
@pytest.mark.parametrize("column", [Column.KEY, Column.TAGS, Column.HEADERS, Column.BODY])
def test_rows_longer_than_the_limit_are_not_valid(column: Column, count: int):
    limit = ROW_SIZES_MAX[column]
    for size in (limit, limit + 1):
        rows = [b"x"] * (count - 1) + [b"x" * size]
        draft = Draft([b"a"] * count, keys=[b""] * count, key_hashes=[1] * count)
        frame = FrameView(with_column(draft.build(), column, Codec.RAW, variable(rows)).tobytes())
        if size == limit:
            frame.validate()
        else:
            with pytest.raises(FrameError, match=f"row longer than {limit} bytes"):
                frame.validate()


NOT_TEXT = [
    [b"\xff", b""],
    [b"a", b"\xc3"],
    # One character split over two rows: the column is UTF-8, its rows are not.
    [b"\xc3", b"\xa9"],
    [b"\xed\xa0\x80", b""],
]


@pytest.mark.parametrize("padding", [0, 100])
@pytest.mark.parametrize("rows", NOT_TEXT)
@pytest.mark.parametrize("column", [Column.KEY, Column.TAGS])
def test_keys_and_tags_that_are_not_text_are_not_valid(column: Column, rows: list[bytes], padding: int):
    rows = rows + ["é".encode()] * padding
    draft = Draft([b"a"] * len(rows), keys=[b""] * len(rows), key_hashes=[1] * len(rows))
    frame = FrameView(with_column(draft.build(), column, Codec.RAW, variable(rows)).tobytes())
    with pytest.raises(FrameError, match="not UTF-8"):
        frame.validate()


@pytest.mark.parametrize("time", [-1, TIME_MAX + 1, -(1 << 63), (1 << 63) - 1])
@pytest.mark.parametrize("column", [Column.SEND_TIME, Column.DELIVER_AT])
def test_times_that_are_not_dates_are_not_valid(column: Column, time: int):
    for codec, values in ((Codec.CONST, [time]), (Codec.RAW, [5, time, 5])):
        frame = with_column(Draft([b"a"] * 3).build(), column, codec, struct.pack(f"<{len(values)}q", *values))
        with pytest.raises(FrameError, match="not a date"):
            FrameView(frame.tobytes()).validate()


@pytest.mark.parametrize(
    ("codec", "size"), [(Codec.RAW, 0), (Codec.RAW, 16), (Codec.CONST, 24), (Codec.ZSTD, 24), (7, 24)]
)
@pytest.mark.parametrize("column", [Column.KEY_HASH, Column.SEND_TIME, Column.DELIVER_AT])
def test_fixed_columns_of_the_wrong_size_or_codec_are_refused(column: Column, codec: int, size: int):
    frame = FrameView(with_column(Draft([b"a"] * 3).build(), column, codec, b"\0" * size).tobytes())
    with pytest.raises(FrameError, match=r"has .* bytes"):
        frame.fixed(column)
    with pytest.raises(FrameError):
        frame.validate()


OFFSETS = [
    [0, 1, 2],
    [0, 3, 2, 4],
    [0, 0, 0, 5],
    [0, 0, 0, 3],
    [-1, 1, 2, 3],
    [-4, -3, -2, 0],
    [0, -1, 2, 4],
    # Differences that fit only if 32-bit arithmetic wraps around.
    [(1 << 31) - 2, -(1 << 31), -(1 << 31) + 1, -(1 << 31) + 2],
]


@pytest.mark.parametrize("copies", [1, 10])
@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("column", [Column.KEY, Column.BODY, Column.TAGS, Column.HEADERS])
def test_offsets_that_do_not_fit_are_refused(column: Column, offsets: list[int], copies: int):
    offsets = offsets[:1] * (3 * copies - 2) + offsets[1:]
    count = 3 * copies
    draft = Draft([b"a"] * count, keys=[b""] * count, key_hashes=[1] * count)
    data = struct.pack(f"<{len(offsets)}i", *offsets) + b"abcd"
    changed = with_column(draft.build(), column, Codec.RAW, data).tobytes()
    if column is Column.HEADERS and offsets[0] == -1:
        with pytest.raises(FrameError, match="header block"):
            FrameView(changed).validate()
        return
    frame = FrameView(changed)
    with pytest.raises(FrameError, match="offsets"):
        frame.variable(column)
    with pytest.raises(FrameError, match="offsets"):
        frame.validate()


@pytest.mark.parametrize("codec", [Codec.CONST, 4, 15])
def test_bodies_in_an_unknown_codec_are_refused(codec: int):
    frame = FrameView(with_column(Draft([b"a"] * 3).build(), Column.BODY, codec, b"\0" * 24).tobytes())
    with pytest.raises(FrameError, match=f"codec {int(codec)}, which is not allowed for it"):
        frame.validate()


@pytest.mark.parametrize("column", [Column.KEY, Column.TAGS])
def test_columns_that_a_broker_filters_by_are_never_compressed(column: Column):
    packed = deflate(variable([b"k" * 300] * 2), Codec.ZSTD)
    draft = Draft([b"a"] * 2, keys=[b""] * 2, key_hashes=[1] * 2)
    frame = FrameView(with_column(draft.build(), column, Codec.ZSTD, packed).tobytes())
    with pytest.raises(FrameError, match="which is not allowed for it"):
        frame.validate()


def test_a_frame_of_one_message_adds_about_a_hundred_bytes():
    for size in range(300):
        bare = build_frame([b"x" * size], producer=1, first=1)
        timed = build_frame([b"x" * size], producer=1, first=1, send_time=1)
        padding = -size % 8
        assert bare.size - size - padding <= 96
        assert timed.size - size - padding <= 104
        assert timed.size - size <= 111


def test_header_directory_and_columns_are_laid_out_as_specified():
    frame = build_frame([b"hello"], producer=1, first=1, send_time=0x0102030405060708).tobytes()
    assert frame[:4] == b"PL\x01\x00"
    assert struct.unpack_from("<III", frame, 4) == (len(frame), 1, 1 << Column.SEND_TIME | 1 << Column.BODY)
    assert struct.unpack_from("<II", frame, 80) == (8 | Codec.CONST << ENTRY_SIZE_BITS, 13)
    assert frame[88:96] == bytes([8, 7, 6, 5, 4, 3, 2, 1])
    assert frame[96:112] == struct.pack("<ii", 0, 5) + b"hello" + b"\0\0\0"


def test_a_big_endian_machine_is_refused(monkeypatch: pytest.MonkeyPatch):
    spec = importlib.util.spec_from_file_location("header_elsewhere", header_module.__file__)
    assert spec is not None
    assert spec.loader is not None
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(ImportError, match="little-endian"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
