"""Returns by logical partition cover the same rows as returns row by row, and no held row."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from plait.client.consume.delivered import RangesByFrame
from plait.client.consume.failure import EpochRange
from plait.client.consume.ordered.ordered_delivered import OrderedDelivered
from plait.client.consume.outcomes import PendingOutcomes, by_logical_partitions
from plait.client.consume.row_runs import RowMask, mask_runs
from plait.client.types import PartitionName
from plait.frame import FrameView
from plait.frame.slicing import slice_mask
from plait.model.logical_partitions import NO_KEY_HASH, lp_set
from tests.frame.samples import Draft

KEYS = [int(NO_KEY_HASH), *(n << 10 | n % 4 for n in range(1, 8))]
#: The key of each row, and whether the row is returned.
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
def test_ranges_by_logical_partition_cover_exactly_the_returned_rows(drawn: list[list[tuple[int, bool]]]):
    frames = [frame_of([key for key, _ in rows], tag) for tag, rows in enumerate(drawn, 1)]
    masks = [np.array([given for _, given in rows]) for rows in drawn]
    tagged: RangesByFrame = {f: f.tagged(mask_runs(mask)) for f, mask in zip(frames, masks, strict=True) if mask.any()}
    lps, ranges, tags, rest = by_logical_partitions(tagged)
    for frame, mask in zip(frames, masks, strict=True):
        assert frame.keyed is not None
        by_lps = rows_in(frame, [each for each, tag in zip(ranges, tags, strict=True) if tag == frame.tag])
        by_row = rows_in(frame, rest.get(frame, []))
        covered = by_row | (by_lps & lp_set(lps)[frame.lps])
        assert (covered[frame.keyed] == mask[frame.keyed]).all()
        # The broker may count a row without a key to any logical partition.
        assert (by_row[~frame.keyed] == mask[~frame.keyed]).all()
        assert not (by_lps & ~mask & ~frame.keyed).any()
    assert len(ranges) + sum(map(len, rest.values())) <= sum(map(len, tagged.values()))


def test_a_return_of_every_other_row_of_a_frame_is_one_range():
    frame = frame_of([KEYS[1], KEYS[2]] * 50, 1)
    mask = np.arange(100) % 2 == 0
    lps, ranges, tags, rest = by_logical_partitions({frame: frame.tagged(mask_runs(mask))})
    assert (lps, tags, rest) == ([(1, 2)], [1], {})
    assert ranges == [(1000, 1100, frame.epoch)]


@given(st.lists(st.sampled_from(["returned", "reported", "open"]), min_size=1, max_size=40))
def test_ranges_of_reported_rows_may_span_returned_rows(states: list[str]):
    frame = frame_of([KEYS[1]] * len(states), 1)
    returned, reported = (np.array([state == each for state in states]) for each in ("returned", "reported"))
    if not reported.any():
        return
    before = frame.tagged(mask_runs(reported))
    if returned.any():
        frame.given_back(frame.tagged(mask_runs(returned)))
    ranges = frame.widened(before)
    assert (rows_in(frame, ranges) & ~returned == reported).all()
    assert len(ranges) <= len(before)
    if "open" not in states:
        assert len(ranges) == 1


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_rows_that_were_acked_in_any_order_keep_their_acks_in_a_new_session(selected: list[bool], draw: random.Random):
    selected[-1] = True
    view = Draft([b"x"] * len(selected), base=100).view()
    frame = OrderedDelivered(
        FrameView(slice_mask(view, np.array(selected)).tobytes()), "s", PartitionName("s", "g"), None, [(100, 130, 1)]
    )
    frame.tag = 1
    pending = PendingOutcomes()
    acked = draw.sample(range(frame.count), draw.randrange(1, frame.count + 1))
    for row in acked:
        frame.put([(row, row + 1)], pending.acks)
    pending.new_session()
    sequences = [sequence for start, end, _ in pending.acks[None] for sequence in range(start, end)]
    assert sorted(sequences) == sorted(frame.sequences[acked].tolist())
