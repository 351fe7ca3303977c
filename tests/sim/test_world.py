"""Worlds in which all features meet (``tests/sim/world``): the promises hold under every plan.

``World(seed)`` repeats a failure; ``World(seed, plan=draw_plan(seed)._replace(script=()))`` leaves parts of it out.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.sim.ordered_defects import ask_brokers_that_hold_nothing
from tests.sim.world.plan import Plan, draw_plan
from tests.sim.world.world import World
from tests.sim.world_defects import (
    Defect,
    delete_what_is_not_archived,
    leave_out_where_failed_messages_are,
    skip_rows_after_a_full_reply,
)

#: Worlds that one test runs: a hundred in total.
SEEDS = 5
SECONDS = 3.0
#: A world that handles nothing for this long is stuck.
QUIET_SECONDS = 12.0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(20))
def test_nothing_is_lost_stuck_or_out_of_order_whatever_meets(seed: int, number: int):
    for each in range(seed, seed + SEEDS):
        World(each, seconds=SECONDS).run()


def test_the_same_seed_gives_the_same_run():
    worlds = [World(11, seconds=2.0) for _ in range(2)]
    for world in worlds:
        world.run()
    assert worlds[0].simulation.trace.digest == worlds[1].simulation.trace.digest


def test_a_hundred_plans_have_every_feature_and_every_fault():
    plans = [draw_plan(seed) for seed in range(100)]
    assert {subject.partitions for plan in plans for subject in plan.subjects} >= {1, 2, 16, 64}
    modes = {(group.mode, group.start) for plan in plans for group in plan.groups}
    assert modes >= {
        (mode, start) for mode in ("ordered", "shared", "once") for start in ("earliest", "latest", "time")
    }
    assert {fault.kind for plan in plans for fault in plan.disk_faults} == {"sync", "full", "checkpoint"}
    assert {fault.kind for plan in plans for fault in plan.script} >= {"kill", "power_loss", "crash_at", "pause", "cut"}

    def share(holds: list[bool]) -> float:
        return sum(holds) / len(holds)

    for part in (
        lambda plan: plan.calm,
        lambda plan: plan.delays,
        lambda plan: plan.priorities,
        lambda plan: any(group.fair_by is not None for group in plan.groups),
        lambda plan: plan.cancels > 0,
        lambda plan: plan.fixed_ids,
        lambda plan: plan.deleted_at is not None,
        lambda plan: any(subject.retention for subject in plan.subjects),
        lambda plan: any(group.away for group in plan.groups),
        lambda plan: any(group.without for group in plan.groups),
        lambda plan: bool(plan.addressed),
        lambda plan: plan.requests is not None,
        lambda plan: bool(plan.outages),
        lambda plan: plan.queries,
        lambda plan: plan.skew > 3600.0,
        lambda plan: plan.archived,
        lambda plan: plan.emptied is not None and plan.forgotten,
        lambda plan: plan.emptied is not None and not plan.forgotten,
    ):
        assert 0.05 < share([bool(part(plan)) for plan in plans]) < 0.95


def with_failing_messages(seed: int, seconds: float) -> Plan:
    """A plan without faults of machines, in which rows of many keys wait for a failed message."""
    plan = draw_plan(seed, seconds)
    groups = tuple(group._replace(attempts=min(group.attempts, 2)) for group in plan.groups)
    plan = plan._replace(groups=groups, failures=0.2, script=(), disk_faults=(), outages=(), emptied=None)
    return plan._replace(archived=False, queries=False, requests=None, rates=(), recurrences=())


@pytest.mark.parametrize(
    ("defect", "seed", "draw"),
    [
        (delete_what_is_not_archived, 24, draw_plan),
        (ask_brokers_that_hold_nothing, 22, draw_plan),
        (leave_out_where_failed_messages_are, 24, with_failing_messages),
        (skip_rows_after_a_full_reply, 0, draw_plan),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_worlds_notice_a_defect_of_archives_retention_filters_and_of_brokers_that_are_switched_off(
    defect: Defect, seed: int, draw: Callable[[int, float], Plan], monkeypatch: pytest.MonkeyPatch
):
    defect(monkeypatch)
    plan = draw(seed, 4.0)
    world = World(seed, plan=plan, quiet_seconds=QUIET_SECONDS)
    with pytest.raises(AssertionError):
        world.run()
    monkeypatch.undo()
    World(seed, plan=plan).run()


def test_a_calm_world_handles_everything_once():
    plan: Plan = draw_plan(7)._replace(script=(), disk_faults=(), outages=(), cancels=0.0, failures=0.0, apps=0.0)
    world = World(7, plan=plan)
    world.run()
    assert len(world.ledger.sent) > 20
