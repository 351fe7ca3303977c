"""Frames read back as built, with every combination of columns."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import FrameError
from plait.frame import FrameView, build_frame, frames_in
from plait.frame.columns import Codec, Column
from tests.frame.samples import NOW, Draft, drafts, full_draft, relaxed, rows_of


@relaxed
@given(drafts())
def test_a_frame_reads_back_as_it_was_built(draft: Draft):
    frame = draft.view().validate()
    assert rows_of(frame) == draft.rows()
    assert (frame.producer, frame.first, frame.previous) == (draft.producer, draft.first, draft.previous)
    assert (frame.count, frame.flags, frame.base) == (draft.count, draft.flags, draft.base)
    assert (frame.partition, frame.store_time, frame.durable, frame.epoch) == (3, NOW, 4096, 2)
    assert frame.end == draft.base + draft.count
    assert frame.selection() is None
    assert frame.runs().tolist() == [(draft.producer, draft.first, draft.count, 0, draft.previous)]


OPTIONAL = ("keys", "tags", "headers", "send_time", "deliver_at", "priority")


@pytest.mark.parametrize("compression", [None, "zstd", "lz4"])
def test_every_set_of_columns_reads_back(compression: str | None):
    full = full_draft(12, compression)
    for chosen in product([False, True], repeat=len(OPTIONAL)):
        absent = {name: None for name, present in zip(OPTIONAL, chosen, strict=True) if not present}
        draft = Draft(**{**vars(full), **absent})
        frame = draft.view().validate()
        assert rows_of(frame) == draft.rows()
        assert frame.has(Column.KEY) == chosen[0]
        assert frame.compressed == (compression is not None)


@pytest.mark.parametrize(("compression", "codec"), [("zstd", Codec.ZSTD), ("lz4", Codec.LZ4)])
def test_only_bodies_and_headers_are_compressed(compression: str, codec: Codec):
    count = 200
    frame = FrameView(
        build_frame(
            [b"body"] * count,
            producer=1,
            first=1,
            keys=[b"key"] * count,
            tags=[b"\x1ftag\x1f"] * count,
            headers=[b"\x80"] * count,
            compression=compression,
        ).tobytes()
    )
    assert {number for number, place in frame.places.items() if place[0] == codec} == {Column.BODY, Column.HEADERS}


def test_columns_that_do_not_get_shorter_stay_raw():
    bodies = [np.random.default_rng(1).bytes(2000)]
    assert not FrameView(build_frame(bodies, producer=1, first=1, compression="lz4").tobytes()).compressed
    assert not FrameView(build_frame([b"a" * 100], producer=1, first=1, compression="zstd").tobytes()).compressed


@relaxed
@given(st.lists(drafts(count_max=4), max_size=5))
def test_consecutive_frames_in_a_buffer_are_found(sequence: list[Draft]):
    buffer = b"".join(draft.build().tobytes() for draft in sequence)
    found = frames_in(memoryview(buffer))
    assert [rows_of(frame.verify()) for frame in found] == [draft.rows() for draft in sequence]
    if buffer:
        with pytest.raises(FrameError):
            frames_in(buffer[:-1])
        with pytest.raises(FrameError):
            frames_in(buffer + b"\0" * 8)


@pytest.mark.parametrize("offset", range(9))
def test_a_frame_reads_the_same_at_every_position(offset: int):
    draft = full_draft(9, "lz4")
    buffer = b"\xff" * offset + draft.build().tobytes() + b"\xff" * 11
    for kind in (bytes, bytearray, memoryview):
        assert rows_of(FrameView(kind(buffer), offset).validate()) == draft.rows()


def test_a_frame_with_the_maximum_count_reads_back():
    count = 1 << 20
    frame = FrameView(build_frame([b""] * count, producer=1, first=1).tobytes()).validate()
    assert frame.count == count
    assert frame.sequences()[-1] == count - 1
    assert frame.message_ids()[1][-1] == count


def test_follow_changes_only_the_predecessor_and_the_checksum():
    frame = full_draft().build()
    before = FrameView(frame.tobytes())
    frame.follow(12345)
    after = FrameView(frame.tobytes()).validate()
    assert (before.previous, after.previous) == (990, 12345)
    assert (after.base, after.store_time) == (before.base, before.store_time)
    assert rows_of(after) == rows_of(before)


def test_a_stamp_does_not_change_the_client_checksum():
    frame = build_frame([b"a"], producer=1, first=1)
    unstamped = FrameView(frame.tobytes()).validate()
    frame.stamp_with(full_draft().build().stamp)
    stamped = FrameView(frame.tobytes()).validate()
    assert stamped.crc == unstamped.crc
    assert (unstamped.base, stamped.base) == (0, 1 << 40)
