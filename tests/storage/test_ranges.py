"""Ranges against a simple model: a dictionary of single sequences."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from plait.storage.ranges import Range, Ranges

SEQUENCES = st.integers(0, 40)
ATTEMPTS = st.integers(0, 3)


def spelled_out(ranges: list[Range]) -> dict[int, int]:
    return {sequence: r.attempt for r in ranges for sequence in range(r.start, r.end)}


class RangesMachine(RuleBasedStateMachine):
    """Every operation is done on both, and both must agree."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges = Ranges()
        self.model: dict[int, int] = {}

    @rule(start=SEQUENCES, size=st.integers(-2, 12), attempt=ATTEMPTS)
    def add(self, start: int, size: int, attempt: int) -> None:
        self.ranges.add(start, start + size, attempt)
        self.model.update(dict.fromkeys(range(start, start + size), attempt))

    @rule(start=SEQUENCES, size=st.integers(-2, 12))
    def remove(self, start: int, size: int) -> None:
        expected = {s: self.model.pop(s) for s in range(start, start + size) if s in self.model}
        assert self.ranges.overlap(start, start + size) == (removed := self.ranges.remove(start, start + size))
        assert spelled_out(removed) == expected

    @rule(start=SEQUENCES, size=st.integers(0, 12))
    def look(self, start: int, size: int) -> None:
        expected = {s: self.model[s] for s in range(start, start + size) if s in self.model}
        assert spelled_out(self.ranges.overlap(start, start + size)) == expected

    @rule()
    def clear(self) -> None:
        self.ranges.clear()
        self.model = {}

    @rule()
    def copy(self) -> None:
        self.ranges = Ranges(list(self.ranges))

    @invariant()
    def they_agree(self) -> None:
        listed = list(self.ranges)
        assert spelled_out(listed) == self.model
        assert self.ranges.count == len(self.model)
        assert bool(self.ranges) == bool(self.model)
        if self.model:
            assert self.ranges.first == min(self.model)
            assert self.ranges.head() == listed[0]

    @invariant()
    def as_few_ranges_as_possible_in_order(self) -> None:
        listed = list(self.ranges)
        assert len(self.ranges) == len(listed)
        for one, two in itertools.pairwise(listed):
            assert one.end < two.start or (one.end == two.start and one.attempt != two.attempt)


TestRanges = RangesMachine.TestCase
TestRanges.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


@given(st.lists(st.tuples(SEQUENCES, st.integers(1, 9), ATTEMPTS)))
def test_ranges_are_made_of_any_ranges_in_any_order(pieces: list[tuple[int, int, int]]):
    model: dict[int, int] = {}
    for start, size, attempt in pieces:
        model.update(dict.fromkeys(range(start, start + size), attempt))
    assert spelled_out(list(Ranges((s, s + n, a) for s, n, a in pieces))) == model


@pytest.mark.parametrize("size", [1, 31, 33, 34, 100, 1000])
def test_removing_the_lowest_ranges_one_by_one_leaves_the_rest(size: int):
    ranges = Ranges((3 * n, 3 * n + 2, 1) for n in range(size))
    for n in range(size):
        assert (len(ranges), ranges.first, ranges.count) == (size - n, 3 * n, 2 * (size - n))
        assert ranges.head() == (3 * n, 3 * n + 2, 1)
        assert ranges.heads(10**9, 2) == [(3 * m, 3 * m + 2, 1) for m in range(n, min(n + 2, size))]
        assert ranges.overlap(0, 3 * n) == []
        assert ranges.remove(0, 3 * n) == []
        assert ranges.remove(3 * n, 3 * n + 2) == [(3 * n, 3 * n + 2, 1)]
        if n % 7 == 0 and n + 1 < size:
            # A returned range is the lowest again.
            ranges.add(3 * n, 3 * n + 1, 5)
            assert list(ranges)[:1] == [(3 * n, 3 * n + 1, 5)]
            ranges.remove(3 * n, 3 * n + 1)
    assert not ranges
    ranges.add(1, 2, 1)
    assert list(ranges) == [(1, 2, 1)]
