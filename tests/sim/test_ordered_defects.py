"""Does the simulated cluster find what is wrong? Each defect is put into the shipped classes, and has to be noticed by
the checker, or by the wait for the end, within a few seeds that are fine without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from plait.testing.sim import Fault
from tests.sim import ordered_defects as defects
from tests.sim.ordered_cluster import BROKERS, METAS, OrderedCluster
from tests.sim.ordered_defects import Defect

#: Long enough for everything that is not wrong to be drained.
DRAIN_SECONDS = 40.0
#: A consumer that hears no meta server, one that hears nobody, and more to do than anybody can at once.
CUT_OFF = [
    *(Fault("cut", 1.0, 6.5, consumer, meta) for consumer in ("consumer-0", "consumer-3") for meta in METAS),
    *(Fault("cut", 2.0, 5.0, "consumer-0", broker) for broker in BROKERS),
]
#: Defects that any run shows, mostly the first.
COMMON: list[Defect] = [
    defects.take_rows_behind_the_fence,
    defects.report_drained_too_early,
    defects.ask_the_newest_span_first,
    defects.ask_all_spans_at_once,
    defects.overtake_rows_that_are_sent_again,
    defects.use_an_epoch_again,
    defects.hand_over_too_early,
    defects.take_rows_of_a_lost_owner_for_done,
    defects.lose_returned_rows_when_a_strand_is_split,
    defects.let_a_failed_row_be_overtaken,
    defects.hand_out_a_key_twice_at_a_time,
]
#: Those that consumers show which are cut off.
OF_LEASES: list[Defect] = [
    defects.accept_a_lower_epoch,
    defects.ignore_the_lease,
    defects.keep_what_is_not_ours_any_more,
]
COMMON_SEEDS = range(200, 208)
LEASE_SEEDS = range(1, 9)


def common(seed: int) -> OrderedCluster:
    return OrderedCluster(seed, drain_seconds=DRAIN_SECONDS)


def cut_off(seed: int) -> OrderedCluster:
    return OrderedCluster(seed, slow=True, script=CUT_OFF, changes=[], drain_seconds=DRAIN_SECONDS)


def found(make: Callable[[int], OrderedCluster], seeds: Iterable[int]) -> bool:
    """One of the runs fails."""
    for seed in seeds:
        try:
            make(seed).run()
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize("defect", COMMON, ids=lambda defect: defect.__name__)
def test_a_defect_is_found(defect: Defect, monkeypatch: pytest.MonkeyPatch):
    defect(monkeypatch)
    assert found(common, COMMON_SEEDS)


@pytest.mark.parametrize("defect", OF_LEASES, ids=lambda defect: defect.__name__)
def test_a_defect_of_locks_and_leases_is_found(defect: Defect, monkeypatch: pytest.MonkeyPatch):
    defect(monkeypatch)
    assert found(cut_off, LEASE_SEEDS)


@pytest.mark.parametrize("number", COMMON_SEEDS)
def test_the_same_seeds_pass_without_a_defect(number: int):
    common(number).run()


@pytest.mark.parametrize("number", LEASE_SEEDS)
def test_so_do_those_with_consumers_that_are_cut_off(number: int):
    cut_off(number).run()
