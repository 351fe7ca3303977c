"""How partitions share what a consumer pulls ahead."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

import plait
from plait.client.prefetch import Prefetch


@dataclass(eq=False)
class Partition:
    """What one partition uses."""

    rows: int = 0
    asked: int = 0
    open_bytes: int = 0
    more: bool = False
    since_oldest: int = 0

    def held(self) -> int:
        return self.rows

    def span(self) -> int:
        return self.since_oldest


LIMITS = plait.ClientLimits(prefetch_count=100, prefetch_span=200, prefetch_bytes=1_000)


def test_one_partition_has_all_of_it() -> None:
    prefetch, alone = Prefetch(LIMITS), Partition()
    assert prefetch.wanted(alone, [alone]) == 100
    alone.rows, alone.asked = 30, 50
    assert prefetch.wanted(alone, [alone]) == 20
    alone.open_bytes = 1_000
    assert prefetch.wanted(alone, [alone]) == 0


def test_who_has_more_gets_what_is_for_all() -> None:
    prefetch, idle, busy = Prefetch(LIMITS), Partition(), Partition(more=True)
    both = [idle, busy]
    assert (prefetch.wanted(idle, both), prefetch.wanted(busy, both)) == (25, 75)
    busy.rows = 75
    assert (prefetch.wanted(idle, both), prefetch.wanted(busy, both)) == (25, 0)


def test_bytes_of_one_leave_the_other_its_share() -> None:
    prefetch, idle, busy = Prefetch(LIMITS), Partition(), Partition(rows=10, more=True, open_bytes=750)
    assert (prefetch.wanted(idle, [idle, busy]), prefetch.wanted(busy, [idle, busy])) == (25, 0)


@pytest.mark.parametrize(("spans", "wanted"), [(True, 0), (False, 99)])
def test_a_stuck_row_lets_the_rest_not_run_away_unless_keys_are_apart(spans: bool, wanted: int) -> None:
    stuck = Partition(rows=1, since_oldest=200)
    assert Prefetch(LIMITS, spans=spans).wanted(stuck, [stuck]) == wanted


def test_at_most_once_only_what_is_asked_for_is_pulled_by_all_together() -> None:
    one, two = Partition(), Partition(asked=3)
    assert Prefetch.wanted_now(10, one, [one, two]) == 5
    assert Prefetch.wanted_now(10, two, [one, two]) == 2
    assert Prefetch.wanted_now(0, one, [one, two]) == 0


@given(
    st.integers(1, 200),
    st.lists(st.tuples(st.booleans(), st.integers(0, 1)), min_size=1, max_size=30),
    st.lists(st.integers(0, 29), max_size=100),
)
def test_together_they_stay_within_the_limit_and_each_has_its_share(
    count: int, kinds: list[tuple[bool, int]], turns: list[int]
) -> None:
    prefetch = Prefetch(plait.ClientLimits(prefetch_count=count))
    partitions = [Partition(more=more, asked=asked) for more, asked in kinds]
    for turn in turns:
        partition = partitions[turn % len(partitions)]
        partition.rows += prefetch.wanted(partition, partitions)
    assert sum(each.rows + each.asked for each in partitions) <= max(count, len(partitions))
    for each in partitions:
        each.rows += prefetch.wanted(each, partitions)
        assert each.rows + each.asked >= max(count // (2 * len(partitions)), 1)
