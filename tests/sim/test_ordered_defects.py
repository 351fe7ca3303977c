"""Does the simulated cluster find what is wrong? Each defect is put into the shipped classes, and has to be noticed, by
the checker as it goes or by the wait for the end, within a few seeds that are fine without it.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from plait.testing.sim import Fault
from tests.sim import ordered_defects as defects
from tests.sim.ordered_changes import Change, ways_back
from tests.sim.ordered_cluster import BROKERS, METAS, STRICT, OrderedCluster
from tests.sim.ordered_defects import Defect

#: Long enough for everything that is not wrong to be handled.
QUIET_SECONDS = 10.0
HELD_UP = ("consumer-0", "consumer-3")
#: Consumers that hear no meta server, so that others are to have what they have...
UNHEARD = [Fault("cut", 1.0, 6.5, consumer, meta) for consumer in HELD_UP for meta in METAS]
#: ...one of which hears nobody.
CUT_OFF = [*UNHEARD, *(Fault("cut", 2.0, 5.0, HELD_UP[0], broker) for broker in BROKERS)]
#: Both hear nobody when the brokers start anew, which therefore cannot know what they have in their hands.
RESTARTED = [
    *UNHEARD,
    *(Fault("cut", 3.8, 4.0, consumer, broker) for consumer in HELD_UP for broker in BROKERS),
    *(Fault("kill", 4.0, 0.1, broker) for broker in BROKERS),
]
#: Brokers made a checkpoint while much was in hands; then nobody has it any more.
ALL_KILLED = [Fault("kill", 4.6, 0.1, name) for name in (*BROKERS, *(f"consumer-{n}" for n in range(8)))]
#: One consumer after another: what each had goes to the others.
KILLED = [Fault("kill", 2.0 + 0.6 * n, 0.3, f"consumer-{n}") for n in range(8)]


def common(seed: int) -> OrderedCluster:
    return OrderedCluster(seed, quiet_seconds=QUIET_SECONDS, early=True)


def busy(script: list[Fault], slow: float) -> Callable[[int], OrderedCluster]:
    """More to do than anybody can at once, and these faults."""
    return lambda seed: OrderedCluster(
        seed, slow=slow, script=script, changes=[Change(1.5, STRICT, 1)], quiet_seconds=QUIET_SECONDS, early=True
    )


def coming_back(seed: int) -> OrderedCluster:
    """Partitions become more and soon as few as before, again and again, and much is sent meanwhile."""
    consumers = [f"consumer-{n}" for n in range(8)]
    changes, script = ways_back(random.Random(seed), 8.0, STRICT, consumers, list(METAS))
    return OrderedCluster(seed, slow=0.1, script=script, changes=changes, quiet_seconds=QUIET_SECONDS, early=True)


#: What a defect that does not fit the shipped classes any more comes to.
BROKEN_CODE = (TypeError, AttributeError, NameError)

#: Seeds for a defect that the listed ones do not show any more: whatever takes another turn changes what they show.
MORE = range(300, 320)
#: What each defect is shown by, and by which seeds: the first that does makes the test a short one.
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
    defects.hand_out_what_came_after_a_way_back: (coming_back, (2, 8)),
    defects.use_an_epoch_again: COMMON,
    defects.hand_over_too_early: ONE_BY_ONE,
    defects.take_rows_of_a_lost_owner_for_done: ONE_BY_ONE,
    defects.lose_returned_rows_when_a_strand_is_split: (common, (1,)),
    defects.let_a_failed_row_be_overtaken: COMMON,
    defects.hand_out_a_key_twice_at_a_time: COMMON,
    defects.accept_a_lower_epoch: (busy(CUT_OFF, 0.25), (3, 4)),
    defects.ignore_the_lease: LONG_HANDLING,
    defects.keep_what_is_not_ours_any_more: LONG_HANDLING,
    defects.grant_right_after_a_start: (busy(RESTARTED, 0.25), (3, 2)),
    defects.forget_rows_in_hands_at_a_checkpoint: (busy(ALL_KILLED, 0.25), (1, 2)),
    defects.settle_rows_of_other_tags: (busy(KILLED, 0.25), (206,)),
}


def fails(cluster: OrderedCluster) -> bool:
    """The cluster notices that something is wrong; an error in the code, as of a wrong argument, is not that."""
    try:
        cluster.run()
    except AssertionError as failure:
        if isinstance(failure.__cause__, BROKEN_CODE):
            raise
        return True
    return False


#: These take longest.
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


#: Without a defect all of them are fine. So are those that the ordinary tests of the same cluster run.
FINE = dict.fromkeys((make, seed) for make, seeds in SHOWN_BY.values() for seed in seeds)


@pytest.mark.deep("plants")
@pytest.mark.parametrize("number", range(len(FINE)))
def test_the_same_seeds_pass_without_a_defect(number: int):
    make, seed = list(FINE)[number]
    make(seed).run()
