"""The simulated cluster finds defects that a test patches into Plait's classes.

A few seeds pass without the defect. With the defect at least one of them fails: the checker finds a violation, or the
run does not end.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from plait.testing.sim import Fault
from tests.sim import ordered_defects as defects
from tests.sim.meta_servers import METAS
from tests.sim.ordered_changes import Change, round_trips
from tests.sim.ordered_cluster import BROKERS, STRICT, OrderedCluster
from tests.sim.ordered_defects import Defect

#: A run without a defect always handles a message within this time.
QUIET_SECONDS = 10.0
HELD_UP = ("consumer-0", "consumer-3")
#: Two consumers are cut off from the meta servers, so that others are allocated their shares...
CUT_FROM_METAS = [Fault("cut", 1.0, 6.5, consumer, meta) for consumer in HELD_UP for meta in METAS]
#: ...and one of them also from the brokers.
CUT_OFF = [*CUT_FROM_METAS, *(Fault("cut", 2.0, 5.0, HELD_UP[0], broker) for broker in BROKERS)]
#: Both consumers are cut off from all servers while the brokers restart, so the brokers cannot know which rows the
#: consumers hold.
RESTARTED = [
    *CUT_FROM_METAS,
    *(Fault("cut", 3.8, 4.0, consumer, broker) for consumer in HELD_UP for broker in BROKERS),
    *(Fault("kill", 4.0, 0.1, broker) for broker in BROKERS),
]
#: Brokers made a checkpoint while many rows were in flight; then all holders die.
ALL_KILLED = [Fault("kill", 4.6, 0.1, name) for name in (*BROKERS, *(f"consumer-{n}" for n in range(8)))]
#: One consumer after another is killed. The others get its rows.
KILLED = [Fault("kill", 2.0 + 0.6 * n, 0.3, f"consumer-{n}") for n in range(8)]


def common(seed: int) -> OrderedCluster:
    return OrderedCluster(seed, quiet_seconds=QUIET_SECONDS, early=True)


def busy(script: list[Fault], slow: float) -> Callable[[int], OrderedCluster]:
    return lambda seed: OrderedCluster(
        seed, slow=slow, script=script, changes=[Change(1.5, STRICT, 1)], quiet_seconds=QUIET_SECONDS, early=True
    )


def round_trip(seed: int) -> OrderedCluster:
    """Partitions are added and soon removed, again and again, under load."""
    consumers = [f"consumer-{n}" for n in range(8)]
    changes, script = round_trips(random.Random(seed), 8.0, STRICT, consumers, list(METAS))
    return OrderedCluster(seed, slow=0.1, script=script, changes=changes, quiet_seconds=QUIET_SECONDS, early=True)


#: Errors of a defect whose patch does not fit Plait's classes any more.
BROKEN_CODE = (TypeError, AttributeError, NameError)

#: More seeds, in case the listed seeds no longer find a defect. Any change of the code may change what a seed does.
MORE = range(300, 320)
#: The clusters and seeds that find defects. A seed that finds the defect comes first, so that the test is short.
COMMON = (common, (208, 202, 205, 209))
ONE_BY_ONE = (busy(KILLED, 0.25), (1, 3))
LONG_HANDLING = (busy(CUT_OFF, 1.5), (3,))
SHOWN_BY: dict[Defect, tuple[Callable[[int], OrderedCluster], tuple[int, ...]]] = {
    defects.take_rows_behind_the_fence: COMMON,
    defects.deliver_behind_the_fence: COMMON,
    defects.ask_brokers_that_hold_nothing: (common, (204,)),
    defects.report_drained_too_early: (common, (203,)),
    defects.ask_the_newest_span_first: COMMON,
    defects.ask_all_spans_at_once: (common, (203,)),
    defects.overtake_rows_that_are_sent_again: COMMON,
    defects.deliver_rows_from_after_a_round_trip: (round_trip, (2, 8)),
    defects.use_an_epoch_again: COMMON,
    defects.hand_over_too_early: ONE_BY_ONE,
    defects.count_rows_of_a_lost_owner_as_done: ONE_BY_ONE,
    defects.lose_returned_rows_when_a_cursor_is_split: (common, (1,)),
    defects.let_a_failed_row_be_overtaken: COMMON,
    defects.hand_out_a_key_twice_at_a_time: COMMON,
    defects.accept_a_lower_epoch: (busy(CUT_OFF, 0.25), (3, 4)),
    defects.ignore_the_lease: LONG_HANDLING,
    defects.handle_rows_of_lost_locks: LONG_HANDLING,
    defects.grant_right_after_a_start: (busy(RESTARTED, 0.25), (3, 2)),
    defects.forget_held_rows_at_a_checkpoint: (busy(ALL_KILLED, 0.25), (1, 2)),
    defects.settle_rows_of_other_tags: (busy(KILLED, 0.25), (206,)),
}


def fails(cluster: OrderedCluster) -> bool:
    """Whether the cluster finds a violation. An error in the defect's own code does not count."""
    try:
        cluster.run()
    except AssertionError as failure:
        if isinstance(failure.__cause__, BROKEN_CODE):
            raise
        return True
    return False


#: The slowest ones.
SLOW = (
    defects.overtake_rows_that_are_sent_again,
    defects.ask_all_spans_at_once,
    defects.report_drained_too_early,
    defects.use_an_epoch_again,
    defects.grant_right_after_a_start,
    defects.accept_a_lower_epoch,
)


def marked(defect: Defect) -> object:
    return pytest.param(defect, marks=pytest.mark.deep("plants")) if defect in SLOW else defect


@pytest.mark.parametrize("defect", [marked(defect) for defect in SHOWN_BY], ids=lambda defect: defect.__name__)
def test_a_defect_is_found(defect: Defect, monkeypatch: pytest.MonkeyPatch):
    make, seeds = SHOWN_BY[defect]
    defect(monkeypatch)
    found = next((seed for seed in (*seeds, *MORE) if fails(make(seed))), None)
    assert found is not None
    if found not in seeds:
        monkeypatch.undo()
        make(found).run()


#: The clusters and seeds of all defects. All of them pass without a defect.
FINE = dict.fromkeys((make, seed) for make, seeds in SHOWN_BY.values() for seed in seeds)


@pytest.mark.deep("plants")
@pytest.mark.parametrize("number", range(len(FINE)))
def test_the_same_seeds_pass_without_a_defect(number: int):
    make, seed = list(FINE)[number]
    make(seed).run()
