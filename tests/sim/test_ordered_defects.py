"""Does the simulated cluster find what is wrong? Each defect is put into the shipped classes, and has to be noticed by
the checker, or by the wait for the end, within a few seeds that are fine without it.
"""

from __future__ import annotations

import pytest

from tests.sim import ordered_defects as defects
from tests.sim.ordered_cluster import OrderedCluster
from tests.sim.ordered_defects import Defect

#: Long enough for everything that is not wrong to be drained.
DRAIN_SECONDS = 40.0
#: Seeds of which one at least shows the defect.
SEEDS: dict[Defect, list[int]] = {
    defects.take_rows_behind_the_fence: [200],
    defects.report_drained_too_early: [200],
    defects.ask_the_newest_span_first: [200],
    defects.ask_all_spans_at_once: [201],
    defects.overtake_rows_that_are_sent_again: [202],
    defects.use_an_epoch_again: [200],
    defects.hand_over_too_early: [200],
    defects.accept_a_lower_epoch: [4],
    defects.take_rows_of_a_lost_owner_for_done: [204],
    defects.lose_returned_rows_when_a_strand_is_split: [201],
    defects.let_a_failed_row_be_overtaken: [200],
    defects.hand_out_a_key_twice_at_a_time: [200],
}


def first_failure(seeds: list[int]) -> AssertionError | None:
    """What the first of the seeds that fails says."""
    for seed in seeds:
        try:
            OrderedCluster(seed, drain_seconds=DRAIN_SECONDS).run()
        except AssertionError as failure:
            return failure
    return None


@pytest.mark.parametrize("defect", SEEDS, ids=lambda defect: defect.__name__)
def test_a_defect_is_found(defect: Defect, monkeypatch: pytest.MonkeyPatch):
    defect(monkeypatch)
    assert first_failure(SEEDS[defect]) is not None


@pytest.mark.parametrize("seed_", sorted({seed for seeds in SEEDS.values() for seed in seeds}))
def test_the_same_seeds_pass_without_a_defect(seed_: int):
    assert first_failure([seed_]) is None
