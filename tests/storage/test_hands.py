"""Rows in an owner's hands: how many of each logical partition, whatever is let go of and split off."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from plait.model.logical_partitions import lp_set
from plait.storage.held_rows import HeldRowArrays, HeldRows

TAGS = (1, 2)
#: (sequence, logical partition, tag) of rows; a key is told apart by more than its logical partition.
ROWS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(TAGS), st.booleans()), max_size=40)


def hands_of(rows: dict[int, tuple[int, int, int]]) -> HeldRows:
    by_tag = {}
    for tag in TAGS:
        mine = [(sequence, lp, key) for sequence, (lp, each, key) in sorted(rows.items()) if each == tag]
        sequences, lps, keys = zip(*mine, strict=True) if mine else ((), (), ())
        by_tag[tag] = HeldRowArrays(np.array(sequences, np.int64), np.array(lps, np.uint16), np.array(keys, np.uint64))
    return HeldRows(by_tag)


def counts_of(hands: HeldRows) -> dict[int, int]:
    return {lp: int(hands.counts[lp]) for lp in np.flatnonzero(hands.counts).tolist()}


@given(ROWS, st.lists(st.tuples(st.sampled_from(TAGS), st.integers(0, 40), st.integers(0, 40))), st.integers(0, 4))
def test_counts_are_those_of_the_rows_that_are_left(drawn: list, gone: list[tuple[int, int, int]], split_at: int):
    rows = {sequence: (lp, tag, lp + 1024 * other) for sequence, (lp, tag, other) in enumerate(drawn)}
    hands = hands_of(rows)
    halves = [(hands, rows)]
    for at, (tag, start, end) in enumerate(gone):
        if at == split_at:
            part = hands.take(lp_set([(0, 2)]), None)
            key = hands.take(lp_set([(3, 4)]), 3)
            mine = {s: row for s, row in rows.items() if row[0] < 2}
            keys = {s: row for s, row in rows.items() if row[2] == 3}
            halves = [(hands, {s: r for s, r in rows.items() if s not in mine and s not in keys}), (part, mine)]
            halves.append((key, keys))
        for each, left in halves:
            each.let_go(tag, start, end)
            for sequence in [s for s, row in left.items() if row[1] == tag and start <= s < end]:
                del left[sequence]
                rows.pop(sequence, None)
    for each, left in halves:
        assert counts_of(each) == dict(Counter(lp for lp, _, _ in left.values()))
