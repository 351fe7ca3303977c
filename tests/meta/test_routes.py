"""Routes: every LP has a place at any time, its past is never rewritten, and as little moves as can be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from plait.errors import InvalidArgument
from plait.limits import LOGICAL_PARTITIONS
from plait.meta.balance import balance, shares
from plait.meta.lps import Run, mark
from plait.meta.routes import (
    Place,
    Route,
    Span,
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


def places(count: int, groups: int = 2) -> list[Place]:
    return [Place(f"s#{number}" if number else "s", f"g{number % groups}") for number in range(count)]


def check(route: Route) -> None:
    """What holds of every route."""
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
    """Seal everything that has to be."""
    while work := moves(route):
        for partition, lps in work:
            route = sealed(route, partition, [(first, end, fence) for first, end in lps])
    check(route)
    return route


def sizes(numbers: np.ndarray) -> set[int]:
    return set(np.unique(numbers, return_counts=True)[1].tolist())


@given(COUNTS)
def test_shares_have_no_gap_and_no_overlap(count: int):
    runs = shares(count)
    assert len(runs) == count
    assert [first for first, _ in runs] == [0, *(end for _, end in runs[:-1])]
    assert runs[-1][1] == LOGICAL_PARTITIONS
    assert len({end - first for first, end in runs}) <= 2


@pytest.mark.parametrize("count", [0, 1025])
def test_no_subject_has_no_or_too_many_partitions(count: int):
    with pytest.raises(InvalidArgument, match="1 to 1024"):
        default_route("s", places(count))
    with pytest.raises(ValueError, match="shares"):
        shares(count)


def test_a_partition_named_twice_is_refused():
    with pytest.raises(InvalidArgument, match="s@g0 is named twice"):
        default_route("s", [Place("s", "g0"), Place("s", "g0")])


@given(COUNTS)
def test_the_default_route_takes_every_lp(count: int):
    route = default_route("s", places(count))
    check(route)
    assert (current(route) == target(route)).all()
    assert moves(route) == []
    for index in {0, count // 2, count - 1}:
        assert openings(route, index) == [shares(count)[index]]


@given(COUNTS, COUNTS)
@settings(max_examples=60, deadline=None)
def test_a_change_moves_as_few_lps_as_can_be(before: int, after: int):
    route = default_route("s", places(before))
    changed = retarget(route, places(after))
    check(changed)
    assert max(sizes(target(changed))) - min(sizes(target(changed))) <= 1
    moving = sum(end - first for each in moves(changed) for first, end in each.lps)
    held = np.bincount(current(route), minlength=max(before, after))
    # Nobody can have less than the small share taken away, and so many may keep one more.
    small, larger = divmod(LOGICAL_PARTITIONS, after)
    stay = np.minimum(held[:after], small).sum() + min(larger, (held[:after] > small).sum())
    assert moving == LOGICAL_PARTITIONS - stay


@given(*[st.integers(1, 40) | st.sampled_from([300, 1024])] * 2)
@settings(max_examples=15, deadline=None)
def test_a_change_that_is_carried_out_reaches_its_target(before: int, after: int):
    route = converge(retarget(default_route("s", places(before)), places(after)))
    assert (current(route) == target(route)).all()
    assert moves(route) == []
    assert {route.partitions[index] for index in current(route).tolist()} == set(places(after))


def test_the_same_partitions_again_change_nothing():
    route = default_route("s", places(3))
    assert retarget(route, places(3)[::-1]) is route


def test_contraction_to_one_keeps_the_others_listed_while_they_drain():
    route = converge(retarget(default_route("s", places(4)), places(1)), fence=50)
    assert openings(route, 0) == [(0, LOGICAL_PARTITIONS)]
    assert route.partitions == tuple(places(4))
    assert spans(route, 1023) == (Span(3, 50), Span(0))
    assert spans(route, 0) == (Span(0),)


def test_a_drained_partition_is_listed_no_more():
    route = converge(retarget(default_route("s", places(2)), places(1)), fence=50)
    assert retire(route, 1, 49) is route
    retired = retire(route, 1, 50)
    check(retired)
    assert retired.version == route.version + 1
    assert retired.partitions == tuple(places(1))
    assert spans(retired, 1023) == (Span(0),)


def test_only_the_oldest_spans_are_dropped():
    route = converge(retarget(default_route("s", places(1)), [Place("b", "g")]), fence=10)
    route = converge(retarget(route, places(1)), fence=20)
    back = [place for place in route.partitions if place.name == "b"]
    assert retire(route, route.partitions.index(back[0]), 1000) is route
    first = retire(route, route.partitions.index(places(1)[0]), 10)
    assert [span.fence for span in spans(first, 0)] == [20, None]


def test_a_way_back_is_a_third_span_in_the_same_partition():
    there = converge(retarget(default_route("s", places(1)), [Place("t", "g")]), fence=10)
    back = converge(retarget(there, places(1)), fence=7)
    check(back)
    assert back.partitions == (*places(1), Place("t", "g"))
    assert spans(back, 5) == (Span(0, 10), Span(1, 7), Span(0))


def test_lps_of_an_unreachable_group_stay_and_move_later():
    route = retarget(default_route("s", places(2)), places(4))
    lost = {index for index, place in enumerate(route.partitions) if place.group == "g1"}
    for partition, lps in moves(route):
        if partition not in lost:
            route = sealed(route, partition, [(first, end, 9) for first, end in lps])
    left = moves(route)
    assert {each.partition for each in left} == {1}
    assert all((current(route)[first:end] == 1).all() for first, end in left[0].lps)
    assert (current(converge(route)) == target(route)).all()


def test_lps_do_not_move_to_partitions_that_are_not_made_yet():
    route = retarget(default_route("s", places(1)), places(3))
    assert moves(route, made={0}) == []
    moving = mark(moves(route, made={0, 2})[0].lps)
    assert (target(route)[moving] == 2).all()
    assert moving.sum() == (target(route) == 2).sum()


def test_what_may_be_sealed_is_sealed_again_when_it_is_to_stay_after_all():
    """The seal may be durable at the broker though nobody heard of it: without a new span nothing could be sent."""
    route = retarget(default_route("s", places(1)), places(2))
    (move,) = moves(route)
    home = retarget(route, places(1))
    assert (target(home) == current(home)).all()
    assert moves(home) == [move]
    done = sealed(home, 0, [(first, end, 33) for first, end in move.lps])
    check(done)
    assert moves(done) == []
    assert spans(done, move.lps[0][0]) == (Span(0, 33), Span(0))
    assert done.gained[0] == done.version


def test_a_partition_that_no_lp_ever_reached_is_dropped_from_the_list():
    route = retarget(default_route("s", places(1)), places(3))
    assert retarget(route, places(1)).partitions == tuple(places(1))


def test_a_report_that_comes_twice_changes_nothing():
    route = retarget(default_route("s", places(1)), places(2))
    (move,) = moves(route)
    fences = [(first, end, 5) for first, end in move.lps]
    once = sealed(route, 0, fences)
    assert sealed(once, 0, fences) is once


def test_seals_of_different_attempts_have_fences_of_their_own():
    route = retarget(default_route("s", places(1)), [Place("t", "g")])
    route = sealed(route, 0, [(0, 512, 5), (512, 1024, 8)])
    assert spans(route, 511) == (Span(0, 5), Span(1))
    assert spans(route, 512) == (Span(0, 8), Span(1))


def test_there_is_no_lp_1024():
    with pytest.raises(IndexError):
        spans(default_route("s", places(1)), LOGICAL_PARTITIONS)


@given(
    st.lists(st.integers(-1, 9), min_size=LOGICAL_PARTITIONS, max_size=LOGICAL_PARTITIONS),
    st.sets(st.integers(0, LOGICAL_PARTITIONS - 1)),
)
@settings(max_examples=30, deadline=None)
def test_what_is_loose_goes_first(numbers: list[int], loose_lps: set[int]):
    owners, loose = np.array(numbers), np.zeros(LOGICAL_PARTITIONS, dtype=np.bool_)
    loose[list(loose_lps)] = True
    after = balance(owners, 10, loose=loose)
    for owner in range(10):
        mine = owners == owner
        if (mine & loose & (after == owner)).any():
            assert (after[mine & ~loose] == owner).all()


class Broker:
    """What one partition's broker does: orders of an older route than it has heard of are refused (None)."""

    def __init__(self) -> None:
        self.end = 0
        self.heard = 0
        self.open: set[int] = set()
        self.fences: dict[int, int] = {}

    def seal(self, version: int, lps: list[Run]) -> list[tuple[int, int, int]] | None:
        if version < self.heard:
            return None
        self.heard = version
        chosen = [lp for first, end in lps for lp in range(first, end)]
        for lp in self.open.intersection(chosen):
            self.fences[lp] = self.end
        self.open.difference_update(chosen)
        return [(lp, lp + 1, self.fences.get(lp, 0)) for lp in chosen]

    def take(self, version: int, lps: list[Run]) -> None:
        if version >= self.heard:
            self.heard = version
            self.open.update(lp for first, end in lps for lp in range(first, end))


class RouteMachine(RuleBasedStateMachine):
    """Targets change at any moment, seals are carried out late, in part, twice, or unheard of."""

    def __init__(self) -> None:
        super().__init__()
        self.route = default_route("s", places(2))
        self.brokers: dict[Place, Broker] = {}
        self.sent: dict[int, list[tuple[Place, int]]] = {lp: [] for lp in (0, 300, 511, 512, 700, 1023)}
        self.asked: list[tuple[int, Place, list[Run]]] = []
        self.told: list[tuple[int, Place, list[Run]]] = []

    def broker(self, place: Place) -> Broker:
        return self.brokers.setdefault(place, Broker())

    def publish(self, route: Route) -> None:
        if route is self.route:
            return
        assert route.version == self.route.version + 1
        for lp in self.sent:
            before = [(self.route.partitions[span.partition], span.fence) for span in spans(self.route, lp)]
            after = [(route.partitions[span.partition], span.fence) for span in spans(route, lp)]
            assert after[: len(before) - 1] == before[:-1]
            assert after[len(before) - 1][0] == before[-1][0]
        self.route = route

    @rule(count=st.sampled_from([1, 2, 3, 5, 12]), groups=st.integers(1, 3))
    def retarget(self, count: int, groups: int) -> None:
        self.publish(retarget(self.route, places(count, groups)))

    @rule(pick=st.integers(0, 5))
    def order(self, pick: int) -> None:
        """Somebody asks for a seal; whether it arrives is another matter."""
        work = moves(self.route)
        if work:
            each = work[pick % len(work)]
            self.asked.append((self.route.version, self.route.partitions[each.partition], each.lps))

    @rule(pick=st.integers(0, 5), heard=st.booleans(), keep=st.booleans())
    def carry_out(self, pick: int, heard: bool, keep: bool) -> None:
        if not self.asked:
            return
        at = pick % len(self.asked)
        version, place, lps = self.asked[at] if keep else self.asked.pop(at)
        fences = self.broker(place).seal(version, lps)
        if fences is not None and heard and place in self.route.partitions:
            self.publish(sealed(self.route, self.route.partitions.index(place), fences))

    @rule()
    def order_to_open(self) -> None:
        for index, place in enumerate(self.route.partitions):
            self.told.append((self.route.version, place, openings(self.route, index)))

    @rule(pick=st.integers(0, 9), keep=st.booleans())
    def open(self, pick: int, keep: bool) -> None:
        """An order to open arrives, perhaps late, perhaps once more."""
        if self.told:
            at = pick % len(self.told)
            version, place, lps = self.told[at] if keep else self.told.pop(at)
            self.broker(place).take(version, lps)

    @rule(lp=st.sampled_from([0, 300, 511, 512, 700, 1023]))
    def send(self, lp: int) -> None:
        place = self.route.partitions[int(current(self.route)[lp])]
        broker = self.broker(place)
        if lp in broker.open:
            self.sent[lp].append((place, broker.end))
            broker.end += 1

    @invariant()
    def the_route_is_whole(self) -> None:
        check(self.route)

    @invariant()
    def rows_lie_along_the_spans_in_the_order_they_were_sent(self) -> None:
        for lp, rows in self.sent.items():
            left = list(rows)
            for span in spans(self.route, lp):
                place = self.route.partitions[span.partition]
                while left and left[0][0] == place and (span.fence is None or left[0][1] < span.fence):
                    left.pop(0)
            assert left == []

    def teardown(self) -> None:
        """In the end it converges, and every LP can be sent to again."""
        while work := moves(self.route):
            partition, lps = work[0]
            place = self.route.partitions[partition]
            fences = self.broker(place).seal(self.route.version, lps)
            assert fences is not None
            self.publish(sealed(self.route, partition, fences))
        for index, place in enumerate(self.route.partitions):
            self.broker(place).take(self.route.version, openings(self.route, index))
        assert (current(self.route) == target(self.route)).all()
        for lp in self.sent:
            place = self.route.partitions[int(current(self.route)[lp])]
            assert lp in self.broker(place).open


RouteMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestRouteMachine = RouteMachine.TestCase
