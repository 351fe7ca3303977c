"""Long runs of the broker's models: many more examples of each."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.broker.ordered_world import World
from tests.broker.test_retry_model import Retrying
from tests.broker.test_schedule_model import Scheduling
from tests.support.deep import Cycles

EXAMPLES = 50
FLUSHES = ("async", "sync")


@pytest.mark.deep("models")
@pytest.mark.parametrize("machine", [Retrying, Scheduling])
def test_a_state_machine_finds_nothing(machine: type[RuleBasedStateMachine], seed: int, cycles: Cycles):
    many = settings(
        max_examples=EXAMPLES,
        stateful_step_count=50,
        deadline=None,
        derandomize=False,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    for number in cycles(100):
        drawn = hypothesis.seed(seed + number)(type(machine.__name__, (machine,), {}))
        run_state_machine_as_test(drawn, settings=many)


@pytest.mark.deep("models")
def test_keys_are_handled_in_order_once_and_completely(seed: int, cycles: Cycles):
    for number in cycles(1_000):
        World(seed + number, FLUSHES[number % 2]).run(250)
