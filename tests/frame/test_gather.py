"""New frames of rows from many frames: unchanged rows, in the requested order."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from plait.frame.coalesce import coalesce
from plait.frame.columns import ORIGINAL_SIZE_MAX, Column
from plait.frame.gather import Gathered
from plait.frame.header import FLAG_UNSEQUENCED
from plait.frame.places import FLATTEN_BIT, PLACE, Places, place_of, row_sets
from plait.frame.view import FrameView
from plait.model.logical_partitions import NO_KEY_HASH
from tests.frame.samples import Draft, Row, alike, drafts, full_draft, rows_of


def table(frames: list[FrameView]) -> tuple[bytes, Places]:
    """Consecutive frames in a buffer, and their places."""
    buffer, places = b"", b""
    for frame in frames:
        places += place_of(frame, len(buffer))
        buffer += bytes(frame.buffer)
    return buffer, np.frombuffer(places, PLACE)


def gathered(frames: list[FrameView], chosen: list[tuple[int, int]]) -> Gathered:
    """The (frame, row) pairs in order. Frames that must be flattened get their own buffers."""
    buffer, places = table(frames)
    index = np.array([frame for frame, _ in chosen])
    rows = np.array([row for _, row in chosen])
    sets, which = row_sets(buffer, places, index, rows)
    return Gathered(sets, np.argsort(which))


def expected(frames: list[FrameView], chosen: list[tuple[int, int]], due: list[int]) -> list[Row]:
    """The rows of the model; a row without a value for a column of the new frame is empty there."""
    all_rows = [rows_of(frame) for frame in frames]
    return [replace(all_rows[frame][row], deliver_at=due[i]) for i, (frame, row) in enumerate(chosen)]


def filled(row: Row) -> Row:
    return replace(
        row,
        sequence=0,
        key=row.key or None,
        tags=row.tags or None,
        headers=row.headers or None,
        key_hash=None if row.key_hash == NO_KEY_HASH else row.key_hash,
    )


def check(frames: list[FrameView], chosen: list[tuple[int, int]], size: int, row_by_row: bool) -> None:
    due = [1_000 + 7 * i for i in range(len(chosen))]
    numbers = np.arange(len(chosen), dtype=np.uint64) * 3
    result = gathered(frames, chosen)
    assert result.count == len(chosen)
    got: list[Row] = []
    schedule: list[int] = []
    for start, stop in result.cuts(size):
        parts = result.frame(start, stop, np.array(due), numbers, row_by_row=row_by_row)
        frame = FrameView(parts.tobytes()).validate()
        assert frame.flags == FLAG_UNSEQUENCED
        # Columns that were sent compressed may be compressed again.
        assert not frame.compressed or any(each.compressed for each in frames)
        if row_by_row and not frame.compressed:
            assert not int(np.frombuffer(place_of(frame, 0), PLACE)["bits"][0]) & FLATTEN_BIT
        got += rows_of(frame)
        schedule += frame.values(Column.SCHEDULE).tolist()
    assert schedule == numbers.tolist()
    assert list(map(filled, got)) == list(map(filled, expected(frames, chosen, due)))


@given(st.lists(drafts(count_max=12), min_size=1, max_size=5), st.data(), st.sampled_from([1, 300, 1 << 20]))
def test_any_rows_of_any_frames_are_gathered_in_any_order(sources: list[Draft], data: st.DataObject, size: int) -> None:
    frames = [replace(draft, producer=7 + i).view() for i, draft in enumerate(sources)]
    places = [(f, r) for f, frame in enumerate(frames) for r in range(frame.count)]
    chosen = data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=30))
    check(frames, chosen, size, data.draw(st.booleans()))


@given(alike(), st.randoms(use_true_random=False))
def test_rows_of_joined_frames_keep_their_ids(sources: list[Draft], rng: Random) -> None:
    joined = FrameView(coalesce([draft.view() for draft in sources]).tobytes())
    frames = [joined, *(draft.view() for draft in sources)]
    chosen = [(f, r) for f, frame in enumerate(frames) for r in range(frame.count)]
    rng.shuffle(chosen)
    check(frames, chosen, 1 << 20, row_by_row=True)


def test_consecutive_rows_of_one_producer_are_one_run() -> None:
    frame = full_draft(5).view()
    result = gathered([frame], [(0, 1), (0, 2), (0, 3)])
    parts = result.frame(0, 3, np.zeros(3, np.int64), np.zeros(3, np.uint64), row_by_row=False)
    assert not FrameView(parts.tobytes()).has(Column.RUNS)
    assert (parts.producer, parts.first) == (frame.producer, frame.first + 1)


def test_long_rows_are_gathered_and_the_largest_fits_a_frame() -> None:
    draft = Draft([b"a" * 70_000, b"", b"b" * (16 << 20), b"c" * 300_000], compression="zstd", deliver_at=5)
    check([draft.view()], [(0, 2), (0, 3), (0, 0), (0, 1)], 1 << 20, row_by_row=True)
    assert draft.view().size < ORIGINAL_SIZE_MAX


def test_many_short_rows_of_many_frames_are_gathered() -> None:
    rng = Random(3)
    frames = [
        Draft([bytes([i % 256]) * rng.randrange(40) for _ in range(20)], producer=i + 1).view() for i in range(1_000)
    ]
    chosen = [(f, r) for f in range(1_000) for r in range(20)]
    rng.shuffle(chosen)
    check(frames, chosen, 1 << 20, row_by_row=False)
