"""Many seeds of the simulated clusters; the ordinary tests run a few of each."""

from __future__ import annotations

import pytest

from tests.sim.cluster import Cluster
from tests.sim.ordered_cluster import OrderedCluster
from tests.support.deep import Cycles


@pytest.mark.deep("sim")
@pytest.mark.parametrize("flush", ["async", "sync"])
def test_a_shared_cluster_survives_two_thousand_seeds(seed: int, cycles: Cycles, flush: str):
    for number in cycles(2000):
        Cluster(seed + number, flush=flush, seconds=15.0 + number % 4 * 10.0).run()


@pytest.mark.deep("sim")
def test_an_ordered_cluster_survives_two_thousand_seeds(seed: int, cycles: Cycles):
    for number in cycles(2000):
        OrderedCluster(seed + number, seconds=8.0 + number % 3 * 4.0).run()
