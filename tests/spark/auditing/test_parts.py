"""Small parts of the audit: missing ranges, percentiles, order across blocks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.spark.auditing.block_arrays import merged, without
from plait.spark.auditing.key_order import crossings, out_of_order
from plait.spark.auditing.tally import latency_bins, percentile
from plait.spark.auditing.verdicts import NEVER, GroupVerdict
from tests.spark.auditing.test_judging import block_rows


@pytest.mark.parametrize(
    ("start", "missing"), [(0, [(0, 2), (5, 8)]), (2, [(5, 8)]), (3, [(5, 8)]), (6, [(6, 8)]), (8, []), (20, [])]
)
def test_missing_ranges_are_the_gaps_between_the_stored_ones(start: int, missing: list[tuple[int, int]]):
    assert without([(start, 10)], [(2, 5), (8, 10)]) == missing
    assert without([(start, 30)], [(2, 5), (8, 10)]) == [*missing, (max(start, 10), 30)]


def test_adjacent_ranges_are_joined():
    assert merged([(5, 7), (1, 3), (3, 4), (6, 9), (9, 9)]) == [(1, 4), (5, 9)]


@given(st.lists(st.integers(1, 10**12), min_size=1), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_a_percentile_is_exact_to_one_bin(micros: list[int], share: float):
    bins, counts = np.unique(latency_bins(np.array(micros)), return_counts=True)
    exact = sorted(micros)[max(int(np.ceil(share * len(micros))) - 1, 0)] / 1e6
    assert percentile(bins, counts, share) == pytest.approx(exact, rel=0.05)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9), st.booleans()), min_size=2, max_size=30),
    st.sets(st.integers(1, 29)),
)
def test_order_across_blocks_is_judged_as_in_one_block(drawn: list[tuple[int, int, bool]], cuts: set[int]):
    keys, places, excused = (np.array(each) for each in zip(*drawn, strict=True))
    at = np.where(places > 0, 100 * places, NEVER)
    edges = [0, *sorted(cut for cut in cuts if cut < len(drawn)), len(drawn)]

    def look(first: int, last: int) -> tuple[bool, tuple[np.ndarray, ...]]:
        count = last - first
        hashes = keys[first:last].astype(np.uint64)
        numbers = np.arange(first, last)
        rows = block_rows(numbers, hashes, numbers, np.ones(count, np.int64), np.zeros(count, np.uint16))
        verdict = GroupVerdict(np.zeros(count, np.uint8), acked_at=at[first:last], excused=excused[first:last])
        wrong, times = out_of_order(rows, verdict)
        of = np.full(len(times.hashes), 7), times.hashes.view(np.int64), np.full(len(times.hashes), first)
        return bool(len(wrong)), (*of, times.earliest, times.latest)

    whole, _ = look(0, len(drawn))
    blocks = [look(first, last) for first, last in pairwise(edges)]
    groups, hashes, firsts, earliest, latest = (
        np.concatenate(column) for column in zip(*(facts for _, facts in blocks), strict=True)
    )
    crossed = crossings(groups, hashes, firsts, (earliest, latest))
    assert (any(wrong for wrong, _ in blocks) or bool(len(crossed))) == whole
    assert set(crossed.tolist()) <= {7}
