"""Give-backs by logical partitions mean the same rows as row by row, and no row in the user's hands."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from plait.client.consume.failure import EpochRange
from plait.client.consume.ordered.ordered_delivered import OrderedDelivered, RowMask
from plait.client.consume.ordered.returned_ranges import Tagged, scoped
from plait.client.types import PartitionName
from plait.model.logical_partitions import NO_KEY_HASH, lp_set
from tests.frame.samples import Draft

KEYS = [int(NO_KEY_HASH), *(n << 10 | n % 4 for n in range(1, 8))]
#: Of each row its key, and whether it is given back.
FRAMES = st.lists(
    st.lists(st.tuples(st.sampled_from(KEYS), st.booleans()), min_size=1, max_size=40), min_size=1, max_size=3
)


def frame_of(hashes: list[int], tag: int) -> OrderedDelivered:
    base = 1000 * tag
    view = Draft([b"x"] * len(hashes), keys=[b"k"] * len(hashes), key_hashes=hashes, base=base).view()
    frame = OrderedDelivered(view, "s", PartitionName("s", "g"), None, [(base, base + len(hashes), 1)])
    frame.tag = tag
    return frame


def rows_in(frame: OrderedDelivered, ranges: list[EpochRange]) -> RowMask:
    inside = np.zeros(frame.count, bool)
    for start, end, epoch in ranges:
        assert epoch == frame.epoch
        inside |= (frame.sequences >= start) & (frame.sequences < end)
    return inside


@given(FRAMES)
def test_they_mean_the_rows_that_are_given_back_and_no_others(drawn: list[list[tuple[int, bool]]]):
    frames = [frame_of([key for key, _ in rows], tag) for tag, rows in enumerate(drawn, 1)]
    masks = [np.array([given for _, given in rows]) for rows in drawn]
    tagged: Tagged = {f: f.tagged(f.runs(mask)) for f, mask in zip(frames, masks, strict=True) if mask.any()}
    lps, ranges, tags, rest = scoped(tagged)
    for frame, mask in zip(frames, masks, strict=True):
        assert frame.keyed is not None
        by_lps = rows_in(frame, [each for each, tag in zip(ranges, tags, strict=True) if tag == frame.tag])
        by_row = rows_in(frame, rest.get(frame, []))
        said = by_row | (by_lps & lp_set(lps)[frame.lps])
        assert (said[frame.keyed] == mask[frame.keyed]).all()
        # The broker may take a row without a key for one of any logical partition.
        assert (by_row[~frame.keyed] == mask[~frame.keyed]).all()
        assert not (by_lps & ~mask & ~frame.keyed).any()
    assert len(ranges) + sum(map(len, rest.values())) <= sum(map(len, tagged.values()))


def test_every_other_row_of_a_frame_is_one_range():
    frame = frame_of([KEYS[1], KEYS[2]] * 50, 1)
    mask = np.arange(100) % 2 == 0
    lps, ranges, tags, rest = scoped({frame: frame.tagged(frame.runs(mask))})
    assert (lps, tags, rest) == ([(1, 2)], [1], {})
    assert ranges == [(1000, 1100, frame.epoch)]


@given(st.lists(st.sampled_from(["back", "said", "open"]), min_size=1, max_size=40))
def test_what_is_said_of_the_rest_of_a_frame_may_reach_over_what_the_broker_has_back(states: list[str]):
    frame = frame_of([KEYS[1]] * len(states), 1)
    back, said = (np.array([state == each for state in states]) for each in ("back", "said"))
    if not said.any():
        return
    before = frame.tagged(frame.runs(said))
    if back.any():
        frame.given_back(frame.tagged(frame.runs(back)))
    ranges = frame.widened(before)
    assert (rows_in(frame, ranges) & ~back == said).all()
    assert len(ranges) <= len(before)
    if "open" not in states:
        assert len(ranges) == 1
