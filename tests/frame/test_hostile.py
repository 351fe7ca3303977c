"""Reading arbitrary bytes gives a value or ``FrameError``: no other exception, and no bytes from outside the frame."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from plait.errors import FrameError
from plait.frame import FrameView, can_coalesce, coalesce, frames_in, slice_mask, slice_rows
from plait.frame.arrow import record_batch
from plait.frame.columns import RUN_SIZE, Codec, Column
from plait.frame.header import HEADER_SIZE
from plait.limits import FRAME_COUNT_MAX
from tests.frame.samples import Draft, drafts, full_draft, header_row, relaxed, resign, rows_of, with_column
from tests.support.deep import Cycles


def read_everything(data: bytes) -> str:
    """Read bytes in every way that readers do. Returns the outcome."""
    try:
        frame = FrameView(data)
    except FrameError:
        return "refused"
    outcomes = [_outcome(step, frame) for step in _STEPS]
    if outcomes[0] == "read":
        # The frame is valid, so every read must succeed.
        assert outcomes == ["read"] * len(outcomes)
        assert _outcome(_slices, frame) == ("refused" if frame.has(Column.SELECTION) else "read")
        if can_coalesce(frame):
            assert rows_of(FrameView(coalesce([frame, frame]).tobytes()).validate())
        return "valid"
    _outcome(_slices, frame)
    return "parsed"


def _outcome(step: Callable[[FrameView], object], frame: FrameView) -> str:
    try:
        step(frame)
    except FrameError:
        return "refused"
    return "read"


def _slices(frame: FrameView) -> None:
    middle = (frame.count + 1) // 2
    start = middle - 1
    sliced = FrameView(slice_rows(frame, start, middle).tobytes())
    rows_of(sliced)
    masked = FrameView(slice_mask(frame, np.arange(frame.count) % 3 == 0).tobytes())
    rows_of(masked)


def _read_batch(frame: FrameView) -> None:
    batch = record_batch(frame)
    batch.validate(full=True)
    batch.to_pylist()


_STEPS = (
    FrameView.validate,
    FrameView.verify,
    rows_of,
    _read_batch,
    lambda frame: (block := frame.header_block()) and (block.maps(), block.map(0), block.rows(), block.tobytes()),
    lambda frame: (frame.runs(), frame.selection(), frame.end, frame.compressed),
)


#: Headers as a block with every kind of column.
HEADED = Draft([b"a"] * 20, headers=[header_row(random.Random(number)) for number in range(20)])


def valid_frames() -> list[bytes]:
    several = [Draft([b"a" * i] * i, send_time=i, producer=i, keys=[b"k"] * i, key_hashes=[i] * i) for i in (1, 2, 3)]
    joined = coalesce([draft.view() for draft in several])
    return [
        Draft([b"hello"]).build().tobytes(),
        full_draft(6).build().tobytes(),
        full_draft(40).build().tobytes(),
        full_draft(12, "zstd").build().tobytes(),
        full_draft(12, "lz4").build().tobytes(),
        joined.tobytes(),
        slice_rows(FrameView(joined.tobytes()), 1, 5).tobytes(),
        slice_mask(FrameView(joined.tobytes()), np.arange(6) % 2 == 0).tobytes(),
        slice_rows(full_draft(12, "zstd").view(), 2, 7).tobytes(),
        slice_mask(full_draft(12, "lz4").view(), np.arange(12) % 3 == 0).tobytes(),
        with_column(full_draft(3).build(), 31, 12, b"newer").tobytes(),
        HEADED.build().tobytes(),
        slice_rows(HEADED.view(), 3, 9).tobytes(),
        slice_mask(HEADED.view(), np.arange(20) % 3 == 0).tobytes(),
    ]


VALID = valid_frames()
#: Numbers at the bounds of types and limits.
EDGES = [
    0,
    1,
    2,
    7,
    8,
    0x7F,
    0xFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    0x0FFFFFFF,
    FRAME_COUNT_MAX,
    FRAME_COUNT_MAX + 1,
]


def mutated(rng: random.Random) -> bytes:
    """A valid frame after a few changes; half of them with corrected checksums."""
    frame = bytearray(rng.choice(VALID))
    for _ in range(rng.choice([1, 1, 2, 4])):
        kind = rng.randrange(6)
        place = rng.randrange(len(frame)) if rng.random() < 0.5 else rng.randrange(min(len(frame), 140))
        if kind == 0:
            frame[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            frame[place] = rng.randrange(256)
        elif kind == 2:
            struct.pack_into("<I", frame, min(place, len(frame) - 4) & ~3, rng.choice(EDGES))
        elif kind == 3 and len(frame) >= HEADER_SIZE + 16:
            struct.pack_into("<Q", frame, min(place, len(frame) - 8) & ~7, rng.choice(EDGES) << rng.choice([0, 30, 32]))
        elif kind == 4:
            other = rng.choice(VALID)
            begin = rng.randrange(len(other))
            piece = other[begin : begin + rng.randrange(40)]
            frame[place : place + len(piece)] = piece
        else:
            step = 8 * rng.randrange(1, 4)
            frame[place:place] = bytes(step) if rng.random() < 0.5 else b""
            del frame[place : place + (step if rng.random() < 0.3 else 0)]
        if len(frame) < HEADER_SIZE:
            return bytes(frame)
    if rng.random() < 0.5:
        struct.pack_into("<I", frame, 4, len(frame))
    return resign(frame) if rng.random() < 0.75 else bytes(frame)


@pytest.mark.parametrize("index", range(len(VALID)))
def test_the_unchanged_frames_are_valid(index: int):
    assert read_everything(VALID[index]) == "valid"


@relaxed
@given(st.binary(max_size=400))
@example(b"")
@example(b"PL\x01" + b"\0" * 200)
def test_arbitrary_bytes_give_a_value_or_a_frame_error(data: bytes):
    read_everything(data)
    try:
        frames_in(data)
    except FrameError:
        pass


@relaxed
@given(st.data())
def test_an_arbitrary_body_behind_a_good_header_gives_a_value_or_a_frame_error(data: st.DataObject):
    count = data.draw(st.integers(1, 20))
    bits = data.draw(st.integers(0, 0xFFFFFFFF)) & 0xFFFF00FF
    tail = data.draw(st.binary(min_size=8, max_size=240).map(lambda b: b[: len(b) & ~7]))
    header = bytearray(Draft([b"a"]).build().tobytes()[:HEADER_SIZE])
    struct.pack_into("<III", header, 4, HEADER_SIZE + len(tail), count, bits)
    read_everything(resign(header + tail))


@relaxed
@given(st.data(), drafts(count_max=12))
def test_one_wrong_byte_in_any_frame_gives_a_value_or_a_frame_error(data: st.DataObject, draft: Draft):
    frame = bytearray(draft.build().tobytes())
    place = data.draw(st.integers(0, len(frame) - 1))
    frame[place] = data.draw(st.integers(0, 255))
    read_everything(resign(frame))


def test_changed_frames_give_a_value_or_a_frame_error(seed: int):
    rng = random.Random(seed)
    outcomes = [read_everything(mutated(rng)) for _ in range(2000)]
    # The changes reach every layer: some frames do not parse, some parse and are refused later, some stay valid.
    assert min(outcomes.count(outcome) for outcome in ("refused", "parsed", "valid")) > 200


@pytest.mark.deep("frames")
def test_very_many_changed_frames_give_a_value_or_a_frame_error(seed: int, cycles: Cycles):
    for number in cycles(20):
        rng = random.Random(f"{seed}/{number}")
        for _ in range(5_000):
            read_everything(mutated(rng))


# --- wrong tables --------------------------------------------------------------------------------


def run_table(*runs: tuple[int, int, int, int]) -> bytes:
    return b"".join(
        struct.pack("<QQIIQ", producer, first, rows, 0, previous) for producer, first, rows, previous in runs
    )


@pytest.mark.parametrize(
    "table",
    [
        b"",
        b"\0" * (RUN_SIZE - 8),
        run_table((1, 1, 4, 0)),
        run_table((1, 1, 6, 0)),
        run_table((1, 1, 5, 0), (2, 1, 0, 0)),
        run_table((1, 1, 0, 0), (2, 1, 5, 0)),
        run_table((1, 1, 4, 0), (2, 1, (1 << 32) - 4, 0), (3, 1, 5, 0)),
        run_table((1, 1, (1 << 32) - 1, 0), (2, 1, 6, 0)),
        run_table((1, 1, (1 << 20) + 1, 0)),
        run_table((1, (1 << 64) - 2, 5, 0)),
        run_table((1, (1 << 62) - 4, 5, 0)),
    ],
)
def test_wrong_run_tables_are_refused(table: bytes):
    frame = FrameView(with_column(full_draft(5).build(), Column.RUNS, Codec.RAW, table).tobytes())
    for step in (FrameView.runs, FrameView.message_ids, FrameView.validate, lambda f: slice_rows(f, 1, 2)):
        with pytest.raises(FrameError, match="run table"):
            step(frame)


@pytest.mark.parametrize("codec", [Codec.CONST, Codec.ZSTD, Codec.LZ4, 9])
def test_tables_with_a_codec_are_refused(codec: int):
    draft = full_draft(5)
    runs = FrameView(with_column(draft.build(), Column.RUNS, codec, run_table((1, 1, 5, 0))).tobytes())
    with pytest.raises(FrameError, match="run table is malformed"):
        runs.validate()
    chosen = FrameView(with_column(draft.build(), Column.SELECTION, codec, struct.pack("<II", 9, 0)).tobytes())
    with pytest.raises(FrameError, match="selection is malformed"):
        chosen.validate()


@pytest.mark.parametrize(
    "selection",
    [
        b"",
        b"\0" * 7,
        struct.pack("<II", 4, 0),
        struct.pack("<II", 9, 5),
        struct.pack("<II", 5, 1),
        struct.pack("<II", 9, 0xFFFFFFFF),
        struct.pack("<II", FRAME_COUNT_MAX + 1, 0),
        struct.pack("<II", 0xFFFFFFFF, 0),
        struct.pack("<II", 9, 0) + b"\x1f",
        struct.pack("<II", 9, 0) + b"\x1f\0\0",
        struct.pack("<II", 9, 0) + b"\x0f\0",
        struct.pack("<II", 9, 0) + b"\x3f\0",
        struct.pack("<II", 9, 0) + b"\0\0",
        # The only bits are after the last row.
        struct.pack("<II", 9, 0) + b"\0\xfe",
        struct.pack("<II", 9, 1) + b"\x1f\0",
    ],
)
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_wrong_selections_are_refused(selection: bytes, compression: str | None):
    frame = with_column(full_draft(5, compression).build(), Column.SELECTION, Codec.RAW, selection)
    view = FrameView(frame.tobytes())
    for step in (FrameView.selection, FrameView.sequences, FrameView.message_ids, FrameView.runs, FrameView.validate):
        with pytest.raises(FrameError, match="row selection"):
            step(view)


def test_a_selection_of_more_rows_than_the_compressed_column_has_is_refused():
    frame = with_column(full_draft(5, "zstd").build(), Column.SELECTION, Codec.RAW, struct.pack("<II", 1000, 990))
    with pytest.raises(FrameError, match="body column has"):
        FrameView(frame.tobytes()).validate()
