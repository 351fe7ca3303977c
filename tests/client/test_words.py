"""What was said of the rows of a frame, against a model that knows each row by itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plait.client.delivered import Delivered
from plait.client.types import PartitionName
from plait.frame import FrameView, build_frame
from plait.frame.header import pack_stamp
from plait.frame.slicing import slice_mask

COUNT = 12
BASE = 100
EPOCH = 3
ROWS = st.integers(0, COUNT - 1) | st.builds(
    lambda a, b: slice(min(a, b), max(a, b) + 1), st.integers(0, COUNT - 1), st.integers(0, COUNT - 1)
)
#: Rows and what is said of them; "collect": it is asked for.
WORDS = st.lists(st.tuples(ROWS, st.sampled_from(["ack", None, 0.0, 5.0, "collect"])), max_size=30)


class Anybody:
    """Collects when told to."""

    def settle_soon(self, delivered: Delivered) -> None: ...

    def from_thread(self, delivered: Delivered, row: int, *, acked: bool, delay: float | None = None) -> None:
        raise AssertionError("these rows belong to one thread")


def delivered(mask: list[bool] | None) -> tuple[Delivered, list[int]]:
    """A frame in somebody's hands, and the sequences of its rows."""
    parts = build_frame([b"%d" % n for n in range(COUNT)], producer=1, first=1)
    parts.stamp_with(pack_stamp(1, BASE, 0, 0, EPOCH))
    frame = FrameView(parts.tobytes())
    sequences = list(range(BASE, BASE + COUNT))
    if mask is not None:
        frame = FrameView(slice_mask(frame, mask).tobytes())  # type: ignore[arg-type]
        sequences = [sequence for sequence, chosen in zip(sequences, mask, strict=True) if chosen]
    return Delivered(frame, "s", PartitionName("s", "g"), Anybody(), [(BASE, BASE + COUNT, 1)]), sequences


def sequences_of(ranges: list[tuple[int, int, int]]) -> list[int]:
    assert all(epoch == EPOCH for _, _, epoch in ranges)
    return [sequence for start, end, _ in ranges for sequence in range(start, end)]


@given(WORDS, st.none() | st.lists(st.booleans(), min_size=COUNT, max_size=COUNT).filter(any))
def test_the_first_word_on_each_row_is_told_once(words: list[tuple[int | slice, object]], mask: list[bool] | None):
    frame, sequences = delivered(mask)
    said: dict[int, object] = {}
    told: dict[int, object] = {}

    def collect() -> None:
        acks, nacks = frame.collect()
        for sequence in sequences_of(acks):
            assert sequence not in told
            told[sequence] = "ack"
        for delay, ranges in nacks.items():
            for sequence in sequences_of(ranges):
                assert sequence not in told
                told[sequence] = delay

    for rows, word in words:
        if word == "collect":
            collect()
            assert told == said
            continue
        chosen = range(*rows.indices(frame.count)) if isinstance(rows, slice) else [rows]
        if not chosen or chosen[-1] >= frame.count:
            # Nobody has such rows in their hands.
            continue
        for row in chosen:
            said.setdefault(sequences[row], word)
        if word == "ack":
            frame.acking.append(rows)
        else:
            frame.nack_rows(rows, word)  # type: ignore[arg-type]
    collect()
    assert told == said
    assert frame.open_count == len(sequences) - len(said)
    assert sequences_of(frame.open_ranges()) == [sequence for sequence in sequences if sequence not in said]
