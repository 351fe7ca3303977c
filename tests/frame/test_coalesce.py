"""A joined frame has the rows of all its parts, in order, with their message ids."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import InvalidArgument
from plait.frame import FrameView, build_frame, can_coalesce, coalesce, slice_mask, slice_rows
from plait.frame.builder import pack_stamp
from plait.frame.coalesce import COALESCE_SIZE_MAX
from plait.frame.columns import Column
from plait.frame.header import FLAG_UNSEQUENCED, SEQUENCE_MAX
from tests.frame.samples import NOW, Draft, Row, alike, full_draft, relaxed, rows_of, with_column

BASE = 500


def joined(frames: list[Draft]) -> FrameView:
    """The frames joined into one, stored at sequence ``BASE``."""
    parts = coalesce([draft.view().validate() for draft in frames])
    parts.stamp_with(pack_stamp(3, BASE, NOW, 0, 1))
    return FrameView(parts.tobytes())


def rows_in_order(frames: list[Draft]) -> list[Row]:
    rows = [row for draft in frames for row in draft.rows()]
    return [replace(row, sequence=BASE + i) for i, row in enumerate(rows)]


@relaxed
@given(alike())
def test_joined_frames_have_all_rows_in_order(frames: list[Draft]):
    frame = joined(frames).validate()
    assert rows_of(frame) == rows_in_order(frames)
    assert frame.runs().tolist() == [(d.producer, d.first, d.count, d.view().crc, d.previous) for d in frames]
    assert (frame.producer, frame.first, frame.previous) == (0, 0, 0)
    assert frame.end == BASE + sum(draft.count for draft in frames)


@relaxed
@given(st.data(), alike())
def test_a_slice_of_joined_frames_is_the_slice_of_their_rows(data: st.DataObject, frames: list[Draft]):
    frame = joined(frames)
    start = data.draw(st.integers(0, frame.count - 1))
    stop = data.draw(st.integers(start + 1, frame.count))
    sliced = FrameView(slice_rows(frame, start, stop).tobytes()).validate()
    assert rows_of(sliced) == rows_in_order(frames)[start:stop]
    assert sliced.has(Column.RUNS) == (len(sliced.runs()) > 1)
    again = data.draw(st.integers(0, sliced.count - 1))
    assert rows_of(FrameView(slice_rows(sliced, again, sliced.count).tobytes())) == rows_of(sliced)[again:]


def test_runs_that_end_with_the_last_sequence_are_joined_and_sliced():
    frames = [Draft([b"a", b"b"], producer=producer, first=SEQUENCE_MAX - 2) for producer in range(3)]
    frame = joined(frames).validate()
    for start in range(6):
        for stop in range(start + 1, 7):
            sliced = FrameView(slice_rows(frame, start, stop).tobytes()).validate()
            assert rows_of(sliced) == rows_in_order(frames)[start:stop]


@relaxed
@given(st.data(), alike())
def test_a_mask_of_joined_frames_selects_their_rows(data: st.DataObject, frames: list[Draft]):
    frame = joined(frames)
    mask = data.draw(st.lists(st.booleans(), min_size=frame.count, max_size=frame.count).filter(any))
    masked = FrameView(slice_mask(frame, np.array(mask)).tobytes()).validate()
    assert rows_of(masked) == [row for row, chosen in zip(rows_in_order(frames), mask, strict=True) if chosen]


def test_frames_built_from_array_slices_are_joined():
    array = pa.array([b"skipped", b"one", b"", b"three"])[1:]
    frames = [FrameView(build_frame(array, producer=p, first=1).tobytes()) for p in (1, 2)]
    assert frames[0].stored(Column.BODY)[:4] != b"\0\0\0\0"
    both = FrameView(coalesce(frames).tobytes()).validate()
    assert both.binary(Column.BODY).to_pylist() == [b"one", b"", b"three"] * 2


@pytest.mark.parametrize("flags", [0, FLAG_UNSEQUENCED])
def test_a_joined_frame_is_unsequenced_if_its_parts_are(flags: int):
    assert joined([Draft([b"a"], flags=flags), Draft([b"b"], flags=flags)]).flags == flags


def test_small_raw_frames_of_one_producer_can_be_joined():
    assert can_coalesce(full_draft(5).view())
    size = COALESCE_SIZE_MAX - 80 - 8 - 8
    assert can_coalesce(Draft([b"x" * size]).view())
    assert not can_coalesce(Draft([b"x" * (size + 1)]).view())


def test_frames_that_cannot_be_concatenated_are_not_joined():
    frame = full_draft(5).build()
    assert not can_coalesce(full_draft(5, "zstd").view())
    assert not can_coalesce(full_draft(5, "lz4").view())
    assert not can_coalesce(joined([Draft([b"a"]), Draft([b"b"])]))
    assert not can_coalesce(FrameView(slice_mask(full_draft(5).view(), np.arange(5) == 2).tobytes()))
    assert not can_coalesce(FrameView(with_column(frame, 25, 0, b"newer").tobytes()))


def test_frames_with_different_columns_or_flags_are_not_joined():
    plain, keyed = Draft([b"a"]), Draft([b"a"], keys=[b"k"], key_hashes=[1])
    for other in (keyed, replace(plain, flags=FLAG_UNSEQUENCED)):
        with pytest.raises(InvalidArgument, match="different columns or flags"):
            coalesce([plain.view(), other.view()])
