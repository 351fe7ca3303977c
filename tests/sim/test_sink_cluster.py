"""Drivers of Plait's Spark sink, brokers and meta servers in a simulation with faults of every kind.

Each batch is stored once and completely, with the rows of a single attempt, and the rows of each key are in order.
``SinkCluster(seed)`` repeats a failure.
"""

from __future__ import annotations

import pytest

import plait
from plait.client.staged import batch_commit as committing
from plait.client.staged.stage_writer import Staged
from plait.testing.sim import Fault
from tests.sim import sink_cluster
from tests.sim.ordered_cluster import STRICT, Change
from tests.sim.sink_cluster import SinkCluster
from tests.sim.world_defects import forget_decisions_by_the_wall_clock

#: At least one of this many seeds finds a defect.
SEEDS = 10


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(2))
def test_each_batch_is_there_once_through_faults_and_changes(seed: int, number: int):
    cluster = SinkCluster(seed)
    cluster.run()
    assert min(cluster.noted.values()) > 2


def test_without_faults_partitions_may_change_at_any_moment():
    changes = [Change(1.0 + at, STRICT, count) for at, count in enumerate((4, 7, 3, 1, 5))]
    cluster = SinkCluster(1, script=[], changes=changes, forgetful=0.0)
    cluster.run()
    assert min(cluster.noted.values()) > 20
    # Only batches that a driver aborted were written again.
    assert cluster.refused == 0


def dying_driver() -> SinkCluster:
    """A cluster whose driver is killed every few batches, at any moment."""
    script = [Fault("kill", 0.5 + 0.037 * n, 0.001, "driver-0") for n in range(60)]
    return SinkCluster(2, script=script, changes=[], drivers=1, pause_seconds=0.001, forgetful=0.0, seconds=4.0)


def test_a_driver_that_dies_again_and_again_finds_its_decided_batches():
    cluster = dying_driver()
    cluster.run()
    assert cluster.refused > 0


def test_publishing_without_a_decision_is_found(monkeypatch: pytest.MonkeyPatch):
    async def publish(client: plait.Client, query: str, batch: int, stages: list[Staged]) -> bool:
        await committing._publish(client, stages)
        return True

    monkeypatch.setattr(sink_cluster, "commit", publish)
    with pytest.raises(AssertionError, match=r"out of order|several attempts"):
        dying_driver().run()


def test_dropping_a_batch_that_may_be_decided_is_found(monkeypatch: pytest.MonkeyPatch):
    async def drop(client: plait.Client, query: str, batch: int, stages: list[Staged]) -> None:
        await committing._drop(client, stages)

    async def give_up(client: plait.Client, query: str, batch: int, stages: list[Staged]) -> bool:
        """As Spark does: abort a batch whose commit failed."""
        await committing._decide(client, query, batch, stages)
        await drop(client, query, batch, stages)
        return await committing.commit(client, query, batch, stages)

    monkeypatch.setattr(sink_cluster, "commit", give_up)
    with pytest.raises(AssertionError, match="missing"):
        SinkCluster(2, script=[], changes=[], seconds=2.0).run()


def test_forgetting_decisions_by_the_wall_clock_is_found_out(monkeypatch: pytest.MonkeyPatch, seed: int):
    forget_decisions_by_the_wall_clock(monkeypatch)

    def explore() -> None:
        for each in range(seed, seed + SEEDS):
            SinkCluster(each).run()

    with pytest.raises(AssertionError, match=r"out of order|several attempts|missing"):
        explore()


@pytest.mark.parametrize("kind", ["kill", "power_loss", "pause"])
def test_a_broker_that_is_away_for_a_while_holds_a_batch_up_and_nothing_more(kind: str):
    script = [Fault(kind, at, 2.0, broker) for at, broker in ((2.0, "g1"), (5.0, "g2"), (8.0, "g3"))]  # type: ignore[arg-type]
    cluster = SinkCluster(3, script=script, changes=[])
    cluster.run()
    assert min(cluster.noted.values()) > 5
