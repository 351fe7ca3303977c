"""Routes: every LP always has a partition, its history is never rewritten, and as few LPs as possible move."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from plait.errors import InvalidArgument
from plait.limits import LOGICAL_PARTITIONS
from plait.model.logical_partitions import balance, lp_set, shares
from plait.model.route import (
    PartitionId,
    Route,
    current,
    default_route,
    moves,
    openings,
    retarget,
    retire,
    sealed,
    spans,
    target,
)

COUNTS = st.integers(1, LOGICAL_PARTITIONS)


def places(count: int, groups: int = 2) -> list[PartitionId]:
    return [PartitionId(f"s#{number}" if number else "s", f"g{number % groups}") for number in range(count)]


def check(route: Route) -> None:
    """The invariants of every route."""
    edges = [0]
    for history in route.histories:
        assert history.first == edges[-1] < history.end
        edges.append(history.end)
        assert history.spans
        assert [span.fence is None for span in history.spans] == [False] * (len(history.spans) - 1) + [True]
    assert edges[-1] == LOGICAL_PARTITIONS
    assert {span.partition for each in route.histories for span in each.spans} <= set(range(len(route.partitions)))
    assert len(set(route.partitions)) == len(route.partitions) == len(route.gained)
    assert (target(route) >= 0).all()
    assert all(version <= route.version for version in route.gained)


def converge(route: Route, fence: int = 100) -> Route:
    """Seal every LP that has to move."""
    while work := moves(route):
        for partition, lps in work:
            route = sealed(route, route.version, partition, [(first, end, fence) for first, end in lps])
    check(route)
    return route


def fences_of(route: Route, lp: int) -> list[tuple[int, int | None]]:
    """The partitions and fences of an LP's spans."""
    return [(span.partition, span.fence) for span in spans(route, lp)]


def sizes(numbers: np.ndarray) -> set[int]:
    return set(np.unique(numbers, return_counts=True)[1].tolist())


def test_shares_have_no_gap_and_no_overlap_for_any_count():
    for count in range(1, LOGICAL_PARTITIONS + 1):
        runs = shares(count)
        assert len(runs) == count
        assert [first for first, _ in runs] == [0, *(end for _, end in runs[:-1])]
        assert runs[-1][1] == LOGICAL_PARTITIONS
        assert len({end - first for first, end in runs}) <= 2


@pytest.mark.parametrize("count", [0, 1025])
def test_a_subject_without_partitions_or_with_too_many_is_refused(count: int):
    with pytest.raises(InvalidArgument, match="1 to 1024"):
        default_route("s", places(count))
    with pytest.raises(ValueError, match="shares"):
        shares(count)


def test_a_partition_named_twice_is_refused():
    with pytest.raises(InvalidArgument, match="s@g0 is named twice"):
        default_route("s", [PartitionId("s", "g0"), PartitionId("s", "g0")])


@given(COUNTS)
def test_the_default_route_takes_every_lp(count: int):
    route = default_route("s", places(count))
    check(route)
    assert (current(route) == target(route)).all()
    assert moves(route) == []
    for index in {0, count // 2, count - 1}:
        assert openings(route)[index] == [shares(count)[index]]


@given(COUNTS, COUNTS)
@settings(max_examples=60, deadline=None)
def test_a_change_moves_as_few_lps_as_possible(before: int, after: int):
    route = default_route("s", places(before))
    changed = retarget(route, places(after))
    check(changed)
    assert max(sizes(target(changed))) - min(sizes(target(changed))) <= 1
    moving = sum(end - first for each in moves(changed) for first, end in each.lps)
    held = np.bincount(current(route), minlength=max(before, after))
    # A partition keeps at most the smaller share, and only some keep one LP more.
    small, larger = divmod(LOGICAL_PARTITIONS, after)
    stay = np.minimum(held[:after], small).sum() + min(larger, (held[:after] > small).sum())
    assert moving == LOGICAL_PARTITIONS - stay


@given(*[st.integers(1, 40)] * 2)
@settings(max_examples=20, deadline=None)
@example(1024, 3)
@example(1, 1024)
def test_a_change_that_is_carried_out_reaches_its_target(before: int, after: int):
    route = converge(retarget(default_route("s", places(before)), places(after)))
    assert (current(route) == target(route)).all()
    assert moves(route) == []
    assert {route.partitions[index] for index in current(route).tolist()} == set(places(after))


def test_the_same_partitions_again_change_nothing():
    route = default_route("s", places(3))
    assert retarget(route, places(3)[::-1]) is route


def test_a_drained_partition_is_no_longer_listed():
    route = converge(retarget(default_route("s", places(2)), places(1)), fence=50)
    assert retire(route, 1, 49) is route
    retired = retire(route, 1, 50)
    check(retired)
    assert retired.version == route.version + 1
    assert retired.partitions == tuple(places(1))
    assert fences_of(retired, 1023) == [(0, None)]


def test_only_the_oldest_spans_are_dropped():
    route = converge(retarget(default_route("s", places(1)), [PartitionId("b", "g")]), fence=10)
    route = converge(retarget(route, places(1)), fence=20)
    back = [place for place in route.partitions if place.name == "b"]
    assert retire(route, route.partitions.index(back[0]), 1000) is route
    first = retire(route, route.partitions.index(places(1)[0]), 10)
    assert [span.fence for span in spans(first, 0)] == [20, None]


def test_moving_an_lp_back_adds_a_third_span_in_the_same_partition():
    there = converge(retarget(default_route("s", places(1)), [PartitionId("t", "g")]), fence=10)
    back = converge(retarget(there, places(1)), fence=7)
    check(back)
    assert back.partitions == (*places(1), PartitionId("t", "g"))
    assert fences_of(back, 5) == [(0, 10), (1, 7), (0, None)]


def test_an_lp_that_may_be_sealed_is_sealed_again_when_it_stays_after_all():
    """The seal may be durable although its answer was lost. Without a new span no partition would accept the LP."""
    route = retarget(default_route("s", places(1)), places(2))
    (move,) = moves(route)
    home = retarget(route, places(1))
    assert (target(home) == current(home)).all()
    assert moves(home) == [move]
    done = sealed(home, home.version, 0, [(first, end, 33) for first, end in move.lps])
    check(done)
    assert moves(done) == []
    assert fences_of(done, move.lps[0][0]) == [(0, 33), (0, None)]
    assert done.gained[0] == done.version


def test_a_partition_that_no_lp_ever_reached_is_dropped_from_the_list():
    route = retarget(default_route("s", places(1)), places(3))
    assert retarget(route, places(1)).partitions == tuple(places(1))


def test_there_is_no_lp_1024():
    with pytest.raises(IndexError):
        spans(default_route("s", places(1)), LOGICAL_PARTITIONS)


@given(
    st.lists(st.integers(-1, 9), min_size=LOGICAL_PARTITIONS, max_size=LOGICAL_PARTITIONS),
    st.sets(st.integers(0, LOGICAL_PARTITIONS - 1)),
)
@settings(max_examples=30, deadline=None)
def test_loose_lps_are_given_away_first(numbers: list[int], loose_lps: set[int]):
    owners, loose = np.array(numbers), np.zeros(LOGICAL_PARTITIONS, dtype=np.bool_)
    loose[list(loose_lps)] = True
    after = balance(owners, 10, loose=loose)
    for owner in range(10):
        mine = owners == owner
        if (mine & loose & (after == owner)).any():
            assert (after[mine & ~loose] == owner).all()


def test_a_fence_stays_valid_when_the_target_changes_before_it_is_reported():
    """The LPs are not opened again meanwhile, because no consumer would find rows from the fence on."""
    route = retarget(default_route("s", places(1)), places(2))
    (move,) = moves(route)
    home = retarget(route, places(1))
    assert not (lp_set(openings(home)[0]) & lp_set(move.lps)).any()
    late = sealed(home, route.version, 0, [(first, end, 33) for first, end in move.lps])
    assert fences_of(late, move.lps[0][0]) == [(0, 33), (0, None)]
    assert openings(late)[0] == [(0, LOGICAL_PARTITIONS)]


def test_a_fence_that_is_reported_after_the_lp_was_opened_again_is_ignored():
    route = retarget(default_route("s", places(1)), places(2))
    (move,) = moves(route)
    fences = [(first, end, 33) for first, end in move.lps]
    home = retarget(route, places(1))
    opened = sealed(home, home.version, 0, fences)
    assert sealed(opened, route.version, 0, fences) is opened


def test_an_lp_that_is_to_be_sealed_is_not_opened():
    route = retarget(default_route("s", places(1)), places(2))
    (move,) = moves(route)
    assert (lp_set(openings(route)[0]) ^ lp_set(move.lps)).all()
