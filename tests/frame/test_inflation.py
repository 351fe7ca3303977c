"""Inflation of compressed columns: exactly the declared size, at most the limit, and freed after validation."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import textwrap

import pyarrow as pa
import pytest

from plait.errors import FrameError, InvalidArgument, TooLarge
from plait.frame import FrameView, build_frame
from plait.frame.columns import Codec, Column
from plait.frame.compression import codec_named, deflate, inflate
from plait.limits import COLUMN_SIZE_MAX, FRAME_SIZE_MAX, MIB
from tests.frame.samples import Draft, arrow_bytes, full_draft, rows_of, with_column

CODECS = [Codec.ZSTD, Codec.LZ4]
NAMES = {Codec.ZSTD: "zstd", Codec.LZ4: "lz4"}


def packed(raw: bytes, codec: Codec, declared: int, copies: int = 1) -> bytes:
    """A compressed column of ``copies`` of the raw bytes, with any declared size."""
    return struct.pack("<I", declared) + deflate(raw, codec)[4:] * copies


def column(body: bytes) -> bytes:
    return struct.pack("<ii", 0, len(body)) + body


def with_body(stored: bytes, codec: Codec) -> FrameView:
    return FrameView(with_column(Draft([b"x"]).build(), Column.BODY, codec, stored).tobytes())


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("difference", [-1000, -10, -1, 1, 10, 1000, 100_000])
def test_a_column_that_inflates_to_another_size_is_refused(codec: Codec, difference: int):
    raw = column(b"a" * 5000)
    stored = packed(raw, codec, len(raw) + difference)
    with pytest.raises(FrameError, match="does not inflate"):
        inflate(memoryview(stored), codec)
    frame = with_body(stored, codec)
    with pytest.raises(FrameError, match="does not inflate"):
        frame.binary(Column.BODY)
    with pytest.raises(FrameError, match="does not inflate"):
        frame.validate()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("declared", [COLUMN_SIZE_MAX + 1, 1 << 31, (1 << 32) - 1])
def test_a_column_over_the_limit_is_refused_before_inflation(codec: Codec, declared: int):
    before = pa.default_memory_pool().max_memory()
    with pytest.raises(FrameError, match=f"declares {declared} bytes; the limit is {COLUMN_SIZE_MAX}"):
        with_body(packed(column(b"a" * 5000), codec, declared), codec).validate()
    assert pa.default_memory_pool().max_memory() - before < MIB


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("size", [0, 1, 3])
def test_a_column_without_room_for_its_size_is_refused(codec: Codec, size: int):
    with pytest.raises(FrameError, match="no room for its size"):
        with_body(b"\0" * size, codec).validate()


@pytest.mark.parametrize("codec", CODECS)
def test_damaged_compression_is_refused(codec: Codec):
    raw = column(b"the quick brown fox " * 100)
    good = deflate(raw, codec)
    for stored in (good[:-1], good[:10], good + b"x", good + good[4:], good[:4] + b"\xff" * 40, good[:4]):
        with pytest.raises(FrameError, match="does not inflate"):
            inflate(memoryview(stored), codec)


@pytest.mark.parametrize("codec", CODECS)
def test_columns_inflated_for_validation_are_freed(codec: Codec):
    size = 8 * MIB
    bodies = deflate(column(bytes(size)), codec)
    headers = deflate(column(bytes(60_000)), codec)
    frame = with_column(Draft([b"x"]).build(), Column.BODY, codec, bodies)
    stored = with_column(frame, Column.HEADERS, codec, headers).tobytes()
    before = arrow_bytes()
    waiting = [FrameView(stored).validate() for _ in range(20)]
    assert arrow_bytes() - before < MIB
    assert len(waiting[0].binary(Column.BODY)[0].as_py()) == size


def test_a_column_is_inflated_once_for_all_its_readers():
    frame = full_draft(50, "zstd").view()
    assert frame.variable(Column.BODY)[1].obj is frame.variable(Column.BODY)[1].obj


@pytest.mark.parametrize("codec", CODECS)
def test_a_body_over_the_limit_is_not_valid_however_small_it_is_compressed(codec: Codec):
    frame = with_body(deflate(column(bytes(16 * MIB + 1)), codec), codec)
    assert frame.size < MIB
    with pytest.raises(FrameError, match="row longer than 16777216 bytes"):
        frame.validate()


def test_a_frame_that_no_reader_could_inflate_is_not_built():
    bodies = [bytes(16 * MIB)] * 4
    with pytest.raises(TooLarge, match=str(FRAME_SIZE_MAX)):
        build_frame(bodies, producer=1, first=1, compression="zstd")
    smaller = FrameView(build_frame(bodies[:3], producer=1, first=1, compression="zstd").tobytes()).validate()
    assert [row.body for row in rows_of(smaller)] == bodies[:3]


def test_an_unknown_compression_is_refused_by_name():
    with pytest.raises(InvalidArgument, match="'gzip' is not known; use 'zstd' or 'lz4'"):
        codec_named("gzip")
    with pytest.raises(InvalidArgument, match="'snappy'"):
        build_frame([b"a"], producer=1, first=1, compression="snappy")


# Measured in a separate process, because other tests raise the peak of this one.
PROBE = textwrap.dedent(
    """
    import json, resource, struct, sys
    import numpy as np
    import plait.frame.arrow
    from plait.errors import FrameError
    from plait.frame import FrameView
    from plait.frame.arrow import record_batch
    from plait.frame.columns import Column

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def read(frame):
        for step in (
            FrameView.validate,
            FrameView.message_ids,
            FrameView.sequences,
            lambda view: view.binary(Column.BODY),
            record_batch,
        ):
            try:
                step(FrameView(frame))
                yield "read"
            except FrameError:
                yield "refused"

    frames = [bytes.fromhex(line) for line in sys.stdin.read().split()]
    list(read(frames[0]))
    grown, outcomes = [], []
    for frame in frames[1:]:
        before = peak()
        outcomes.append(list(read(frame)))
        grown.append(peak() - before)
    print(json.dumps([grown, outcomes]))
    """
)


def probe(frames: list[bytes]) -> tuple[list[int], list[list[str]]]:
    """For each frame, the growth of the peak memory of a process that read it, and the outcome of each read."""
    warm_up = full_draft(20, "zstd").build().tobytes()
    lines = "\n".join(frame.hex() for frame in [warm_up, *frames])
    result = subprocess.run([sys.executable, "-c", PROBE], input=lines, capture_output=True, text=True, check=True)
    grown, outcomes = json.loads(result.stdout)
    return grown, outcomes


def test_bombs_are_refused_in_bounded_memory():
    zeros = bytes(16 * MIB)
    bombs = [
        with_body(packed(zeros, codec, declared, copies=64), codec).buffer.tobytes()
        for codec in CODECS
        for declared in (1000, MIB, (1 << 32) - 1)
    ]
    assert max(map(len, bombs)) < 5 * MIB
    grown, outcomes = probe(bombs)
    # Each contains a gigabyte; the second of each kind declares a megabyte.
    assert max(grown) < 24 * MIB
    assert {tuple(outcome) for outcome in outcomes} == {("refused", "read", "read", "refused", "refused")}


def test_a_column_at_the_limit_takes_about_its_size():
    raw = struct.pack("<5i", 0, *(16_000_000 * i for i in (1, 2, 3, 4))) + bytes(64_000_000)
    assert len(raw) <= COLUMN_SIZE_MAX
    frames = [
        with_column(Draft([b"x"] * 4).build(), Column.BODY, codec, deflate(raw, codec)).tobytes() for codec in CODECS
    ]
    grown, outcomes = probe(frames)
    assert sum(grown) < 2.5 * COLUMN_SIZE_MAX
    assert outcomes == [["read"] * 5] * 2


@pytest.mark.parametrize("count", [1 << 20, 1_000_000])
def test_huge_counts_take_at_most_a_few_bytes_per_row(count: int):
    frame = bytearray(Draft([b"x"], send_time=1).build().tobytes())
    struct.pack_into("<I", frame, 8, count)
    chosen = bytearray(
        with_column(Draft([b"x"]).build(), Column.SELECTION, 0, struct.pack("<II", 1 << 20, 0)).tobytes()
    )
    struct.pack_into("<I", chosen, 8, count)
    grown, outcomes = probe([bytes(frame), bytes(chosen)])
    assert sum(grown) < 100 * count
    assert [outcome[3] for outcome in outcomes] == ["refused", "refused"]
