"""Measuring and cutting ranges of sequences by their consume-log records."""

from __future__ import annotations

import numpy as np
import pytest

from plait.storage.logs import consume_log as spans
from plait.storage.logs.consume_log import RECORD, Records


def records(*frames: tuple[int, int, int], time: int = 0) -> Records:
    """Records of frames (base, count, size), stored one second apart."""
    found = np.zeros(len(frames), RECORD)
    for index, (base, count, size) in enumerate(frames):
        found[index] = (base, index * 1000, time + index * 1_000_000, size, count, 0)
    return found


TEN = records(*[(number * 10, 10, 1000) for number in range(10)])


def test_a_range_has_the_size_of_its_rows():
    assert spans.sizes_in(TEN, 0, 100).sum() == 10_000
    assert spans.sizes_in(TEN, 15, 30).sum() == 1500
    assert spans.sizes_in(TEN, 95, 200).sum() == 500


@pytest.mark.parametrize(
    ("start", "end", "size", "expected"),
    [
        (0, 100, 20_000, [100]),
        (0, 100, 10_000, [100]),
        (0, 100, 5_000, [50, 100]),
        (0, 100, 2_500, [30, 50, 80, 100]),
        (15, 85, 4_000, [50, 85]),
        (0, 100, 1, [*range(10, 100, 10), 100]),
        (3, 7, 1, [7]),
    ],
)
def test_pieces_are_about_equal_and_end_at_frame_ends(start: int, end: int, size: int, expected: list[int]):
    assert spans.cut(TEN, start, end, size) == expected


def test_a_gap_between_frames_is_in_a_piece():
    holed = records((0, 10, 1000), (30, 10, 1000), (40, 10, 1000))
    assert spans.cut(holed, 0, 50, 1000) == [10, 40, 50]
    assert spans.cut(records(), 5, 9, 10) == [9]


@pytest.mark.parametrize(
    ("start", "size", "expected"),
    [(0, 3_000, 30), (0, 3_999, 30), (0, 10, 10), (0, 0, 10), (15, 0, 20), (15, 1_500, 30), (0, 10_000, 100)],
)
def test_a_reach_ends_at_a_frame_end_after_at_least_one_frame(start: int, size: int, expected: int):
    assert spans.reach(TEN, start, 100, size) == expected


def test_a_reach_stays_in_its_range():
    assert spans.reach(TEN, 0, 25, 100_000) == 25
    assert spans.reach(TEN[:1], 0, 5, 1) == 5


def test_times_are_found_even_if_the_clock_was_set_back():
    times = records(*[(number * 10, 10, 1000) for number in range(5)])
    times["time"] = [10, 20, 15, 30, 40]
    assert spans.first_at(times, [16, 41, 10], 50).tolist() == [10, 50, 0]
    assert spans.end_before(times, [16, 10, 41], 3).tolist() == [30, 3, 50]
    assert spans.first_at(times[:0], [16], 50).tolist() == [50]
    assert spans.end_before(times[:0], [16], 3).tolist() == [3]
