"""The broker's models notice when it breaks its promises."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.broker.ordered_world import World
from tests.broker.test_schedule_model import Scheduling
from tests.support import broker_defects as defects

Defect = Callable[[pytest.MonkeyPatch], None]


def run_worlds(seeds: range) -> None:
    for seed in seeds:
        World(seed, "sync").run(250)


@pytest.mark.parametrize("defect", [defects.skip_copies_behind_a_stale_start], ids=lambda each: each.__name__)
def test_the_model_of_ordered_groups_notices(defect: Defect, monkeypatch: pytest.MonkeyPatch):
    defect(monkeypatch)
    with pytest.raises(AssertionError, match="came after"):
        run_worlds(range(4))


@pytest.mark.parametrize(
    ("machine", "defect", "symptom"),
    [(Scheduling, defects.forget_what_is_filed, "the log is pinned")],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_state_machine_notices(
    machine: type[RuleBasedStateMachine], defect: Defect, symptom: str, monkeypatch: pytest.MonkeyPatch
):
    defect(monkeypatch)
    # Finding it is enough; making the example small takes longer.
    found = settings(
        max_examples=100,
        stateful_step_count=50,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises(AssertionError, match=symptom):
        run_state_machine_as_test(machine, settings=found)
