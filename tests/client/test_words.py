"""What was said of the rows of a frame, against a model that knows each row by itself."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import plait
from plait.client.consume.delivered import DeliveredFrame
from plait.client.consume.failure import FailureOutcome, failed_of, reason_of, rejected_of
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
WHY = plait.Reason("E", "why")
WORDS = st.lists(
    st.tuples(
        ROWS,
        st.sampled_from(
            [
                "ack",
                FailureOutcome(),
                FailureOutcome(0.0),
                FailureOutcome(5.0),
                FailureOutcome(5.0, WHY),
                FailureOutcome(None, WHY, reject=True),
                "collect",
            ]
        ),
    ),
    max_size=30,
)


class Anybody:
    """Collects when told to."""

    reasons_from = 1

    def settle_soon(self, delivered: DeliveredFrame) -> None: ...

    def from_thread(self, delivered: DeliveredFrame, row: int, failed: FailureOutcome | None) -> None:
        raise AssertionError("these rows belong to one thread")


def delivered(
    mask: list[bool] | None, attempts: list[tuple[int, int, int]] | None = None
) -> tuple[DeliveredFrame, list[int]]:
    """A frame in somebody's hands, and the sequences of its rows."""
    parts = build_frame([b"%d" % n for n in range(COUNT)], producer=1, first=1)
    parts.stamp_with(pack_stamp(1, BASE, 0, 0, EPOCH))
    frame = FrameView(parts.tobytes())
    sequences = list(range(BASE, BASE + COUNT))
    if mask is not None:
        frame = FrameView(slice_mask(frame, mask).tobytes())  # type: ignore[arg-type]
        sequences = [sequence for sequence, chosen in zip(sequences, mask, strict=True) if chosen]
    ranges = attempts or [(BASE, BASE + COUNT, 1)]
    return DeliveredFrame(frame, "s", PartitionName("s", "g"), Anybody(), ranges), sequences


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
        for failed, ranges in nacks.items():
            for sequence in sequences_of(ranges):
                assert sequence not in told
                told[sequence] = failed

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


class Wanting(Anybody):
    """Wants reasons from the third attempt on."""

    reasons_from = 3


@given(
    ROWS,
    st.lists(st.integers(1, 5), min_size=COUNT, max_size=COUNT),
    st.none() | st.lists(st.booleans(), min_size=COUNT, max_size=COUNT).filter(any),
    st.booleans(),
)
def test_a_reason_is_told_from_the_attempt_on_from_which_it_is_wanted(
    rows: int | slice, numbers: list[int], mask: list[bool] | None, rejected: bool
):
    frame, sequences = delivered(mask, [(BASE + n, BASE + n + 1, number) for n, number in enumerate(numbers)])
    frame.owner = Wanting()
    chosen = range(*rows.indices(frame.count)) if isinstance(rows, slice) else [rows]
    if not chosen or chosen[-1] >= frame.count:
        return
    frame.nack_rows(rows, FailureOutcome(7.0, WHY, reject=rejected))
    acks, nacks = frame.collect()
    assert acks == []
    told = {sequence: failed for failed, ranges in nacks.items() for sequence in sequences_of(ranges)}
    assert told == {
        sequences[row]: FailureOutcome(7.0, WHY if rejected or numbers[sequences[row] - BASE] >= 3 else None, rejected)
        for row in chosen
    }


def test_reasons_of_all_kinds():
    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert failed_of(None, None) == FailureOutcome()
    assert failed_of("5m", "why") == FailureOutcome(300.0, plait.Reason("", "why"))
    assert failed_of(0, ValueError("no")) == FailureOutcome(0.0, plait.Reason("ValueError", "no"))
    assert rejected_of(plait.Reason("A", "b", "c")) == FailureOutcome(None, plait.Reason("A", "b", "c"), reject=True)
    odd = reason_of(Odd(), "handler")
    assert odd is not None
    assert (odd.text, odd.handler) == ("its text cannot be read: RuntimeError", "handler")
    assert reason_of("half of a pair: \ud800") == plait.Reason("", r"half of a pair: \ud800")
    with pytest.raises(plait.InvalidArgument, match="reason 5 is a int; use an exception, text or"):
        reason_of(5)


def test_what_a_rejection_says():
    assert plait.Reject("no such order").told("h") == plait.Reason("plait.Reject", "no such order", "h")
    assert plait.Reject(KeyError("x")).told("h") == plait.Reason("KeyError", "'x'", "h")
    assert plait.Reject(plait.Reason("A", "b", "mine")).told("h") == plait.Reason("A", "b", "mine")
    for bare in (plait.Reject, plait.Reject(), plait.Reject(None), plait.Reject("")):
        with pytest.raises(plait.Reject) as caught:
            raise bare from ValueError("bad")
        assert caught.value.told("h") == plait.Reason("ValueError", "bad", "h")
        assert str(caught.value) == ""


@pytest.mark.parametrize("reason", [0, False, [], {}, 0.0, b"", b"bytes"])
def test_a_rejection_with_anything_else_is_refused_where_it_is_written(reason: Any):
    with pytest.raises(plait.InvalidArgument, match="use an exception, text or a"):
        plait.Reject(reason)


def test_reasons_are_of_text():
    for wrong in (("a", None), (None,), ("a", "b", 5)):
        with pytest.raises(plait.InvalidArgument, match="of a reason is text, not a"):
            plait.Reason(*wrong)


def test_types_are_named_as_they_are_imported():
    assert plait.Reason.of(plait.RetryLater(5)).type == "plait.RetryLater"
    assert plait.Reason.of(plait.CodecError("no")).type == "plait.CodecError"
    assert plait.Reason.of(ValueError()).type == "ValueError"
    assert plait.Reason.of(msgspec.DecodeError()).type == "msgspec.DecodeError"
