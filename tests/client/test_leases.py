"""Which locks an ordered consumer requests, and how long their lease is valid."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.client.consume.ordered.ordered_delivered import LockRights, no_lps
from plait.client.consume.ordered.wanted_locks import (
    LockReport,
    WantedLocks,
    left_behind,
    parked_before,
    wanted,
    wanted_at_once,
    wants,
)
from plait.client.net.router import SubjectRoute
from plait.clock import ManualClock
from plait.model.logical_partitions import LpSet, lp_set, runs_of, runs_with
from plait.wire import messages as m

ALL = lp_set([(0, 1024)])
NONE: frozenset[int] = frozenset()
#: The hash of a key of logical partition 5.
KEY = frozenset({7 << 10 | 5})


def route_of(*histories: m.LpHistory, partitions: int = 3) -> SubjectRoute:
    names = [(f"s#{n}", "g1") for n in range(partitions)]
    return SubjectRoute(m.RouteReply("s", 1, "strict", names, list(histories), {}))


def done(
    parked: frozenset[int] = NONE, inherited: frozenset[int] = NONE, again: LpSet | None = None, **runs: tuple[int, int]
) -> LockReport:
    """A report of LPs that are done up to a sequence: ``to_90=(0, 100)``."""
    found = np.zeros(1024, np.int64)
    for name, (first, end) in runs.items():
        found[first:end] = int(name.removeprefix("to_"))
    return LockReport(found, parked, inherited, no_lps() if again is None else again)


def runs(several: list[WantedLocks]) -> list[list[tuple[int, int, int]]]:
    """The wanted locks of three partitions, with their end sequences; a partition outside the route has none."""
    found = [runs_with(some.until, some.lps) for some in several]
    return found + [[] for _ in range(3 - len(found))]


def before(route: SubjectRoute, reports: list[LockReport]) -> list[set[int]]:
    """For each partition, the keys that are parked on an earlier partition of their history."""
    return parked_before(route, reports, wanted(route, ALL, reports))


def test_without_order_locks_are_wanted_on_every_partition_of_the_history() -> None:
    route = route_of((0, 512, [(0, 90), (1, 50), (0, None)]), (512, 1024, [(2, None)]))
    found = runs(wanted_at_once(route, lp_set([(500, 600)])))
    assert found == [[(500, 512, 0)], [(500, 512, 0)], [(512, 600, 0)]]


def test_a_lock_is_wanted_on_the_oldest_unfinished_span_up_to_its_fence() -> None:
    route = route_of((0, 512, [(0, 90), (1, 50), (2, None)]), (512, 1024, [(0, None)]))
    reports = [done(), done(), done()]
    assert runs(wanted(route, ALL, reports)) == [[(0, 512, 90), (512, 1024, 0)], [], []]
    reports[0] = done(to_90=(0, 100))
    assert runs(wanted(route, ALL, reports)) == [[(100, 512, 90), (512, 1024, 0)], [(0, 100, 50)], []]
    reports[1] = done(to_50=(50, 200))
    assert runs(wanted(route, ALL, reports))[1:] == [[(0, 50, 50)], [(50, 100, 0)]]
    assert runs(wanted(route, lp_set([(60, 70)]), reports)) == [[], [], [(60, 70, 0)]]


def test_a_route_back_to_a_partition_waits_for_the_span_between() -> None:
    route = route_of((0, 1024, [(0, 90), (1, 50), (0, None)]))
    reports = [done(), done(), done()]
    assert runs(wanted(route, ALL, reports)) == [[(0, 1024, 90)], [], []]
    reports[0] = done(to_90=(0, 1024))
    assert runs(wanted(route, ALL, reports)) == [[], [(0, 1024, 50)], []]
    reports[1] = done(to_50=(0, 1024))
    assert runs(wanted(route, ALL, reports)) == [[(0, 1024, 0)], [], []]


def test_locks_of_parked_keys_stay_wanted() -> None:
    route = route_of((0, 1024, [(0, 90), (1, None)]))
    reports = [done(KEY, to_90=(0, 1024)), done(), done()]
    assert runs(wanted(route, ALL, reports)) == [[(5, 6, 90)], [(0, 1024, 0)], []]
    assert before(route, reports) == [set(), set(KEY)]


def test_an_inherited_parked_mark_is_not_passed_on() -> None:
    """Otherwise two partitions that a route alternates between would keep each other's marks permanently."""
    route = route_of((0, 1024, [(0, 90), (1, 50), (0, None)]))
    reports = [done(to_90=(0, 1024)), done(KEY, KEY, to_50=(0, 1024)), done()]
    assert before(route, reports) == [set(), set()]


@pytest.mark.parametrize("last", [0, 1])
def test_a_resumed_key_continues_one_partition_after_the_other(last: int) -> None:
    """Its rows on the second partition precede those on the third; the last partition may be an earlier one again."""
    route = route_of((0, 1024, [(0, 90), (1, 50), (2, 70), (last, None)]))
    reports = [done(to_90=(0, 1024)), done(KEY, KEY, to_50=(0, 1024)), done(KEY, KEY, to_70=(0, 1024))]
    assert runs(wanted(route, lp_set([(5, 6)]), reports)) == [[], [(5, 6, 50)], []]
    # The marks of the resumed key are removed at once.
    assert before(route, reports) == [set(), set(), set()]
    reports[1] = done()
    assert runs(wanted(route, lp_set([(5, 6)]), reports)) == [[], [(5, 6, 50)], []]
    reports[1] = done(to_50=(0, 1024))
    assert runs(wanted(route, lp_set([(5, 6)]), reports)) == [[], [], [(5, 6, 70)]]


def test_a_parked_key_holds_back_no_other_key_on_later_partitions() -> None:
    route = route_of((0, 1024, [(0, 90), (1, 50), (2, None)]))
    reports = [done(KEY, to_90=(0, 1024)), done(KEY, KEY, to_50=(0, 1024)), done()]
    assert runs(wanted(route, lp_set([(5, 6)]), reports)) == [[(5, 6, 90)], [(5, 6, 50)], [(5, 6, 0)]]
    keys = set(KEY)
    assert before(route, reports) == [set(), keys, keys]


def test_a_parked_key_holds_back_the_span_between_when_the_route_returns() -> None:
    """Otherwise the resumed key would continue past the fence, ahead of its rows on the partition between."""
    route = route_of((0, 1024, [(0, 90), (1, 50), (0, None)]))
    reports = [done(KEY, to_90=(0, 1024)), done(to_50=(0, 1024)), done()]
    assert runs(wanted(route, ALL, reports)) == [[(0, 5, 0), (5, 6, 90), (6, 1024, 0)], [], []]
    assert before(route, reports) == [set(), set()]


def test_a_parked_key_holds_back_a_later_span_on_an_earlier_partition() -> None:
    """A mark there would also cover the key's rows of the earlier span."""
    route = route_of((0, 1024, [(0, 90), (1, 50), (0, None)]))
    reports = [done(to_90=(0, 1024)), done(KEY, to_50=(0, 1024)), done()]
    assert runs(wanted(route, lp_set([(5, 6)]), reports)) == [[], [(5, 6, 50)], []]


def test_the_mark_of_a_later_span_is_removed_when_the_first_span_is_wanted() -> None:
    """The key waits on the next partition; two partitions must not wait for each other."""
    route = route_of((0, 1024, [(0, 90), (1, 50), (0, 95), (1, None)]))
    reports = [done(KEY, KEY, to_90=(0, 1024)), done(KEY), done()]
    assert runs(wanted(route, lp_set([(5, 6)]), reports)) == [[(5, 6, 90)], [], []]
    assert before(route, reports) == [set(), set()]


def test_an_empty_span_is_skipped() -> None:
    """A want with end 0 has no end."""
    route = route_of((0, 1024, [(0, 0), (1, 50), (0, None)]))
    reports = [done(KEY, KEY), done(), done()]
    assert runs(wanted(route, lp_set([(5, 6)]), reports)) == [[], [(5, 6, 50)], []]
    # The empty span precedes nothing on the other partition.
    reports = [done(KEY), done(KEY, KEY), done()]
    assert before(route, reports) == [set(), set()]


def test_a_finished_span_that_has_rows_again_is_wanted_too() -> None:
    route = route_of((0, 1024, [(0, 90), (1, None)]))
    reports = [done(again=lp_set([(3, 5)]), to_90=(0, 1024)), done(), done()]
    assert runs(wanted(route, ALL, reports)) == [[(3, 5, 90)], [(0, 1024, 0)], []]


def test_keys_are_parked_on_later_partitions_of_their_own_history_only() -> None:
    route = route_of((0, 512, [(0, 9), (1, None)]), (512, 1024, [(0, 9), (2, None)]))
    low, high = 3 << 10 | 100, 3 << 10 | 600
    ended = done(frozenset({low, high}), to_9=(0, 1024))
    assert before(route, [ended, done(), done()]) == [set(), {low}, {high}]


def test_left_behind_are_the_sealed_lps_of_each_partition() -> None:
    route = route_of((0, 512, [(0, 9), (1, None)]), (512, 1024, [(0, None)]))
    assert [runs_of(lps) for lps in left_behind(route)] == [[(0, 512)], []]


@given(st.lists(st.tuples(st.integers(0, 1023), st.integers(1, 5), st.integers(0, 3)), max_size=30))
def test_wants_have_the_epoch_and_the_end_of_each_lp(several: list[tuple[int, int, int]]) -> None:
    lps, epochs, until = no_lps(), np.zeros(1024, np.int64), np.zeros(1024, np.int64)
    for lp, epoch, limit in several:
        lps[lp], epochs[lp], until[lp] = True, epoch, limit
    found = {lp: (epoch, limit) for first, end, epoch, limit in wants(lps, epochs, until) for lp in range(first, end)}
    assert found == {lp: (int(epochs[lp]), int(until[lp])) for lp, _, _ in several}


class Session:
    """The lock rights of one session."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.rights = LockRights(self.clock)
        self.rights.attached(m.AttachReply(7, 1, "s", "g", 1, 10.0))

    def grant(
        self, answer: m.LeaseReply, *, asked: LpSet = ALL, wants: LpSet = ALL, sent: float | None = None
    ) -> LpSet:
        until = np.full(1024, 90)
        return self.rights.granted(answer, self.clock.monotonic() if sent is None else sent, asked, until, wants)


def test_a_lease_starts_when_its_request_is_sent() -> None:
    session = Session()
    assert not session.rights.valid()
    sent = session.clock.monotonic()
    session.clock.advance(4)
    session.grant(m.LeaseReply(10.0, 1, [(0, 1024, 1)]), sent=sent)
    session.clock.advance(5.9)
    assert session.rights.valid()
    session.clock.advance(0.1)
    assert not session.rights.valid()


def test_a_renewal_counts_only_for_its_session_and_never_shortens_the_lease() -> None:
    session = Session()
    session.grant(m.LeaseReply(10.0, 1, [(0, 1024, 1)]))
    session.rights.renewed(7, session.clock.monotonic() - 5)
    session.clock.advance(9)
    assert session.rights.valid()
    session.rights.renewed(6, session.clock.monotonic())
    session.clock.advance(1)
    assert not session.rights.valid()
    session.rights.renewed(7, session.clock.monotonic())
    assert session.rights.valid()


def test_leaving_and_given_up_locks_are_not_open() -> None:
    session = Session()
    assert not session.grant(m.LeaseReply(10.0, 1, [(0, 100, 1)]), wants=lp_set([(0, 50)])).any()
    assert runs_of(session.rights.open) == [(0, 50)]
    lost = session.grant(m.LeaseReply(10.0, 2, [(0, 20, 1)], leaving=[(20, 50)]))
    assert runs_of(lost) == [(20, 50)]
    assert runs_of(session.rights.open) == [(0, 20)]


def test_lps_stay_drained_and_keys_stay_parked_until_they_are_requested_again() -> None:
    session = Session()
    session.grant(m.LeaseReply(10.0, 1, drained=[(0, 10)], parked=[5]))
    session.grant(m.LeaseReply(10.0, 2), asked=lp_set([(8, 20)]))
    assert (session.rights.done == done(to_90=(0, 10)).done).all()
    assert session.rights.parked == {5}
    session.grant(m.LeaseReply(10.0, 3), asked=lp_set([(5, 6)]))
    assert session.rights.parked == frozenset()
    # The key is resumed, so its LP is no longer done.
    assert (session.rights.done == done(to_90=(0, 10), to_0=(5, 6)).done).all()
