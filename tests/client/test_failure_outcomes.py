"""The outcomes of the rows of a frame, compared with a model of single rows."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import plait
from plait.client.consume.delivered import DeliveredFrame, Deliveries
from plait.client.consume.failure import FailureOutcome, failed_of, reason_of, rejected_of
from plait.client.types import PartitionName
from plait.frame import FrameView, build_frame
from plait.frame.builder import pack_stamp
from plait.frame.slicing import slice_mask

COUNT = 12
BASE = 100
EPOCH = 3
ROWS = st.integers(0, COUNT - 1) | st.builds(
    lambda a, b: slice(min(a, b), max(a, b) + 1), st.integers(0, COUNT - 1), st.integers(0, COUNT - 1)
)
WHY = plait.Reason("E", "why")
#: Rows and their outcome; "collect": the outcomes are collected.
OUTCOMES = st.lists(
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


def no_collector(reasons_from: int = 1) -> Deliveries:
    """Deliveries whose outcomes are collected only when the test asks for it."""

    async def flush() -> None:
        raise AssertionError("there is no broker")

    deliveries = Deliveries(lambda _: None, lambda: None, flush)
    deliveries.reasons_from = reasons_from
    return deliveries


def delivered(
    mask: list[bool] | None, attempts: list[tuple[int, int, int]] | None = None
) -> tuple[DeliveredFrame, list[int]]:
    """A delivered frame, and the sequences of its rows."""
    parts = build_frame([b"%d" % n for n in range(COUNT)], producer=1, first=1)
    parts.stamp_with(pack_stamp(1, BASE, 0, 0, EPOCH))
    frame = FrameView(parts.tobytes())
    sequences = list(range(BASE, BASE + COUNT))
    if mask is not None:
        frame = FrameView(slice_mask(frame, mask).tobytes())  # type: ignore[arg-type]
        sequences = [sequence for sequence, chosen in zip(sequences, mask, strict=True) if chosen]
    ranges = attempts or [(BASE, BASE + COUNT, 1)]
    return DeliveredFrame(frame, "s", PartitionName("s", "g"), no_collector(), ranges), sequences


def sequences_of(ranges: list[tuple[int, int, int]]) -> list[int]:
    assert all(epoch == EPOCH for _, _, epoch in ranges)
    return [sequence for start, end, _ in ranges for sequence in range(start, end)]


@given(OUTCOMES, st.none() | st.lists(st.booleans(), min_size=COUNT, max_size=COUNT).filter(any))
def test_the_first_outcome_of_each_row_is_collected_once(
    reports: list[tuple[int | slice, object]], mask: list[bool] | None
):
    frame, sequences = delivered(mask)
    reported: dict[int, object] = {}
    collected: dict[int, object] = {}

    def collect() -> None:
        acks, nacks = frame.collect()
        for sequence in sequences_of(frame.ranges(acks)):
            assert sequence not in collected
            collected[sequence] = "ack"
        for failed, runs in nacks.items():
            for sequence in sequences_of(frame.ranges(runs)):
                assert sequence not in collected
                collected[sequence] = failed

    for rows, outcome in reports:
        if outcome == "collect":
            collect()
            assert collected == reported
            continue
        chosen = range(*rows.indices(frame.count)) if isinstance(rows, slice) else [rows]
        if not chosen or chosen[-1] >= frame.count:
            # No such rows in this frame.
            continue
        for row in chosen:
            reported.setdefault(sequences[row], outcome)
        if outcome == "ack":
            frame.acking.append(rows)
        else:
            frame.nack_rows(rows, outcome)  # type: ignore[arg-type]
    collect()
    assert collected == reported
    assert frame.open_count == len(sequences) - len(reported)
    assert sequences_of(frame.open_ranges()) == [sequence for sequence in sequences if sequence not in reported]


@given(
    ROWS,
    st.lists(st.integers(1, 5), min_size=COUNT, max_size=COUNT),
    st.none() | st.lists(st.booleans(), min_size=COUNT, max_size=COUNT).filter(any),
    st.booleans(),
)
def test_reasons_are_collected_from_the_attempt_that_the_broker_asks_for(
    rows: int | slice, numbers: list[int], mask: list[bool] | None, rejected: bool
):
    frame, sequences = delivered(mask, [(BASE + n, BASE + n + 1, number) for n, number in enumerate(numbers)])
    frame.deliveries = no_collector(reasons_from=3)
    chosen = range(*rows.indices(frame.count)) if isinstance(rows, slice) else [rows]
    if not chosen or chosen[-1] >= frame.count:
        return
    frame.nack_rows(rows, FailureOutcome(7.0, WHY, reject=rejected))
    acks, nacks = frame.collect()
    assert acks == []
    collected = {sequence: failed for failed, runs in nacks.items() for sequence in sequences_of(frame.ranges(runs))}
    assert collected == {
        sequences[row]: FailureOutcome(7.0, WHY if rejected or numbers[sequences[row] - BASE] >= 3 else None, rejected)
        for row in chosen
    }


def test_a_reason_is_text_an_exception_or_a_reason():
    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert failed_of(None, None) == FailureOutcome()
    assert failed_of("5m", "why") == FailureOutcome(300.0, plait.Reason("", "why"))
    assert failed_of(0, ValueError("no")) == FailureOutcome(0.0, plait.Reason("ValueError", "no"))
    assert rejected_of(plait.Reason("A", "b", "c")) == FailureOutcome(None, plait.Reason("A", "b", "c"), reject=True)
    odd = reason_of(Odd(), "handler")
    assert odd is not None
    assert (odd.text, odd.handler) == ("str() of the exception raised RuntimeError", "handler")
    assert reason_of("half of a pair: \ud800") == plait.Reason("", r"half of a pair: \ud800")
    with pytest.raises(plait.InvalidArgument, match="reason 5 is a int; use an exception, text or"):
        reason_of(5)


def test_the_reason_of_a_rejection():
    assert plait.Reject("no such order").reason_for("h") == plait.Reason("plait.Reject", "no such order", "h")
    assert plait.Reject(KeyError("x")).reason_for("h") == plait.Reason("KeyError", "'x'", "h")
    assert plait.Reject(plait.Reason("A", "b", "mine")).reason_for("h") == plait.Reason("A", "b", "mine")
    for bare in (plait.Reject, plait.Reject(), plait.Reject(None), plait.Reject("")):
        with pytest.raises(plait.Reject) as caught:
            raise bare from ValueError("bad")
        assert caught.value.reason_for("h") == plait.Reason("ValueError", "bad", "h")
        assert str(caught.value) == ""


@pytest.mark.parametrize("reason", [0, False, [], {}, 0.0, b"", b"bytes"])
def test_a_rejection_with_another_type_is_refused_at_construction(reason: Any):
    with pytest.raises(plait.InvalidArgument, match="use an exception, text or a"):
        plait.Reject(reason)


def test_the_fields_of_a_reason_are_text():
    for wrong in (("a", None), (None,), ("a", "b", 5)):
        with pytest.raises(plait.InvalidArgument, match="of a reason is text, not a"):
            plait.Reason(*wrong)


def test_exception_types_have_their_import_names():
    assert plait.Reason.of(plait.RetryLater(5)).type == "plait.RetryLater"
    assert plait.Reason.of(plait.CodecError("no")).type == "plait.CodecError"
    assert plait.Reason.of(ValueError()).type == "ValueError"
    assert plait.Reason.of(msgspec.DecodeError()).type == "msgspec.DecodeError"
