"""Ordered delivery in a simulated cluster with faults of every kind.

Members join and leave, and the number of partitions changes. The tests check that each key of a strict subject is
handled in order, that each logical partition has one owner per epoch, and that no message is lost or invented.
``OrderedCluster(seed)`` repeats a failure.
"""

from __future__ import annotations

import pytest

from plait.testing.sim import Fault
from tests.sim.meta_servers import Outage
from tests.sim.ordered_changes import Change
from tests.sim.ordered_cluster import STRICT, OrderedCluster

#: The number of seeds that one test runs. ``test_world.py`` runs a hundred worlds, and ``make test-deep SUITE=sim``
#: runs 2,000 seeds of this cluster.
SEEDS = 1


def survive(seed: int, *, affinity: bool = False) -> None:
    for each in range(seed, seed + SEEDS):
        cluster = OrderedCluster(each, affinity=affinity, seconds=5.0 + each % 3)
        cluster.run()
        assert len(cluster.senders.done) > 10


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(2))
def test_each_key_stays_in_order_through_faults_and_changes(seed: int, number: int):
    survive(seed)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(1))
def test_with_affinity_nothing_is_lost_through_faults_and_changes(seed: int, number: int):
    survive(seed, affinity=True)


@pytest.mark.parametrize("affinity", [False, True])
def test_without_faults_everything_is_handled_once_while_partitions_and_members_change(affinity: bool):
    changes = [Change(1.0 + at, STRICT, count) for at, count in enumerate((4, 7, 3, 1, 5))]
    cluster = OrderedCluster(1, script=[], changes=changes, affinity=affinity)
    cluster.run()
    history = cluster.histories[STRICT]
    successes = [handling.value for handling in history.handlings if handling.outcome == "ok"]
    assert len(successes) == len(set(successes)) == len(history.sends) > 50
    # Many partitions delivered messages.
    assert len({handling.place[0] for handling in history.handlings if handling.place is not None}) > 4


def test_without_their_database_meta_servers_decide_nothing_and_messages_are_handled_as_before():
    """R16: the outage is longer than a lease; afterwards everything resumes."""
    outage = Outage(2.0, 5.0)
    cluster = OrderedCluster(4, script=[], changes=[Change(1.0, STRICT, 4), Change(3.0, STRICT, 1)], outages=[outage])
    cluster.run()
    begun = [handling.begun for handling in cluster.histories[STRICT].handlings]
    # Members that left during the outage cannot join again before its end.
    assert sum(3.0 < time < 7.0 for time in begun) > 10


def test_the_same_seed_gives_the_same_run():
    runs = [OrderedCluster(3, seconds=3.0) for _ in range(2)]
    for cluster in runs:
        cluster.run()
    assert runs[0].simulation.trace.digest == runs[1].simulation.trace.digest


@pytest.mark.parametrize(
    "fault",
    [
        Fault("kill", 1.5, 5.0, "g1"),
        Fault("pause", 1.5, 5.0, "g1"),
        Fault("pause", 1.5, 5.0, "meta-1"),
        Fault("kill", 1.5, 5.0, "meta-2"),
        Fault("pause", 1.5, 5.0, "consumer-0"),
        Fault("cut", 1.5, 5.0, "g1", "consumer-0"),
        Fault("cut", 1.5, 5.0, "g1", "meta-1"),
        Fault("cut_one_way", 1.5, 5.0, "g1", "consumer-0"),
        Fault("cut_one_way", 1.5, 5.0, "consumer-0", "g1"),
        Fault("jump", 1.5, 0.0, "g1", amount=-20.0),
    ],
    ids=str,
)
def test_one_fault_longer_than_a_lease_does_no_harm(fault: Fault):
    cluster = OrderedCluster(2, script=[fault], changes=[Change(2.0, STRICT, 4), Change(3.0, STRICT, 1)])
    cluster.run()
    assert len(cluster.senders.done) > 50
