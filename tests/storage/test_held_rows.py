"""The number of held rows of each logical partition, after rows are let go and split off."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from plait.model.logical_partitions import lp_set
from plait.storage.held_rows import HeldRowArrays, HeldRows

TAGS = (1, 2)
#: (logical partition, tag, second key) of rows: each logical partition has two keys.
ROWS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(TAGS), st.booleans()), max_size=40)


def held_rows_of(rows: dict[int, tuple[int, int, int]]) -> HeldRows:
    by_tag = {}
    for tag in TAGS:
        mine = [(sequence, lp, key) for sequence, (lp, each, key) in sorted(rows.items()) if each == tag]
        sequences, lps, keys = zip(*mine, strict=True) if mine else ((), (), ())
        by_tag[tag] = HeldRowArrays(np.array(sequences, np.int64), np.array(lps, np.uint16), np.array(keys, np.uint64))
    return HeldRows(by_tag)


def counts_of(held: HeldRows) -> dict[int, int]:
    return {lp: int(held.counts[lp]) for lp in np.flatnonzero(held.counts).tolist()}


@given(ROWS, st.lists(st.tuples(st.sampled_from(TAGS), st.integers(0, 40), st.integers(0, 40))), st.integers(0, 4))
def test_counts_are_those_of_the_rows_that_are_still_held(drawn: list, gone: list[tuple[int, int, int]], split_at: int):
    rows = {sequence: (lp, tag, lp + 1024 * other) for sequence, (lp, tag, other) in enumerate(drawn)}
    held = held_rows_of(rows)
    halves = [(held, rows)]
    for at, (tag, start, end) in enumerate(gone):
        if at == split_at:
            part = held.take(lp_set([(0, 2)]), None)
            key = held.take(lp_set([(3, 4)]), 3)
            mine = {s: row for s, row in rows.items() if row[0] < 2}
            keys = {s: row for s, row in rows.items() if row[2] == 3}
            halves = [(held, {s: r for s, r in rows.items() if s not in mine and s not in keys}), (part, mine)]
            halves.append((key, keys))
        for each, left in halves:
            each.let_go(tag, start, end)
            for sequence in [s for s, row in left.items() if row[1] == tag and start <= s < end]:
                del left[sequence]
                rows.pop(sequence, None)
    for each, left in halves:
        assert counts_of(each) == dict(Counter(lp for lp, _, _ in left.values()))
